"""`holdfast tokens`: tokens of the REST API, in a file that supervisors read."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.tables import AsJson, console, show_list
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import write_private
from holdfast.runtime.trust.api_tokens import TOKENS_FILE, ApiRole, ApiToken, added, read_tokens_file, text_of, without

DAYS_MAX = 3650
DAY_S = 86_400

app = typer.Typer(
    help="Tokens of the REST API with roles: create, list, revoke.",
    no_args_is_help=True,
    epilog="Roles, each with what those before it may: viewer (read), submitter (submit jobs, change its own), operator "
    "(change all jobs and nodes), admin. Supervisors read the file that HOLDFAST_API_TOKENS_FILE names, and notice changes.",
)

File = Annotated[
    Path, typer.Option("--file", help="File of the tokens, as the supervisors have it.", envvar=TOKENS_FILE)
]
FILE = Path("~/.local/state/holdfast/api-tokens.json")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose token it is: a person, or a program.")],
    role: Annotated[ApiRole, typer.Option(help="What the token is for.")],
    days: Annotated[int, typer.Option(help="How long it is valid; 0 = until it is revoked.", min=0, max=DAYS_MAX)] = 0,
    file: File = FILE,
) -> None:
    """Create a token and print it. It is not stored: a lost token must be replaced."""
    now = time.time()
    with _changing(file) as path:
        tokens, token = added(_read(path), name, role, now, now + days * DAY_S if days else 0.0)
        write_private(path, text_of(tokens))
    print(token)


@app.command("list")
def list_tokens(file: File = FILE, as_json: AsJson = False) -> None:
    """List the tokens: name, role, and until when they are valid."""
    now = time.time()
    rows = [_row(each, now) for each in _read(file.expanduser())]
    show_list(rows, ["name", "role", "state", "created_at", "expires_at"], as_json, "no tokens yet")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the token, as `list` shows it.")], file: File = FILE
) -> None:
    """Revoke a token: supervisors with this file refuse it from their next request on."""
    with _changing(file) as path:
        write_private(path, text_of(without(_read(path), name)))
    console.print(f"revoked: {name}", markup=False)


def _read(path: Path) -> tuple[ApiToken, ...]:
    return read_tokens_file(path) if path.exists() else ()


def _row(token: ApiToken, now: float) -> dict[str, object]:
    return {
        "name": token.name,
        "role": str(token.role),
        "state": "expired" if token.is_over(now) else "valid",
        "created_at": token.created_at,
        "expires_at": token.expires_at or None,
    }


@contextmanager
def _changing(file: Path) -> Iterator[Path]:
    """Lock the file against other commands while it is changed. Raises `InvalidSpec` if it cannot be written."""
    path = file.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidSpec("--file", str(path), f"a file that can be written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(lock)
