"""Parts of documents that are generated, between two marker lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def written_between(text: str, begin: str, end: str, content: str) -> str:
    """`text` with `content`, which ends with a newline, between the marker lines. Raises ValueError if it has no markers."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"there is no line {begin if not found_begin else end}")
    return f"{before}{begin}\n{content}{end}{after}"


def write_or_check(module: str, description: str | None, generated_into: Callable[[str], str], stale: str) -> int:
    """`python -m MODULE DOCUMENT [--check]`: write the generated part, or fail if it is another. Returns the exit status.

    `stale`: the message of a failed check, with `{document}`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is not current")
    options = parser.parse_args()
    text = options.document.read_text()
    new = generated_into(text)
    if not options.check:
        options.document.write_text(new)
    elif new != text:
        sys.stderr.write(f"{stale.format(document=options.document)}\n")
        return 1
    return 0
