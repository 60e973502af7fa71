"""The name of a checkpoint."""

# Without `from __future__ import annotations`: codecs read the types of a named tuple's fields as they are.

from typing import NamedTuple


class CheckpointId(NamedTuple):
    """One step of one attempt. The greater one is the newer: a newer attempt is newer whatever its steps."""

    attempt: int
    step: int


NOTHING_SAVED = CheckpointId(0, 0)  # older than every checkpoint
