"""`holdfast tokens`: what it writes is private and has no token in it, and what supervisors read; wrong input is named."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from holdfast.cli.tokens import app
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound
from holdfast.runtime.trust.api_tokens import (
    TOKENS_MAX,
    ApiRole,
    ApiToken,
    TokensFile,
    added,
    read_tokens_file,
    text_of,
)


def tokens(path: Path, *arguments: str) -> str:
    """What the command prints. Raises what it refuses with."""
    done = CliRunner().invoke(app, [*arguments, "--file", str(path)])
    if isinstance(done.exception, HoldfastError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output.strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tokens.json"


def test_a_token_is_shown_once_and_found_by_supervisors(path: Path) -> None:
    token = tokens(path, "create", "ada", "--role", "submitter")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    found = TokensFile(path).find(token, time.time())
    assert found is not None
    assert (found.name, found.role) == ("ada", ApiRole.SUBMITTER)
    (row,) = json.loads(tokens(path, "list", "--json"))
    assert (row["name"], row["role"], row["state"], row["expires_at"]) == ("ada", "submitter", "valid", None)
    assert "digest" not in row


def test_a_token_is_over_when_its_days_are(path: Path) -> None:
    token, now = tokens(path, "create", "ada", "--role", "viewer", "--days", "2"), time.time()
    file = TokensFile(path)
    assert file.find(token, now + 86_400) is not None
    assert file.find(token, now + 3 * 86_400) is None


def test_a_revoked_token_is_gone_and_its_name_is_free(path: Path) -> None:
    first = tokens(path, "create", "ada", "--role", "viewer")
    file = TokensFile(path)
    with pytest.raises(Conflict, match="revoke it first"):
        tokens(path, "create", "ada", "--role", "admin")
    assert tokens(path, "revoke", "ada") == "revoked: ada"
    assert file.find(first, time.time()) is None
    second = tokens(path, "create", "ada", "--role", "admin")
    assert file.find(second, time.time()) is not None
    with pytest.raises(NotFound, match="holdfast tokens list"):
        tokens(path, "revoke", "bob")


@pytest.mark.parametrize("name", ["", " ada", "a\nb", "n" * 65])
def test_a_name_that_is_none_is_refused(path: Path, name: str) -> None:
    with pytest.raises(InvalidSpec, match="visible characters"):
        tokens(path, "create", name, "--role", "viewer")
    assert not path.exists()


def test_there_are_not_more_tokens_than_supervisors_keep() -> None:
    many = tuple(ApiToken(str(number), ApiRole.VIEWER, "0" * 64, 0.0) for number in range(TOKENS_MAX))
    with pytest.raises(Conflict, match="at most 1000"):
        added(many, "ada", ApiRole.VIEWER, 0.0)


BROKEN = ["", "[]", "{}", '{"tokens": [{}]}', '{"tokens": [{"name": 1}]}', '{"tokens": 7}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_file_that_is_none_is_refused_at_the_start_and_not_used_later(path: Path, content: str) -> None:
    token = tokens(path, "create", "ada", "--role", "viewer")
    file = TokensFile(path)
    path.write_text(content)
    with pytest.raises(InvalidSpec, match="HOLDFAST_API_TOKENS_FILE"):
        read_tokens_file(path)
    with capture_logs() as logs:
        assert file.find(token, time.time()) is not None, "the tokens before stay valid"
    assert [each["event"] for each in logs] == ["tokens not read, those before are valid"]


def test_a_role_that_is_none_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(text_of([ApiToken("ada", ApiRole.VIEWER, "0" * 64, 0.0)]).replace(b"viewer", b"king"))
    with pytest.raises(InvalidSpec, match="king"):
        read_tokens_file(path)


def test_a_file_that_is_missing_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"none\.json"):
        TokensFile(tmp_path / "none.json")
