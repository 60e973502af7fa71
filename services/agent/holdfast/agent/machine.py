"""Which machine this is, and which of its boots. Neither changes while an agent runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from holdfast.runtime.survivors import BOOT_ID

BOOT_ID_CHARS_MAX = 64
PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")  # of the firmware; a virtual machine has one of its own
# What firmware has that nobody has set: dmidecode and systemd leave these out, too.
_NOBODYS = {"03000200-0400-0500-0006-000700080009", "4c4c4544-0000-2010-8020-80c04f202020"}

__all__ = ["BOOT_ID", "PRODUCT_UUID", "boot_id", "machine_id"]


def boot_id(path: Path) -> str:
    """Another one after each boot; empty = it cannot be read, and a reboot is not recognised."""
    return _read(path)[:BOOT_ID_CHARS_MAX]


def machine_id(path: Path) -> str:
    """The same after each boot, another one on another machine; empty = the firmware has none, or only root may read it.

    A digest: the number itself identifies the machine to others, too, and is nobody's business.
    """
    uuid = _read(path).lower()
    if not uuid or uuid in _NOBODYS or len(set(uuid) - {"-"}) == 1:
        return ""
    return hashlib.blake2s(uuid.encode(), digest_size=16, person=b"holdfast").hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
