"""Say whether the built dashboard is what its sources say: `python check.py BUILD_JSON`. Needs no Node.js.

`stamp.mjs` writes the same hash when it has built: of each file in order of its path: path, NUL, length, NUL, bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

INPUTS = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
HERE = Path(__file__).parent


def hash_of_sources() -> str:
    names = [*INPUTS, *(str(path.relative_to(HERE)) for path in (HERE / "src").rglob("*") if path.is_file())]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (HERE / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def main(built: Path) -> int:
    if json.loads(built.read_text())["sources_sha256"] == hash_of_sources():
        return 0
    sys.stderr.write(f"{built.parent} was built from other sources than {HERE} has: run make dashboard\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
