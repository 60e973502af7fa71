"""The API tokens of stacks that this user has started on this machine, so that the user's commands and browser find them.

Every user and every program of the machine can connect to a loopback address, and a submitted job runs code as the user of the
agents. So a stack creates a token for its API, in `<directory>/api-token`, unless a token is configured. Links to these files
are in `~/.local/state/holdfast/api`, by port.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import quote, urlsplit

from holdfast.cli.secret_file import secret_in

FILE = "api-token"
LINKS = Path("~/.local/state/holdfast/api")
TOKEN_BYTES_MAX = 4096


def make(file: Path) -> str:
    """Return a new token, and write it to the file, which only this user can read. Raises OSError."""
    file.unlink(missing_ok=True)
    return secret_in(file)


def note(url: str, file: Path) -> None:
    """Let the commands of this user find the token of the API at `url`. Raises OSError."""
    links = LINKS.expanduser()
    links.mkdir(parents=True, exist_ok=True, mode=0o700)
    for link in links.iterdir():
        if link.is_symlink() and not link.exists():  # of a stack whose directory is gone
            link.unlink(missing_ok=True)
    new = links / f".{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(file.absolute())
    new.replace(links / str(_port(url)))


def unnote(url: str) -> None:
    """The API at `url` has no token that a stack has made."""
    (LINKS.expanduser() / str(_port(url))).unlink(missing_ok=True)


def forget(url: str, file: Path) -> None:
    """Delete the token of a stack that has stopped."""
    link = LINKS.expanduser() / str(_port(url))
    if link.is_symlink() and link.readlink() == file.absolute():
        link.unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def find(url: str) -> str:
    """Return the token of the API at this loopback address, if this user has started it; else an empty string."""
    return read(LINKS.expanduser() / str(_port(url)))


def read(file: Path) -> str:
    """Return the token in the file; empty if there is none, or if others than this user could have written or read it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return ""
            return opened.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except (OSError, ValueError):
        return ""


def sign_in_link(url: str, token: str) -> str:
    """Return the address of the dashboard with which a browser is signed in. What stands behind the `#` is sent to no server,
    and the page removes it from the address."""
    return f"{url.rstrip('/')}/#token={quote(token, safe='')}" if token else url


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
