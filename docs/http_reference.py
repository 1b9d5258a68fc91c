"""Hook of MkDocs: `http.md` and `cli.md`, made from the application itself when the site is built."""

from __future__ import annotations

import json
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from weightdepot.api.app import create_app
from weightdepot.api.settings import Settings
from weightdepot.cli import app as commands


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    files.append(File.generated(config, "http.md", content=http_page(create_app(Settings()).openapi())))
    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files


def http_page(document: dict[str, Any]) -> str:
    """Every operation: what it is for, what it takes, what it answers."""
    lines = ["# HTTP reference", "", str(document["info"].get("description", "")), ""]
    described = {tag["name"]: tag.get("description", "") for tag in document.get("tags", [])}
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault((operation.get("tags") or ["other"])[0], []).append((method, path, operation))
    for tag, operations in by_tag.items():
        lines += [f"## {tag.capitalize()}", "", described.get(tag, ""), ""]
        for method, path, operation in operations:
            lines += _operation(method, path, operation, document)
    return "\n".join(lines) + "\n"


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    lines = [f"### {operation.get('summary', path)}", "", "```http", f"{method.upper()} {path}", "```", ""]
    if operation.get("description"):
        lines += [operation["description"], ""]
    rows = [
        (f"`{p['name']}` ({p['in']})", _type(p.get("schema", {})), p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    for media, content in body.items():
        schema = _resolved(content.get("schema", {}), document)
        if media != "application/json":
            rows.append(("body", f"`{media}`", ""))
        for name, field in schema.get("properties", {}).items():
            needed = "" if name in schema.get("required", []) else " (optional)"
            rows.append((f"`{name}`{needed}", _type(field), field.get("description", "")))
    if rows:
        lines += ["| given | type | |", "|---|---|---|"]
        lines += [f"| {name} | {kind} | {_cell(text)} |" for name, kind, text in rows] + [""]
    answers = []
    for status, answer in operation.get("responses", {}).items():
        schemas = [_type(c.get("schema", {})) for c in answer.get("content", {}).values()]
        answers.append(f"| {status} | {', '.join(schemas)} | {_cell(answer.get('description', ''))} |")
    return [*lines, "| status | answer | |", "|---|---|---|", *answers, ""]


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
        return found
    return schema


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[-1]}`"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(one) for one in schema[key])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    return f"`{schema.get('type', 'any')}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def cli_page() -> str:
    """Every command, as its own help has it."""
    group = typer.main.get_command(commands)
    lines = ["# Command line", "", "Every command has `--help`.", ""]
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        lines += [f"## {name}", "", command.help or "", ""]
        rows = []
        for parameter in command.params:
            record = parameter.to_info_dict() if hasattr(parameter, "to_info_dict") else {}
            opts = ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])
            shown = (
                opts
                if parameter.param_type_name == "option"
                else f"`{parameter.make_metavar_text()}`"
                if hasattr(parameter, "make_metavar_text")
                else f"`{(parameter.metavar or parameter.name).upper()}`"
            )
            variable = f" (`{record['envvar']}`)" if record.get("envvar") else ""
            rows.append(f"| {shown} | {_cell((getattr(parameter, 'help', '') or '') + variable)} |")
        if rows:
            lines += ["| option | |", "|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"
