"""Scripts by which producers tell of memory that outlived the index, or take it back. See scripts.py."""

from __future__ import annotations

from weightdepot.store.index.scripts import PRELUDE
from weightdepot.store.index.scripts_groups import GROUPS

REMEMBERED_S = 3600  # seconds that a part waits for those of the other ranks

# ARGV: 3 rank, 4 session, 5 world size, 6 retention, 7 highest or "", then for each part: version, attempt,
# slot, tiling, part (JSON), tile digests (raw)
# value: AnnouncedWire
ANNOUNCE = (
    GROUPS
    + f"local REMEMBERED_S = {REMEMBERED_S}\n"
    + """
local rank, session, world_size = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
if not exists() then return unknown_model() end
local holder = call('HGET', PRODUCERS, rank)
if holder ~= session then return not_holder(rank, 'the producers', session, holder) end
touch(session)

-- Versions only rise: what is open must be above all that was ever ready.
local function rise(v)
  if v > (num(meta('highest')) or -1) then call('HSET', META, 'highest', string.format('%d', v)) end
  local open = num(meta('open'))
  if open and open <= v then
    close(open, 'aborted', 'version ' .. v .. ' was ready before the index lost its data: versions only rise')
  end
end
local highest = tonumber(ARGV[7])
if highest then rise(highest) end

-- Comes back if every rank has announced a part of the same attempt, in the same slot, by who holds it now.
local function restored(v, attempt, slot, tiling)
  local parts = {}
  for r = 0, world_size - 1 do
    local raw = call('HGET', P .. 'announced:' .. v, r)
    local one = raw and cjson.decode(raw)
    if not one or one.attempt ~= attempt or one.slot ~= slot or one.tiling ~= tiling
      or one.session ~= call('HGET', PRODUCERS, r) then return false end
    parts[r] = one
  end
  if slot >= 0 then
    for _, other in ipairs(all_versions()) do
      local state = state_of(other)
      if tonumber(vget(other, 'slot')) == slot and
        (state == 'open' or state == 'ready' or state == 'retired' or #leases(other) > 0) then
        return false
      end
    end
  end
  call('ZADD', VERSIONS, v, v)
  local nbytes = 0
  for r = 0, world_size - 1 do
    call('HSET', P .. 'parts:' .. v, r, parts[r].part)
    call('HSET', P .. 'digests:' .. v, r, call('HGET', P .. 'announced-digests:' .. v, r))
    call('HSET', P .. 'expect:' .. v, r, parts[r].session)
    call('SADD', P .. 'granted:' .. v, r)
    nbytes = nbytes + cjson.decode(parts[r].part).nbytes
  end
  call('HSET', P .. 'version:' .. v, 'state', 'ready', 'slot', slot, 'tiling', tiling,
    'incarnation', tonumber(meta('incarnation')), 'world_size', world_size, 'opened', stamp(NOW),
    'ready', stamp(NOW), 'deadline', stamp(NOW), 'nbytes', string.format('%d', nbytes), 'live', '0',
    'attempt', attempt)
  if v > (num(meta('latest')) or -1) then call('HSET', META, 'latest', v) end
  rise(v)
  published(v)
  call('DEL', P .. 'announced:' .. v, P .. 'announced-digests:' .. v)
  call('SREM', P .. 'announced', v)
  emit('ready', v)
  return true
end

local ready = {}
for i = 8, #ARGV, 6 do
  local v, attempt, slot, tiling = tonumber(ARGV[i]), ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local state = state_of(v)
  if state then
    if state == 'ready' and vget(v, 'attempt') == attempt then ready[#ready + 1] = v end
  elseif world_size == tonumber(meta('world_size')) and num(meta('open')) ~= v then
    call('HSET', P .. 'announced:' .. v, rank, cjson.encode({attempt = attempt, slot = slot, tiling = tiling,
      session = session, part = ARGV[i + 4]}))
    call('HSET', P .. 'announced-digests:' .. v, rank, ARGV[i + 5])
    call('SADD', P .. 'announced', v)
    call('EXPIRE', P .. 'announced', REMEMBERED_S)
    call('EXPIRE', P .. 'announced:' .. v, REMEMBERED_S)
    call('EXPIRE', P .. 'announced-digests:' .. v, REMEMBERED_S)
    if restored(v, attempt, slot, tiling) then ready[#ready + 1] = v end
  end
end
return answer({ready = some(ready)})
"""
)

# ARGV: 3 version, 4 session, 5 reason
# value: VersionWire
WITHDRAW = (
    PRELUDE
    + """
local v, session = tonumber(ARGV[3]), ARGV[4]
if not exists() then return unknown_model() end
local state = state_of(v)
if not state then return gone(v) end
local mine = false
for _, s in ipairs(call('HVALS', P .. 'expect:' .. v)) do mine = mine or s == session end
if not mine then
  return refuse('member-conflict', 'session ' .. session .. ' has no part in version ' .. v ..
    ' of model ' .. MODEL .. ': it cannot take it back', {version = v, session = session})
end
if state == 'open' then
  close(v, 'aborted', ARGV[5])
elseif state == 'ready' or state == 'retired' then
  call('DEL', P .. 'leases:' .. v)  -- whoever reads it now finds its lease lost, and discards what it read
  close(v, 'freed', ARGV[5])
end
return answer(version_view(v))
"""
)
