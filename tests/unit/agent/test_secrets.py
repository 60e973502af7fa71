"""Variables by reference: the value reaches the worker's environment, and no error shows one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.agent.workers import secrets
from holdfast.agent.workers.secrets import read_all
from holdfast.domain.errors import Unavailable
from holdfast.domain.job import EnvSource

pytestmark = pytest.mark.anyio

SECRET = "s3cr3t"
ENVIRONMENT = {"PATH": os.environ["PATH"], "VAULT": SECRET}


async def test_files_and_commands(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET} with spaces\n")
    values = await read_all(
        (
            EnvSource("KEY", file=str(tmp_path / "key")),
            EnvSource("TOKEN", command="sh -c 'echo noise >&2; printf %s\\\\n \"$VAULT\"'"),
        ),
        ENVIRONMENT,
    )
    assert values == {"KEY": f"{SECRET} with spaces", "TOKEN": SECRET}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            EnvSource("KEY", file="/no/such/file"),
            r"env_from\.KEY: the file /no/such/file cannot be read \(No such file",
        ),
        (
            EnvSource("KEY", command="no-such-program a"),
            r"env_from\.KEY: the command `no-such-program a` ended with exit code 127",
        ),
        (EnvSource("KEY", command="sh -c 'echo $VAULT; exit 3'"), "ended with exit code 3, on this node"),
        (EnvSource("KEY", command="true"), "has no value"),
        (EnvSource("KEY", command="printf 'a\\0b'"), "has a NUL character"),
        (EnvSource("KEY", command="printf '\\377'"), "no text in UTF-8"),
        (EnvSource("KEY", command="head -c 100000 /dev/zero"), "more than 32768 bytes"),
    ],
)
async def test_what_cannot_be_read_names_the_variable_and_shows_no_value(source: EnvSource, said: str) -> None:
    with pytest.raises(Unavailable, match=said) as error:
        await read_all((source,), ENVIRONMENT)
    assert SECRET not in str(error.value)


async def test_a_command_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match=r"did not end within 0\.05 s"):
        await read_all((EnvSource("KEY", command="sleep 600"),), ENVIRONMENT)
