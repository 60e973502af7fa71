"""`holdfast up` with a token and TLS of its environment, and with addresses that other machines reach."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certificates
import httpx
import psutil
import pytest
from commands import Shell, read_until, refused
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.cli.protection import is_loopback, require_protection
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.processes.survivors import find

PORTS = ("--port", "0", "--control-port", "0", "--diagnostics-port", "0")
TOKEN = "a-token-of-the-api"
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = certificates.make(tmp_path_factory.mktemp("pki"))
    certificates.issue(
        folder, "stack", *(f"holdfast://main/{each}" for each in ("supervisor", "diagnostics", "agent/node-0"))
    )
    certificates.issue(folder, "node-9", "holdfast://main/agent/node-9")
    return folder


def protected(pki: Path, directory: Path, leaf: str = "ours", **more: str) -> dict[str, str]:
    files = {"CERT": f"{leaf}.pem", "KEY": f"{leaf}.key", "CA": "ours-ca.pem"}
    return {
        "HOLDFAST_API_TOKEN": TOKEN,
        # relative, as somebody types them: the services have other working directories
        **{f"HOLDFAST_TLS_{name}": os.path.relpath(pki / file, directory) for name, file in files.items()},
        **more,
    }


@contextmanager
def up(shell: Shell, *flags: str) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Its output up to where it is up, and the endpoints of its services."""
    with shell.start("up", "--dir", "up", *PORTS, *flags) as process:
        said = ""
        while "Ctrl-C stops everything" not in said:
            said += read_until(process, r".").string
        yield said, json.loads((shell.directory / "up" / "stack.json").read_text())["endpoints"]
        process.terminate()
        process.wait(START_TIMEOUT_S)
    shell.assert_nothing_runs()


def environment_of(shell: Shell, part: str) -> dict[str, str]:
    survivor = find(shell.directory / "up" / part)
    assert survivor is not None
    return psutil.Process(survivor.pid).environ()


def test_token_and_tls_reach_the_services_and_the_agents(pki: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path, protected(pki, tmp_path, "stack", HOLDFAST_LINK_TESTS_EVERY_S="0"))
    with up(shell, "--nodes", "1") as (said, endpoints):
        api = endpoints["supervisor"]["api"]
        assert httpx.get(f"{api}/v1/nodes").status_code == 401, "the token is asked for"
        with Client(api, token=TOKEN) as client:
            wait_until(
                lambda: [node["node"] for node in client.nodes()] == ["node-0"],
                description="the agent, over TLS", timeout_s=START_TIMEOUT_S,
            )  # fmt: skip
        control = f"grpc://{endpoints['supervisor']['control']}"
        assert shell("health", control).code == 0
        plain = Shell(shell.directory, mark=shell.mark)
        assert plain("health", control).code == 1, "nobody without a certificate"
        assert plain("health", f"grpc://{endpoints['diagnostics']['endpoint']}").code == 1
        assert "HOLDFAST_API_TOKEN" in environment_of(shell, "supervisor/supervisor.pid")
        assert "HOLDFAST_API_TOKEN" not in environment_of(shell, "nodes/node-0/agent.pid"), "workers would have it"
        assert "HOLDFAST_LINK_TESTS_EVERY_S" in said, "what is not passed on is said"
        assert TOKEN not in said + (shell.directory / "up" / "stack.json").read_text()


def test_with_both_other_machines_are_let_in(pki: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path, protected(pki, tmp_path))
    with up(shell, "--host", "0.0.0.0") as (said, endpoints):
        assert endpoints["supervisor"]["control"].startswith("0.0.0.0:")
        api = endpoints["supervisor"]["api"]
        assert api.startswith("https://localhost:")
        assert re.search(rf"export HOLDFAST_API={re.escape(api)} HOLDFAST_API_CA=/\S+/ours-ca.pem\n", said)
        assert json.loads(shell("jobs", "list", "--json", "--api", api).out) == []
        assert shell("health", f"{api}/healthz").code == 0
        token = {"HOLDFAST_API_TOKEN": TOKEN}
        stranger = Shell(tmp_path, token | {"HOLDFAST_API_CA": str(pki / "foreign-ca.pem")}, mark=shell.mark)
        refused(
            stranger("jobs", "list", "--api", api), "not signed by a CA that is trusted here", "set HOLDFAST_API_CA"
        )
        plain = api.replace("https:", "http:")
        refused(Shell(tmp_path, token, mark=shell.mark)("jobs", "list", "--api", plain), f"set HOLDFAST_API={api}")
        assert "HOLDFAST_API_TLS" not in environment_of(shell, "supervisor/supervisor.pid"), "only what was given"
        survivor = find(shell.directory / "up" / "supervisor/supervisor.pid")
        assert survivor is not None
        psutil.Process(survivor.pid).kill()

        def answers_again() -> bool:
            again = find(shell.directory / "up" / "supervisor/supervisor.pid")
            return again is not None and again.pid != survivor.pid and shell("health", f"{api}/healthz").code == 0

        wait_until(answers_again, description="the supervisor at the same address", timeout_s=START_TIMEOUT_S)


def test_the_api_has_plain_http_behind_a_proxy_and_tls_on_loopback_if_that_is_asked_for(
    pki: Path, tmp_path: Path
) -> None:
    with up(Shell(tmp_path, protected(pki, tmp_path, HOLDFAST_API_TLS="off")), "--host", "0.0.0.0") as (_, endpoints):
        assert endpoints["supervisor"]["api"].startswith("http://")
    own = {"HOLDFAST_API_TLS_CERT": str(pki / "ours.pem"), "HOLDFAST_API_TLS_KEY": str(pki / "ours.key")}
    shell = Shell(tmp_path, own | {"HOLDFAST_API_CA": str(pki / "ours-ca.pem")})
    with up(shell) as (_, endpoints):
        api = endpoints["supervisor"]["api"]
        assert api.startswith("https://127.0.0.1:")
        # the token that `up` has made is found for https, too
        assert json.loads(shell("jobs", "list", "--json", "--api", api).out) == []
        assert shell("dashboard", "--api", api).out.startswith(f"{api}/#token=")


def test_without_either_only_who_says_insecure(tmp_path: Path, pki: Path) -> None:
    only_token = {"HOLDFAST_API_TOKEN": TOKEN}
    no_token = protected(pki, tmp_path) | {"HOLDFAST_API_TOKEN": ""}
    for environment, missing in (
        ({}, "HOLDFAST_API_TOKEN, HOLDFAST_TLS_CERT"), (only_token, "HOLDFAST_TLS_CERT"), (no_token, "HOLDFAST_API_TOKEN"),
    ):  # fmt: skip
        shell = Shell(tmp_path, environment)
        refused(shell("up", "--dir", str(tmp_path / "up"), *PORTS, "--host", "0.0.0.0"), "--insecure", f"({missing}")
    assert not (tmp_path / "up").exists(), "nothing was started"
    with up(Shell(tmp_path), "--host", "0.0.0.0", "--insecure") as (_, endpoints):
        assert (
            httpx.get(f"http://127.0.0.1:{endpoints['supervisor']['api'].rpartition(':')[2]}/v1/nodes").status_code
            == 200
        )


def test_half_of_tls_and_files_that_are_not_there_are_refused(tmp_path: Path, pki: Path) -> None:
    half = {"HOLDFAST_TLS_CERT": str(pki / "ours.pem")}
    refused(Shell(tmp_path, half)("up", "--dir", "up", *PORTS), "HOLDFAST_TLS_KEY", "together")
    gone = protected(pki, tmp_path) | {"HOLDFAST_TLS_KEY": str(tmp_path / "gone.key")}
    refused(Shell(tmp_path, gone)("up", "--dir", "up", *PORTS), "HOLDFAST_TLS_KEY", "a readable PEM file")


def test_services_without_a_token_are_not_taken_over_as_if_they_had_one(tmp_path: Path, pki: Path) -> None:
    plain = Shell(tmp_path)
    with plain.start("up", "--dir", "up", *PORTS) as process:
        read_until(process, "Ctrl-C stops everything")
        process.kill()
        process.wait()
        token = Shell(tmp_path, {"HOLDFAST_API_TOKEN": TOKEN}, mark=plain.mark)
        refused(token("up", "--dir", "up", *PORTS), "was started with HOLDFAST_API_TOKEN unset")
        with plain.start("up", "--dir", "up", *PORTS) as again:
            read_until(again, "Ctrl-C stops everything")
            again.terminate()
            again.wait(START_TIMEOUT_S)
    plain.assert_nothing_runs()


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
    ("10.0.0.5", False), ("nowhere.invalid", False),
])  # fmt: skip
def test_what_other_machines_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_token_alone_does_not_show_in_what_is_said() -> None:
    with pytest.raises(InvalidSpec) as refusal:
        require_protection("0.0.0.0", {"HOLDFAST_API_TOKEN": TOKEN})
    assert TOKEN not in str(refusal.value)


def test_a_stack_whose_certificate_is_for_somebody_else_says_so(tmp_path: Path, pki: Path) -> None:
    done = Shell(tmp_path, protected(pki, tmp_path, "node-9"))("up", "--dir", "up", *PORTS, timeout_s=START_TIMEOUT_S)
    assert done.code != 0
    assert (
        "a certificate for holdfast://main/diagnostics; this one is for holdfast://main/agent/node-9"
        in done.err + done.out
    )
