"""Traces by OpenTelemetry, where a collector is configured; else nothing is imported and nothing is done.

Configured means the environment that every OpenTelemetry exporter reads (`OTEL_EXPORTER_OTLP_ENDPOINT`), with
the extra `weightdepot[otel]` installed; or a program that has set up OpenTelemetry itself, whose provider is
used then.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
Value = str | int | float | bool

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORT_TIMEOUT = 2.0  # seconds: a collector that is away holds no program up at its end
HEADER = "traceparent"  # W3C Trace Context

log = logging.getLogger("weightdepot.spans")


class Span(Protocol):
    """What is known of a piece of work only once it has begun."""

    def set(self, **attributes: Value | None) -> None:
        """Attributes, named without their prefix `weightdepot.`. None is left out."""

    def rename(self, name: str) -> None: ...

    def fail(self, why: str) -> None: ...


class _Nothing:
    def set(self, **attributes: Value | None) -> None:
        pass

    def rename(self, name: str) -> None:
        pass

    def fail(self, why: str) -> None:
        pass


_NOTHING = _Nothing()


class _Traced:
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Value | None) -> None:
        self._span.set_attributes(_named(attributes))

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, why))


@contextlib.contextmanager
def span(
    name: str,
    *,
    kind: Literal["internal", "client", "server"] = "internal",
    parent: str = "",
    link: str = "",
    **attributes: Value | None,
) -> Iterator[Span]:
    """A piece of work, which ends with the block; what the block raises is recorded and raised.

    parent: a `traceparent` that came from elsewhere, instead of the span that is current here. link: one that
    this work builds on, in a trace of its own.
    """
    tracer = _tracer()
    if tracer is None:
        yield _NOTHING
        return
    from opentelemetry.trace import Link, SpanKind

    linked = _context_of(link)
    with tracer.start_as_current_span(
        name,
        context=_remote(parent),
        kind=SpanKind[kind.upper()],
        attributes=_named(attributes),
        links=[] if linked is None else [Link(linked)],
    ) as begun:
        yield _Traced(begun)


def traceparent() -> str:
    """The span that is current here, for others to go on from; "" where there is none."""
    if _tracer() is None:
        return ""
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def carried(function: Callable[..., T]) -> Callable[..., T]:
    """The function, with the span that is current now, whichever thread calls it, once."""
    if _tracer() is None:
        return function
    return functools.partial(contextvars.copy_context().run, function)


# -- where OpenTelemetry is known ------------------------------------------------------------------------

_lock = threading.Lock()
_decided: list[Any] = []  # a tracer, or None; empty until the first span


def _tracer() -> Any:
    if not _decided:
        with _lock:
            if not _decided:
                _decided.append(_configured())
    return _decided[0]


def _configured() -> Any:
    wanted = any(os.environ.get(name) for name in ENDPOINTS)
    wanted = wanted and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "none"
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not wanted and "opentelemetry.trace" not in sys.modules:
        return None
    try:
        from opentelemetry import trace

        if not wanted or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return trace.get_tracer("weightdepot")
        return _own_provider().get_tracer("weightdepot")
    except ImportError as error:
        log.warning("traces are asked for, but %s: pip install 'weightdepot[otel]'", error)
        return None


def _own_provider() -> Any:
    """One of ours alone: what else the program does with OpenTelemetry stays as it is."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = any(os.environ.get(name) for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"))
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "weightdepot"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT)))
    return provider


def _named(attributes: dict[str, Value | None]) -> dict[str, Value]:
    return {
        (name.replace("__", ".") if "__" in name else f"weightdepot.{name}"): value
        for name, value in attributes.items()
        if value is not None
    }


def _context_of(text: str) -> Any:
    """The span that a `traceparent` names; None for one that is none."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not text:
        return None
    found = get_current_span(
        TraceContextTextMapPropagator().extract({HEADER: text}, context=_empty())
    ).get_span_context()
    return found if found.is_valid else None


def _remote(text: str) -> Any:
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    found = _context_of(text)
    return None if found is None else set_span_in_context(NonRecordingSpan(found))


def _empty() -> Any:
    from opentelemetry.context import Context

    return Context()
