"""The certificate of a node that has joined by an invitation, in a directory of its agent.

    identity/fleet.json           fleet, node and endpoints of the supervisors
    identity/join-token           of the fleet, if it has one
    identity/current -> SERIAL    in use; replaced as a whole, so that key and certificate always belong together
    identity/SERIAL/tls.crt, tls.key, ca.crt

All of it is readable by the agent's user only.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import write_private, write_whole
from holdfast.runtime.private import close_to_others, make_private
from holdfast.runtime.trust.revocation import serial_of, shown
from holdfast.runtime.trust.tls import CERT, KEY, require_pair

DIRECTORY = "identity"
CURRENT, FLEET, TOKEN = "current", "fleet.json", "join-token"
CERTIFICATE, PRIVATE, TRUSTED = "tls.crt", "tls.key", "ca.crt"


@dataclass(frozen=True, slots=True)
class Joined:
    """What a node knows of the fleet that it has joined. `control`: endpoints for agents."""

    fleet: str
    node: str
    control: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Files:
    cert: Path
    key: Path
    ca: Path
    join_token: Path | None


class Enrolled:
    """The directory `identity` below that of an agent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def joined(self) -> Joined | None:
        """None: this machine has not joined by an invitation. Raises `InvalidSpec` for a file that cannot be read."""
        file = self.path / FLEET
        try:
            values = json.loads(file.read_text())
            return Joined(str(values["fleet"]), str(values["node"]), tuple(map(str, values["control"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = f"what `holdfast agent --invite` has written ({error}); delete {self.path}, and join again"
            raise InvalidSpec("directory", str(file), expected) from error

    @property
    def files(self) -> Files:
        current, token = self.path / CURRENT, self.path / TOKEN
        return Files(current / CERTIFICATE, current / PRIVATE, current / TRUSTED, token if token.exists() else None)

    def join(self, joined: Joined, *, certificate: bytes, key: bytes, ca: bytes, join_token: str) -> None:
        """Keep what an invitation has brought. Raises OSError, and `InvalidSpec` for files of others or a wrong pair."""
        make_private(self.path)
        close_to_others(self.path)
        if join_token:
            write_private(self.path / TOKEN, f"{join_token}\n".encode())
        self.replace(certificate=certificate, key=key, ca=ca)
        # last: without it, the next start does not take the directory for a whole one
        write_whole(self.path / FLEET, json.dumps(asdict(joined)).encode(), durable=True)

    def replace(self, *, certificate: bytes, key: bytes, ca: bytes) -> None:
        """Use another certificate and key from now on. The ones before are deleted at the next replacement, because a process
        may be about to read them. Raises OSError, and `InvalidSpec` if they do not belong together."""
        require_pair(certificate, key, self.path, CERT, KEY)
        name = shown(serial_of(certificate))
        before = os.readlink(self.path / CURRENT) if (self.path / CURRENT).is_symlink() else ""
        for old in self.path.iterdir():
            if old.is_dir() and not old.is_symlink() and old.name not in (before, name):
                shutil.rmtree(old, ignore_errors=True)
        new = self.path / name
        new.mkdir(mode=0o700, exist_ok=True)
        write_private(new / PRIVATE, key)
        write_whole(new / TRUSTED, ca, durable=True)
        write_whole(new / CERTIFICATE, certificate, durable=True)
        link = self.path / f".{CURRENT}.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self.path / CURRENT)
