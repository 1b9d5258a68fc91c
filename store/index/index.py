"""The index: what is where, who is alive, which version is whole. The one place that knows Redis' keys.

Every transition is one Lua script, so that any number of controllers may call at once and any of them
may die between two calls. Nothing here waits: a method answers a value, or `Wait` (which says what to
wait for), or raises. Waiting is the business of who can be woken: see `events`.
"""

from __future__ import annotations

from weightdepot.store.index import check, wire
from weightdepot.store.index.group_rounds import GroupRounds
from weightdepot.store.index.memberships import Memberships
from weightdepot.store.index.policies import Policies
from weightdepot.store.index.records import Group, Model, Policy
from weightdepot.store.index.scripts_views import VIEW_GROUP, VIEW_GROUPS, VIEW_MODEL
from weightdepot.store.index.versions import Versions


class Index(Memberships, Versions, GroupRounds, Policies):
    """The index of one run. Safe for concurrent use within one event loop.

    Order of calls. A producer rank: `join_producer`, then for each version `open_version` (again, while
    it answers `Wait`) and `seal` or `abort`; `leave` at the end. A consumer rank: `join_consumer`,
    `set_layout` where it joined without one, then for each update `begin_round` and `finish_round`, and
    `round_status` until the group is whole; `leave` at the end. Both call `heartbeat` all the while.
    The controller calls `sweep` now and then.

    All methods raise `IndexUnavailable` when Redis does not answer (in time), and `InvalidRequest` for
    arguments that can never work. A call that raised `IndexUnavailable` may or may not have happened:
    repeat it, all of them may be repeated.
    """

    async def models(self) -> list[str]:
        """Names of all models that somebody registered in this run, sorted."""
        return await self._redis.members(self._models)

    async def model(self, m: str) -> Model:
        """Producers, and the versions that still matter. Raises `UnknownModel`."""
        return (await self._ask(VIEW_MODEL, m, type=wire.ModelWire)).record(m)

    async def groups(self, m: str) -> list[Group]:
        """All consumer groups, sorted by name. Raises `UnknownModel`."""
        answer = await self._ask(VIEW_GROUPS, m, type=wire.GroupsWire)
        return sorted((g.record(m) for g in answer.groups), key=lambda g: g.group)

    async def group(self, m: str, group: str) -> Group:
        """One consumer group. Raises `UnknownModel` where there is no such model or group."""
        answer = await self._ask(VIEW_GROUP, m, check.name("group", group), type=wire.GroupWire)
        return answer.record(m)

    async def set_policy(self, m: str, policy: Policy) -> Model:
        """`change_policy`, and the model as it is then."""
        await self.change_policy(m, policy)
        return await self.model(m)

    async def hold(self, m: str, v: int) -> Model:
        """`change_hold`, and the model as it is then."""
        await self.change_hold(m, v)
        return await self.model(m)

    async def release(self, m: str) -> Model:
        """Lets go of what `hold` holds; no error where nothing is held."""
        await self.change_hold(m, None)
        return await self.model(m)
