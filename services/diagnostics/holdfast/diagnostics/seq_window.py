"""Recognises ticks that an agent has sent again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW = 1024  # sequence numbers remembered per incarnation


@dataclass(slots=True)
class SeqWindow:
    """The folded sequence numbers of an incarnation: the newest number, and one bit for each of the 1,024 numbers before it."""

    newest: int = -1
    bits: int = 0

    def add(self, seq: int) -> bool:
        """Add `seq`. Returns False if `seq` was added before. A number older than the window counts as new, because folding a
        tick twice is safer than losing a tick."""
        if seq > self.newest:
            self.bits = ((self.bits << min(seq - self.newest, _WINDOW)) | 1) & ((1 << _WINDOW) - 1)
            self.newest = seq
            return True
        back = self.newest - seq
        if back >= _WINDOW:
            return True
        if self.bits >> back & 1:
            return False
        self.bits |= 1 << back
        return True
