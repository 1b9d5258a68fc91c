"""Scripts of what operators and modes ask for: policy, pins, tags, hold, who has applied what.

See scripts.py for keys and common arguments.
"""

from __future__ import annotations

from weightdepot.store.index.scripts_groups import GROUPS

MAX_PROTECTED = 16  # versions of one model that are pinned or tagged: each takes the memory of a version

# ARGV: 3 mode, 4 max_lag
# value: true
SET_POLICY = (
    GROUPS
    + """
if not exists() then return unknown_model() end
call('HSET', META, 'mode', ARGV[3], 'max_lag', ARGV[4])
emit('policy')
return answer(true)
"""
)

_KEEP = (
    GROUPS
    + f"local MAX_PROTECTED = {MAX_PROTECTED}\n"
    + """
if not exists() then return unknown_model() end
abort_overdue()
local v = tonumber(ARGV[3])
local name = 'version ' .. v .. ' of model ' .. MODEL
-- nil where it may be kept from now on
local function refused(what)
  local state = state_of(v)
  if not state then return gone(v) end
  if state ~= 'ready' then
    return refuse('version-gone', name .. ' is ' .. state .. (state == 'retired' and
      ': its memory is wanted already' or '') .. ', it cannot be ' .. what .. '; only ready versions can',
      {version = v, state = state, latest = num(meta('latest'))})
  end
  local safe, count, names = protected(), 0, {}
  for other in pairs(safe) do
    count = count + 1
    names[#names + 1] = other
  end
  if not safe[v] and count >= MAX_PROTECTED then
    table.sort(names)
    return refuse('invalid-request', name .. ' cannot be ' .. what .. ': ' .. count ..
      ' versions are kept already (' .. table.concat(names, ', ') ..
      '), each in memory of its own; let one go',
      {version = v, kept = names})
  end
end
"""
)

# ARGV: 3 version
# value: VersionWire
PIN = (
    _KEEP
    + """
local no = refused('pinned')
if no then return no end
if call('SADD', P .. 'pins', v) == 1 then emit('pinned', v) end
return answer(version_view(v))
"""
)

# ARGV: 3 version
# value: VersionWire
UNPIN = (
    _KEEP
    + """
if not state_of(v) then return gone(v) end
if call('SREM', P .. 'pins', v) == 1 then emit('unpinned', v) end
return answer(version_view(v))
"""
)

# ARGV: 3 version, 4 tag
# value: VersionWire
TAG = (
    _KEEP
    + """
local no = refused('tagged')
if no then return no end
if call('HGET', P .. 'tags', ARGV[4]) ~= tostring(v) then
  call('HSET', P .. 'tags', ARGV[4], string.format('%d', v))
  emit('tagged', v)
end
return answer(version_view(v))
"""
)

# ARGV: 3 tag
# value: true
UNTAG = (
    GROUPS
    + """
if not exists() then return unknown_model() end
local v = num(call('HGET', P .. 'tags', ARGV[3]))
if v then
  call('HDEL', P .. 'tags', ARGV[3])
  emit('untagged', v)
end
return answer(true)
"""
)

# ARGV: 3 version
# value: true
HOLD = (
    _KEEP
    + """
local state = state_of(v)
if not state then return gone(v) end
if state ~= 'ready' then
  return refuse('version-gone', name .. ' is ' .. state .. ': a model can be held at a ready version only' ..
    '; the newest is ' .. (meta('latest') or 'none'),
    {version = v, state = state, latest = num(meta('latest'))})
end
if held_at() ~= v then
  call('HSET', META, 'hold', string.format('%d', v))
  emit('held', v)
end
return answer(true)
"""
)

# no ARGV of its own
# value: true
RELEASE = (
    GROUPS
    + """
if not exists() then return unknown_model() end
local v = held_at()
if v then
  call('HDEL', META, 'hold')
  emit('released', v)
end
return answer(true)
"""
)

# ARGV: 3 version that is wanted at least, 4 "1": what is current, also where the model is held
# value: VersionWire. Waits for: version. Looks at one version, however many there are.
LATEST = (
    GROUPS
    + """
if not exists() then return unknown_model() end
local min, hold = tonumber(ARGV[3]), held_at()
local v = num(meta('latest'))
if ARGV[4] == '1' and hold then v = hold end
if v and v >= min then return answer(version_view(v)) end
return wait('version', 'model ' .. MODEL .. ' has no ready version' ..
  (min > 0 and ' of at least ' .. min or '') .. ' yet (' ..
  (v and 'the newest is ' .. v or 'nothing is ready') .. ')' ..
  ((hold and ARGV[4] == '1') and '; it is held at ' .. hold or ''),
  {model = MODEL, min_version = min, latest = num(meta('latest')), held = hold})
"""
)

# ARGV: 3 version
# value: AppliedWire
APPLIED = (
    GROUPS
    + """
local v = tonumber(ARGV[3])
if not exists() then return unknown_model() end
abort_overdue()
local state = state_of(v)
if not state then return gone(v) end
if state == 'aborted' then
  return refuse('version-gone', 'version ' .. v .. ' of model ' .. MODEL .. ' was aborted: ' ..
    vget(v, 'reason'), {version = v, state = state})
end
local applied, pending = {}, {}
for _, g in ipairs(call('SMEMBERS', P .. 'groups')) do
  settle_round(g)
  if live(g) then
    local last = last_of(g)
    local list = (last and last >= v) and applied or pending
    list[#list + 1] = g
  end
end
return answer({version = v, state = state, applied = some(applied), pending = some(pending),
  held = held_at()})
"""
)

# no ARGV of its own
# value: ConvergenceWire
CONVERGENCE = (
    GROUPS
    + """
if not exists() then return unknown_model() end
local current, at, behind, absent = held_at() or num(meta('latest')), {}, {}, {}
for _, g in ipairs(call('SMEMBERS', P .. 'groups')) do
  settle_round(g)
  local list = absent
  if live(g) then list = (current and whole_at(g) == current) and at or behind end
  if not gget(g, 'observer') then list[#list + 1] = g end
end
return answer({current = current, held = held_at() ~= nil, at = some(at), behind = some(behind),
  absent = some(absent)})
"""
)
