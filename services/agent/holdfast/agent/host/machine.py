"""Identifies the machine and its current boot. Neither id changes while an agent runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from holdfast.runtime.processes.survivors import BOOT_ID

BOOT_ID_CHARS_MAX = 64
PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")  # from the firmware; each virtual machine has its own
# Default values of firmware on which no UUID was set. dmidecode and systemd ignore them, too.
_UNSET_UUIDS = {"03000200-0400-0500-0006-000700080009", "4c4c4544-0000-2010-8020-80c04f202020"}

__all__ = ["BOOT_ID", "PRODUCT_UUID", "boot_id", "machine_id"]


def boot_id(path: Path) -> str:
    """Return the id of the boot, which changes with each boot; "" = it cannot be read, and a reboot is not recognised."""
    return _read(path)[:BOOT_ID_CHARS_MAX]


def machine_id(path: Path) -> str:
    """Return the id of the machine, which does not change with a boot; "" = the firmware has none, or only root may read it.

    The id is a digest, because the number itself is confidential: it identifies the machine to others, too.
    """
    uuid = _read(path).lower()
    if not uuid or uuid in _UNSET_UUIDS or len(set(uuid) - {"-"}) == 1:
        return ""
    return hashlib.blake2s(uuid.encode(), digest_size=16, person=b"holdfast").hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
