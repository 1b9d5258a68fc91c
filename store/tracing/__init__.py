"""From a framework's loader to a layout: `trace_load` and `trace_module_load`; `coverage` proves a layout."""

from weightdepot.store.tracing.content import Fault
from weightdepot.store.tracing.coverage import Left, coverage
from weightdepot.store.tracing.module import trace_module_load
from weightdepot.store.tracing.trace import LoadWeights, Trace, trace_load

__all__ = ["Fault", "Left", "LoadWeights", "Trace", "coverage", "trace_load", "trace_module_load"]
