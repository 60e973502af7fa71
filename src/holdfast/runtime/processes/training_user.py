"""The user that training runs as, if it is another one than that of the agent.

An agent that runs as root can start its workers under another uid. They then cannot read its keys and its environment, and
cannot signal it. `spawn` of `runtime.children` starts a process as this user.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

ROOT = 0
ID_MAX = 2**32 - 2  # 2**32 - 1 means "unchanged" to the kernel
OPTION = "--user (HOLDFAST_AGENT_USER)"
_EXPECTED = "NAME or UID, or one of them with :GROUP"
# Variables of a root shell that name root's own places
_OF_ROOT = ("MAIL", "XDG_RUNTIME_DIR", "SUDO_COMMAND", "SUDO_USER", "SUDO_UID", "SUDO_GID")


@dataclass(frozen=True, slots=True)
class TrainingUser:
    """`groups`: all groups of the processes, `gid` included. `home` is empty for a uid without an entry in the user database.
    `umask`: that of the agent, for the processes of the user."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = ""
    umask: int = 0o022

    def environment(self, inherited: Mapping[str, str], home: Path) -> dict[str, str]:
        """Return the environment of this user's processes. `home`: the home directory of a uid that has none."""
        kept = {name: value for name, value in inherited.items() if name not in _OF_ROOT}
        return {**kept, "HOME": self.home or str(home), "USER": self.name, "LOGNAME": self.name}

    def expanded(self, path: str, environment: Mapping[str, str]) -> str:
        """Return a path with this user's home directory in the place of a leading `~`."""
        if path == "~" or path.startswith("~/"):
            return environment.get("HOME", self.home) + path[1:]
        return os.path.expanduser(path)


def training_user(text: str) -> TrainingUser | None:
    """Return the user; None if training runs as the user of this process, because no other one is named.

    Raises `InvalidSpec` for a user or group that does not exist, and if this process is not root and may not change its user.
    """
    if not text:
        return None
    who, colon, group = text.partition(":")
    entry, uid = _user(text, who)
    if colon and not group:
        raise InvalidSpec(OPTION, text, f"{_EXPECTED}; the group is empty")
    gid = _group(text, group) if colon else uid if entry is None else entry.pw_gid
    if os.geteuid() != ROOT:
        if uid != os.geteuid() or gid != os.getegid():
            raise InvalidSpec(
                OPTION,
                text,
                f"the user of the agent: it runs as user {os.geteuid()}, and only root can start workers as another",
            )
        return None
    if uid == ROOT:
        return None
    name = entry.pw_name if entry is not None else str(uid)
    groups = os.getgrouplist(name, gid) if entry is not None else [gid]
    return TrainingUser(
        name, uid, gid, tuple(sorted({gid, *groups})), entry.pw_dir if entry is not None else "", _umask()
    )


def _user(text: str, who: str) -> tuple[pwd.struct_passwd | None, int]:
    try:
        if not _is_number(who):
            entry = pwd.getpwnam(who)
            return entry, entry.pw_uid
        if int(who) > ID_MAX:
            raise InvalidSpec(OPTION, text, f"a uid of at most {ID_MAX}")
        return pwd.getpwuid(int(who)), int(who)
    except (KeyError, ValueError):  # ValueError: a NUL character
        if _is_number(who):
            return None, int(who)  # usual in containers
        raise InvalidSpec(OPTION, text, f"{_EXPECTED}; this machine has no user {who!r}") from None


def _group(text: str, group: str) -> int:
    if _is_number(group):
        if int(group) > ID_MAX:
            raise InvalidSpec(OPTION, text, f"a gid of at most {ID_MAX}")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        raise InvalidSpec(OPTION, text, f"{_EXPECTED}; this machine has no group {group!r}") from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _umask() -> int:
    """Return the umask, which the kernel reports only when it is set. Called while the process has one thread."""
    current = os.umask(0o077)
    os.umask(current)
    return current
