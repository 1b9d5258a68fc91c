"""From a framework's loader or exporter to a layout; `coverage` proves a layout."""

from weightdepot.store.tracing.content import Fault
from weightdepot.store.tracing.coverage import Left, coverage
from weightdepot.store.tracing.export import trace_export
from weightdepot.store.tracing.module import trace_module_load
from weightdepot.store.tracing.recording import LoadWeights
from weightdepot.store.tracing.report import Trace
from weightdepot.store.tracing.trace import trace_load

__all__ = [
    "Fault",
    "Left",
    "LoadWeights",
    "Trace",
    "coverage",
    "trace_export",
    "trace_load",
    "trace_module_load",
]
