"""Scripts that open, seal, abort and free versions. See scripts.py for keys and common arguments."""

from __future__ import annotations

from weightdepot.store.index.scripts import PRELUDE, REMEMBERED
from weightdepot.store.index.scripts_groups import GROUPS

# ARGV: 3 version, 4 rank, 5 session, 6 tiling, 7 incarnation that the tiling is for, 8 seal_timeout (s),
# 9 "1" if it is read in place and needs no slot, 10 the membership that the tiling is for, or ""
# value: Grant. Waits for: ranks, open-version, lag, slot.
OPEN_VERSION = (
    GROUPS
    + f"local REMEMBERED = {REMEMBERED}\n"
    + """
local v, rank, session, tiling = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local in_place = ARGV[9] == '1'
if not exists() then return unknown_model() end
local holder = call('HGET', PRODUCERS, rank)
if holder ~= session then return not_holder(rank, 'the producers', session, holder) end
touch(session)

local incarnation = tonumber(meta('incarnation'))
if tonumber(ARGV[7]) ~= incarnation then
  return wait('ranks', 'membership changed: the producers of model ' .. MODEL .. ' are incarnation ' ..
    incarnation .. ' now, not ' .. ARGV[7], {incarnation = incarnation})
end

if ARGV[10] ~= '' and ARGV[10] ~= meta('membership') then
  return wait('ranks', 'membership changed: another tiling may be wanted', {membership = meta('membership')})
end

abort_overdue()
local world_size, latest, highest = tonumber(meta('world_size')), num(meta('latest')), num(meta('highest'))
local kept = window()
local function grant()
  call('SADD', P .. 'granted:' .. v, rank)
  local sessions, keep, slots = {}, {}, {}
  for slot = 0, kept - 1 do slots[#slots + 1] = slot end
  for _, old in ipairs(all_versions()) do
    local state, slot = state_of(old), tonumber(vget(old, 'slot'))
    if slot >= kept and (state == 'open' or state == 'ready' or state == 'retired' or #leases(old) > 0) then
      slots[#slots + 1] = slot
    end
    -- of a freed version too, while somebody may still read the parts whose producers did not leave
    if state == 'ready' or state == 'retired' or (state == 'freed' and #leases(old) > 0) then
      local s = call('HGET', P .. 'expect:' .. old, rank)
      if s and not sessions[s] then
        sessions[s] = true
        keep[#keep + 1] = s
      end
    end
  end
  return answer({version = v, slot = tonumber(vget(v, 'slot')), tiling = vget(v, 'tiling'),
    incarnation = incarnation, keep_sessions = some(keep), attempt = vget(v, 'attempt'),
    policy = policy_view(), slots = some(slots)})
end

local open = num(meta('open'))
if open == v then
  if call('HEXISTS', P .. 'parts:' .. v, rank) == 1 then
    return refuse('version-not-newer', 'version ' .. v .. ' of model ' .. MODEL ..
      ' is already published by rank ' .. rank .. '; it waits for ' .. ranks_text(unsealed(v)),
      {version = v, rank = rank})
  end
  return grant()
end
if highest and v <= highest then
  return refuse('version-not-newer', 'version ' .. v .. ' of model ' .. MODEL .. ' is not above ' ..
    highest .. ', the highest that was ever ready (the newest ready one is ' .. (latest or 'none') ..
    '): versions only rise; resume above it, or start a new run',
    {version = v, latest = latest, highest = highest})
end

local missing, dead, who = {}, {}, {}
for r = 0, world_size - 1 do
  local s = call('HGET', PRODUCERS, r)
  if not s then
    missing[#missing + 1] = r
  elseif not alive(s) then
    dead[#dead + 1] = r
  end
end
if #missing > 0 then who[#who + 1] = ranks_text(missing) .. ' to join' end
if #dead > 0 then who[#who + 1] = ranks_text(dead) .. ' to come back or be replaced (no sign of life)' end
if #who > 0 then
  return wait('ranks', 'version ' .. v .. ' of model ' .. MODEL .. ' waits for ' ..
    table.concat(who, ' and ') .. ', of ' .. world_size .. ' producers',
    {missing = some(missing), dead = some(dead), world_size = world_size})
end
if open then
  local pending = unsealed(open)
  return wait('open-version', 'version ' .. v .. ' of model ' .. MODEL .. ' waits for version ' .. open ..
    ', which ' .. ranks_text(pending) .. ' did not seal yet', {version = open, pending = pending})
end

local policy = policy_view()
if policy.mode == 'bounded' then
  local late, lags = {}, {}
  for _, g in ipairs(call('SMEMBERS', P .. 'groups')) do
    local lag = lag_of(g)
    if lag > policy.max_lag and live(g) then
      lags[g] = lag
      late[#late + 1] = 'group ' .. g .. ' by ' .. lag
    end
  end
  if #late > 0 then
    table.sort(late)
    local hold = held_at()
    return wait('lag', 'version ' .. v .. ' of model ' .. MODEL .. ' waits for ' ..
      table.concat(late, ', ') .. ', which lag more than ' .. policy.max_lag .. ' version(s) behind' ..
      (hold and '; the model is held at version ' .. hold or ''),
      {groups = lags, max_lag = policy.max_lag, held = hold})
  end
end

-- A slot is free if no living version has it, and nobody may still be reading it: a version whose producer
-- left is freed at once, though readers of its other ranks hold a lease. What is protected has its slot
-- besides those that rotate, so that pins never keep a trainer waiting.
local safe = protected()
local limit = kept
for other in pairs(safe) do
  local state = state_of(other)
  if (state == 'ready' or state == 'retired') and vget(other, 'live') ~= '1' then limit = limit + 1 end
end
local function free_slot()
  local used = {}
  for _, other in ipairs(all_versions()) do
    local state = state_of(other)
    if state == 'open' or state == 'ready' or state == 'retired' or #leases(other) > 0 then
      used[tonumber(vget(other, 'slot'))] = true
    end
  end
  for slot = 0, limit - 1 do
    if not used[slot] then return slot end
  end
end
local function retire_old()
  local ready = {}
  for _, other in ipairs(in_state('ready')) do
    if not safe[other] and vget(other, 'live') ~= '1' then ready[#ready + 1] = other end
  end
  for i = 1, #ready - (kept - 1) do
    call('HSET', P .. 'version:' .. ready[i], 'state', 'retired')
    emit('retired', ready[i])
  end
end
free_idle()
local slot = in_place and -1 or free_slot()
if not slot then
  retire_old()
  free_idle()
  slot = free_slot()
end
if not slot then
  local holders, versions = {}, {}
  for _, other in ipairs(in_state('retired', 'freed')) do
    local lessees = leases(other)
    if #lessees > 0 then versions[#versions + 1] = other end
    for _, lease in ipairs(lessees) do holders[#holders + 1] = lease end
  end
  return wait('slot', 'version ' .. v .. ' of model ' .. MODEL .. ' waits for one of ' .. limit ..
    ' slots: old versions ' .. table.concat(versions, ', ') .. ' are leased by (group/round) ' ..
    table.concat(holders, ', '), {versions = versions, holders = holders, retention = kept})
end

forget(REMEMBERED)
erase(v)  -- an aborted attempt at the same step
call('ZADD', VERSIONS, v, v)
call('HSET', P .. 'version:' .. v, 'state', 'open', 'slot', slot, 'tiling', tiling,
  'incarnation', incarnation, 'world_size', world_size, 'opened', stamp(NOW),
  'deadline', stamp(NOW + tonumber(ARGV[8])), 'nbytes', 0, 'live', in_place and '1' or '0',
  'attempt', string.format('%d-%s', incarnation, stamp(NOW)))
for r = 0, world_size - 1 do call('HSET', P .. 'expect:' .. v, r, call('HGET', PRODUCERS, r)) end
call('HSET', META, 'open', v)
emit('open', v)
return grant()
"""
)

# ARGV: 3 version, 4 rank, 5 session, 6 part (JSON), 7 its digest, 8 its bytes, 9 tile digests (raw)
# value: VersionWire
SEAL = (
    PRELUDE
    + """
local v, rank, session, digest = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[7]
if not exists() then return unknown_model() end
abort_overdue()
local state = state_of(v)
if not state then return gone(v) end
local name = 'version ' .. v .. ' of model ' .. MODEL
local expected = call('HGET', P .. 'expect:' .. v, rank)
if state == 'aborted' then
  return refuse('publish-aborted', name .. ' was aborted: ' .. vget(v, 'reason') ..
    '; nothing was made visible',
    {version = v, rank = rank, reason = vget(v, 'reason')})
end
if expected ~= session then
  return refuse('member-conflict', name .. ' expects its part of rank ' .. rank .. ' from session ' ..
    (expected or 'none') .. ', not from ' .. session .. ': it was replaced',
    {version = v, rank = rank, session = session, holder = expected or nil})
end
local part = call('HGET', P .. 'parts:' .. v, rank)
if part then
  if cjson.decode(part).digests == digest then return answer(version_view(v)) end
  return refuse('version-not-newer', 'rank ' .. rank .. ' has sealed ' .. name ..
    ' before, with other bytes: versions do not change', {version = v, rank = rank})
end
-- (every other state than open has all of its parts)
if call('SISMEMBER', P .. 'granted:' .. v, rank) == 0 then
  return refuse('publish-aborted', name .. ' was aborted and opened again by another rank, maybe in' ..
    ' another slot: rank ' .. rank .. ' must open it again before it seals', {version = v, rank = rank})
end
touch(session)
call('HSET', P .. 'parts:' .. v, rank, ARGV[6])
call('HSET', P .. 'digests:' .. v, rank, ARGV[9])
call('HINCRBY', P .. 'version:' .. v, 'nbytes', ARGV[8])
if call('HLEN', P .. 'parts:' .. v) == tonumber(vget(v, 'world_size')) then
  call('HSET', P .. 'version:' .. v, 'state', 'ready', 'ready', stamp(NOW))
  call('HDEL', META, 'open')
  call('HSET', META, 'latest', v, 'highest', v)
  published(v)
  emit('ready', v)
else
  emit('sealed', v)
end
return answer(version_view(v))
"""
)

# ARGV: 3 version, 4 session, 5 reason
# value: VersionWire
ABORT = (
    PRELUDE
    + """
local v, session = tonumber(ARGV[3]), ARGV[4]
if not exists() then return unknown_model() end
abort_overdue()
local state = state_of(v)
if not state then return gone(v) end
local rank
for r = 0, tonumber(vget(v, 'world_size')) - 1 do
  if call('HGET', P .. 'expect:' .. v, r) == session then rank = r end
end
if not rank then
  return refuse('member-conflict', 'session ' .. session .. ' has no part in version ' .. v ..
    ' of model ' .. MODEL .. ': it cannot abort it', {version = v, session = session})
end
-- not granted: the abort means an earlier attempt at this version, which another rank has opened again
if state == 'open' and call('SISMEMBER', P .. 'granted:' .. v, rank) == 1 then
  close(v, 'aborted', 'rank ' .. rank .. ': ' .. ARGV[5])
end
return answer(version_view(v))
"""
)

# ARGV: 3 version, 4 rank whose part could not be read, 5 reason
# value: VersionWire
REPORT_LOST = (
    PRELUDE
    + """
local v, rank = tonumber(ARGV[3]), tonumber(ARGV[4])
if not exists() then return unknown_model() end
local state = state_of(v)
if not state then return gone(v) end
local session = call('HGET', P .. 'expect:' .. v, rank)
if not session then
  return refuse('invalid-request', 'version ' .. v .. ' of model ' .. MODEL .. ' has no rank ' .. rank ..
    ' (it has ' .. vget(v, 'world_size') .. ')', {version = v, rank = rank})
end
local held = call('HGET', PRODUCERS, rank) == session and alive(session)
if (state == 'ready' or state == 'retired') and not held then
  close(v, 'freed', 'rank ' .. rank .. ' is gone: ' .. ARGV[5])
end
return answer(version_view(v))
"""
)
