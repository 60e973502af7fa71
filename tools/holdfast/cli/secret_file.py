"""Secrets that a command creates on first use and stores in a file that only its user can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

SECRET_BYTES = 32


def secret_in(path: Path) -> str:
    """Return the secret in the file, which is created if it does not exist. If several processes start at the same time, one of
    them creates it. Raises OSError."""
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
