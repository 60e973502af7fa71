"""A machine joins by one command, trains, and its certificate is replaced several times meanwhile: no step is lost."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import Shell, read_until, refused
from waiting import TIMEOUT_S, wait_until

from holdfast.runtime.processes.survivors import find
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.enrolled import DIRECTORY, Enrolled
from holdfast.runtime.trust.revocation import serial_of

TOKEN = "a-token-of-the-api"
LIFE_S = 30  # the shortest that a supervisor signs for
PORTS = ("--port", "0", "--control-port", "0", "--diagnostics-port", "0")
SCRIPT = """
import pathlib, time
import holdfast.train as hf

def main(run):
    step = 0
    with open("steps", "a") as steps:
        while not pathlib.Path("finish").exists():
            with run.step(step) as s:
                time.sleep(0.02)
                s.log(loss=1.0)
            print(step, file=steps, flush=True)
            step += 1

hf.launch(main)
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="hf-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_certificates_are_renewed_during_training_and_no_step_is_lost(tmp_path: Path, memory: Path) -> None:
    plain = Shell(tmp_path, {"HOLDFAST_API_TOKEN": TOKEN})
    assert plain("ca", "init", "--dir", "ca").code == 0
    issued = plain("ca", "issue", "supervisor", "diagnostics", "--host", "localhost", "--out", "tls", "--dir", "ca")
    made = plain("ca", "issue", "--intermediate", "--out", "enrolment", "--dir", "ca")
    settings = dict(re.findall(r"export (\w+)=(\S+)", issued.out + made.out))
    assert settings["HOLDFAST_CA_DIR"] == str(tmp_path / "enrolment")
    head = Shell(
        tmp_path,
        {
            **settings,
            "HOLDFAST_API_TOKEN": TOKEN,
            "HOLDFAST_API_TLS": "on",
            "HOLDFAST_NODE_CERTIFICATE_S": str(LIFE_S),
        },
        mark=plain.mark,
    )
    with head.start("up", "--dir", "up", *PORTS) as up:
        read_until(up, "Ctrl-C stops everything")
        api = json.loads((tmp_path / "up" / "stack.json").read_text())["endpoints"]["supervisor"]["api"]
        command = Shell(
            tmp_path, {"HOLDFAST_API": api, "HOLDFAST_API_TOKEN": TOKEN, "HOLDFAST_API_CA": str(tmp_path / "ca/ca.crt")}
        )
        invited = command("nodes", "invite", "node-1")
        (line,) = re.findall(r"^holdfast agent --invite (\S+)$", invited.out, re.MULTILINE)
        node = Shell(tmp_path, {"HOLDFAST_INVITE": line}, mark=plain.mark)
        flags = (
            "--dir",
            "a",
            "--memory",
            str(memory),
            "--kernel-log",
            "/dev/null",
            "--no-preflight",
            "--address",
            "127.0.0.1",
        )
        with node.start("agent", *flags) as agent:
            train(command, tmp_path, head)
            agent.terminate()
            agent.wait(TIMEOUT_S)
        used = Shell(tmp_path, {"HOLDFAST_INVITE": line}, mark=plain.mark)
        refused(used("agent", "--node", "node-1", "--dir", "b"), "was used already, by node-1")
        up.terminate()
        up.wait(TIMEOUT_S)
    plain.assert_nothing_runs()


def train(command: Shell, directory: Path, head: Shell) -> None:
    own = directory / "a" / "node-1"

    def serial() -> int:
        return serial_of(Enrolled(own / DIRECTORY).files.cert.read_bytes())

    def connected() -> bool:
        return [each["connected"] for each in json.loads(command("nodes", "list", "--json").out or "[]")] == [True]

    wait_until(connected, description="the node that has joined")
    first = serial()
    (directory / "train.py").write_text(SCRIPT)
    assert command("run", "--detach", "--name", "job", "train.py").code == 0
    steps = directory / "steps"
    wait_until(lambda: steps.exists() and len(steps.read_text().split()) > 5, description="steps")
    wait_until(lambda: serial() != first, description="another certificate", timeout_s=3 * LIFE_S)
    second = serial()
    # a new connection: the supervisor dies, and the agent shows it the certificate that it has got meanwhile
    killed = find(directory / "up" / "supervisor" / "supervisor.pid")
    assert killed is not None
    psutil.Process(killed.pid).kill()
    wait_until(lambda: serial() not in (first, second), description="a third certificate", timeout_s=3 * LIFE_S)
    wait_until(connected, description="the node at the new supervisor")
    (directory / "finish").touch()

    def over() -> bool:
        return bool(json.loads(command("jobs", "show", "job", "--json").out)["phase"] == "completed")

    wait_until(over, description="the end of the job")
    job = json.loads(command("jobs", "show", "job", "--json").out)
    assert job["generation"] == 1, job["reason"]
    assert json.loads(command("incidents", "list", "--json").out) == []
    done = [int(each) for each in steps.read_text().split()]
    assert done == list(range(len(done))), "each step once, in order"
    records = Authority(directory / "enrolment").records()
    assert len(records) >= 3
    assert {each.identities for each in records} == {("agent/node-1",)}
