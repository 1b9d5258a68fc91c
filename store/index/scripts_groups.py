"""What the scripts share that touch consumer groups and their rounds. See scripts.py for the keys.

A round ends whole (every rank applied it), or fails: then each rank's next `begin_round` belongs to a new
one, and ranks still in flight may finish. The group's lease lives until the round is whole, or has failed
and every rank that began it has reported or was replaced; or until nobody renews it.

A rank's *claim* is a round that it began and did not finish.
"""

from __future__ import annotations

from weightdepot.store.index.scripts import PRELUDE

GROUPS = (
    PRELUDE
    + """
local ROUNDS_REMEMBERED = 64
local TABLES_OF_A_RANK = {'ranks:', 'held:', 'begun:', 'done:', 'aim:', 'staged:', 'stats:'}

local function gget(g, field) return call('HGET', P .. 'group:' .. g, field) end
local function of_rank(kind, g, rank) return call('HGET', P .. kind .. ':' .. g, rank) end
local function size_of(g) return num(gget(g, 'world_size')) end
local function round_of(g) return num(call('HGET', P .. 'rounds', g)) or 0 end
local function active(g) return gget(g, 'active') == '1' end
local function target_of(g) return num(gget(g, 'target')) end
local function begun(g, rank) return num(of_rank('begun', g, rank)) or 0 end
local function done(g, rank) return num(of_rank('done', g, rank)) or 0 end
local function held(g, rank) return num(of_rank('held', g, rank)) end
local function aim(g, rank) return num(of_rank('aim', g, rank)) end  -- tonumber('-') is nil: nothing to move
local function staged(g, rank) return num(of_rank('staged', g, rank)) or 0 end
local function lease_name(g, round) return g .. '/' .. string.format('%d', round) end

local function unknown_group(g)
  return refuse('unknown-model', 'model ' .. MODEL .. ' has no consumer group ' .. g ..
    ': its ranks have not joined, or have all left', {group = g})
end
local function group_text(g) return 'group ' .. g end

local function last_of(g) return num(gget(g, 'last')) end
-- A group that never held a version lags from the time that it came.
local function lag_of(g) return lag_behind(last_of(g) or num(gget(g, 'base'))) end
-- every rank has joined and is alive: only such groups are waited for
local function live(g)
  if gget(g, 'observer') then return false end
  for rank = 0, size_of(g) - 1 do
    if not alive(of_rank('ranks', g, rank)) then return false end
  end
  return true
end

-- A rank that is on its way to another version than it holds may have written half of it.
local function in_flight(g, rank)
  local target = aim(g, rank)
  return begun(g, rank) > done(g, rank) and target ~= nil and target ~= held(g, rank)
end
-- the version that every rank holds
local function whole_at(g)
  local common
  for rank = 0, size_of(g) - 1 do
    local v = held(g, rank)
    if not v or (common and common ~= v) or in_flight(g, rank) then return nil end
    common = v
  end
  return common
end
local function pending(g)
  local round, ranks = round_of(g), {}
  for rank = 0, size_of(g) - 1 do
    if done(g, rank) < round then ranks[#ranks + 1] = rank end
  end
  return ranks
end
-- Nobody reads for this round any more: every rank has staged what it needs, or is through.
local function all_staged(g, round)
  for rank = 0, size_of(g) - 1 do
    if done(g, rank) < round and staged(g, rank) ~= round then return false end
  end
  return true
end
local function put_outcome(g, round, state, version, why)
  call('HSET', P .. 'outcome:' .. g, round, cjson.encode({version = version, state = state, error = why}))
  call('HDEL', P .. 'outcome:' .. g, round - ROUNDS_REMEMBERED)
end

-- Gives back the lease of a round that nobody reads for any more.
local function release_unclaimed(g, round, version)
  if not version then return end
  if active(g) and round_of(g) == round then return end
  for rank = 0, size_of(g) - 1 do
    if begun(g, rank) == round and done(g, rank) < round and staged(g, rank) ~= round then return end
  end
  call('ZREM', P .. 'leases:' .. version, lease_name(g, round))
  free_idle()
end
-- Whether no rank lost what it held, or is on its way from it: then a failure has made nothing half.
local function unharmed(g)
  if whole_at(g) then return true end
  for rank = 0, size_of(g) - 1 do
    if held(g, rank) or in_flight(g, rank) then return false end
  end
  return last_of(g) == nil
end
local function fail_round(g, why)
  local round, target = round_of(g), target_of(g)
  call('HSET', P .. 'group:' .. g, 'active', '0')
  if not unharmed(g) then call('HSET', P .. 'group:' .. g, 'error', why) end
  put_outcome(g, round, 'half', target, why)
  emit('half', target, g)
  if gget(g, 'noop') == '0' then release_unclaimed(g, round, target) end
end
-- Ends the round under way if every rank is through; sees when late reports made a failed group whole.
local function settle_whole(g)
  local v = whole_at(g)
  if not v then return end
  local round, target = round_of(g), target_of(g)
  if active(g) then
    if #pending(g) > 0 then return end
    call('HSET', P .. 'group:' .. g, 'active', '0')
  elseif gget(g, 'error') == '' and last_of(g) == v then
    return
  end
  call('HSET', P .. 'group:' .. g, 'error', '', 'last', v)
  -- a group re-made after its ranks had left keeps the count of its rounds, but has no target yet
  if target == v then put_outcome(g, round, 'whole', v, '') end
  emit('applied', v, g)
  if gget(g, 'noop') == '0' then release_unclaimed(g, round, target) end
end
-- The due transition of a group: a round that cannot become whole any more fails. Answers what it did.
local function settle_round(g)
  if not active(g) then return {} end
  local round, target, why = round_of(g), target_of(g), nil
  for _, rank in ipairs(pending(g)) do
    local session = of_rank('ranks', g, rank)
    if not alive(session) and not why then
      why = 'rank ' .. rank .. ' died in round ' .. round .. ' (to version ' .. target ..
        '): it gave no sign of life in time'
    end
  end
  if not why and gget(g, 'noop') == '0' and not all_staged(g, round)
    and not lease_live(target, lease_name(g, round)) then
    why = 'the lease on version ' .. target .. ' ran out in round ' .. round .. ', before ' ..
      ranks_text(pending(g)) .. ' had finished'
  end
  if not why then return {} end
  fail_round(g, why)
  return {'round ' .. round .. ' of group ' .. g .. ' failed: ' .. why}
end

local function delete_group(g)
  for _, session in ipairs(call('HVALS', P .. 'ranks:' .. g)) do drop_session(session) end
  for _, kind in ipairs(TABLES_OF_A_RANK) do call('DEL', P .. kind .. g) end
  call('DEL', P .. 'group:' .. g, P .. 'outcome:' .. g)
  call('SREM', P .. 'groups', g)
end
-- A rank's session goes. The group stays, even with no rank in it.
local function vacate_consumer(g, rank, why)
  local round, version = begun(g, rank), aim(g, rank)
  drop_session(of_rank('ranks', g, rank))
  for _, kind in ipairs(TABLES_OF_A_RANK) do
    call('HDEL', P .. kind .. g, rank)
  end
  if active(g) then
    fail_round(g, why)
  elseif call('HLEN', P .. 'held:' .. g) > 0 then
    call('HSET', P .. 'group:' .. g, 'error', why)  -- the others hold a version that this rank does not
    emit('half', nil, g)
  end
  if round > 0 then release_unclaimed(g, round, version) end
  emit('member')
end
-- For ranks that go for good: the last one takes the group along.
local function remove_consumer(g, rank, why)
  vacate_consumer(g, rank, why)
  if call('HLEN', P .. 'ranks:' .. g) == 0 then delete_group(g) end
end

local function group_state(g)
  if active(g) then return 'moving' end
  if gget(g, 'error') ~= '' then return 'half' end
  return whole_at(g) and 'whole' or 'empty'
end
local function group_view(g)
  local members, moving = {}, active(g)
  for rank = 0, size_of(g) - 1 do
    local session = of_rank('ranks', g, rank)
    if session then
      local member = member_view(rank, session)
      member.held, member.stats = held(g, rank), of_rank('stats', g, rank) or nil
      if staged(g, rank) > done(g, rank) then member.staged = aim(g, rank) end
      members[#members + 1] = member
    end
  end
  local leased = {}
  for _, v in ipairs(all_versions()) do
    for _, lease in ipairs(leases(v)) do
      if string.sub(lease, 1, #g + 1) == g .. '/' then leased[#leased + 1] = v end
    end
  end
  local view = {group = g, world_size = size_of(g), state = group_state(g), round = round_of(g),
    members = some(members), error = gget(g, 'error'), live = live(g), last = last_of(g), lag = lag_of(g),
    leased = some(leased)}
  if moving then
    view.target = target_of(g)
    view.pending = some(pending(g))
  elseif view.state == 'whole' then
    view.version = whole_at(g)
  end
  return view
end
local function round_view(g, round)
  if round == round_of(g) and active(g) then
    return answer({version = target_of(g), state = 'moving', pending = some(pending(g))})
  end
  local outcome = call('HGET', P .. 'outcome:' .. g, round)
  if outcome then return answer(cjson.decode(outcome)) end
  return refuse('invalid-request', 'round ' .. round .. ' of group ' .. g .. ' of model ' .. MODEL ..
    ' is not known: it is in round ' .. round_of(g) .. ', and the last ' .. ROUNDS_REMEMBERED ..
    ' are remembered',
    {group = g, round = round})
end
"""
)
