"""Scripts of members: producers' joining, layouts, leaving, heartbeats, sweeping. See scripts.py for keys."""

from __future__ import annotations

from weightdepot.store.index.scripts import REMEMBERED
from weightdepot.store.index.scripts_groups import GROUPS

# ARGV: 3 rank, 4 world size, 5 session, 6 layout, 7 process (JSON), 8 retention, 9 ttl (s),
# 10 session that is known to be dead, or "", 11 "1" if it gives way to any other
# value: Joined
JOIN_PRODUCER = (
    GROUPS
    + """
local rank, world_size, session, layout = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local retention, replace, yielding = tonumber(ARGV[8]), ARGV[10], ARGV[11] == '1'
-- those that yield do so to those that do not
local function holds(s) return alive(s) and (yielding or not yields(s)) end
local refused = misused(session, 'producer', '', rank)
if refused then return refused end
create_if_missing()
local size, slots = tonumber(meta('world_size')), tonumber(meta('retention'))
local holder = call('HGET', PRODUCERS, rank)

local others, longest = {}, 0
for r = 0, size - 1 do
  local s = call('HGET', PRODUCERS, r)
  if r ~= rank and holds(s) then
    others[#others + 1] = r
    longest = math.max(longest, expiry(s) - NOW)
  end
end
if #others > 0 and (size ~= world_size or slots ~= retention) then
  return refuse('member-conflict', string.format(
    'rank %d joins the producers of model %s as one of %d with retention %d, but %s joined as of %d with' ..
    ' retention %d and live', rank, MODEL, world_size, retention, ranks_text(others), size, slots),
    {rank = rank, world_size = world_size, holders_world_size = size,
    retention = retention, holders_retention = slots, expires_in = longest})
end
if holder and holder ~= session and holds(holder) and holder ~= replace then
  return taken(holder, rank, 'the producers')
end

if size ~= world_size then
  for r = 0, size - 1 do
    local s = call('HGET', PRODUCERS, r)
    if s then drop_session(s) end
  end
  call('DEL', PRODUCERS)
  holder = false
  next_incarnation('the producers started anew with ' .. world_size .. ' ranks')
elseif slots ~= retention then
  -- slots are counted anew: what was granted may not exist any more
  next_incarnation('rank ' .. rank .. ' changed the retention to ' .. retention)
end
call('HSET', META, 'world_size', world_size, 'retention', retention)

if holder == session then
  local was_alive = alive(session)
  renew(session, tonumber(ARGV[9]))
  if call('HGET', P .. 'layouts', session) ~= layout then
    call('HSET', P .. 'layouts', session, layout)
    next_incarnation('rank ' .. rank .. ' changed its layout')
  elseif not was_alive then
    emit('member')
  end
else
  if holder then vacate_producer(rank, 'rank ' .. rank .. ' was replaced') end
  call('HSET', PRODUCERS, rank, session)
  add_session(session, 'producer', '', rank, layout, ARGV[7], ARGV[9])
  emit('member')
end
if yielding then call('SADD', P .. 'yielding', session) end
return answer({incarnation = tonumber(meta('incarnation')), world_size = world_size,
  latest = num(meta('latest')) or cjson.null, highest = num(meta('highest')) or cjson.null})
"""
)

# ARGV: 3 group, 4 rank, 5 session, 6 layout
# value: true
SET_LAYOUT = (
    GROUPS
    + """
local g, rank, session = ARGV[3], tonumber(ARGV[4]), ARGV[5]
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
local holder = of_rank('ranks', g, rank)
if holder ~= session then return not_holder(rank, group_text(g), session, holder) end
touch(session)
call('HSET', P .. 'layouts', session, ARGV[6])
emit('member')
return answer(true)
"""
)

# ARGV: 3 session
# value: whether it was a member
LEAVE = (
    GROUPS
    + """
local session = ARGV[3]
local mine = info(session)
if not mine then
  -- it was replaced before: the memory that it still had goes now
  for _, v in ipairs(in_state('ready', 'retired')) do
    for _, s in ipairs(call('HVALS', P .. 'expect:' .. v)) do
      if s == session then
        close(v, 'freed', 'a producer that had been replaced left')
        break
      end
    end
  end
  return answer(false)
end
if mine.role == 'consumer' then
  remove_consumer(mine.group, mine.rank, 'rank ' .. mine.rank .. ' left')
  return answer(true)
end
local why = 'producer rank ' .. mine.rank .. ' left'
vacate_producer(mine.rank, why)
-- its memory goes with it
for _, v in ipairs(in_state('ready', 'retired')) do
  if call('HGET', P .. 'expect:' .. v, mine.rank) == session then close(v, 'freed', why) end
end
return answer(true)
"""
)

# ARGV: 3 session, 4 ttl (s), 5 lease_ttl (s), then pairs: group, round
# value: HeartbeatWire
HEARTBEAT = (
    GROUPS
    + """
local session, ttl, lease_ttl = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local mine, lost = info(session), {}
if mine then
  local was_alive = alive(session)
  renew(session, ttl)
  if not was_alive then emit('member') end
end
for i = 6, #ARGV, 2 do
  local g, round = ARGV[i], tonumber(ARGV[i + 1])
  local kept = false
  if mine and mine.role == 'consumer' and mine.group == g and begun(g, mine.rank) == round then
    local target = aim(g, mine.rank)
    local under_way = active(g) and round_of(g) == round
    -- needed while this rank reads, and while the others of its group do
    if target and (done(g, mine.rank) < round or under_way) then
      local lives = lease_live(target, lease_name(g, round))
      if lives then renew_lease(target, lease_name(g, round), lease_ttl) end
      -- what it has read whole is its own: it needs no lease any more
      kept = lives or staged(g, mine.rank) == round
    else
      kept = true  -- no lease was needed, or it is needed no more
    end
  end
  if not kept then lost[#lost + 1] = round end
end
return answer({member = mine ~= nil, lost = some(lost)})
"""
)

# ARGV: 3 seconds after which dead members are forgotten
# value: SweepWire
SWEEP = (
    GROUPS
    + f"local REMEMBERED = {REMEMBERED}\n"
    + """
if not exists() then return unknown_model() end
local report, long_ago = {}, NOW - tonumber(ARGV[3])
local function add(lines)
  for _, line in ipairs(lines) do report[#report + 1] = line end
end
add(abort_overdue())
for _, g in ipairs(call('SMEMBERS', P .. 'groups')) do add(settle_round(g)) end
for _, session in ipairs(call('ZRANGEBYSCORE', P .. 'alive', '-inf', stamp(long_ago))) do
  local mine = info(session)
  local why = 'rank ' .. mine.rank .. ' was gone for too long'
  if mine.role == 'consumer' then
    remove_consumer(mine.group, mine.rank, why)
    add({'group ' .. mine.group .. ': ' .. why .. ' and was forgotten'})
  else
    vacate_producer(mine.rank, why)
    add({'producers: ' .. why .. ' and was forgotten'})
  end
end
add(free_idle())
forget(REMEMBERED)
return answer({done = some(report)})
"""
)
