"""The sandbox of a policy's process, which may compute, import what is installed, and print.

A policy comes with a job and runs next to the supervisor's keys. So its process has none of the supervisor's environment,
limited memory and, where the kernel allows it, no files but those of Python (Landlock, Linux 5.13) and no network, signals or
other processes (seccomp). Neither needs a privilege, and both also apply to processes that it starts.

Constants: linux/landlock.h, linux/seccomp.h, linux/filter.h, linux/audit.h, asm/unistd.h.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

MEMORY_BYTES_MAX = 4 << 30  # address space
FILES_MAX = 256  # open at a time
# Environment variables that are passed on: the locations of programs and modules, and the formats of text and times.
PASSED_ON = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIX = "LC_"
# Of numerical libraries, which reserve address space for each thread: on a large machine more than a policy's limit.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_READABLE = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/timezone",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
)
_WRITABLE = ("/dev/null",)

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Number of access rights by version of Landlock: all rights that a version knows are denied, then reading is allowed by path.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_SINCE, _TCP = 4, 0b11
_SCOPE_SINCE, _SCOPE = 6, 0b11  # abstract Unix sockets, signals

_ERRNO, _ALLOW, _KILL = 0x00050000, 0x7FFF0000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32 = 0x40000000
# architecture of the audit → numbers of: socket, kill, tkill, tgkill, pidfd_open, pidfd_send_signal, pidfd_getfd, ptrace,
# process_vm_readv, process_vm_writev, io_uring_setup, bpf, perf_event_open, mount, unshare, setns, add_key, request_key, keyctl
_DENIED: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (41, 62, 200, 234, 434, 424, 438, 101, 310, 311, 425, 321, 298, 165, 272, 308, 248, 249, 250),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 129, 130, 131, 434, 424, 438, 117, 270, 271, 425, 280, 241, 40, 97, 268, 217, 218, 219),
    ),
}


class Confinement(StrEnum):
    """A part of the sandbox that the kernel may not support."""

    FILES = "files (Landlock)"
    CALLS = "network, signals and other processes (seccomp)"


def environment(whole: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that a policy's process receives."""
    passed_on = {
        name: value for name, value in whole.items() if name in PASSED_ON or name.startswith(_PASSED_ON_PREFIX)
    }
    return passed_on | dict.fromkeys(_THREADS, "1")


def missing() -> tuple[Confinement, ...]:
    """The parts that this kernel does not offer to this process."""
    parts = {Confinement.FILES: _landlock_version() > 0, Confinement.CALLS: _has_seccomp()}
    return tuple(part for part, there in parts.items() if not there)


def enter() -> None:
    """Confine this thread and those that it starts, permanently. Unsupported parts are left out: see `missing`."""
    _limit(resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    _limit(resource.RLIMIT_NOFILE, FILES_MAX)
    _limit(resource.RLIMIT_CORE, 0)
    without = missing()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses to keep this process from new privileges")
    if Confinement.FILES not in without:
        _confine_files(libc, _landlock_version())
    if Confinement.CALLS not in without:
        _deny_calls(libc)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with suppress(OSError, ValueError):  # more than the limit is in use already
        resource.setrlimit(what, (value, value))


def _landlock_version() -> int:
    """0 = the kernel does not support it, or it is not active."""
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def _has_seccomp() -> bool:
    return platform.machine() in _DENIED and Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def _confine_files(libc: ctypes.CDLL, version: int) -> None:
    rights = (1 << _RIGHTS[min(version, max(_RIGHTS))]) - 1
    fields = [rights]
    if version >= _TCP_SINCE:
        fields.append(_TCP)
    if version >= _SCOPE_SINCE:
        fields.append(_SCOPE)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses a set of rules")
    try:
        for path in {*_READABLE, *_python_paths()}:
            _allow(libc, ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in _WRITABLE:
            _allow(libc, ruleset, path, _WRITE_FILE | _READ_FILE)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "Landlock refuses to confine this process")
    finally:
        os.close(ruleset)


def _python_paths() -> Iterable[str]:
    """Directories that modules are imported from, including those of packages that are installed from their sources."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path))
    for module in tuple(sys.modules.values()):
        with suppress(Exception):  # a module may have set __path__ to anything
            yield from map(str, getattr(module, "__path__", ()))


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    try:
        if not Path(path).is_dir():
            rights &= ~_READ_DIR
        if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0):
            raise OSError(ctypes.get_errno(), "Landlock refuses a rule", path)
    finally:
        os.close(place)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _deny_calls(libc: ctypes.CDLL) -> None:
    architecture, denied = _DENIED[platform.machine()]
    refuse = _ERRNO | 1  # EPERM
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # a call of another architecture has other numbers
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    for number in denied:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = _Program(len(steps), b"".join(struct.pack("=HBBI", *step) for step in steps))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp refuses the filter")
