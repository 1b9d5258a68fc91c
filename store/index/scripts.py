"""What all Lua scripts of the index share: keys, clock, answers, members, versions.

Keys. Every script gets one key, the model's prefix `wd:{RUN/MODEL}:`, and makes all others from it. They
share its hash tag, so in a Redis Cluster they are on the shard that the prefix is routed to.

    meta              hash    membership (rises with every change of members), incarnation, world_size,
                              retention; versions: open, latest, highest, and hold (the version that the
                              model is held at); policy: mode, max_lag
    published         zset    the last 1024 versions that became ready
    pins              set     versions that are pinned
    tags              hash    name -> version
    alive             zset    session -> when its membership ends
    sessions          hash    session -> JSON: role, group, rank, ttl, process, joined
    layouts           hash    session -> digest of its layout
    producers         hash    rank -> session
    yielding          set     sessions of producers that give way to any other
    versions          zset    every version that is remembered
    version:V         hash    state, slot, tiling, incarnation, world_size, opened, deadline, ready, nbytes,
                              reason, attempt, live
    announced         set     versions that an index without memory was told of (for an hour, as what follows)
    announced:V       hash    rank -> JSON of a part that is still in its memory
    announced-digests:V       rank -> its tile digests, raw bytes
    expect:V          hash    rank -> session that must seal it: the incarnation as it was at the first open
    granted:V         set     ranks that opened it: a rank that missed an abort in between may not seal
    parts:V           hash    rank -> JSON of its Part
    digests:V         hash    rank -> its tile digests, raw bytes
    leases:V          zset    "GROUP/ROUND" -> when the lease ends
    groups            set     names of consumer groups
    rounds            hash    group -> its last round; outlives the group: lease names are never reused
    group:G           hash    world_size, target, noop, active, error; last: the version that it held as a
                              whole last; base: the newest ready one when the group was made
    ranks:G           hash    rank -> session
    held:G            hash    rank -> version that its parameters hold
    begun:G, done:G   hash    rank -> last round that it began, finished
    aim:G             hash    rank -> version that the round it began moves to, or "-": nothing to move
    staged:G          hash    rank -> round whose version it has read whole, and not put in place yet
    stats:G           hash    rank -> JSON of what it said of its last update
    outcome:G         hash    round -> JSON of how it ended (the last 64)

Times are Unix seconds of Redis' own clock. Versions and rounds stay below 10^14, where Lua's numbers are
exact in whatever form they are written. A version of any state but `open` and `aborted` keeps its slot
from being written while it has a live lease.

Arguments. ARGV[1] is the channel of the run's events, ARGV[2] the model's name; a script's own begin at
ARGV[3]. Answers are JSON: {"value": ...}, {"wait": reason, "message", "details"}, or {"error": slug,
"message", "details"}. An error is answered, not raised, because due transitions made before it must stay.
"""

from __future__ import annotations

REMEMBERED = 16  # freed and aborted versions that are kept for those who ask what became of them

PRELUDE = """
local call = redis.call
local P, CHANNEL, MODEL = KEYS[1], ARGV[1], ARGV[2]
local clock = call('TIME')
local NOW = clock[1] + clock[2] / 1000000

-- HGET and friends answer false where there is nothing
local function num(x) if x then return tonumber(x) end end
local function stamp(t) return string.format('%.6f', t) end
-- Lua cannot tell an empty list from an empty table: an empty list is left out of an answer
local function some(list) if #list > 0 then return list end end

local function emit(kind, version, group)
  if kind == 'member' then call('HINCRBY', P .. 'meta', 'membership', 1) end
  call('PUBLISH', CHANNEL, cjson.encode({MODEL, kind, version or cjson.null, group or ''}))
end
local function answer(value) return cjson.encode({value = value}) end
local function wait(reason, message, details)
  return cjson.encode({wait = reason, message = message, details = details})
end
local function refuse(slug, message, details)
  details = details or {}
  details.model = MODEL
  return cjson.encode({error = slug, message = message, details = details})
end

local function ranks_text(ranks)
  return (#ranks == 1 and 'rank ' or 'ranks ') .. table.concat(ranks, ', ')
end

-- the model -----------------------------------------------------------------------------------------

local META = P .. 'meta'
local function meta(field) return call('HGET', META, field) end
local function exists() return call('EXISTS', META) == 1 end
local function unknown_model()
  return refuse('unknown-model', 'nobody has registered model ' .. MODEL ..
    ': a producer or consumer must join first')
end
local function create_if_missing()
  if not exists() then
    -- begins at the hour: an index that lost its data must not count up to what somebody remembers
    call('HSET', META, 'incarnation', 0, 'world_size', 0, 'retention', 0, 'membership',
      string.format('%d', clock[1] * 1000))
  end
end

-- policy --------------------------------------------------------------------------------------------

local PUBLISHED_REMEMBERED = 1024
local function policy_view() return {mode = meta('mode') or 'async', max_lag = num(meta('max_lag')) or 1} end
local function held_at() return num(meta('hold')) end
-- how many versions became ready after v; of all that are remembered where v is nil
local function lag_behind(v)
  return call('ZCOUNT', P .. 'published', v and '(' .. string.format('%d', v) or '-inf', '+inf')
end
local function published(v)
  call('ZADD', P .. 'published', v, v)
  call('ZREMRANGEBYRANK', P .. 'published', 0, -PUBLISHED_REMEMBERED - 1)
end
-- How many of the newest ready versions stay: more than the retention where readers may lag further, since
-- one is written while the others are read.
local function window()
  local keep, policy = tonumber(meta('retention')), policy_view()
  if policy.mode == 'bounded' then keep = math.max(keep, policy.max_lag + 2) end
  return keep
end
-- versions that are kept whatever the retention says: v -> true
local function protected()
  local set = {}
  for _, v in ipairs(call('SMEMBERS', P .. 'pins')) do set[tonumber(v)] = true end
  for _, v in ipairs(call('HVALS', P .. 'tags')) do set[tonumber(v)] = true end
  local hold = held_at()
  if hold then set[hold] = true end
  return set
end

-- members -------------------------------------------------------------------------------------------

local function expiry(session) return num(call('ZSCORE', P .. 'alive', session)) end
local function alive(session)
  if not session then return false end
  local ends = expiry(session)
  return ends ~= nil and ends > NOW
end
local function info(session)
  local raw = call('HGET', P .. 'sessions', session)
  if raw then return cjson.decode(raw) end
end
-- extends, never shortens
local function renew(session, ttl)
  local ends = expiry(session)
  if not ends or ends < NOW + ttl then call('ZADD', P .. 'alive', stamp(NOW + ttl), session) end
end
-- any call by a member is a sign of life, as good as a heartbeat
local function touch(session)
  local was_alive = alive(session)
  renew(session, info(session).ttl)
  if not was_alive then emit('member') end
end
local function add_session(session, role, group, rank, layout, process, ttl)
  call('HSET', P .. 'sessions', session, string.format(
    '{"role":"%s","group":"%s","rank":%d,"ttl":%s,"process":%s,"joined":%s}',
    role, group, rank, ttl, process, stamp(NOW)))
  call('HSET', P .. 'layouts', session, layout)
  renew(session, tonumber(ttl))
end
-- An importer's claim: whoever else wants the rank has it.
local function yields(session) return call('SISMEMBER', P .. 'yielding', session) == 1 end
local function drop_session(session)
  call('SREM', P .. 'yielding', session)
  call('HDEL', P .. 'sessions', session)
  call('HDEL', P .. 'layouts', session)
  call('ZREM', P .. 'alive', session)
end
-- A session is one rank of one role; nil where it is free for this one.
local function misused(session, role, group, rank)
  local mine = info(session)
  if mine and (mine.role ~= role or mine.group ~= group or mine.rank ~= rank) then
    return refuse('member-conflict', 'session ' .. session .. ' is rank ' .. mine.rank .. ' of the ' ..
      mine.role .. 's ' .. mine.group .. ' of model ' .. MODEL ..
      ' already: every rank needs a session of its own',
      {rank = rank, session = session})
  end
end
local function taken(session, rank, what)
  local ends = expiry(session) - NOW
  return refuse('member-conflict', string.format(
    'rank %d of %s of model %s is held by session %s, which was alive a moment ago: wait %.1f s until it' ..
    ' counts as dead, or replace it by name if you know that its process is gone',
    rank, what, MODEL, session, ends),
    {rank = rank, session = session, process = info(session).process, expires_in = ends})
end
local function not_holder(rank, what, session, holder)
  return refuse('member-conflict', 'session ' .. session .. ' does not hold rank ' .. rank .. ' of ' ..
    what .. ' of model ' .. MODEL .. (holder and ': it was replaced by session ' .. holder
    or ': it was replaced, left or was forgotten; join again'),
    {rank = rank, session = session, holder = holder or nil})
end
local function member_view(rank, session)
  return {rank = tonumber(rank), session = session, info = call('HGET', P .. 'sessions', session),
    layout = call('HGET', P .. 'layouts', session), expires_in = expiry(session) - NOW}
end

-- versions ------------------------------------------------------------------------------------------

local VERSIONS = P .. 'versions'
local PARTS_OF_A_VERSION = {'version:', 'expect:', 'granted:', 'parts:', 'digests:', 'leases:'}
local function vget(v, field) return call('HGET', P .. 'version:' .. v, field) end
local function state_of(v) return vget(v, 'state') end
local function all_versions()  -- rising
  local list = call('ZRANGE', VERSIONS, 0, -1)
  for i = 1, #list do list[i] = tonumber(list[i]) end
  return list
end
local function in_state(...)  -- rising
  local wanted, found = {}, {}
  for _, state in ipairs({...}) do wanted[state] = true end
  for _, v in ipairs(all_versions()) do
    if wanted[state_of(v)] then found[#found + 1] = v end
  end
  return found
end
local function leases(v) return call('ZRANGEBYSCORE', P .. 'leases:' .. v, '(' .. stamp(NOW), '+inf') end
local function lease_live(v, lease)
  local ends = num(call('ZSCORE', P .. 'leases:' .. v, lease))
  return ends ~= nil and ends > NOW
end
local function renew_lease(v, lease, ttl)
  local ends = num(call('ZSCORE', P .. 'leases:' .. v, lease))
  if not ends or ends < NOW + ttl then call('ZADD', P .. 'leases:' .. v, stamp(NOW + ttl), lease) end
end
local function erase(v)
  for _, kind in ipairs(PARTS_OF_A_VERSION) do call('DEL', P .. kind .. v) end
  call('ZREM', VERSIONS, v)
end
local function unsealed(v)
  local missing = {}
  for rank = 0, tonumber(vget(v, 'world_size')) - 1 do
    if call('HEXISTS', P .. 'parts:' .. v, rank) == 0 then missing[#missing + 1] = rank end
  end
  return missing
end
local function close(v, state, reason)
  call('HSET', P .. 'version:' .. v, 'state', state, 'reason', reason)
  if state == 'aborted' then call('HINCRBY', META, 'aborted', 1) end
  call('SREM', P .. 'pins', v)
  local tags = call('HGETALL', P .. 'tags')
  for i = 1, #tags, 2 do
    if tonumber(tags[i + 1]) == v then call('HDEL', P .. 'tags', tags[i]) end
  end
  if held_at() == v then
    call('HDEL', META, 'hold')
    emit('released', v)
  end
  if num(meta('open')) == v then call('HDEL', META, 'open') end
  if num(meta('latest')) == v then
    local ready = in_state('ready')
    if #ready > 0 then call('HSET', META, 'latest', ready[#ready]) else call('HDEL', META, 'latest') end
  end
  emit(state, v)
end
local function abort_open(reason)
  local v = num(meta('open'))
  if v then close(v, 'aborted', reason) end
  return v
end

-- Due transitions. Each answers what it did, in words, for `sweep`.
local function abort_overdue()
  local v, why = num(meta('open')), nil
  if not v then return {} end
  local missing = unsealed(v)
  if tonumber(vget(v, 'deadline')) <= NOW then
    why = ranks_text(missing) .. ' did not seal in time'
  else
    for _, rank in ipairs(missing) do
      if not alive(call('HGET', P .. 'expect:' .. v, rank)) then
        why = 'rank ' .. rank .. ' died before it sealed its part (no sign of life)'
        break
      end
    end
  end
  if not why then return {} end
  close(v, 'aborted', why)
  return {'version ' .. v .. ' aborted: ' .. why}
end
local function free_idle()
  local freed = {}
  for _, v in ipairs(in_state('retired')) do
    if #leases(v) == 0 then
      close(v, 'freed', 'retired to make room for newer versions')
      freed[#freed + 1] = 'version ' .. v .. ' freed: retired, and its last lease is gone'
    end
  end
  return freed
end
-- Closed versions lose their digests at once, and are forgotten but for the last few, unless a reader
-- whose source left still holds a lease.
local function forget(keep)
  local closed = in_state('freed', 'aborted')
  for i, v in ipairs(closed) do
    if #leases(v) == 0 then
      if i <= #closed - keep then erase(v) else call('DEL', P .. 'digests:' .. v) end
    end
  end
end

local function tags_of(v)
  local all, found = call('HGETALL', P .. 'tags'), {}
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]) == v then found[#found + 1] = all[i] end
  end
  return found
end
local function version_view(v)
  local at = P .. 'version:' .. v
  local function n(field) return num(call('HGET', at, field)) end
  local function s(field) return call('HGET', at, field) or '' end
  local sealed = call('HKEYS', P .. 'parts:' .. v)
  for i = 1, #sealed do sealed[i] = tonumber(sealed[i]) end
  return {version = v, state = s('state'), slot = n('slot'), tiling = s('tiling'),
    incarnation = n('incarnation'), world_size = n('world_size'), opened = n('opened'),
    ready = n('ready'), nbytes = n('nbytes'), reason = s('reason'),
    attempt = s('attempt'), live = s('live') == '1', pinned = call('SISMEMBER', P .. 'pins', v) == 1,
    tags = some(tags_of(v)), sealed = some(sealed), leases = some(leases(v))}
end
local function gone(v)
  local highest = num(meta('highest'))
  local why
  if highest and v <= highest then why = 'it was freed or never published, and forgotten'
  else why = 'it was never opened, or was aborted and forgotten' end
  return refuse('version-gone', 'version ' .. v .. ' of model ' .. MODEL .. ' is not known: ' .. why ..
    '; the newest ready one is ' .. (meta('latest') or 'none'), {version = v, latest = num(meta('latest'))})
end

-- producers -----------------------------------------------------------------------------------------

local PRODUCERS = P .. 'producers'
-- The table of producers changes: what was cached for the incarnation is void, what is open cannot be whole.
local function next_incarnation(why)
  call('HINCRBY', META, 'incarnation', 1)
  abort_open(why)
  emit('member')
end
local function vacate_producer(rank, why)
  drop_session(call('HGET', PRODUCERS, rank))
  call('HDEL', PRODUCERS, rank)
  next_incarnation(why)
end
"""
