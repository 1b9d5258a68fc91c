"""A collector of traces: what it is sent by OTLP over HTTP, decoded."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    links: tuple[str, ...]  # traces
    failed: str  # the status' message; "" where it did not fail
    service: str
    events: tuple[str, ...]


class Collector:
    """Listens at `url` until it is closed."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector._spans.extend(_spans(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[Seen]:
        return list(self._spans)

    def named(self, name: str, **attributes: Any) -> list[Seen]:
        wanted = {f"weightdepot.{key}": value for key, value in attributes.items()}
        return [s for s in self.spans if s.name == name and wanted.items() <= s.attributes.items()]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Seen(
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            attributes=_plain(span.attributes),
            links=tuple(link.trace_id.hex() for link in span.links),
            failed=span.status.message if span.status.code == 2 else "",
            service=str(_plain(resource.resource.attributes).get("service.name")),
            events=tuple(event.name for event in span.events),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
