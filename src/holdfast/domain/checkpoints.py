"""The name of a checkpoint."""

# Without `from __future__ import annotations`: codecs read the types of a named tuple's fields as they are.

from typing import NamedTuple


class CheckpointId(NamedTuple):
    """One step of one attempt. Ordered by age: the newer attempt is greater, and within an attempt the later step."""

    attempt: int
    step: int


NOTHING_SAVED = CheckpointId(0, 0)  # older than every checkpoint
