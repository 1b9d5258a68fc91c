"""Settings come from a file, the environment and options, in that order, and say where each is from."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightdepot.api.config import ClientSettings, configured, unknown_variables, variable
from weightdepot.api.settings import Settings
from weightdepot.cli import app
from weightdepot.store.errors import InvalidRequest


def file(folder: Path, text: str) -> Path:
    path = folder / "weightdepot.toml"
    path.write_text(text)
    return path


def source(found: object, key: str) -> str:
    origins = getattr(found, "origins", ())
    return str(next(o.source for o in origins if o.key == key))


def test_options_win_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    path = file(
        tmp_path, '[controller]\nport = 1\nhost = "::1"\nrun = "a"\n[controller.timeouts]\nsweep = 3\n'
    )
    environment = {"WEIGHTDEPOT_PORT": "2", "WEIGHTDEPOT_RUN": "b", "WEIGHTDEPOT_TIMEOUTS_WAIT": "7.5"}
    found = configured(Settings, "controller", {"port": 3, "run": None}, environment, path)
    s = found.settings
    assert (s.port, s.run, s.host, s.timeouts.sweep, s.timeouts.wait) == (3, "b", "::1", 3.0, 7.5)
    assert source(found, "port") == "option --port"
    assert source(found, "run") == "variable WEIGHTDEPOT_RUN"
    assert source(found, "host") == f"file {path}"
    assert source(found, "timeouts.sweep") == f"file {path}"
    assert source(found, "limits.body") == "default"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = file(tmp_path, '[client]\ncontroller = "http://a:1"\n')
    found = configured(ClientSettings, "client", {}, {"WEIGHTDEPOT_CONFIG": str(path)})
    assert found.settings.controller == "http://a:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[controller]\nprot = 1\n", r"key \[controller\] prot: no such key \(did you mean port\?\)"),
        ('[controller]\nport = "x"\n', r"key \[controller\] port is 'x': a whole number is taken"),
        ("[controller]\nport = 70000\n", r"weightdepot.toml, key port: port 70000 is outside 0 to 65535"),
        ('[controller]\nlog_level = "loud"\n', "log level 'loud' is not one of debug, info, warning, error"),
        ("[server]\n", r"no such table \[server\]"),
        ("controller = 1\n", r"write \[controller\]"),
        ("[controller\n", "is not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_key_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        configured(Settings, "controller", {}, {}, path)
    assert str(path) in str(refused.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(InvalidRequest, match="variable WEIGHTDEPOT_TIMEOUTS_SWEEP is 'soon': a number"):
        configured(Settings, "controller", {}, {"WEIGHTDEPOT_TIMEOUTS_SWEEP": "soon"})
    with pytest.raises(InvalidRequest, match="enableServiceLinks"):
        configured(Settings, "controller", {}, {"WEIGHTDEPOT_PORT": "tcp://10.0.0.1:8300"})


def test_values_that_fit_only_together_are_not_refused_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="give one of the two"):
        configured(
            Settings,
            "controller",
            {},
            {"WEIGHTDEPOT_REDIS_URL": "redis://h:1", "WEIGHTDEPOT_DATA_DIR": str(tmp_path)},
        )


def test_misspelt_variables_are_told_and_those_of_kubernetes_are_not() -> None:
    told = unknown_variables(
        {"WEIGHTDEPOT_PROT": "1", "WEIGHTDEPOT_SERVICE_HOST": "10.0.0.1", "WEIGHTDEPOT_RUN": "x", "PATH": "/"}
    )
    assert told == ["WEIGHTDEPOT_PROT (did you mean WEIGHTDEPOT_PORT?)"]


def test_every_key_has_a_variable_of_its_own() -> None:
    for kind, section in ((Settings, "controller"), (ClientSettings, "client")):
        keys = [o.key for o in configured(kind, section, {}, {}).origins]
        assert len({variable(key) for key in keys}) == len(keys)


def test_the_command_shows_values_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTDEPOT_TOKEN", "very-secret")
    monkeypatch.setenv("WEIGHTDEPOT_REDIS_URL", "redis://me:hidden@redis:6379/0")
    for arguments in (["config"], ["config", "--json"]):
        said = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
        assert said.exit_code == 0, said.output
        assert "very-secret" not in said.output
        assert "hidden" not in said.output
        assert "REDIS_URL" in said.output


def test_a_missing_file_is_said_in_one_line(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["config", "--config", str(tmp_path / "none.toml")])
    assert said.exit_code == 2
    assert "cannot be read" in said.output
