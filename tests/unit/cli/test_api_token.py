"""How the commands of a user find the token of a stack that the user has started on this machine, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.cli import api_token
from holdfast.cli.client import Client
from holdfast.domain.errors import InvalidSpec

URL = "http://127.0.0.1:18470"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stack" / api_token.FILE


def authorization(url: str = URL) -> str | None:
    with Client(url) as client:
        found: str | None = client._http.headers.get("Authorization")
    return found


def test_a_token_is_new_with_each_start_and_only_its_user_reads_it(file: Path) -> None:
    first = api_token.make(file)
    assert len(first) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = api_token.make(file)
    assert second != first
    assert api_token.read(file) == second


def test_commands_find_it_by_the_port_and_not_after_the_end(file: Path, home: Path) -> None:
    token = api_token.make(file)
    api_token.note(URL, file)
    assert authorization() == f"Bearer {token}"
    assert authorization("http://localhost:18470") == f"Bearer {token}"
    assert authorization("http://127.0.0.1:18471") is None
    assert stat.S_IMODE((home / ".local/state/holdfast/api").stat().st_mode) == 0o700
    api_token.forget(URL, file)
    assert authorization() is None
    assert not file.exists()


def test_it_goes_to_no_other_machine(file: Path) -> None:
    api_token.make(file)
    api_token.note(URL, file)
    assert authorization("http://10.0.0.7:18470") is None


def test_the_token_of_the_environment_is_for_every_other_api(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_TOKEN", "of-the-cluster")
    assert authorization() == "Bearer of-the-cluster"
    token = api_token.make(file)
    api_token.note(URL, file)
    assert authorization() == f"Bearer {token}", "a local run finds its own stack beside the cluster's setting"
    api_token.unnote(URL)
    assert authorization() == "Bearer of-the-cluster"


def test_a_file_has_the_token_as_it_is_now(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = tmp_path / "renewed"
    monkeypatch.setenv("HOLDFAST_API_TOKEN_FILE", str(renewed))
    for token in ("eyJ.of.now", "eyJ.of.later"):
        renewed.write_text(f"{token}\n")
        assert authorization("https://head-1:8470") == f"Bearer {token}"
    monkeypatch.setenv("HOLDFAST_API_TOKEN", "given")
    assert authorization("https://head-1:8470") == "Bearer given"


@pytest.mark.parametrize("content", [None, b"", b"\n", b"two\ntokens", b"\xff", b"x" * 20_000])
def test_a_file_without_a_token_is_named(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("HOLDFAST_API_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(InvalidSpec, match="HOLDFAST_API_TOKEN_FILE"):
        authorization("https://head-1:8470")


def test_the_end_of_an_earlier_stack_leaves_the_token_of_the_next_one_alone(file: Path, tmp_path: Path) -> None:
    api_token.make(file)
    api_token.note(URL, file)
    next_file = tmp_path / "next" / api_token.FILE
    token = api_token.make(next_file)
    api_token.note(URL, next_file)
    api_token.forget(URL, file)
    assert api_token.find(URL) == token


def test_links_of_stacks_that_are_gone_are_removed(file: Path, home: Path) -> None:
    api_token.make(file)
    api_token.note("http://127.0.0.1:1", file)
    file.unlink()
    other = file.with_name("other")
    api_token.make(other)
    api_token.note(URL, other)
    assert [link.name for link in (home / ".local/state/holdfast/api").iterdir()] == ["18470"]


def test_a_file_that_others_may_read_or_that_is_no_file_counts_for_nothing(file: Path) -> None:
    api_token.make(file)
    file.chmod(0o644)
    assert api_token.read(file) == ""
    file.unlink()
    os.mkfifo(file, 0o600)
    assert api_token.read(file) == "", "and it does not wait"
    file.unlink()
    file.write_bytes(b"\xff\xfe")
    file.chmod(0o600)
    assert api_token.read(file) == ""


def test_the_link_of_the_dashboard_has_it_where_no_server_sees_it() -> None:
    assert api_token.sign_in_link(f"{URL}/", "a b") == f"{URL}/#token=a%20b"
    assert api_token.sign_in_link(URL, "") == URL
