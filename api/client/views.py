"""What there is: models, groups, and whether they are fresh."""

from __future__ import annotations

import msgspec

from weightdepot.api.client.calls import TIMEOUT, Calls
from weightdepot.api.exchange import Deadline
from weightdepot.store.index.records import Group, Model


class _Models(msgspec.Struct):
    models: tuple[str, ...]


class _Groups(msgspec.Struct):
    groups: tuple[Group, ...]


class ViewCalls(Calls):
    def ready(self, *, timeout: float = TIMEOUT) -> None:
        """Returns when the controller and its index answer."""
        self._http.send("GET", "/v1/ready", Deadline(timeout))

    def models(self, *, timeout: float = TIMEOUT) -> tuple[str, ...]:
        return self._ask("GET", "/v1/models", timeout, _Models).models

    def model(self, model: str, *, timeout: float = TIMEOUT) -> Model:
        """Raises UnknownModel."""
        return self._ask("GET", self._model(model), timeout, Model)

    def groups(self, model: str, *, timeout: float = TIMEOUT) -> tuple[Group, ...]:
        return self._ask("GET", f"{self._model(model)}/groups", timeout, _Groups).groups

    def group(self, model: str, group: str, *, timeout: float = TIMEOUT) -> Group:
        """Raises UnknownModel where there is no such model or group."""
        return self._ask("GET", self._group(model, group), timeout, Group)

    def freshness(self, model: str, group: str, *, max_lag: int = 0, timeout: float = 0.0) -> Group:
        """The group, once it is fresh (`Group.is_fresh`), or when the time is up. Raises UnknownModel."""
        path = f"{self._group(model, group)}/freshness"
        return self._settled(path, timeout, Group, lambda seen: seen.is_fresh(max_lag), {"max_lag": max_lag})
