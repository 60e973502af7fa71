"""What bad input gets where nothing runs: an error that names the field, the value and what would be right, exit code 2,
nothing started and nothing left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_policies import POLICIES
from commands import Shell, refused

GOOD_POLICY = "from holdfast.policy import restart\ndef decide(incident, job):\n    return restart('why not')\n"
JOBS = {
    "unknown_key": ("nods: 2", ("job.yaml:3: nods: 2", "a known key; did you mean 'nodes'?")),
    "unknown_nested_key": ("elastic: {min: 1}", ("job.yaml:3: elastic.min: 1", "min_dp")),
    "mesh": ("nodes: 3\nmesh: {dp: 2, pp: 2}", ("job.yaml:4: mesh: 'dp 2 × pp 2'", "= 3 ranks, not 4")),
    "min_over_max": (
        "nodes: 2\nelastic: {min_dp: 3, max_dp: 2}",
        ("job.yaml:4: elastic.min_dp: 3", "at most elastic.max_dp (2)"),
    ),
    "outside": ("nodes: 2\nelastic: {max_dp: 1}", ("job.yaml", "elastic", "at most elastic.max_dp (1)")),
    "text_for_number": ("nodes: two", ("job.yaml:3: nodes: 'two'", "integer")),
    "zero": ("nodes: 0", ("job.yaml:3: nodes: 0", "at least 1")),
    "twice": ("nodes: 1\nnodes: 2", ("job.yaml:4: nodes", "each key once; first on line 3")),
    "script": ("cwd: nowhere", ("job.yaml:3: cwd: 'nowhere'", "an existing directory")),
    "policy": ("policy: missing.py", ("job.yaml:3: policy: 'missing.py'", "an existing file")),
    "not_yaml": ("nodes: [1", ("job.yaml:", "YAML")),
    "two_at_once": ("nods: 2\nnproc_per_node: 0", ("job.yaml:3: nods", "job.yaml:4: nproc_per_node: 0")),
}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Fails the test when the command leaves a process or a shared-memory file of its own."""
    (tmp_path / "train.py").write_text("")
    for name, (text, _) in POLICIES.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    shell = Shell(tmp_path, {"HOLDFAST_API": ""})
    yield shell
    shell.assert_nothing_runs()
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith(("holdfast-", "hf-"))]


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("case", JOBS)
def test_a_job_file_that_is_wrong(shell: Shell, case: str) -> None:
    lines, parts = JOBS[case]
    (shell.directory / "job.yaml").write_text(f"name: llm\nscript: train.py\n{lines}\n")
    refused(shell("run", "--local", "job.yaml"), *parts)


@pytest.mark.parametrize("case", POLICIES)
def test_a_policy_that_is_of_no_use(shell: Shell, case: str) -> None:
    """Checked before a local stack is started for the job."""
    _, parts = POLICIES[case]
    refused(shell("run", "--local", "--policy", case, "train.py"), "policy", *parts)


@pytest.mark.parametrize("case", POLICIES)
def test_policy_check_says_the_same(shell: Shell, case: str) -> None:
    _, parts = POLICIES[case]
    result = shell("policy", "check", case)
    assert result.code == 2
    said = " ".join((result.out + result.err).split())
    assert "Traceback" not in said
    for part in parts:
        assert part in said


def test_policy_check_of_a_good_one(shell: Shell) -> None:
    (shell.directory / "good.py").write_text(GOOD_POLICY)
    result = shell("policy", "check", "good.py")
    assert "restart" in result.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "missing.py"], ["script: 'missing.py'", "an existing file"]),
        (["run", "missing.yaml"], ["missing.yaml", "a readable YAML file (No such file or directory)"]),
        (["run", "--nnodes", "x", "train.py"], ["--nnodes: 'x'", "a number or MIN:MAX"]),
        (["run", "--no-such-flag", "train.py"], ["No such option", "--no-such-flag"]),
        (["run"], ["Missing argument", "target"]),
        (["run", "--api", "nonsense", "train.py"], ["--api: 'nonsense'", "http://127.0.0.1:8470"]),
        (["run", "--detach", "--local", "train.py"], ["--detach cannot be used with --local"]),
        (["jobs", "list", "--api", "http://127.0.0.1:1"], ["no Holdfast API answers at http://127.0.0.1:1", "--api"]),
        (["inject", "crash", "--job", "x", "--rank", "-1"], ["--rank", "0"]),
        (["inject", "hang", "--job", "x"], ["Missing option", "--rank"]),
        (
            ["up", "--redis-url", "redis://127.0.0.1:1", "--port", "0", "--dir", "up"],
            ["--redis-url", "redis://127.0.0.1:1"],
        ),
        (["up", "--redis-url", "nonsense", "--port", "0", "--dir", "up"], ["--redis-url", "redis://host:port/db"]),
        (["up", "--port", "99999", "--dir", "up"], ["--port", "65535"]),
        (
            ["up", "--port", "0", "--host", "203.0.113.7", "--dir", "up"],
            ["--host: '203.0.113.7'", "address of this machine"],
        ),
        (
            ["up", "--port", "0", "--host", "0.0.0.0", "--dir", "up"],
            [
                "--host: '0.0.0.0'",
                "HOLDFAST_API_TOKEN, HOLDFAST_TLS_CERT, HOLDFAST_TLS_KEY, HOLDFAST_TLS_CA",
                "--insecure",
            ],
        ),
        (
            ["up", "--port", "0", "--dir", "train.py"],
            ["--dir: 'train.py'", "a directory that can be created and written"],
        ),
        (["up", "--port", "0", "--dir", "/proc/holdfast"], ["--dir: '/proc/holdfast'", "can be created and written"]),
        (["up", "--nodes", "-1", "--dir", "up"], ["--nodes", "0"]),
        (["demo", "--out", "/proc/holdfast"], ["--out: '/proc/holdfast'", "can be created and written"]),
        (["demo", "--steps", "5"], ["--steps", "150"]),
        (["agent", "--supervisor", "nonsense"], ["--supervisor: 'nonsense'", "host:port"]),
        (["agent", "--supervisor", "a:1,b:70000"], ["--supervisor: 'b:70000'", "host:port"]),
        (["agent", "--supervisor", "a:1", "--dir", "train.py"], ["train.py"]),
        (["simulate", "--seeds", "x"], ["--seeds", "integer"]),
        (
            ["simulate", "--all-worlds", "--seed", "599999", "--seeds", "2"],
            ["--all-worlds", "from 0 to 599999", "fewer --seeds"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and value[0].isalpha() else "",
)
def test_a_command_that_cannot_mean_anything(shell: Shell, arguments: list[str], parts: list[str]) -> None:
    if arguments[0] == "up":  # whichever is not about ports must not fail for those
        arguments = [*arguments, "--control-port", "0", "--diagnostics-port", "0"]
    refused(shell(*arguments), *parts)
    assert not (shell.directory / "up" / "redis").exists(), "something was started"


@pytest.mark.parametrize("flag", ["--port", "--control-port", "--diagnostics-port"])
def test_a_port_in_use(shell: Shell, taken: str, flag: str) -> None:
    ports = {"--port": "0", "--control-port": "0", "--diagnostics-port": "0"} | {flag: taken}
    result = shell("up", "--dir", "up", *(part for pair in ports.items() for part in pair))
    refused(result, f"{flag}: {taken} is not valid; expected a free port (127.0.0.1:{taken} is in use")
    assert not (shell.directory / "up").exists()
