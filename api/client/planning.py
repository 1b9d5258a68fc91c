"""Layouts, tilings and plans."""

from __future__ import annotations

import msgspec

from weightdepot.api.client.calls import TIMEOUT, Calls
from weightdepot.api.exchange import Deadline
from weightdepot.api.names import check_digest
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.planning import Plan
from weightdepot.store.tiling import SourceTiling, Tiling


class _Manifest(msgspec.Struct):
    tensors: tuple[TensorSpec, ...]


class PlanningCalls(Calls):
    """What is made once for each set of layouts."""

    def put_layout(self, layout: Layout, *, timeout: float = TIMEOUT) -> str:
        """Make a layout known; its digest. Raises LayoutError where it does not hold together."""
        self._http.send("PUT", f"/v1/layouts/{layout.digest}", Deadline(timeout), content=layout.to_bytes())
        return layout.digest

    def manifest(self, model: str, *, timeout: float) -> tuple[TensorSpec, ...]:
        """The checkpoint that is published, once every producer rank has joined.

        Raises WaitTimeout (naming the ranks that are missing), LayoutError where the ranks disagree.
        """
        what = f"the manifest of {model!r}"
        content = self._poll("GET", f"{self._model(model)}/manifest", timeout, what)
        return self._http.decode(content, _Manifest).tensors

    def tiling(self, model: str, tiling: str, *, timeout: float = TIMEOUT) -> Tiling:
        """What all producer ranks store under this tiling. Raises VersionGone for a forgotten one."""
        return Tiling.from_bytes(self._http.send("GET", self._tiling(model, tiling), Deadline(timeout)))

    def put_tiling(self, model: str, name: str, tiling: Tiling, *, timeout: float = TIMEOUT) -> None:
        """Make a tiling known again to an index that has lost it. `name`: its id, as grants say it. One that
        is known stays as it is. Raises InvalidRequest where it does not hold together."""
        path = self._tiling(model, name)
        self._http.send("PUT", path, Deadline(timeout), content=tiling.to_bytes())

    def source_tiling(self, model: str, tiling: str, rank: int, *, timeout: float = TIMEOUT) -> SourceTiling:
        """What producer rank `rank` stores under this tiling. Raises VersionGone for a forgotten tiling."""
        what = f"the tile table of rank {rank} of {model!r}"
        path = f"{self._tiling(model, tiling)}/sources/{rank}"
        return SourceTiling.from_bytes(self._poll("GET", path, timeout, what))

    def plan(self, model: str, tiling: str, layout: str, *, timeout: float = TIMEOUT) -> Plan:
        """What a rank with this layout reads. Raises LayoutError naming the tensors that do not fit."""
        check_digest("tiling", tiling)
        check_digest("layout", layout)
        path = f"{self._model(model)}/plans/{tiling}/{layout}"
        return Plan.from_bytes(self._poll("GET", path, timeout, f"the plan of a rank of {model!r}"))

    def _tiling(self, model: str, tiling: str) -> str:
        return f"{self._model(model)}/tilings/{check_digest('tiling', tiling)}"
