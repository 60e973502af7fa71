"""`holdfast health`: ask one service whether it serves. What container health checks and start-up scripts call."""

from __future__ import annotations

from typing import Annotated

import anyio
import grpc
import httpx
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.grpc_channel import open_channel

SCHEMES = "grpc://host:port, unix:/path of a gRPC socket, or http://host:port/healthz"


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Exit code 1 when it does not serve. Example: [bold]holdfast health grpc://127.0.0.1:8472[/]",
        rich_help_panel="Look",
    )(health)


def health(
    target: Annotated[str, typer.Argument(help=f"Where to ask: {SCHEMES}.")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the answer.", min=0.1)] = 3.0,
) -> None:
    """Say whether the service at TARGET serves: diagnostics and replicators by gRPC health, the supervisor by /healthz."""
    if target.startswith(("http://", "https://")):
        problem = _http(target, timeout_s)
    elif target.startswith(("grpc://", "unix:")):
        problem = anyio.run(_grpc, target.removeprefix("grpc://"), timeout_s)
    else:
        raise InvalidSpec("TARGET", target, SCHEMES)
    console = Console(highlight=False, emoji=False, markup=False)
    if problem:
        console.print(f"{target} does not serve: {problem}")
        raise typer.Exit(1)
    console.print(f"{target} serves")


def _http(url: str, timeout_s: float) -> str:
    """What is wrong, or an empty string. Never through a proxy: what is asked is this very service."""
    try:
        with httpx.Client(timeout=timeout_s, trust_env=False) as client:
            answer = client.get(url)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if answer.is_success else f"HTTP {answer.status_code} {answer.text[:200]}"


async def _grpc(endpoint: str, timeout_s: float) -> str:
    async with open_channel(endpoint) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
