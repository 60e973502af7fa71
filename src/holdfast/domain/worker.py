"""The messages between a worker and its agent. Standard library only, because this module runs in the user's training process.

There are two channels, inherited or named by an environment variable:

* **notes** (worker → agent): one datagram each on the Unix socket `HOLDFAST_NOTES`, sent without blocking and dropped if the
  buffer is full (`domain.notes`). A slow or failed agent therefore never delays a training step.
* **control** (both directions): a `SOCK_SEQPACKET` pair whose worker end is the file descriptor `HOLDFAST_CONTROL_FD`. Before
  the user's script runs, the forked child sends `ready` and waits for `start`. Later the library reads the channel between
  steps without blocking: `checkpoint_now`, `stop`. End of file means that the agent has ended.

Messages are JSON objects with a `type`; unknown types and fields are ignored, so that old and new versions interoperate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MESSAGE_BYTES_MAX = 60_000

# Exit code of a script that ended because of a `stop` message: neither a success nor a crash. EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75

# Environment of a worker, besides torchrun's own variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …).
ENV_NOTES = "HOLDFAST_NOTES"  # path of the agent's datagram socket
ENV_RECORDER = "HOLDFAST_RECORDER"  # path of the socket on which the worker serves its flight recorder
ENV_CONTROL_FD = "HOLDFAST_CONTROL_FD"
ENV_REPLICATOR = "HOLDFAST_REPLICATOR"  # path of the replicator's datagram socket; `saved` notes are sent there as well
ENV_JOB = "HOLDFAST_JOB"
ENV_GENERATION = "HOLDFAST_GENERATION"
ENV_ATTEMPT = "HOLDFAST_ATTEMPT"
ENV_FIRST_ATTEMPT = "HOLDFAST_FIRST_ATTEMPT"  # of this submission of the job; 0 = not known
ENV_MESH = "HOLDFAST_MESH"  # JSON object, outermost dimension first: {"dp": 3, "pp": 3}
ENV_PREVIOUS_MESH = "HOLDFAST_PREVIOUS_MESH"  # of the generation that saved the restored step; for on_resize
ENV_IMAGES = "HOLDFAST_IMAGES"  # directory on /dev/shm for this worker's shard images
ENV_IMAGE_FALLBACK_DIR = "HOLDFAST_IMAGE_FALLBACK_DIR"  # optional: directory for images that do not fit into /dev/shm
ENV_COPY_THREADS = "HOLDFAST_COPY_THREADS"  # optional: threads that copy a save, including the training thread
ENV_INTERVAL_STEPS = "HOLDFAST_CHECKPOINT_INTERVAL_STEPS"
ENV_REPLICA_CHECK_STEPS = "HOLDFAST_REPLICA_CHECK_STEPS"  # steps between comparisons of replicas' parameters; 0 = never
ENV_OBSERVE_STEPS = "HOLDFAST_OBSERVE_STEPS"  # observation of a script's steps (`train.observed_steps`); "0" = off
# Lines that torch logs about the server through which an agent reads the flight recorder. They are not output of the script.
TORCH_SERVER_LINE = re.compile(r"WorkerServer\.cpp:\d+\] \[c10d\] Server (?:listening to UNIX|shutting down|exited)")
ENV_BEGAN_S = "HOLDFAST_BEGAN_S"  # time.monotonic() at the begin of the script; for the duration of its imports
ENV_IMPORTS = "HOLDFAST_IMPORTS"  # file for the names of the modules that the script has imported; absent = no file
ENV_RESTORE = "HOLDFAST_RESTORE"  # JSON: {"step": 120, "attempt": 2, "path": "/dev/shm/…"}; absent = from scratch.
# In addition "paths" if the state was sharded differently: the rank then takes its state from several shards.
ENV_TRACEPARENT = "TRACEPARENT"

_COMPACT = json.JSONEncoder(separators=(",", ":"))


def encode(kind: str, **fields: object) -> bytes:
    """Encode one message. Raises ValueError if it does not fit into a datagram."""
    raw = _COMPACT.encode({"type": kind, **fields}).encode()
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {kind!r} message of {len(raw)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Mapping[str, Any]:
    """Decode one message. Returns an empty mapping if it is malformed: a worker can write anything, which must not affect the
    agent."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, or thousands of nested brackets
        return {}
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else {}


# The messages of the control channel.
#
#   ready     (worker → agent, control)  pid:int votes:bool
#                                                             votes: this library answers a `ballot`
#   start     (agent → worker, control)  env:{name: value}    applied before the script runs: MASTER_ADDR, MASTER_PORT,
#                                                             HOLDFAST_RESTORE, …
#   checkpoint_now (agent → worker)      at_step:int leaving:str
#                                                             leaving: optional; the reason of the planned change that
#                                                             follows the save
#                                        ballot:int           optional: only a proposal. The rank answers with `vote`; after
#                                                             a yes, it waits at the step for `checkpoint_now` or `void`
#   vote      (worker → agent, control)  ballot:int yes:bool done:int
#                                                             done: steps finished
#   void      (agent → worker)           at_step:int          the proposal of this step is void
#   interval  (agent → worker)           from_step:int interval_steps:int
#                                                             save at multiples of interval_steps from from_step on
#   stop      (agent → worker)           save:bool            raise hf.Interrupted: at the end of this step or, to save
#                                                             first, in the next run.checkpoint. Ranks may read the message
#                                                             one step apart; to end all ranks at one global step, send
#                                                             checkpoint_now first
