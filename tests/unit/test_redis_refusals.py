"""What a Redis that answers and does not serve is reported as: its own words without those of scripts, and what to do."""

from __future__ import annotations

import pytest
from redis import exceptions

from holdfast.domain.errors import RedisAway, Unavailable
from holdfast.log.connection import Connection

pytestmark = pytest.mark.anyio
# Redis 7 names the script behind its words.
OF_REDIS_7 = " script: 970fbc7ac74d1bf1c4147279a005d4cd34cd8ed8, on @user_script:18."
SCRIPT = "ERR Error running script (call to f_970f): @user_script:18: @user_script: 18: -"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"{SCRIPT}NOREPLICAS Not enough good replicas to write.", "lower its min-replicas-to-write"),
        ("MISCONF Redis is configured to save RDB snapshots", "free space on its disk"),
        (f"{SCRIPT}READONLY You can't write against a read only replica.", "name the primary in HOLDFAST_REDIS_URL"),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", "SCRIPT KILL"),
        ("MOVED 12501 10.0.0.3:6379", "name that member"),
        ("ASK 12501 10.0.0.3:6379", "its cluster moves data"),
        ("UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)", "the primary"),
        ("NOPERM this user has no permissions to run the 'xadd' command", "has the users of Redis"),
        (
            f"ERR The user executing the script can't run this command or subcommand{OF_REDIS_7}",
            "has the users of Redis",
        ),
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


async def test_a_redis_that_loads_its_data_is_to_be_waited_for() -> None:
    connection = Connection("redis://127.0.0.1:1/0", block_s=0.1)

    async def attempt() -> None:
        raise exceptions.BusyLoadingError("Redis is loading the dataset in memory")

    with pytest.raises(RedisAway, match=r"loading the dataset.*; it reads its data after a start: wait until it has"):
        await connection.call(attempt)


# Redis-py names the command of a pipeline before Redis' words.
IN_PIPELINE = (
    "Command # 1 (XADD holdfast:{main}:stream:inbox MAXLEN ~ 100000 * id 3f97/14 type...) of pipeline caused error: "
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"NOREPLICAS Not enough good replicas to write.{OF_REDIS_7}", "NOREPLICAS Not enough good replicas to write"),
        (
            f'READONLY {IN_PIPELINE}("You can\'t write against a read only replica.",)',
            "READONLY You can't write against a read only replica",
        ),
        (
            f"{IN_PIPELINE}('MISCONF Errors writing to the AOF file: No space left on device',)",
            "MISCONF Errors writing to the AOF file: No space left on device",
        ),
    ],
)
async def test_a_refusal_is_the_same_wherever_redis_refuses(said: str, shown: str) -> None:
    connection = Connection("redis://127.0.0.1:1/0", block_s=0.1)

    async def attempt() -> None:
        raise exceptions.ResponseError(said)

    with pytest.raises(Unavailable) as raised:
        await connection.call(attempt)
    assert str(raised.value).partition("; ")[0] == f"Redis at 127.0.0.1:1 does not serve now: {shown}"
