"""What the script of a policy reaches beside the supervisor: nothing that its decision does not need."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.domain.errors import PolicyError
from holdfast.domain.job import PolicySpec
from holdfast.supervisor.policies import sandbox
from holdfast.supervisor.policies.sandbox import Confinement
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job

HEAD = "import os, socket, subprocess, sys, threading\nfrom holdfast.policy import *\n"
Reason = Callable[[str], str]


@pytest.fixture
def reason() -> Reason:
    """What `decide` with this body gives as the reason of a restart, with `said` in its scope; or how it fails."""

    def ask(body: str) -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        source = f"{HEAD}def decide(incident, job):\n{lines}    return restart(str(said) or 'nothing')\n"
        incident = next(iter(sample_incidents()))
        with PolicyScript(PolicySpec("policy.py", source), deadline_s=20.0) as script:
            return script.decide(incident, sample_job(incident)).reason

    return ask


def needs(part: Confinement) -> None:
    if part in sandbox.missing():
        pytest.skip(f"this kernel does not confine {part}")


def test_it_sees_no_secret_of_the_environment(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_TOKEN", "very-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert reason("said = sorted(name for name, value in os.environ.items() if 'secret' in value)") == "[]"
    assert reason("said = os.environ['LC_ALL']") == "C.UTF-8"


@pytest.mark.parametrize(
    "body",
    [
        "said = open({secret!r}).read()",
        "said = os.listdir({directory!r})",
        "said = open('/proc/%d/environ' % os.getppid()).read()",
        "said = open('/etc/passwd').read()",
        "open({directory!r} + '/left-behind', 'w')",
        "os.unlink({secret!r})",
        "os.mkdir({directory!r} + '/made')",
        "open(os.__file__, 'a')",
    ],
)
def test_it_reads_and_changes_no_file(reason: Reason, tmp_path: Path, body: str) -> None:
    needs(Confinement.FILES)
    (tmp_path / "secret").write_text("very secret")
    with pytest.raises(PolicyError, match=r"policy\.py:\d+: PermissionError"):
        reason(body.format(secret=str(tmp_path / "secret"), directory=str(tmp_path)))
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == "very secret"


@pytest.mark.parametrize(
    "body",
    [
        "socket.create_connection(('127.0.0.1', {port}))",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "os.kill(os.getppid(), 0)",
        "os.pidfd_open(os.getppid())",
    ],
)
def test_it_reaches_no_network_and_no_process(reason: Reason, body: str) -> None:
    needs(Confinement.CALLS)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PolicyError, match=r"policy\.py:\d+: PermissionError"),
    ):
        reason(body.format(port=server.getsockname()[1]))


def test_what_it_starts_is_confined_too(reason: Reason, tmp_path: Path) -> None:
    needs(Confinement.FILES)
    (tmp_path / "secret").write_text("very secret")
    code = f"open({str(tmp_path / 'secret')!r})"
    found = reason(f"said = subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True).stderr")
    assert "PermissionError" in found
    thread = f"seen = []\ndef read():\n  try: {code}\n  except OSError as error: seen.append(error)\n"
    assert "denied" in reason(thread + "one = threading.Thread(target=read)\none.start()\none.join()\nsaid = seen")


def test_the_thread_that_reads_questions_is_confined_too(reason: Reason, tmp_path: Path) -> None:
    """It calls what a script can replace: `os._exit`, once its parent has gone."""
    needs(Confinement.FILES)
    reason(f"os._exit = lambda status: open({str(tmp_path / 'mark')!r}, 'w')\nsaid = 1")
    assert list(tmp_path.iterdir()) == []


def test_memory_that_it_does_not_give_back_ends_the_script_and_not_the_machine(reason: Reason) -> None:
    with pytest.raises(PolicyError, match="MemoryError"):
        reason("said = len(bytearray(64 << 30))")


def test_it_imports_what_is_installed_and_prints(reason: Reason) -> None:
    body = "import json, zoneinfo, decimal, numpy\nfrom holdfast.domain import mesh\nprint('hello')\n"
    assert reason(body + "said = json.dumps({'zone': str(zoneinfo.ZoneInfo('UTC')), 'sum': int(numpy.ones(3).sum())})")


def test_a_file_of_a_policy_is_read_before_it_is_confined(tmp_path: Path) -> None:
    file = tmp_path / "policy.py"
    file.write_text(f"{HEAD}def decide(incident, job):\n    return restart('from the file')\n")
    incident = next(iter(sample_incidents()))
    with PolicyScript(PolicySpec(str(file))) as script:
        assert script.decide(incident, sample_job(incident)).reason == "from the file"


def test_this_process_is_not_confined_by_its_policies(reason: Reason, tmp_path: Path) -> None:
    reason("said = 1")
    (tmp_path / "written").write_text(os.environ["PATH"])
    socket.socket().close()
