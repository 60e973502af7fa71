#!/bin/sh
# Starts redis-server with one user per service of Holdfast: sh redis.sh [OPTIONS OF redis-server]
#
#   REDIS_FLEET          the fleet, whose keys the users may access (default: main)
#   REDIS_SUPERVISOR_PASSWORD_FILE, REDIS_DIAGNOSTICS_PASSWORD_FILE     each with a password of 16 characters or more
#   REDIS_RUN            directory for the ACL file, which has digests of the passwords
#   REDIS_FAULTS         `yes`: supervisors may shut the server down, for the injected fault redis_kill (docs/fault-injection.md)
#
# Nobody can be the user `default`: it is off and has no password. It keeps all rights, because Redis replays the transactions of the
# append-only file with them: without, a restart would lose what they wrote. `probe` has a password that everybody knows and may only PING. Commands and keys follow
# src/holdfast/log; the tests of the event log run as these users. Redis 6.2 and later.
set -eu
umask 077

fleet=${REDIS_FLEET:-main}
keys="~holdfast:{$fleet}"

password() { # file
  text=$(head -n 1 "$1") || exit 1
  if [ "${#text}" -lt 16 ]; then
    echo "redis.sh: the password in $1 has ${#text} characters; write one of 16 or more" >&2
    exit 1
  fi
  printf %s "$text" | sha256sum | cut -d ' ' -f 1
}

supervisor=$(password "$REDIS_SUPERVISOR_PASSWORD_FILE")
diagnostics=$(password "$REDIS_DIAGNOSTICS_PASSWORD_FILE")
shutdown=""
if [ "${REDIS_FAULTS:-no}" = yes ]; then shutdown="+shutdown"; fi

# Scripts run with the rights of their caller, so each command in them is listed, too.
trims="+exists +xinfo +xlen +xpending +xtrim +memory|usage"
both="+ping +info +multi +exec +evalsha +script|load +xadd $trims"
leader="+get +set +del +hgetall +hset +hdel +type +pexpire +pttl +time"
reads="+xread +xreadgroup +xgroup +xack +xclaim +xautoclaim +xrange +xrevrange"

cat > "$REDIS_RUN/users.acl" << ACL
user default off resetpass allchannels allkeys allcommands
user probe on >probe resetchannels resetkeys -@all +ping
user supervisor on #$supervisor resetchannels $keys:* -@all $both $leader $reads $shutdown
user diagnostics on #$diagnostics resetchannels $keys:stream:findings $keys:stream:steps -@all $both
ACL

exec redis-server --aclfile "$REDIS_RUN/users.acl" --appendonly yes --appendfsync everysec --maxmemory-policy noeviction "$@"
