"""The C core of gRPC writes nothing to the logs of services."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.runtime.rpc.quiet_grpc import NAME

# A server that refuses frequent pings sends a GOAWAY, which the core of the client logs.
GOAWAY = """
import asyncio, os, sys
if sys.argv[1:]:
    import holdfast.runtime.rpc.quiet_grpc
import grpc
from grpc import aio

assert "GRPC_VERBOSITY" not in os.environ

async def main():
    async def silent(request, context):
        await asyncio.Event().wait()

    rare = [("grpc.http2.min_ping_interval_without_data_ms", 600_000), ("grpc.http2.max_ping_strikes", 1)]
    server = aio.server(options=rare)
    handlers = {"C": grpc.unary_unary_rpc_method_handler(silent)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    often = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1)]
    often += [("grpc.http2.max_pings_without_data", 0)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=often) as channel:
        try:
            await channel.unary_unary("/a.B/C")(b"")
        except aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)

asyncio.run(main())
"""


def run(*arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != NAME}
    command = [sys.executable, "-c", *arguments]
    ended = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_goaway_is_not_logged() -> None:
    assert "oaway" in run(GOAWAY), "what a process of its own would log"
    assert run(GOAWAY, "quiet") == ""


@pytest.mark.parametrize("service", ["agent", "diagnostics", "supervisor", "replicator"])
def test_every_service_imports_grpc_in_this_way(service: str) -> None:
    order = run(f"import sys, holdfast.{service}.__main__; print(*sys.modules)").split()
    assert order.index("holdfast.runtime.rpc.quiet_grpc") == order.index("grpc") + 1, (
        "a module is listed when it is complete"
    )
