"""What a Redis that answers and does not serve is reported as: its own words without those of scripts, and what to do."""

from __future__ import annotations

import pytest
from redis import exceptions

from holdfast.domain.errors import Unavailable
from holdfast.log.connection import Connection

pytestmark = pytest.mark.anyio
SCRIPT = "ERR Error running script (call to f_970f): @user_script:18: @user_script: 18: -"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"{SCRIPT}NOREPLICAS Not enough good replicas to write.", "lower its min-replicas-to-write"),
        ("MISCONF Redis is configured to save RDB snapshots", "free space on its disk"),
        (f"{SCRIPT}READONLY You can't write against a read only replica.", "name the primary in HOLDFAST_REDIS_URL"),
        ("NOPERM this user has no permissions to run the 'xadd' command", "has the users of Redis"),
    ],
)
async def test_a_refusal_says_what_to_do(said: str, shown: str) -> None:
    connection = Connection("redis://127.0.0.1:1/0", block_s=0.1)

    async def attempt() -> None:
        raise exceptions.ResponseError(said)

    with pytest.raises(Unavailable) as raised:
        await connection.call(attempt)
    found, _, advice = str(raised.value).partition("; ")
    assert found.startswith("Redis at 127.0.0.1:1 does not serve now: ")
    assert shown in advice
    assert "user_script" not in found
