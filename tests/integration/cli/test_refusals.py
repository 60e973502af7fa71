"""What a running Holdfast refuses: said in the same way, and nothing that runs is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bad_policies import POLICIES
from commands import Shell, refused
from training import WarmStack
from waiting import TIMEOUT_S

from holdfast.cli.client import Client
from holdfast.cli.stack_options import JOIN_FILE, StackOptions


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStack]:
    """A control plane without nodes: jobs are accepted and wait."""
    with WarmStack(StackOptions(directory=tmp_path_factory.mktemp("stack"))) as stack:
        yield stack


@pytest.fixture
def shell(stack: WarmStack, tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "train.py").write_text("")
    for name, (text, _) in POLICIES.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    shell = Shell(tmp_path, stack.for_commands)
    yield shell
    shell.assert_nothing_runs()
    stack.check()


@pytest.fixture(scope="module")
def waiting_job(stack: WarmStack) -> str:
    body = {
        "name": "waiting",
        "script": "/train.py",
        "nodes": 2,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 1, "max_dp": 2},
    }
    with Client(stack.api_url) as client:
        client.submit(body)
    return "waiting"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["jobs", "show", "nope"], ["there is no job nope"]),
        (["jobs", "stop", "nope"], ["there is no job nope"]),
        (["jobs", "stop", "nope", "--now"], ["there is no job nope"]),
        (["jobs", "goodput", "nope"], ["there is no job nope"]),
        (["jobs", "show", "../nodes"], ["job: '../nodes'", "holdfast jobs list"]),
        (["jobs", "show", ""], ["job: ''", "holdfast jobs list"]),
        (["jobs", "resize", "waiting", "3"], ["dp: 3", "1 to 2"]),
        (["jobs", "checkpoint", "waiting"], ["only a running job can save a checkpoint"]),
        (["nodes", "show", "nope"], ["there is no node nope"]),
        (["nodes", "cordon", "nope"], ["there is no node nope"]),
        (["nodes", "repair", "nope"], ["there is no node nope"]),
        (["incidents", "show", "nope"], ["nope"]),
        (["inject", "crash", "--job", "nope", "--rank", "0"], ["there is no job nope"]),
        (["inject", "hang", "--job", "waiting", "--rank", "7"], ["job waiting has no rank 7 now; the job is"]),
        (["inject", "node-loss", "--node", "nope"], ["there is no node nope"]),
        (["inject", "node-return", "--node", "nope"], ["there is no node nope"]),
        (["inject", "xid", "--node", "nope"], ["there is no node nope"]),
        (["run", "--detach", "--name", "waiting", "train.py"], ["waiting", "another name"]),
    ],
    ids=lambda value: " ".join(value) if value[0].isalpha() else "",
)
def test_what_is_not_there_or_not_now(shell: Shell, waiting_job: str, arguments: list[str], parts: list[str]) -> None:
    refused(shell(*arguments), *parts)


def test_two_jobs_of_one_name_are_a_409_and_the_first_goes_on(stack: WarmStack, waiting_job: str) -> None:
    headers = {"Authorization": f"Bearer {stack.for_commands['HOLDFAST_API_TOKEN']}"}
    with httpx.Client(base_url=stack.api_url, headers=headers, trust_env=False) as http:
        before = http.get("/v1/jobs/waiting").json()
        answer = http.post("/v1/jobs", json={"name": "waiting", "script": "/other.py"})
        after = http.get("/v1/jobs/waiting").json()
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert "waiting" in answer.json()["detail"]
    assert after["spec"] == before["spec"]


@pytest.mark.parametrize("case", [case for case in POLICIES if case != "missing.py"])
def test_a_job_that_names_a_policy_of_no_use(shell: Shell, stack: WarmStack, case: str) -> None:
    _, parts = POLICIES[case]
    refused(shell("run", "--detach", "--name", "with-policy", "--policy", case, "train.py"), "policy", *parts)
    with Client(stack.api_url) as client:
        assert "with-policy" not in [job["name"] for job in client.jobs()]


def test_a_second_stack_in_the_same_directory(shell: Shell, stack: WarmStack) -> None:
    ports = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]
    for _ in range(2):
        refused(
            shell("up", "--dir", str(stack.directory), *ports),
            "--dir",
            "a stack is already running in",
            "choose another",
        )
    with Client(stack.api_url) as client:
        assert client.version()["leader"]


INCOMPATIBLE = """
import dataclasses, runpy, holdfast.domain.nodes as nodes
nodes.PROTOCOL_VERSION = 99
fields = [field.name for field in dataclasses.fields(nodes.NodeFacts)]
given = list(nodes.NodeFacts.__init__.__defaults__)
given[fields.index("protocol_version") - len(fields)] = 99
nodes.NodeFacts.__init__.__defaults__ = tuple(given)
runpy.run_module("holdfast.agent", run_name="__main__")
"""


def test_an_agent_of_another_protocol_version_says_so_and_ends(stack: WarmStack, tmp_path: Path) -> None:
    environment = {
        "HOLDFAST_SUPERVISOR": stack.control_endpoint,
        "HOLDFAST_JOIN_TOKEN_FILE": str(stack.directory / JOIN_FILE),
        "HOLDFAST_NODE": "stranger",
        "HOLDFAST_AGENT_DIR": str(tmp_path / "agent"),
        "HOLDFAST_MEMORY_DIR": str(tmp_path / "memory"),
        "HOLDFAST_DISK_DIR": str(tmp_path / "disk"),
        "HOLDFAST_KERNEL_LOG": str(tmp_path / "kernel.log"),
    }
    (tmp_path / "kernel.log").touch()
    shell = Shell(tmp_path, environment)
    with shell.start_python("-c", INCOMPATIBLE) as agent:
        out, err = agent.communicate(timeout=TIMEOUT_S)
    assert agent.returncode == 2, out + err
    line = err.strip().splitlines()[-1]
    assert line.startswith("holdfast agent: ")
    for part in ("protocol version 99", "speaks 1", "install the same version"):
        assert part in line
    with Client(stack.api_url) as client:
        assert "stranger" not in [node["node"] for node in client.nodes()]
    shell.assert_nothing_runs()


def test_a_port_that_a_stack_has(shell: Shell, stack: WarmStack) -> None:
    port = stack.control_endpoint.rpartition(":")[2]
    result = shell("up", "--dir", "up", "--port", "0", "--control-port", port, "--diagnostics-port", "0")
    refused(result, f"--control-port: {port} is not valid", "a free port")
