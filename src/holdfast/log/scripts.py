"""The Lua scripts of the Redis log: each is one atomic step of the server, run on Redis 6.2 and later.

A script that fails half-way keeps what it wrote before, so each one checks everything that can be wrong before its first
write. Running out of memory is such a check too: Redis refuses the first write that grows, and the growing ones come first.
A lease is stored as "<epoch> <holder>", which makes "still mine, under this epoch" one comparison.
"""

# KEYS: lease, epoch. ARGV: holder, TTL in ms. Returns the epoch as text, or nil when another holds the lease.
#
# The epoch follows the server's clock in seconds: a Redis that has lost its data (or a failover that lost the last writes)
# must not hand out an epoch that agents have already seen, for they would refuse the new leader for good.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  local epoch, holder = string.match(held, '^(%d+) (.*)$')
  if holder ~= ARGV[1] then return nil end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return epoch
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local epoch = string.format('%.0f', math.max(last + 1, tonumber(redis.call('TIME')[1])))
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[1], epoch .. ' ' .. ARGV[1], 'PX', ARGV[2])
return epoch
"""

# KEYS: lease. ARGV: "<epoch> <holder>", TTL in ms. Returns 1, or 0 when the lease is no longer held.
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: lease. ARGV: "<epoch> <holder>". Returns 1, or 0 when it was not held.
RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

# Two bounds that a stream is held to after each commit, as functions for the scripts below.
#
# `trim_consumed` removes what every group has acknowledged: all before the lowest entry that is pending with any group or has
# not been handed out by it. A stream without groups keeps everything: nobody has read it yet.
# `trim_bytes` removes the oldest entries of a stream that takes more memory than it may, read or not: of one that is consumed
# only when it is appended to, since whoever commits is about to read the rest.
# Both trim whole nodes of the stream ("~"), which is cheap and leaves a few entries more; a full memory allows it.
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

# KEYS: streams. ARGV: bytes that each may take; then for each stream 1 = consumed, or 0. Returns how many entries went, and
# how many of them some group had not read.
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

# KEYS: lease, parts of the snapshot, marker, what an earlier version kept instead of parts, then each stream once.
# ARGV: "<epoch> <holder>", this commit's token, the token of the commit before it ('' = not known), stream length, bytes that a
#       stream may take, which streams are consumed (1 or 0 for each, as one word), number of parts, number of appends,
#       per part: name, 1 = write it or 0 = remove it, value;
#       per append: index into KEYS, id, type, traceparent, data;
#       per acknowledgement: index into KEYS, group, position.
# Returns 1; or, when nothing was written, who holds the lease ('' = nobody), or 0: the commit before it is not there.
#
# The marker holds the token of the last commit. One that is repeated because its answer got lost has been done already. One
# whose predecessor is not the last commit was computed from a state that the server has lost (a restart from an append-only
# file without its last second): its differences would make a mix of two states.
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

# Hands pending entries out again. What has been trimmed from the stream is acknowledged and skipped; what has been handed
# out too often goes to the dead stream. Both in the same step as the claim, so that nothing is lost or buried twice.
#
# KEYS: stream, dead stream. ARGV: group, consumer, mode, cursor, count, deliveries allowed, dead stream length, idle in ms.
# Mode 'own' takes what this consumer left pending, beyond the cursor ('-' at first); mode 'idle' takes what has been
# idle for too long with any consumer, this one included: its handler failed. There the cursor is XAUTOCLAIM's ('0-0').
# Returns the next cursor ('' = reached the end), the number buried, and [position, deliveries, fields] for each entry.
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

# Forgets consumers that left nothing pending and have been silent for long: each restart may bring a new name.
# KEYS: stream. ARGV: group, silence in ms. Returns how many.
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

# KEYS: stream. ARGV: group. Returns what is pending, the position of the oldest entry that has not been handed out ('' = none),
# and the server's clock in ms. XINFO itself counts such entries only since Redis 7.
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
