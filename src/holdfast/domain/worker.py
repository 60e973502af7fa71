"""What a worker and its agent say to each other. Standard library only: it runs inside the user's training process.

Two channels, both inherited or named by environment:

* **notes** (worker → agent), one datagram each on the Unix socket `HOLDFAST_NOTES`, sent without blocking and dropped when
  the buffer is full (`domain.notes`). A sick agent can never slow a step.
* **control** (both ways), a `SOCK_SEQPACKET` pair whose worker end is the file descriptor `HOLDFAST_CONTROL_FD`. Before the
  user's script runs, the forked child says `ready` and waits for `start`; later the library looks at it between steps
  without blocking: `checkpoint_now`, `stop`. End of file means that the agent is gone.

Messages are JSON objects with a `type`; unknown types and fields are ignored, so that old and new versions interoperate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MESSAGE_BYTES_MAX = 60_000

# Exit code of a script that left because it was told to (`stop`): neither a success nor a crash. EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75

# Environment of a worker, besides torchrun's own variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …).
ENV_NOTES = "HOLDFAST_NOTES"  # path of the agent's datagram socket
ENV_RECORDER = "HOLDFAST_RECORDER"  # path of the socket on which its flight recorder is to be served
ENV_CONTROL_FD = "HOLDFAST_CONTROL_FD"
ENV_REPLICATOR = "HOLDFAST_REPLICATOR"  # path of the replicator's datagram socket; a `saved` note goes there as well
ENV_JOB = "HOLDFAST_JOB"
ENV_GENERATION = "HOLDFAST_GENERATION"
ENV_ATTEMPT = "HOLDFAST_ATTEMPT"
ENV_MESH = "HOLDFAST_MESH"  # JSON object, outermost dimension first: {"dp": 3, "pp": 3}
ENV_PREVIOUS_MESH = "HOLDFAST_PREVIOUS_MESH"  # of the generation that saved the restored step; for on_resize
ENV_IMAGES = "HOLDFAST_IMAGES"  # directory on /dev/shm for this worker's shard images
ENV_IMAGE_FALLBACK_DIR = "HOLDFAST_IMAGE_FALLBACK_DIR"  # optional: directory for images that /dev/shm has no room for
ENV_COPY_THREADS = "HOLDFAST_COPY_THREADS"  # optional: threads that copy a save, the training's own included
ENV_INTERVAL_STEPS = "HOLDFAST_CHECKPOINT_INTERVAL_STEPS"
ENV_REPLICA_CHECK_STEPS = "HOLDFAST_REPLICA_CHECK_STEPS"  # parameters are compared across replicas so often; 0 = never
ENV_OBSERVE_STEPS = "HOLDFAST_OBSERVE_STEPS"  # of a script that reports none (`train.observed_steps`); "0" = no
# What torch logs about the server through which an agent reads the flight recorder: nothing that the user's script did.
TORCH_SERVER_LINE = re.compile(r"WorkerServer\.cpp:\d+\] \[c10d\] Server (?:listening to UNIX|shutting down|exited)")
ENV_IMPORTS = "HOLDFAST_IMPORTS"  # file for the names of the modules that the script has imported; absent = not wanted
ENV_RESTORE = "HOLDFAST_RESTORE"  # JSON: {"step": 120, "attempt": 2, "path": "/dev/shm/…"}; absent = from scratch.
# "paths" beside "path" when there are several: the state was sharded otherwise, and is put together from all of them
ENV_TRACEPARENT = "TRACEPARENT"

_COMPACT = json.JSONEncoder(separators=(",", ":"))


def encode(kind: str, **fields: object) -> bytes:
    """One message as bytes. Raises ValueError when it would not fit a datagram."""
    raw = _COMPACT.encode({"type": kind, **fields}).encode()
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {kind!r} message of {len(raw)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Mapping[str, Any]:
    """The message; an empty mapping for garbage (a worker can write anything there and must not hurt the agent)."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, thousands of brackets
        return {}
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else {}


# The messages of the control channel.
#
#   ready     (worker → agent, control)  pid:int
#   start     (agent → worker, control)  env:{name: value}    applied before the script runs: MASTER_ADDR, MASTER_PORT,
#                                                             HOLDFAST_RESTORE, …
#   checkpoint_now (agent → worker)      at_step:int leaving:str
#                                                             leaving: optional; a planned change follows the save, and why
#   interval  (agent → worker)           from_step:int interval_steps:int
#                                                             save at multiples of interval_steps from from_step on
#   stop      (agent → worker)           save:bool            leave by hf.Interrupted: at the end of this step or, to save
#                                                             first, in the run.checkpoint after it. Ranks may see it a step
#                                                             apart: for one global step send checkpoint_now before
