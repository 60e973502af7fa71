"""Reads variables that a job names by reference (`env_from`), when workers are started.

If workers run as another user (`user`), files are read with the rights of this user. Otherwise a job could name the agent's own
keys, and so read them.

A value is passed from its file or command only to the environment of the workers. No message, log or error of this module
contains a value or the output of a command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.domain.job import EnvSource
from holdfast.runtime import freeze
from holdfast.runtime.processes.children import running, spawn
from holdfast.runtime.processes.training_user import TrainingUser

VALUE_BYTES_MAX = 32 << 10
TIMEOUT_S = 10.0
_QUIET = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")  # standard error is not part of the value


async def read_all(
    sources: Iterable[EnvSource], environment: Mapping[str, str], user: TrainingUser | None = None
) -> dict[str, str]:
    """Read all values in parallel and return them by name. Commands run in `environment`. `user`: who reads, if it is not
    the user of this process. Raises `Unavailable` that names the variable and its source."""
    values: dict[str, str] = {}

    async def read(source: EnvSource) -> None:
        values[source.name] = await _read(source, environment, user)

    try:
        async with anyio.create_task_group() as tasks:
            for source in sources:
                tasks.start_soon(read, source)
    except* HoldfastError as errors:
        raise errors.exceptions[0] from None
    return values


async def _read(source: EnvSource, environment: Mapping[str, str], user: TrainingUser | None) -> str:
    if source.file and user is not None:
        what = f"the file {source.file}"
        path = user.expanded(source.file, environment)
        raw = await _output(source, what, ("head", "-c", str(VALUE_BYTES_MAX + 1), "--", path), environment, user)
    elif source.file:
        what = f"the file {source.file}"
        try:
            with freeze.patience(TIMEOUT_S) as limit:
                raw = await anyio.to_thread.run_sync(_head, source.file, abandon_on_cancel=True)
        except OSError as error:
            raise _unavailable(source, f"{what} cannot be read ({error.strerror})") from None
        if limit.cancelled_caught:
            raise _unavailable(source, f"{what} could not be read within {TIMEOUT_S:g} s")
    else:
        what = f"the command `{source.command}`"
        raw = await _output(source, what, shlex.split(source.command), environment, user)
    if len(raw) > VALUE_BYTES_MAX:
        raise _unavailable(source, f"{what} has more than {VALUE_BYTES_MAX} bytes")
    try:
        value = raw.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise _unavailable(source, f"{what} has no text in UTF-8") from None
    if not value or "\0" in value:
        raise _unavailable(source, f"{what} has no value" if not value else f"{what} has a NUL character")
    return value


def _head(path: str) -> bytes:
    with Path(path).expanduser().open("rb") as file:
        return file.read(VALUE_BYTES_MAX + 1)


async def _output(
    source: EnvSource, what: str, words: Sequence[str], environment: Mapping[str, str], user: TrainingUser | None
) -> bytes:
    output = os.memfd_create("env_from", os.MFD_CLOEXEC)
    try:
        child = spawn(f"env_from {source.name}", (*_QUIET, *words), env=environment, output=output, user=user)
        code: int | None = None
        async with running(child, stop_grace_s=0.0):
            with freeze.patience(TIMEOUT_S):
                code = await child.wait()
        if code is None:
            raise _unavailable(source, f"{what} did not end within {TIMEOUT_S:g} s")
        if code != 0 and source.file and user is not None:
            raise _unavailable(source, f"{what} cannot be read by {user.name}, the user of training (exit code {code})")
        if code != 0:
            raise _unavailable(source, f"{what} ended with exit code {code}")
        return os.pread(output, VALUE_BYTES_MAX + 1, 0)
    except OSError as error:
        raise _unavailable(source, f"{what} cannot be started ({error.strerror})") from None
    finally:
        os.close(output)


def _unavailable(source: EnvSource, why: str) -> Unavailable:
    return Unavailable(f"env_from.{source.name}: {why}, on this node")
