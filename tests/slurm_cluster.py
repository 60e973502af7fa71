"""A real Slurm on this machine: munge, slurmctld and several slurmds, each under a name of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from ports import free_ports
from waiting import wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
START_TIMEOUT_S = 60.0
# KillOnBadExit=1 would end all agents with the first: as some sites have it, and as srun's options must override it.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
KillOnBadExit=1
MpiDefault=none
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe={sharing}
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [name for name in NEEDED if shutil.which(name, path=path) is None]


@dataclass
class Slurm:
    root: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HOLDFAST_"))}
        return {**inherited, "SLURM_CONF": str(self.root / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def __call__(self, *command: str, timeout_s: float = 60.0) -> str:
        done = subprocess.run(
            command, check=False, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a Slurm job, such as RUNNING."""
        shown = self("scontrol", "-o", "show", "job", job)
        return next(part.split("=", 1)[1] for part in shown.split() if part.startswith("JobState="))

    def field(self, job: str, name: str) -> str:
        shown = self("scontrol", "-o", "show", "job", job)
        return next((part.split("=", 1)[1] for part in shown.split() if part.startswith(f"{name}=")), "")

    def wait_state(self, job: str, *states: str, timeout_s: float = 120.0) -> str:
        return wait_until(
            lambda: state if (state := self.state(job)) in states else None,
            description=f"Slurm job {job} to be {' or '.join(states)}",
            timeout_s=timeout_s,
        )

    def exit_code(self, job: str) -> int:
        """Of its batch script."""
        return int(self.field(job, "ExitCode").partition(":")[0])

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """The controller answers nobody."""
        controller = psutil.Process(int((self.root / "slurmctld.pid").read_text()))
        controller.suspend()
        try:
            yield
        finally:
            controller.resume()

    def slurmd(self, node: str) -> psutil.Process:
        return psutil.Process(int((self.root / f"slurmd-{node}.pid").read_text()))

    def power_off(self, node: str) -> None:
        """Kill the node's slurmd and everything that it has started, as if the machine had lost its power."""
        victims = [self.slurmd(node), *_of_node(node, str(self.root / "slurm.conf"))]
        for process in [*victims, *(child for each in victims for child in _children(each))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _children(process: psutil.Process) -> Sequence[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return ()


def _of_node(node: str, configuration: str) -> list[psutil.Process]:
    """The step daemons of a node are not children of its slurmd; their tasks know the name of their node, and which cluster
    it is of: others may run on this machine."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get("SLURMD_NODENAME") == node and environment.get("SLURM_CONF") == configuration:
                found += [
                    process,
                    *([parent] if (parent := process.parent()) and "slurmstepd" in parent.name() else []),
                ]
    return found


@contextmanager
def slurm(root: Path, names: Sequence[str], *, sharing: str = "NO", tracking: str = "linuxproc") -> Iterator[Slurm]:
    """A cluster, until the end of the block; its daemons and all that they started are ended by id. `tracking`: how Slurm finds
    the processes of a step, and so which of them get its signals."""
    names, nodes = tuple(names), len(names)
    host = socket.gethostname().split(".")[0]
    control, *ports = free_ports(1 + nodes)
    (root / "state").mkdir(parents=True)
    munge = root / "munge"
    munge.mkdir(mode=0o755)
    lines = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    )
    (root / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host,
            control=control,
            munge=munge / "socket",
            root=root,
            nodes=lines,
            sharing=sharing,
            tracking=tracking,
        )
    )
    cluster = Slurm(root, names)
    with ExitStack() as stack:
        stack.callback(_end_all, root)
        _munged(munge, stack)
        for command in (["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-c", "-N", name] for name in names)):
            _daemon([command[0], "-f", str(root / "slurm.conf"), *command[1:]], root, cluster, stack)
        wait_until(
            lambda: cluster("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes),
            description="every node to be idle",
            timeout_s=START_TIMEOUT_S,
        )
        yield cluster


def _munged(directory: Path, stack: ExitStack) -> None:
    """A munge of our own: its key, socket, log and pid file lie in the cluster's directory."""
    key = directory / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {
        "key-file": key,
        "socket": directory / "socket",
        "log-file": directory / "log",
        "pid-file": directory / "pid",
    }
    flags = [f"--{name}={path}" for name, path in files.items()] + [f"--seed-file={directory / 'seed'}"]
    process = subprocess.Popen(["/usr/sbin/munged", "--foreground", "--force", *flags], stderr=subprocess.DEVNULL)
    stack.callback(_end, process)
    wait_until((directory / "socket").exists, description="munged to listen")


def _daemon(command: list[str], root: Path, cluster: Slurm, stack: ExitStack) -> None:
    with (root / f"{Path(command[0]).name}.out").open("ab") as output:
        process = subprocess.Popen(
            command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=root
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_all(root: Path) -> None:
    """Whatever is left of jobs: batch scripts, agents and workers have our configuration in their environment. Step daemons
    have written their title over theirs; they run in the cluster's directory, and would wait for the controller for ever."""
    mark = str(root / "slurm.conf")
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_step_daemon = process.name() == "slurmstepd" and process.cwd() == str(root)
            if process.pid != os.getpid() and (is_step_daemon or process.environ().get("SLURM_CONF") == mark):
                process.kill()
