"""What people decide: modes, holding and releasing, pins and tags; and whether the fleet follows."""

from __future__ import annotations

from weightdepot.api.client.calls import TIMEOUT, Calls
from weightdepot.api.names import check_name
from weightdepot.store.index.records import Convergence, Mode, Model, Version


class OperationCalls(Calls):
    """Every one of them may be repeated."""

    def set_policy(self, model: str, *, mode: Mode, max_lag: int = 1, timeout: float = TIMEOUT) -> Model:
        """How versions are synchronized, from the next publish on. `max_lag`: published versions, for mode
        `bounded`. Raises UnknownModel."""
        body = {"mode": mode, "max_lag": max_lag}
        return self._ask("PUT", f"{self._model(model)}/policy", timeout, Model, body)

    def hold(self, model: str, version: int, *, timeout: float = TIMEOUT) -> Model:
        """Roll back to a ready version, and stay there until `release`. Raises VersionGone."""
        return self._ask("PUT", f"{self._model(model)}/current", timeout, Model, {"version": version})

    def release(self, model: str, *, timeout: float = TIMEOUT) -> Model:
        """The newest version is the current one again."""
        return self._ask("DELETE", f"{self._model(model)}/current", timeout, Model)

    def pin(self, model: str, version: int, *, timeout: float = TIMEOUT) -> Version:
        """Keep a ready version, however many come after it. Raises VersionGone."""
        return self._ask("PUT", f"{self._version(model, version)}/pin", timeout, Version)

    def unpin(self, model: str, version: int, *, timeout: float = TIMEOUT) -> Version:
        return self._ask("DELETE", f"{self._version(model, version)}/pin", timeout, Version)

    def tag(self, model: str, tag: str, version: int, *, timeout: float = TIMEOUT) -> Version:
        """Let a name point to a ready version, which is kept for as long. Raises VersionGone."""
        return self._ask("PUT", self._tag(model, tag), timeout, Version, {"version": version})

    def untag(self, model: str, tag: str, *, timeout: float = TIMEOUT) -> None:
        """A name that points nowhere is no error."""
        self._tell("DELETE", self._tag(model, tag), timeout)

    def convergence(self, model: str, *, timeout: float = 0.0) -> Convergence:
        """Whether every live group serves the current version, once they do or the time is up."""
        path = f"{self._model(model)}/convergence"
        return self._settled(path, timeout, Convergence, lambda seen: seen.converged)

    def _tag(self, model: str, tag: str) -> str:
        return f"{self._model(model)}/tags/{check_name('tag', tag)}"
