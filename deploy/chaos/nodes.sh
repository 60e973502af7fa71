#!/bin/sh
# Profile `chaos`: kills a node of this stack at random every CHAOS_EVERY_S, and starts it again CHAOS_AWAY_S later.
#
# It does so through the engine's socket, and whoever holds that socket is root on the machine: not where you would mind.
set -eu

project=$(docker inspect --format '{{ index .Config.Labels "com.docker.compose.project" }}' "$(hostname)")
echo "a node of $project is killed every $CHAOS_EVERY_S s, and is back $CHAOS_AWAY_S s later"

while sleep "$CHAOS_EVERY_S"; do
    victim=$(docker ps --filter "label=com.docker.compose.project=$project" \
        --format '{{ .ID }} {{ .Label "com.docker.compose.service" }}' | grep -E ' (node-[0-9]+|spare)$' | shuf -n 1)
    if [ -z "$victim" ]; then
        echo "no node runs: nothing to kill"
        continue
    fi
    docker kill "${victim% *}" >/dev/null
    echo "killed ${victim#* }"
    sleep "$CHAOS_AWAY_S"
    docker start "${victim% *}" >/dev/null
    echo "started ${victim#* }"
done
