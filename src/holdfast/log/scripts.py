"""The Lua scripts of the Redis log: each is one atomic step of the server, run on Redis 6.2 and later.

A script that fails after a write does not undo the write, so each script makes all checks before its first write. This includes
the memory limit: Redis refuses the first write that needs memory, so such writes come first. A lease is stored as
"<epoch> <holder>", so that holder and epoch are checked by one comparison.
"""

# KEYS: lease, epoch, candidate, renewal. ARGV: holder, TTL in ms, TTL of the candidate in ms, an epoch and a time of a renewal
# that must have been, the highest epoch that the requester has seen. Returns the epoch as text, '' if there was no such epoch
# or renewal, or '-' and the epoch of another holder, with the time of its last renewal. In that case the requester is recorded
# as candidate, at most twice per TTL of the candidate, and only if there is memory for it. The server stores when a lease ends,
# not how long it lasts. After its clock was set back, or a restart with another clock, a lease of seconds would last for hours.
# All holders request the same TTL, so a longer remaining time is wrong and is shortened.
#
# The epoch follows the server's clock in seconds: a Redis that has lost its data (or a failover that lost the last writes)
# must not issue an epoch that agents have already seen, because they would refuse the new leader permanently. Within the second
# of the last election that clock is not enough, so a new epoch is above all that the requester has seen, too.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
local renewed = string.match(redis.call('GET', KEYS[4]) or '', '^%S+') or '0'
if held then
  local epoch, holder = string.match(held, '^(%d+) (.*)$')
  if holder ~= ARGV[1] then
    local left = redis.call('PTTL', KEYS[1])
    if left < 0 or left > tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
    if redis.call('PTTL', KEYS[3]) < tonumber(ARGV[3]) / 2 then
      redis.pcall('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
    end
    return '-' .. (epoch or '0') .. ' ' .. renewed
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return epoch
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if last < tonumber(ARGV[4]) or tonumber(renewed) < tonumber(ARGV[5]) then return '' end
local epoch = string.format('%.0f', math.max(last + 1, tonumber(ARGV[6]) + 1, tonumber(redis.call('TIME')[1])))
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[1], epoch .. ' ' .. ARGV[1], 'PX', ARGV[2])
return epoch
"""

# KEYS: lease, renewal. ARGV: "<epoch> <holder>", TTL in ms, time of the holder ('' = do not record it). Returns 1, or 0 if the
# lease is no longer held. The holder's time is recorded beside the server's, so that the next holder knows how much time has
# passed since. If there is no memory for it, the record stays as it is.
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] ~= '' then
  local now = redis.call('TIME')
  redis.pcall('SET', KEYS[2], ARGV[3] .. ' ' .. now[1] .. string.format('%06d', now[2]))
end
return 1
"""

# KEYS: renewal. Returns the record, or '' if there is none, and the server's clock in µs, as text.
LAST_RENEWAL = """
local now = redis.call('TIME')
return {redis.call('GET', KEYS[1]) or '', now[1] .. string.format('%06d', now[2])}
"""

# KEYS: lease. ARGV: "<epoch> <holder>". Returns 1, or 0 if it was not held.
RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

# Functions for the scripts below that trim a stream after each commit.
#
# `trim_consumed` removes the entries that every group has acknowledged: all entries before the oldest one that is pending in a
# group or not yet delivered to it. A stream without groups is not trimmed, because its entries have not been read yet.
# `trim_bytes` removes the oldest entries of a stream that exceeds its memory limit, even if they have not been read. A consumed
# stream is trimmed in this way only after an append, because the committing process is about to read its entries.
# Both trim complete nodes of the stream ("~"), which is cheap and leaves a few entries more. Redis allows it if its memory is
# full.
_TRIM = """
local function before(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) end
  return tonumber(a_seq) < tonumber(b_seq)
end
local function trim_consumed(stream)
  if redis.call('EXISTS', stream) == 0 then return 0 end
  local needed = nil
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    local first = info['last-delivered-id']
    if info.pending > 0 then
      first = redis.call('XPENDING', stream, info.name)[2]
    else
      local ms, seq = string.match(first, '^(%d+)-(%d+)$')
      first = ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)
    end
    if needed == nil or before(first, needed) then needed = first end
  end
  return needed and redis.call('XTRIM', stream, 'MINID', '~', needed) or 0
end
local function trim_bytes(stream, bytes_max)
  local used = redis.pcall('MEMORY', 'USAGE', stream)
  if type(used) ~= 'number' or used <= bytes_max then return 0 end
  local keep = math.floor(redis.call('XLEN', stream) * bytes_max / used * 0.9)
  return redis.call('XTRIM', stream, 'MAXLEN', '~', keep)
end
"""

# KEYS: streams. ARGV: the limit of each in bytes; then for each stream 1 = consumed, or 0. Returns the number of removed
# entries, and how many of them a group had not read.
TRIM = (
    _TRIM
    + """
local gone, unread = 0, 0
for i = 1, #KEYS do
  if ARGV[i + 1] == '1' then gone = gone + trim_consumed(KEYS[i]) end
  local surplus = trim_bytes(KEYS[i], tonumber(ARGV[1]))
  gone = gone + surplus
  if ARGV[i + 1] == '1' then unread = unread + surplus end
end
return {gone, unread}
"""
)

# KEYS: lease, parts of the snapshot, marker, the key of an earlier version's snapshot, then each stream once.
# ARGV: "<epoch> <holder>", this commit's token, the token of the commit before it ('' = not known), stream length, bytes that a
#       stream may use, which streams are consumed (one string with 1 or 0 for each), number of parts, number of appends,
#       per part: name, 1 = write it or 0 = remove it, value;
#       per append: index into KEYS, id, type, traceparent, data;
#       per acknowledgement: index into KEYS, group, position.
# Returns 1; or, if nothing was written, the holder of the lease ('' = none), or 0 if the previous commit is missing.
#
# The marker contains the token of the last commit. If it is the token of this commit, the answer was lost and the commit is
# complete. If it is not the token of the previous commit, this commit was computed from a state that the server has lost (after
# a restart from an append-only file without its last second), and its differences would result in a mix of two states.
COMMIT = (
    _TRIM
    + """
local lease, token, before, length, bytes_max, consumed, parts, appends = unpack(ARGV, 1, 8)
local last = redis.call('GET', KEYS[3])
if last == token then return 1 end
local held = redis.call('GET', KEYS[1])
if held ~= lease then return held or '' end
if before ~= '' and last ~= before then return 0 end
for i = 5, #KEYS do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'stream' and kind ~= 'none' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[i] .. ' is a ' .. kind .. ', not a stream')
  end
end
redis.call('SET', KEYS[3], token)
local at = 9
for _ = 1, tonumber(parts) do
  if ARGV[at + 1] == '1' then
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 2])
  else
    redis.call('HDEL', KEYS[2], ARGV[at])
  end
  at = at + 3
end
if tonumber(parts) > 0 then redis.call('DEL', KEYS[4]) end
for _ = 1, tonumber(appends) do
  redis.call('XADD', KEYS[tonumber(ARGV[at])], 'MAXLEN', '~', length, '*',
    'id', ARGV[at + 1], 'type', ARGV[at + 2], 'traceparent', ARGV[at + 3], 'data', ARGV[at + 4])
  at = at + 5
end
while at < #ARGV do
  redis.call('XACK', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
  at = at + 3
end
for i = 5, #KEYS do
  if string.sub(consumed, i - 4, i - 4) == '1' then trim_consumed(KEYS[i]) else trim_bytes(KEYS[i], tonumber(bytes_max)) end
end
return 1
"""
)

# Delivers pending entries again. Trimmed entries are acknowledged and skipped; entries with too many deliveries are moved to
# the dead-letter stream. This is one step with the claim, so that no entry is lost or moved twice.
#
# KEYS: stream, dead-letter stream. ARGV: group, consumer, mode, cursor, count, deliveries allowed, dead-letter stream length,
# idle in ms.
# Mode 'own' takes this consumer's pending entries, beyond the cursor ('-' at first). Mode 'idle' takes entries of any
# consumer that have been idle for too long, including this one, if its handler failed. The cursor is XAUTOCLAIM's ('0-0').
# Returns the next cursor ('' = reached the end), the number of dead letters, and [position, deliveries, fields] of each.
TAKE_PENDING = """
local stream, dead = KEYS[1], KEYS[2]
local group, consumer, mode, from, count, deliveries_max, dead_length, idle_ms = unpack(ARGV)
local positions, cursor = {}, ''
if mode == 'own' then
  for _, pending in ipairs(redis.call('XPENDING', stream, group, from, '+', count, consumer)) do
    positions[#positions + 1] = pending[1]
  end
  if #positions == tonumber(count) then cursor = '(' .. positions[#positions] end
else
  local claimed = redis.call('XAUTOCLAIM', stream, group, consumer, idle_ms, from, 'COUNT', count, 'JUSTID')
  positions = claimed[2]
  if claimed[1] ~= '0-0' then cursor = claimed[1] end
end
local answer, buried = {}, 0
for _, position in ipairs(positions) do
  local deliveries = redis.call('XPENDING', stream, group, position, position, 1)[1][4]
  local entry = redis.call('XRANGE', stream, position, position)[1]
  if not entry then
    redis.call('XACK', stream, group, position)
  elseif deliveries >= tonumber(deliveries_max) then
    local fields = entry[2]
    redis.call('XADD', dead, 'MAXLEN', '~', dead_length, '*', 'position', position, 'group', group,
      'deliveries', deliveries, unpack(fields, 1, math.min(#fields, 1000)))
    redis.call('XACK', stream, group, position)
    buried = buried + 1
  else
    redis.call('XCLAIM', stream, group, consumer, 0, position)
    answer[#answer + 1] = {position, deliveries + 1, entry[2]}
  end
end
return {cursor, buried, answer}
"""

# Deletes consumers without pending entries that have been idle for long, because a restart may use a new name.
# KEYS: stream. ARGV: group, silence in ms. Returns their number.
RETIRE_CONSUMERS = """
local retired = 0
for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local info = {}
  for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
  if info.pending == 0 and info.idle > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], info.name)
    retired = retired + 1
  end
end
return retired
"""

# KEYS: stream. ARGV: group. Returns the pending entries, the position of the oldest undelivered entry ('' = none), and the
# server's clock in ms. XINFO itself counts such entries only since Redis 7.
BACKLOG = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, '', now_ms} end
for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
  if info.name == ARGV[1] then
    local oldest = redis.call('XRANGE', KEYS[1], '(' .. info['last-delivered-id'], '+', 'COUNT', 1)[1]
    return {info.pending, oldest and oldest[1] or '', now_ms}
  end
end
return {0, '', now_ms}
"""
