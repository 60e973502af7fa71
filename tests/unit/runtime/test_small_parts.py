"""Back-off, the ready file, logs."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.ready import announce
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.telling import logs, telemetry
from holdfast.runtime.telling.refusal_log import RefusalLog, Repeats

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

# ---------------------------------------------------------------- back-off


@given(seed=st.integers(), first_s=st.floats(0.01, 1), factor=st.floats(1, 4))
def test_delays_grow_to_the_limit_within_their_jitter(seed: int, first_s: float, factor: float) -> None:
    backoff = Backoff(first_s=first_s, max_s=5.0, factor=factor, chance=random.Random(seed))
    ceiling_s = first_s
    for _ in range(20):
        assert ceiling_s / 2 <= backoff.next_s() <= ceiling_s
        ceiling_s = min(ceiling_s * factor, 5.0)
    backoff.reset()
    assert backoff.next_s() <= first_s


def test_two_agents_do_not_wait_in_step() -> None:
    assert Backoff(chance=random.Random(1)).next_s() != Backoff(chance=random.Random(2)).next_s()


@pytest.mark.parametrize(("first_s", "max_s", "factor"), [(0, 1, 2), (2, 1, 2), (1, 2, 0.5)])
def test_a_backoff_that_would_not_back_off(first_s: float, max_s: float, factor: float) -> None:
    with pytest.raises(ValueError, match="first_s ≤ max_s"):
        Backoff(first_s=first_s, max_s=max_s, factor=factor)


# ---------------------------------------------------------------- the ready file


def test_the_ready_file_is_whole_and_alone(tmp_path: Path) -> None:
    announce(tmp_path / "ready.json", {"endpoint": "127.0.0.1:1"})
    announce(tmp_path / "ready.json", {"endpoint": "127.0.0.1:2"})
    assert json.loads((tmp_path / "ready.json").read_text()) == {"endpoint": "127.0.0.1:2"}
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_a_ready_file_that_cannot_be_written_ends_no_service(tmp_path: Path) -> None:
    announce(tmp_path / "no directory" / "ready.json", {"endpoint": "127.0.0.1:1"})


def test_nobody_asked_for_a_ready_file() -> None:
    announce(None, {"endpoint": "127.0.0.1:1"})


# ---------------------------------------------------------------- logs


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.configure(**before)


@pytest.mark.usefixtures("restored_logging")
def test_our_lines_and_the_librarys_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", form="json")
    structlog.get_logger("holdfast.test").info("restart", node="n1", reason="rank 4 was killed")
    logging.getLogger("uvicorn").warning("slow")
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["service"], ours["level"], ours["node"]) == ("restart", "agent", "info", "n1")
    assert (theirs["event"], theirs["service"], theirs["level"], theirs["logger"]) == (
        "slow",
        "agent",
        "warning",
        "uvicorn",
    )


@pytest.mark.usefixtures("restored_logging")
def test_lines_within_a_trace_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", form="json")
    log = structlog.get_logger("holdfast.test")
    with telemetry.within(PARENT), structlog.contextvars.bound_contextvars(node="n1", job="gpt"):
        log.info("order done")
        log.info("finding", trace_id="c" * 32)
    log.info("idle")
    inside, named, outside = map(json.loads, capsys.readouterr().err.splitlines())
    assert (inside["trace_id"], inside["node"], inside["job"]) == ("a" * 32, "n1", "gpt")
    assert named["trace_id"] == "c" * 32
    assert "trace_id" not in outside


@pytest.mark.usefixtures("restored_logging")
def test_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", level="error", form="console")
    structlog.get_logger("holdfast.test").info("chatter")
    structlog.get_logger("holdfast.test").error("trouble")
    err = capsys.readouterr().err
    assert "trouble" in err
    assert "chatter" not in err


@pytest.mark.usefixtures("restored_logging")
def test_a_traceback_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", form="console")
    token = "s3cret"
    try:
        raise KeyError(len(token))
    except KeyError:
        structlog.get_logger("holdfast.test").exception("trouble")
    err = capsys.readouterr().err
    assert "KeyError: 6" in err
    assert "s3cret" not in err.replace('token = "s3cret"', "")


# ---------------------------------------------------------------- refusals


def test_reasons_that_alternate_are_logged_once_each_until_their_time() -> None:
    now = [0.0]
    repeats = Repeats(30.0, clock=lambda: now[0])
    assert [repeats.is_due(reason) for reason in ("a", "b", "a", "b")] == [True, True, False, False]
    now[0] = 30.0
    assert [repeats.is_due(reason) for reason in ("b", "b", "a")] == [True, False, True]


def test_refusals_that_every_agent_gets_are_one_line_a_minute_and_others_one_for_each_host() -> None:
    now = [0.0]
    refusals = RefusalLog("test", "session refused", clock=lambda: now[0])
    with structlog.testing.capture_logs() as lines:
        for host in range(3000):  # more than are remembered
            refusals.expected(f"ipv4:10.0.{host % 250}.{host // 250}:1", "not the leader")
        refusals.add("ipv4:10.0.0.1:1", "wrong version")
        refusals.add("ipv4:10.0.0.1:2", "wrong version")
        refusals.add("ipv4:10.0.0.2:1", "wrong version")
    assert [(each["reason"], each["log_level"]) for each in lines] == [
        ("not the leader", "info"),
        ("wrong version", "warning"),
        ("wrong version", "warning"),
    ]
    now[0] = 61.0
    with structlog.testing.capture_logs() as lines:
        refusals.expected("ipv4:10.0.0.9:1", "not the leader")
    assert len(lines) == 1
