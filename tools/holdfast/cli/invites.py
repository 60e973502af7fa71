"""`holdfast nodes invite` and `holdfast nodes invites`: how machines become nodes without files being copied to them."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from holdfast.cli.client import Client
from holdfast.cli.durations import period
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, Row, console, show_list
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.hosts import is_loopback
from holdfast.runtime.trust.invitation import Invitation, digest, new_token

COLUMNS = ("id", "node", "state", "uses", "joined", "expires_at", "by")
WILDCARDS = ("0.0.0.0", "::")

app = typer.Typer(help="Invitations: list, revoke.", no_args_is_help=True)


def register(nodes: typer.Typer) -> None:
    nodes.command(
        epilog="Example: [bold]holdfast nodes invite node-7[/], then on node-7 the command that it prints. The supervisors "
        "need HOLDFAST_CA_DIR (docs/security.md)."
    )(invite)
    nodes.add_typer(app, name="invites")


def invite(
    node: Annotated[
        str, typer.Argument(help="Name of the node. Without one, any name that the fleet does not have.")
    ] = "",
    ttl: Annotated[str, typer.Option(help="How long the invitation is valid: 30m, 1h, 2d.")] = "1h",
    uses: Annotated[int, typer.Option(help="Number of nodes, without a name: each uses it once.", min=1)] = 1,
    api_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--api-url",
            help="URL by which the machine reaches a supervisor's API; repeat for several.",
            show_default=False,
        ),
    ] = None,
    supervisor: Annotated[
        str,
        typer.Option(
            help="Control endpoints for the agent, host:port, comma-separated. Default: the hosts of the URLs."
        ),
    ] = "",
    api: Api = "",
) -> None:
    """Print the command that makes a machine a node of the fleet. The invitation in it is a secret until it is used."""
    url = api or api_url()
    ttl_s = period(ttl)
    with Client(url) as client:
        joining = client.joining()
        if not joining["possible"]:
            raise Conflict(str(joining["reason"]))
        version = client.version()
        apis = api_urls or _reachable(str(version["leader_api"]), str(version.get("standby_api", "")), url)
        control = supervisor or ",".join(f"{_bracketed(each)}:{joining['control_port']}" for each in apis)
        token = new_token()
        client.invite(digest(token), node, uses, ttl_s)
    made = Invitation(
        str(joining["fleet"]), tuple(apis), str(joining["ca_sha256"]), tuple(control.split(",")), node, token
    )
    whom = node or (f"{uses} nodes, each under its own name" if uses > 1 else "one node of any name")
    console.print(
        f"for {whom}, within {ttl}; it works once for each node. Supervisors: {', '.join(made.control)}; if there are more, "
        "name them all (--api-url). On the machine:",
        soft_wrap=True,
    )
    print(f"holdfast agent --invite {made.text}")


@app.command("list")
def list_invites(api: Api = "", as_json: AsJson = False) -> None:
    """List open invitations, and those that ended within a week. Tokens are not stored, so they cannot be shown."""
    with Client(api or api_url()) as client:
        rows = list(client.invites())
    shown = rows if as_json else [_row(each) for each in rows]
    show_list(shown, COLUMNS, as_json, "no invitations; make one with `holdfast nodes invite`")


@app.command()
def revoke(
    invitation: Annotated[str, typer.Argument(help="Id, as `list` shows it.")],
    api: Api = "",
) -> None:
    """Revoke an invitation. Nodes that have joined by it stay; `holdfast ca revoke agent/NODE` revokes their certificates."""
    with Client(api or api_url()) as client:
        client.revoke_invite(invitation)
    console.print(f"revoked: {invitation}", markup=False)


def _row(row: Row) -> Row:
    return {**row, "node": row["node"] or "any", "joined": ", ".join(each["node"] for each in row["used"])}


def _reachable(leader: str, standby: str, asked: str) -> list[str]:
    """Return the URLs for an invitation: those of the leader, of a standby and of the supervisor that answered, if other
    machines reach them; otherwise the URL that this machine uses. Raises `InvalidSpec` without TLS."""
    found = list(dict.fromkeys(each.rstrip("/") for each in (leader, standby, asked) if each.startswith("https://")))
    if not found:
        raise InvalidSpec(
            "--api", asked, "the URL of an API with TLS, because an invitation is a secret (docs/security.md)"
        )
    outward = [each for each in found if not is_loopback(host := httpx.URL(each).host) and host not in WILDCARDS]
    if not outward:
        console.print(
            "[yellow]only this machine reaches the API at[/] " + ", ".join(found) + "; name another URL with --api-url",
            soft_wrap=True,
        )
    return outward or found


def _bracketed(url: str) -> str:
    host = httpx.URL(url).host
    return f"[{host}]" if ":" in host else host
