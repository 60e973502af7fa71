"""What is known to fail before anything starts: directories, ports, Redis."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from holdfast.cli import doctor
from holdfast.cli.claim import PID_FILE, SOCKET_PATH_BYTES_MAX, Claim
from holdfast.cli.preflight import redis_risks, redis_version, require_ports
from holdfast.cli.processes import kill_tree
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, Unavailable
from holdfast.log import durability
from holdfast.log.durability import without_password


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


# ---------------------------------------------------------------- the directory


def test_a_claimed_directory_is_refused_to_others_and_free_again_after(tmp_path: Path) -> None:
    first = Claim(tmp_path)
    for _ in range(2):  # the refused one takes nothing away from the holder
        with pytest.raises(Conflict, match=rf"^a stack is already running in .* \(pid {os.getpid()}\)"):
            Claim(tmp_path)
    assert (tmp_path / PID_FILE).read_text().strip() == str(os.getpid())
    first.release()
    first.release()
    assert not (tmp_path / PID_FILE).exists()
    Claim(tmp_path).release()


@pytest.mark.parametrize("left", ["", "garbage", "1"])
def test_what_a_killed_stack_left_does_not_matter(tmp_path: Path, left: str) -> None:
    """Not even when its pid is somebody else's by now."""
    (tmp_path / PID_FILE).write_text(left)
    Claim(tmp_path).release()


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from holdfast.cli.claim import Claim; c = Claim(Path({str(tmp_path)!r})); print(1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; import sys; sys.stdout.flush(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        with pytest.raises(Conflict, match=f"pid {process.pid}"):
            Claim(tmp_path)
        process.kill()
        process.wait()
    Claim(tmp_path).release()


@pytest.mark.parametrize("place", ["file/below", "/proc/holdfast", "/dev/null/x"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidSpec, match=r"--dir: '.*' is not valid; expected a directory that can be created and written"
    ):
        Claim(tmp_path / place)


@pytest.mark.parametrize("deep_temporary", [False, True])
def test_a_deep_directory_gets_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep_temporary: bool
) -> None:
    deep = tmp_path / ("d" * 80)
    if deep_temporary:
        deep.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
    claim = Claim(deep / "stack")
    assert len(os.fsencode(claim.path)) <= SOCKET_PATH_BYTES_MAX
    (claim.path / "x").write_text("here")
    assert (deep / "stack" / "x").read_text() == "here"
    claim.release()
    assert not claim.path.parent.exists()
    assert (deep / "stack" / "x").exists()
    assert [path.name for path in deep.iterdir()] == ["stack"]


# ---------------------------------------------------------------- ports


def test_a_port_that_is_taken_is_named(taken: int) -> None:
    with pytest.raises(InvalidSpec, match=rf"--control-port: {taken} .*127\.0\.0\.1:{taken} is in use; 0 ="):
        require_ports("127.0.0.1", {"--port": 0, "--control-port": taken})


def test_one_port_for_two(taken: int) -> None:
    free = taken + 1 if taken < 65535 else taken - 1
    with pytest.raises(InvalidSpec, match=rf"--control-port: {free} .*a port that differs from --port"):
        require_ports("127.0.0.2", {"--port": free, "--control-port": free})


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "300.1.1.1"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(InvalidSpec, match=r"--host: .* an address of this machine"):
        require_ports(host, {"--port": 0})


def test_any_free_port_any_number_of_times() -> None:
    require_ports("127.0.0.1", {"--port": 0, "--control-port": 0, "--diagnostics-port": 0})


# ---------------------------------------------------------------- Redis


def test_a_redis_that_answers(redis_url: str) -> None:
    assert redis_version(redis_url)[0].isdigit()


def test_a_redis_that_does_not(taken: int) -> None:
    with pytest.raises(Unavailable, match=r"^--redis-url: Redis at redis://127\.0\.0\.1:1 does not answer .*; check"):
        redis_version("redis://127.0.0.1:1")


@pytest.mark.parametrize("url", ["127.0.0.1:6379", "http://x", "redis//x", "redis://x/0?foo=1"])
def test_what_is_no_redis_url(url: str) -> None:
    with pytest.raises(InvalidSpec, match=r"--redis-url: .* redis://host:port/db"):
        redis_version(url)


def test_a_redis_that_forgets_says_what_it_costs(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        before = client.config_get("appendonly")["appendonly"]
        try:
            client.config_set("appendonly", "no")
            [risk] = redis_risks(redis_url)
            assert "a restart of Redis would lose jobs, open incidents and orders" in risk.found
            client.config_set("appendonly", "yes")
            assert redis_risks(redis_url) == []
        finally:
            client.config_set("appendonly", before)


def test_a_redis_that_evicts_keys_says_what_it_would_delete(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        before = client.config_get("maxmemory-policy")["maxmemory-policy"]
        try:
            client.config_set("maxmemory-policy", "allkeys-lru")
            assert ["maxmemory-policy is allkeys-lru" in risk.found for risk in redis_risks(redis_url)].count(True) == 1
        finally:
            client.config_set("maxmemory-policy", before)


def test_a_redis_that_refuses_the_password_is_not_taken_for_absent(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", "known", "on", ">right", "+@all")
        wrong = redis_url.replace("://", "://known:wrong@")
        try:
            with pytest.raises(Unavailable, match=r"refuses the credentials .* correct its user and password"):
                redis_version(wrong)
        finally:
            client.execute_command("ACL", "DELUSER", "known")


def test_a_redis_that_does_not_say_is_not_taken_for_safe() -> None:
    assert "does not show" in durability.risk({})


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"role": "slave"}, "it is a replica, and refuses writes"),
        ({"aof_last_write_status": "err"}, "its last write to its append-only file failed"),
        ({"rdb_last_bgsave_status": "err"}, "its last snapshot failed"),
    ],
)
def test_a_redis_that_refuses_writes_is_named_without_a_supervisor(said: dict[str, str], found: str) -> None:
    sound = {"role": "master", "aof_enabled": 1, "aof_last_write_status": "ok", "rdb_last_bgsave_status": "ok"}
    assert [*durability.risks(sound)] == []
    [risk] = durability.risks({**sound, **said})
    assert risk.found.startswith(found)


def test_a_sentinel_is_no_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis.Redis.info", lambda *_: {"redis_version": "7.0.15", "redis_mode": "sentinel"})
    with pytest.raises(HoldfastError, match=r"--redis-url: .* is a Redis Sentinel, .* name the Redis that it watches"):
        redis_version(redis_url)


def test_a_redis_that_is_too_old(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis.Redis.info", lambda *_: {"redis_version": "6.0.16"})
    with pytest.raises(HoldfastError, match=r"runs Redis 6\.0\.16; Holdfast needs 6\.2"):
        redis_version(redis_url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@host:1/0", "redis://:***@host:1/0"),
        ("redis://me:s3@cret@host/0", "redis://me:***@host/0"),
        ("redis://host/0", "redis://host/0"),
        ("s3cret", "***"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_doctor_asks_the_configured_redis(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", redis_url)
    (check,) = doctor._redis()
    assert check.level == "ok"
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://:s3cret@127.0.0.1:1/0")
    (check,) = doctor._redis()
    assert check.level == "problem"
    assert "s3cret" not in check.found + check.advice


def test_doctor_says_when_the_configured_redis_fills_up(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", redis_url)
    with redis.Redis.from_url(redis_url) as client:
        before = client.config_get("maxmemory")["maxmemory"]
        try:
            client.config_set("maxmemory", 1)  # whatever earlier tests have left there is more
            (check,) = doctor._redis()
        finally:
            client.config_set("maxmemory", before)
    assert (check.level, check.advice) == ("problem", durability.ROOM_ADVICE)
    assert "When it is full, no decisions are made; training continues" in check.found


def test_doctor_names_what_replicators_have_set_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DISK_DIR", str(tmp_path / "disk"))
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "memory"))
    assert list(doctor._set_aside()) == []
    for place in (
        "disk/llm/job.json",
        "disk/llm/a1/s10/rank-0.shard",
        "memory/llm/w0/a.image",
        "memory/llm/w0/a.image.json",
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if "json" not in path.suffix or path.name == "job.json":
            path.rename(f"{path}.corrupt")
    (check,) = doctor._set_aside()
    assert check.level == "note"
    assert "3 damaged files set aside" in check.found
    assert str(tmp_path / "disk/llm/a1/s10/rank-0.shard.corrupt") in check.found


# ---------------------------------------------------------------- processes


def test_a_whole_tree_is_killed() -> None:
    code = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code} print(c.pid, flush=True); c.wait()"], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        pidfd = os.pidfd_open(child)
        kill_tree(parent.pid)
        assert parent.wait(10) == -9
        assert select.select([pidfd], [], [], 10)[0], "the child outlived its parent"
        os.close(pidfd)


def test_killing_a_tree_that_is_gone_is_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    kill_tree(process.pid)
