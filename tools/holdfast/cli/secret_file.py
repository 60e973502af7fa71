"""Secrets that a command makes on first use and keeps in a file that only its user can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

SECRET_BYTES = 32


def secret_in(path: Path) -> str:
    """Return the secret in the file, written first if there is none. Of several processes that start at once one writes it.
    Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    finally:
        mine.unlink()
    return path.read_text()
