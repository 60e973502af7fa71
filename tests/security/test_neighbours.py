"""What another user of the machine may do with a stack on loopback: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import Shell, read_until
from waiting import TIMEOUT_S

from holdfast.cli import api_token

PORTS = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]
NOBODY = 65534


def url_of(shell: Shell) -> str:
    record: Any = json.loads((shell.directory / "up" / "stack.json").read_text())
    return str(record["endpoints"]["supervisor"]["api"])


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Of the user who has started `holdfast up`, without any setting."""
    shell = Shell(tmp_path_factory.mktemp("owner"))
    # A new interpreter: what stands on command lines and in environments is that of users.
    with shell.start_python("-m", "holdfast.cli.main", "up", "--dir", "up", *PORTS) as process:
        read_until(process, "Ctrl-C stops everything")
        yield shell
        process.terminate()
        process.wait(TIMEOUT_S)
    shell.assert_nothing_runs()
    assert not (shell.directory / "up" / api_token.FILE).exists(), "it is of no use after the end"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/nodes/n1/cordon"),
        ("GET", "/v1/events"),
        ("GET", "/v1/audit"),
    ],
)
def test_a_neighbour_without_the_token_is_refused(shell: Shell, method: str, path: str) -> None:
    answer = httpx.request(method, url_of(shell) + path, json={"name": "theirs"} if method == "POST" else None)
    assert answer.status_code == 401
    wrong = {"Authorization": f"Bearer {'0' * 64}"}
    assert httpx.request(method, url_of(shell) + path, headers=wrong).status_code == 401


def test_the_owners_commands_need_no_setting(shell: Shell) -> None:
    listed = shell("jobs", "list", "--json", "--api", url_of(shell))
    assert (listed.code, json.loads(listed.out)) == (0, []), listed.err


def test_the_owners_link_signs_a_browser_in(shell: Shell) -> None:
    link = shell("dashboard", "--api", url_of(shell)).out.strip()
    page, _, token = link.partition("#token=")
    with httpx.Client() as browser:
        assert browser.get(page).status_code == 200, "the page itself says nothing about the fleet"
        assert browser.post(f"{page}v1/session", json={"token": token}, headers={"Origin": page.rstrip("/")}).is_success
        assert browser.get(f"{page}v1/jobs").status_code == 200


def test_the_token_stands_in_no_file_or_command_line_that_others_may_read(shell: Shell) -> None:
    file = shell.directory / "up" / api_token.FILE
    token = file.read_text().strip()
    assert file.stat().st_mode & 0o077 == 0
    readable = [
        path
        for path in shell.directory.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o044 and token.encode() in path.read_bytes()
    ]
    assert readable == []
    for process in shell.processes():
        assert token not in " ".join(process.cmdline())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:  # so that the mode of the file keeps others out
        directory = Path(open_to_all)
        directory.chmod(0o755)
        (directory / "greeting").write_text("hello")
        api_token.make(directory / api_token.FILE)

        def read(name: str) -> subprocess.CompletedProcess[str]:
            command = ["/bin/cat", str(directory / name)]
            return subprocess.run(
                command, check=False, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True
            )

        assert read("greeting").stdout == "hello"
        assert "Permission denied" in read(api_token.FILE).stderr


def test_a_killed_stack_that_is_taken_over_keeps_its_token(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.start("up", "--dir", "up", *PORTS) as process:
        read_until(process, "Ctrl-C stops everything")
        token, url = api_token.read(tmp_path / "up" / api_token.FILE), url_of(shell)
        process.kill()
        process.wait()
        assert httpx.get(f"{url}/v1/jobs").status_code == 401, "its parts go on, and ask as before"
        with shell.start("up", "--dir", "up", *PORTS) as again:
            read_until(again, "Ctrl-C stops everything")
            assert api_token.read(tmp_path / "up" / api_token.FILE) == token
            assert shell("jobs", "list", "--api", url).code == 0
            again.send_signal(signal.SIGTERM)
            again.wait(TIMEOUT_S)
    shell.assert_nothing_runs()


def test_who_says_insecure_has_an_open_api_on_loopback_too(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.start("up", "--dir", "up", *PORTS, "--insecure") as process:
        read_until(process, "Ctrl-C stops everything")
        assert httpx.get(f"{url_of(shell)}/v1/jobs").status_code == 200
        assert not (tmp_path / "up" / api_token.FILE).exists()
        process.terminate()
        process.wait(TIMEOUT_S)
    shell.assert_nothing_runs()
