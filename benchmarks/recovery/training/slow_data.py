"""What `slow_start.py` loads: an index of a synthetic corpus, which takes some seconds to make."""

from __future__ import annotations

TOKENS, WORDS = 8_000_000, 50_000


def prepare() -> dict[str, list[int]]:
    """Return the positions of each word."""
    names = [f"word-{number}" for number in range(WORDS)]
    index: dict[str, list[int]] = {}
    for position in range(TOKENS):
        index.setdefault(names[position * 7919 % WORDS], []).append(position)
    return index
