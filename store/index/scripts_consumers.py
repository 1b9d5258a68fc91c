"""Scripts of consumer groups: joining, and rounds. See scripts.py for keys and common arguments."""

from __future__ import annotations

from weightdepot.store.index.scripts_groups import GROUPS

# ARGV: 3 group, 4 rank, 5 world size, 6 session, 7 layout or "", 8 process (JSON), 9 ttl (s),
# 10 session that is known to be dead, or "", 11 "1" if nobody should wait for this group (an export)
# value: Joined
JOIN_CONSUMER = (
    GROUPS
    + """
local g, rank, world_size, session = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local replace = ARGV[10]
local what = group_text(g)
local refused = misused(session, 'consumer', g, rank)
if refused then return refused end
create_if_missing()
local size = size_of(g)
local holder = size and of_rank('ranks', g, rank)

if size and size ~= world_size then
  local others, longest = {}, 0
  for r = 0, size - 1 do
    local s = of_rank('ranks', g, r)
    if r ~= rank and alive(s) then
      others[#others + 1] = r
      longest = math.max(longest, expiry(s) - NOW)
    end
  end
  if #others > 0 then
    return refuse('member-conflict', string.format('rank %d joins %s of model %s as one of %d, but %s ' ..
      'joined it as of %d and live', rank, what, MODEL, world_size, ranks_text(others), size),
      {group = g, rank = rank, world_size = world_size, holders_world_size = size, expires_in = longest})
  end
end
if holder and holder ~= session and alive(holder) and holder ~= replace then
  return taken(holder, rank, what)
end

if size and size ~= world_size then
  for r = 0, size - 1 do
    if of_rank('ranks', g, r) then
      vacate_consumer(g, r, 'the group was made anew with ' .. world_size .. ' ranks')
    end
  end
  delete_group(g)
  size, holder = nil, nil
end
if not size then
  call('SADD', P .. 'groups', g)
  call('HSET', P .. 'group:' .. g, 'world_size', world_size, 'active', '0', 'noop', '1', 'error', '')
  if meta('latest') then call('HSET', P .. 'group:' .. g, 'base', meta('latest')) end
  if ARGV[11] == '1' then call('HSET', P .. 'group:' .. g, 'observer', '1') end
  call('HSETNX', P .. 'rounds', g, 0)
end
if holder ~= session then
  if holder then vacate_consumer(g, rank, 'rank ' .. rank .. ' was replaced') end
  call('HSET', P .. 'ranks:' .. g, rank, session)
  add_session(session, 'consumer', g, rank, ARGV[7], ARGV[8], ARGV[9])
  emit('member')
else
  local was_alive = alive(session)
  renew(session, tonumber(ARGV[9]))
  local changed = ARGV[7] ~= '' and ARGV[7] ~= call('HGET', P .. 'layouts', session)
  if changed then call('HSET', P .. 'layouts', session, ARGV[7]) end
  if changed or not was_alive then emit('member') end
end
return answer({incarnation = tonumber(meta('incarnation')), world_size = world_size,
  latest = num(meta('latest')) or cjson.null, highest = num(meta('highest')) or cjson.null})
"""
)

# ARGV: 3 group, 4 rank, 5 session, 6 min_version, 7 lease_ttl (s), 8 exact version or "", 9 max_lag or "",
# 10 tag or ""
# value: RoundWire. Waits for: group, version.
BEGIN_ROUND = (
    GROUPS
    + """
local g, rank, session, min, ttl = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
local holder = of_rank('ranks', g, rank)
if holder ~= session then return not_holder(rank, group_text(g), session, holder) end
touch(session)
settle_round(g)
local of_model = ' of model ' .. MODEL
local exact, max_lag, tag = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local hold = held_at()
if tag ~= '' then
  exact = num(call('HGET', P .. 'tags', tag))
  if not exact then
    return wait('version', 'no version' .. of_model .. ' has the tag ' .. tag, {group = g, tag = tag})
  end
end

local function claim(round, noop, target)
  call('HSET', P .. 'begun:' .. g, rank, round)
  call('HDEL', P .. 'staged:' .. g, rank)
  call('HSET', P .. 'aim:' .. g, rank, noop and '-' or target)
  local view = {round = round, version = target, held = held(g, rank), lease_ttl = ttl}
  if not noop then
    renew_lease(target, lease_name(g, round), ttl)
    view.tiling = vget(target, 'tiling')
    view.parts = some(call('HVALS', P .. 'parts:' .. target))
  end
  return answer(view)
end

-- A round that this rank began, that failed through others, and that it now gives up: what its parameters
-- hold is unknown, unless there was nothing to move.
local given_up = begun(g, rank)
if given_up > done(g, rank) and not (active(g) and given_up == round_of(g)) then
  local target = aim(g, rank)
  if target and target ~= held(g, rank) then
    call('HDEL', P .. 'held:' .. g, rank)
  end
  call('HSET', P .. 'done:' .. g, rank, given_up)
  release_unclaimed(g, given_up, target)
end

if active(g) and staged(g, rank) == round_of(g) and done(g, rank) < round_of(g)
  and gget(g, 'noop') == '0' and not lease_live(target_of(g), lease_name(g, round_of(g))) then
  -- It had read everything, so that the lease went back, and has lost it: it cannot read it again.
  call('HDEL', P .. 'held:' .. g, rank)
  call('HSET', P .. 'done:' .. g, rank, round_of(g))
  fail_round(g, 'rank ' .. rank .. ' lost what it had staged')
end

if active(g) then
  local round, target = round_of(g), target_of(g)
  if done(g, rank) < round then
    if exact and exact ~= target then
      return refuse('stale-group', 'rank ' .. rank .. ' asks for version ' .. exact .. ', but round ' ..
        round .. ' of group ' .. g .. of_model .. ' is under way to version ' .. target ..
        ': finish it first, then ask again',
        {group = g, rank = rank, round = round, version = target, wanted = exact})
    end
    if min > target then
      return refuse('stale-group', 'rank ' .. rank .. ' asks for version ' .. min ..
        ' or newer, but round ' .. round .. ' of group ' .. g .. of_model .. ' is under way to version ' ..
        target .. ': finish it first, then ask again',
        {group = g, rank = rank, round = round, version = target, min_version = min})
    end
    return claim(round, gget(g, 'noop') == '1', target)
  end
  local ranks = pending(g)
  return wait('group', 'round ' .. round .. ' of group ' .. g .. of_model .. ' (to version ' .. target ..
    ') waits for ' .. ranks_text(ranks) .. ' to finish', {group = g, round = round, pending = ranks})
end

local missing, dead, who = {}, {}, {}
for r = 0, size_of(g) - 1 do
  local s = of_rank('ranks', g, r)
  if not s then
    missing[#missing + 1] = r
  elseif not alive(s) then
    dead[#dead + 1] = r
  end
end
if #missing > 0 then who[#who + 1] = ranks_text(missing) .. ' to join' end
if #dead > 0 then who[#who + 1] = ranks_text(dead) .. ' to come back or be replaced (no sign of life)' end
if #who > 0 then
  return wait('group', 'group ' .. g .. of_model .. ' waits for ' .. table.concat(who, ' and ') .. ', of ' ..
    size_of(g) .. ' ranks', {group = g, missing = some(missing), dead = some(dead)})
end

local newest, common = hold or num(meta('latest')), whole_at(g)
local target, noop
if exact then
  local state = state_of(exact)
  if common == exact then
    target, noop = exact, true
  elseif state == 'ready' then
    target, noop = exact, false
  elseif state == 'retired' or state == 'freed' then
    return refuse('version-gone', 'version ' .. exact .. of_model .. ' is ' .. state ..
      (state == 'retired' and ': it gives no new leases, its memory is wanted'
      or ': ' .. vget(exact, 'reason')) ..
      '; the newest ready one is ' .. (meta('latest') or 'none'),
      {group = g, version = exact, latest = num(meta('latest'))})
  elseif num(meta('highest')) and exact <= num(meta('highest')) then
    return gone(exact)
  else
    return wait('version', 'version ' .. exact .. of_model .. ' is not ready' .. (state == 'aborted' and
      '; it was aborted: ' .. vget(exact, 'reason') or '') .. '; the newest is ' ..
      (meta('latest') or 'none'), {group = g, wanted = exact, latest = num(meta('latest'))})
  end
elseif common and max_lag and common >= min and lag_behind(common) <= max_lag then
  target, noop = common, true
elseif hold then
  if min > hold then
    return wait('version', 'model ' .. MODEL .. ' is held at version ' .. hold .. ': no version ' .. min ..
      ' or newer is given until it is released', {group = g, min_version = min, held = hold})
  end
  target, noop = hold, common == hold
elseif common and common >= min and (not newest or newest <= common) then
  target, noop = common, true  -- nothing newer: even if it is freed by now, every rank holds it
elseif newest and newest >= min then
  target, noop = newest, false
else
  local text = 'no version ' .. min .. ' or newer' .. of_model .. ' is ready; the newest is ' ..
    (newest or 'none')
  local details = {group = g, min_version = min, latest = newest}
  local aborted = in_state('aborted')
  local last = aborted[#aborted]
  if last and last >= min then
    details.aborted, details.reason = last, vget(last, 'reason')
    text = text .. '; version ' .. last .. ' was aborted: ' .. details.reason
  end
  return wait('version', text, details)
end
local round = call('HINCRBY', P .. 'rounds', g, 1)
call('HSET', P .. 'group:' .. g, 'target', target, 'noop', noop and '1' or '0', 'active', '1')
emit('round', target, g)
return claim(round, noop, target)
"""
)

# ARGV: 3 group, 4 rank, 5 session, 6 round
# value: true
STAGE_ROUND = (
    GROUPS
    + """
local g, rank, session, round = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
local holder = of_rank('ranks', g, rank)
if holder ~= session then return not_holder(rank, group_text(g), session, holder) end
touch(session)
settle_round(g)
local where = 'round ' .. round .. ' of group ' .. g .. ' of model ' .. MODEL
local details = {group = g, rank = rank, round = round}
if begun(g, rank) ~= round then
  return refuse('invalid-request', 'rank ' .. rank .. ' is not in ' .. where ..
    ': the last one that it began is ' .. begun(g, rank), details)
end
local target = aim(g, rank)
-- nothing to move, through already, or the same report again
if not target or done(g, rank) >= round or staged(g, rank) == round then return answer(true) end
if not lease_live(target, lease_name(g, round)) then
  details.version = target
  return refuse('lease-lost', 'the lease of ' .. where .. ' on version ' .. target ..
    ' ran out before rank ' .. rank .. ' had read it: what it read must be discarded', details)
end
call('HSET', P .. 'staged:' .. g, rank, round)
emit('staged', target, g)
if active(g) and round_of(g) == round then
  if all_staged(g, round) then
    call('ZREM', P .. 'leases:' .. target, lease_name(g, round))
    free_idle()
  end
else
  release_unclaimed(g, round, target)
end
return answer(true)
"""
)

# ARGV: 3 group, 4 rank, 5 session, 6 round, 7 error or "", 8 "1" if the failure tore what the rank held,
# 9 stats (JSON) or ""
# value: RoundStatusWire
FINISH_ROUND = (
    GROUPS
    + """
local g, rank, session, round, failure = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7]
local torn = ARGV[8] == '1'
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
local holder = of_rank('ranks', g, rank)
if holder ~= session then return not_holder(rank, group_text(g), session, holder) end
touch(session)
settle_round(g)
local where = 'round ' .. round .. ' of group ' .. g .. ' of model ' .. MODEL
local details = {group = g, rank = rank, round = round}
if begun(g, rank) ~= round then
  return refuse('invalid-request', 'rank ' .. rank .. ' is not in ' .. where ..
    ': the last one that it began is ' .. begun(g, rank), details)
end
local target = aim(g, rank)
details.version = target
if done(g, rank) >= round then  -- the same report again, its answer was lost
  if failure == '' and target and held(g, rank) ~= target then
    return refuse('lease-lost', 'rank ' .. rank .. ' had failed in ' .. where ..
      ', or its lease had run out: what it read must be discarded', details)
  end
  return round_view(g, round)
end

local current = active(g) and round_of(g) == round
-- with nothing to move nothing was read, and there is nothing that a lost lease could have torn
local moves = target and target ~= held(g, rank)
local lost = failure == '' and moves and staged(g, rank) ~= round
  and not lease_live(target, lease_name(g, round))
call('HSET', P .. 'done:' .. g, rank, round)
call('HDEL', P .. 'staged:' .. g, rank)
if ARGV[9] ~= '' and not lost then call('HSET', P .. 'stats:' .. g, rank, ARGV[9]) end
if failure ~= '' or lost then
  if torn or lost then call('HDEL', P .. 'held:' .. g, rank) end
  local why = 'rank ' .. rank .. ': ' .. (lost and 'its lease on version ' .. target .. ' ran out' or failure)
  if current then
    fail_round(g, why)
  elseif gget(g, 'error') == '' and not active(g) and not unharmed(g) then
    call('HSET', P .. 'group:' .. g, 'error', why)
  end
elseif moves then
  call('HSET', P .. 'held:' .. g, rank, target)
end
settle_whole(g)
release_unclaimed(g, round, target)
if lost then
  return refuse('lease-lost', 'the lease of ' .. where .. ' on version ' .. target ..
    ' ran out before rank ' .. rank .. ' had finished: what it read must be discarded', details)
end
return round_view(g, round)
"""
)

# ARGV: 3 group, 4 round
# value: RoundStatusWire
ROUND_STATUS = (
    GROUPS
    + """
local g = ARGV[3]
if not exists() then return unknown_model() end
if not size_of(g) then return unknown_group(g) end
settle_round(g)
return round_view(g, tonumber(ARGV[4]))
"""
)
