"""`holdfast ca`: a private CA for the certificates of services and agents."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.tables import AsJson, console, show_list
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import write_private, write_whole
from holdfast.runtime.trust.authority import CA_DIR, CRL, ENROLMENT, Authority, Record
from holdfast.runtime.trust.identities import Identity, Role, parse_local

DIRECTORY = Path("~/.local/state/holdfast/ca")
DAYS, CA_DAYS, ENROLMENT_DAYS, DAYS_MAX = 30, 3650, 365, 36500
LOCAL_NAMES = ("localhost", "127.0.0.1")
SERVERS = (Role.SUPERVISOR, Role.DIAGNOSTICS)

app = typer.Typer(
    help="Certificates for services and agents, from a CA of your own: init, issue, list, revoke.",
    no_args_is_help=True,
    epilog="Example: [bold]holdfast ca init[/], then [bold]holdfast ca issue agent/node-1 --out node-1[/]. "
    "For installations without a PKI; docs/security.md describes certificates of others.",
)

Directory = Annotated[Path, typer.Option("--dir", help="Directory of the CA.")]


@app.command()
def init(
    directory: Directory = DIRECTORY,
    fleet: Annotated[str, typer.Option(help="Name of the fleet, as for `holdfast up`.")] = "main",
    days: Annotated[int, typer.Option(help="How long the CA is valid.", min=1, max=DAYS_MAX)] = CA_DAYS,
) -> None:
    """Make a CA: its key stays in the directory, readable by you only."""
    made = Authority.create(directory.expanduser(), fleet, days)
    console.print(f"CA of fleet {fleet}: {made.directory}, valid until {made.expires:%Y-%m-%d}", soft_wrap=True)
    console.print(
        "Keep the directory on a machine that runs no jobs: who reads ca.key can be every node.", soft_wrap=True
    )


@app.command(epilog="Example: [bold]holdfast ca issue supervisor diagnostics --host head-1 --out head-1[/]")
def issue(
    identities: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IDENTITY...", help="supervisor, diagnostics, agent/NODE or operator/NAME; one or several."
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory for tls.crt, tls.key and ca.crt. Existing ones are renewed.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which agents reach the service; repeat for several.")
    ] = None,
    intermediate: Annotated[
        bool,
        typer.Option(
            "--intermediate",
            help="Issue an enrolment CA, with which a supervisor signs certificates of invited nodes only. --out: "
            "its directory, for HOLDFAST_CA_DIR.",
        ),
    ] = False,
    days: Annotated[
        int | None,
        typer.Option(
            help=f"How long the certificate is valid. Default: {DAYS}, with --intermediate {ENROLMENT_DAYS}.",
            min=1,
            max=DAYS_MAX,
            show_default=False,
        ),
    ] = None,
    directory: Directory = DIRECTORY,
) -> None:
    """Issue a certificate, or renew one: services and agents use new files without a restart."""
    authority = Authority(directory.expanduser())
    if intermediate == bool(identities):
        raise InvalidSpec("IDENTITY", identities, "one or several identities, or --intermediate without any")
    if intermediate or not identities:
        made = authority.create_enrolment_ca(out, days or ENROLMENT_DAYS)
        console.print(f"enrolment CA of fleet {made.fleet}, valid until {made.expires:%Y-%m-%d}", soft_wrap=True)
        print(f"export {CA_DIR}={shlex.quote(str(out.absolute()))}")
        return
    wanted = [Identity(authority.fleet, *parse_local(each)) for each in identities]
    names = [*(host or []), *(LOCAL_NAMES if any(each.role in SERVERS for each in wanted) else ())]
    if not host and any(each.role in SERVERS for each in wanted):
        console.print("[yellow]no --host[/]: only agents of this machine can reach the service", soft_wrap=True)
    pair = authority.issue(wanted, names, days or DAYS)
    try:
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(out / "tls.key", pair.key)
        write_whole(out / "tls.crt", pair.certificate, durable=True)
        write_whole(out / "ca.crt", authority.certificate, durable=True)
    except OSError as error:
        raise InvalidSpec("--out", str(out), f"a directory that can be written ({error.strerror})") from error
    console.print(f"certificate {pair.record.serial}, valid until {pair.record.expires[:10]}", soft_wrap=True)
    place = shlex.quote(str(out.absolute()))
    for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
        print(f"export HOLDFAST_TLS_{name}={place}/{file}")


@app.command("list")
def list_certificates(directory: Directory = DIRECTORY, as_json: AsJson = False) -> None:
    """List the certificates that were issued, with their serial numbers."""
    authority = Authority(directory.expanduser())
    revoked, now = authority.revoked(), datetime.now(UTC)
    rows = [_row(each, revoked, now) for each in authority.records()]
    show_list(rows, ["serial", "identities", "names", "state", "expires"], as_json, "no certificates yet")


@app.command()
def revoke(
    serial: Annotated[
        str,
        typer.Argument(
            help="Serial number, or the beginning of it, as `list` shows it; or agent/NODE: all certificates of the node; "
            "or enrolment: all enrolment CAs."
        ),
    ],
    directory: Directory = DIRECTORY,
) -> None:
    """Revoke a certificate: write the list that services read (HOLDFAST_TLS_CRL)."""
    authority = Authority(directory.expanduser())
    by_identity = "/" in serial or serial == ENROLMENT
    for record in authority.revoke_identity(serial) if by_identity else (authority.revoke(serial),):
        console.print(f"revoked: {record.serial} ({', '.join(record.identities)})", soft_wrap=True)
    console.print(
        f"Copy {authority.directory / CRL} to the services and agents, where HOLDFAST_TLS_CRL names it: they end the "
        "certificate's sessions within seconds, without a restart.",
        soft_wrap=True,
    )


def _row(record: Record, revoked: frozenset[str], now: datetime) -> dict[str, Any]:
    expired = datetime.fromisoformat(record.expires) <= now
    state = "revoked" if record.serial in revoked else "expired" if expired else "valid"
    return {
        "serial": record.serial,
        "identities": list(record.identities),
        "names": list(record.names),
        "state": state,
        "expires": record.expires,
    }
