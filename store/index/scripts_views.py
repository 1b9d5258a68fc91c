"""Scripts that answer what there is. They too make the transitions that are due. See scripts.py for keys."""

from __future__ import annotations

from weightdepot.store.index.scripts_groups import GROUPS

# no ARGV of its own
# value: ModelWire
VIEW_MODEL = (
    GROUPS
    + """
if not exists() then return unknown_model() end
abort_overdue()
free_idle()
local world_size, producers, versions = tonumber(meta('world_size')), {}, {}
for rank = 0, world_size - 1 do
  local session = call('HGET', PRODUCERS, rank)
  if session then producers[#producers + 1] = member_view(rank, session) end
end
for _, v in ipairs(all_versions()) do versions[#versions + 1] = version_view(v) end
return answer({incarnation = tonumber(meta('incarnation')), world_size = world_size,
  membership = tonumber(meta('membership')),
  retention = tonumber(meta('retention')), latest = num(meta('latest')), highest = num(meta('highest')),
  aborted = num(meta('aborted')) or 0, hold = held_at(), policy = policy_view(),
  tags = some(call('HGETALL', P .. 'tags')),
  producers = some(producers), versions = some(versions)})
"""
)

# ARGV: 3 version
# value: VersionWire
VIEW_VERSION = (
    GROUPS
    + """
local v = tonumber(ARGV[3])
if not exists() then return unknown_model() end
abort_overdue()
free_idle()
if not state_of(v) then return gone(v) end
return answer(version_view(v))
"""
)

# ARGV: 3 group
# value: GroupWire
VIEW_GROUP = (
    GROUPS
    + """
local g = ARGV[3]
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
settle_round(g)
return answer(group_view(g))
"""
)

# no ARGV of its own
# value: GroupsWire
VIEW_GROUPS = (
    GROUPS
    + """
if not exists() then return unknown_model() end
local groups = {}
for _, g in ipairs(call('SMEMBERS', P .. 'groups')) do
  settle_round(g)
  groups[#groups + 1] = group_view(g)
end
return answer({groups = some(groups)})
"""
)
