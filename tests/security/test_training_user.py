"""What a training script can do to the agent, the replicator and other jobs of its node if it runs as another user: nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_harness import Agent, newest_in_memory, prepare_order, read_json, script, start_job
from leftovers import gone
from training_users import (
    GROUP,
    NOBODY,
    NewOtherUsersAgent,
    OtherUsersAgent,
    agent_of,
    needs_another_user,
    reachable_directory,
)
from waiting import wait_until

from holdfast.domain.generations import RankRestore, ShardRecord, ShardSource
from holdfast.domain.job import EnvSource
from holdfast.domain.orders import Inventory, Prepare, RanksStepping, Stop
from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.signals import RankProgress, WorkerExited
from holdfast.shards import peek

pytestmark = [needs_another_user]

# A step takes 50 ms: what an inventory lists is still in memory when somebody has read it, and the job, which goes on during
# all tests of this file, does not take a core.
TRAIN = """
import os, time, torch, holdfast.train as hf
def main(run):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    step = run.restore(state)
    print("user", os.getuid(), "from step", step, flush=True)
    while True:
        with run.step(step) as s:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.05)
            s.log(loss=loss.item(), tokens=4)
        step += 1
        run.checkpoint(state, step)
hf.launch(main)
"""

TRY = """
import json, os, signal, socket, sys
found = {}
def tried(what):
    def run(attempt):
        try:
            found[what] = repr(attempt())[:200]
        except OSError as error:
            found[what] = type(error).__name__
    return run
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[OtherUsersAgent]:
    with (
        reachable_directory() as root,
        agent_of(root, replicator=True, kind=NewOtherUsersAgent, SOME_KEY="k", HOLDFAST_API_TOKEN="s3cret") as agent,
    ):
        yield agent


@pytest.fixture(scope="module")
def victim(agent: Agent) -> Prepare:
    """A job that goes on while others try to harm it."""
    order = prepare_order("victim", script(agent.root, "victim", TRAIN), nproc=2, token="the-secret-of-victim")
    start_job(agent.plane, order)
    common_step(agent, "victim", {0, 1})
    return order


def common_step(agent: Agent, job: str, ranks: set[int], tier: str = "", at_least: int = 1) -> dict[int, ShardRecord]:
    """The newest step that the node's inventory holds for every rank, in one tier or any, as records by rank."""

    def newest() -> dict[int, ShardRecord]:
        inventories = [i for i in agent.plane.all_of(Inventory) if i.job == job]
        steps: dict[tuple[int, int], dict[int, ShardRecord]] = {}
        for shard in inventories[-1].shards if inventories else ():
            if tier in ("", shard.tier):
                steps.setdefault((shard.key.attempt, shard.key.step), {})[shard.key.rank] = shard
        whole = [key for key, shards in steps.items() if shards.keys() == ranks and key[1] >= at_least]
        return steps[max(whole)] if whole else {}

    return wait_until(newest, description=f"a complete step of {job}")


def kept_shard(agent: Agent, job: str) -> Path:
    """Rank 0's shard of a step that its replicator keeps, because no newer one is known to be on every node."""
    key = common_step(agent, job, {0, 1}, tier="disk")[0].key
    agent.plane.tell(CommonCheckpoint(job, key.attempt, key.step))
    directory = agent.root / "disk" / job
    wait_until(
        lambda: read_json(directory / "job.json")["saved_by_all"] == [key.attempt, key.step],
        description=f"word of step {key.step}",
    )
    return directory / f"a{key.attempt}" / f"s{key.step}" / "rank-0.shard"


def again(agent: Agent, order: Prepare, generation: int, shards: dict[int, ShardRecord]) -> Prepare:
    """The order that restores these shards."""
    endpoint = ShardSource("node-0", agent.wait_connected().facts.replicator_endpoint)
    restore = tuple(RankRestore(rank, shard.key, shard.digest, (endpoint,)) for rank, shard in sorted(shards.items()))
    return replace(
        order, generation=generation, attempt=generation, restore_step=shards[0].key.step, restore=restore,
        restore_mesh=order.mesh,
    )  # fmt: skip


def attempts(agent: Agent, name: str, text: str, *arguments: object, **launch: Any) -> dict[str, Any]:
    """Run a script as a job to its end; returns what it has `found`."""
    path = script(agent.root, name, f"{TRY}{text}\nprint(json.dumps(found), flush=True)\n")
    start_job(agent.plane, prepare_order(name, path, args=tuple(map(str, arguments)), **launch))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda signal: signal.job == name)
    said = agent.worker_lines(name, 1, 0)
    assert exited.exit_code == 0, said
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def replicator(agent: Agent) -> int:
    (pid,) = agent.running("holdfast.replicator")
    return pid


def victim_goes_on(agent: Agent) -> None:
    """It makes further steps, and none of its processes has ended."""
    seen = max(agent.plane.signals(RankProgress)[-1].step)
    agent.plane.wait_for_signal(RankProgress, lambda p: p.job == "victim" and min(p.step) > seen)
    assert not [e for e in agent.plane.signals(WorkerExited) if e.job == "victim"]


def test_a_job_saves_is_killed_and_restores_as_its_user(agent: Agent) -> None:
    order = prepare_order("train", script(agent.root, "train", TRAIN), nproc=2)
    first = start_job(agent.plane, order)
    assert {uid for worker in first.workers for uid in psutil.Process(worker.pid).uids()} == {NOBODY}
    common_step(agent, "train", {0, 1}, tier="memory")
    os.kill(first.workers[1].pid, signal.SIGKILL)
    agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "train" and e.rank == 1)
    # Rank 0 does not go on without it: nothing overwrites what memory has now.
    newest = newest_in_memory(agent, "train", 2)
    shards = common_step(agent, "train", {0, 1}, tier="memory", at_least=newest)
    start_job(agent.plane, again(agent, order, 2, shards))
    assert all(gone(worker.pid) for worker in first.workers)
    stepping = agent.plane.wait_for(RanksStepping, lambda r: r.job == "train" and r.generation == 2)
    assert stepping.step > shards[0].key.step
    for rank in (0, 1):
        assert f"user {NOBODY} from step {shards[0].key.step}" in agent.worker_log("train", 2, rank)

    common_step(agent, "train", {0, 1}, tier="disk", at_least=stepping.step)
    assert agent.plane.ask(Stop("train", 2, forget=False, grace_s=0.0)).ok
    on_disk = common_step(agent, "train", {0, 1}, tier="disk", at_least=stepping.step)
    for images in (agent.memory / "train").glob("w*"):
        shutil.rmtree(images)  # as after a hot swap: what a worker restores is a file of the replicator
    shard = agent.root / "disk" / "train" / f"a2/s{on_disk[0].key.step}/rank-0.shard"
    assert shard.stat().st_mode & 0o077 == 0
    start_job(agent.plane, again(agent, order, 3, on_disk))
    agent.plane.wait_for(RanksStepping, lambda r: r.job == "train" and r.generation == 3)
    assert f"user {NOBODY} from step {on_disk[0].key.step}" in agent.worker_log("train", 3, 0)
    assert (shard.stat().st_uid, shard.stat().st_gid, shard.stat().st_mode & 0o777) == (0, GROUP, 0o640)
    assert agent.plane.ask(Stop("train", 3, forget=True, grace_s=0.0)).ok
    assert not (agent.memory / "train").exists()
    assert not (agent.root / "disk" / "train").exists()


def test_keys_environments_and_files_of_others_cannot_be_read(agent: Agent, victim: Prepare) -> None:
    (key := agent.root / "tls.key").touch(0o600)
    (token := agent.root / "join-token").touch(0o600)
    agent_pid, replicator_pid = agent.process.pid, replicator(agent)
    shards = list((agent.root / "disk" / "victim").glob("a*/s*/rank-0.shard"))
    paths = [
        key, token, f"/proc/{agent_pid}/environ", f"/proc/{agent_pid}/mem", f"/proc/{agent_pid}/fd",
        f"/proc/{replicator_pid}/environ", f"/proc/{replicator_pid}/maps", agent.directory / "agent.db",
        agent.directory / "template.log", agent.directory / "logs/victim/g1/rank-0.log",
        agent.root / "disk/victim/job.json", *shards[:1],
    ]  # fmt: skip
    lists = [agent.directory, agent.memory, agent.memory / "victim", agent.root / "disk", agent.directory / "logs"]
    found = attempts(
        agent,
        "reader",
        """
for path in json.loads(sys.argv[1]):
    tried(path)(lambda: open(path, "rb").read(1))
for path in json.loads(sys.argv[2]):
    tried("list " + path)(lambda: os.listdir(path))
found["secrets"] = [each for each in os.environ.items() if "s3cret" in each[1] or each[0] == "HOLDFAST_API_TOKEN"]
found["home"] = [os.environ["USER"], os.environ["LOGNAME"], os.path.expanduser("~"), os.environ["SOME_KEY"]]
found["descriptors"] = sorted({os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")
                               if os.path.exists(f"/proc/self/fd/{fd}")} - {"socket", "/dev/null"})
""",
        json.dumps(list(map(str, paths))),
        json.dumps(list(map(str, lists))),
    )
    expected = {str(path): "PermissionError" for path in paths} | {f"list {path}": "PermissionError" for path in lists}
    assert {what: result for what, result in found.items() if what in expected} == expected
    assert found["secrets"] == []
    assert found["home"][0:2] == ["nobody", "nobody"]
    assert found["home"][3] == "k", "the rest of the agent's environment is the workers' as before"
    own_log = str(agent.directory / "logs/reader/g1/rank-0.log")
    assert [path for path in found["descriptors"] if path.startswith(str(agent.root)) and path != own_log] == []


def test_no_privilege_is_left_and_none_can_be_gained(agent: Agent, victim: Prepare) -> None:
    agent_pid, replicator_pid = agent.process.pid, replicator(agent)
    found = attempts(
        agent,
        "climber",
        """
import ctypes, subprocess
for pid in map(int, sys.argv[1:]):
    tried(f"kill {pid}")(lambda: os.kill(pid, signal.SIGKILL))
    tried(f"stop {pid}")(lambda: os.kill(pid, signal.SIGSTOP))
    libc = ctypes.CDLL(None, use_errno=True)
    found[f"trace {pid}"] = libc.ptrace(16, pid, 0, 0)  # PTRACE_ATTACH
    tried(f"pidfd {pid}")(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL))
    tried(f"limit {pid}")(lambda: __import__("resource").prlimit(pid, 7, (10, 10)))
tried("setuid")(lambda: os.setuid(0))
tried("setgid")(lambda: os.setgroups([0]))
tried("nice")(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
found["status"] = {name: status[name] for name in ("Uid", "Groups", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")}
print("said", file=open("/dev/stdout", "a"))
""",
        agent_pid,
        replicator_pid,
    )
    status: Any = found.pop("status")
    assert {name: value.strip() for name, value in status.items()} == {
        "Uid": "\t".join([str(NOBODY)] * 4), "Groups": str(GROUP), "CapPrm": "0" * 16, "CapEff": "0" * 16,
        "CapAmb": "0" * 16, "NoNewPrivs": "1",
    }  # fmt: skip
    assert {what for what, result in found.items() if result not in ("PermissionError", -1)} == set()
    assert "said" in agent.worker_log("climber", 1, 0)
    assert agent.process.poll() is None
    assert replicator(agent) == replicator_pid
    victim_goes_on(agent)


def test_the_services_sockets_are_closed_to_it(agent: Agent, victim: Prepare) -> None:
    names = ["replicator.sock", "replicator.notes"]
    found = attempts(
        agent,
        "caller",
        """
directory = sys.argv[1]
tried("control")(lambda: socket.socket(socket.AF_UNIX).connect(f"{directory}/replicator.sock"))
saved = json.dumps({"type": "missed", "job": "victim", "generation": 1, "rank": 0, "step": 1, "reason": "none"}).encode()
tried("notes")(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(saved, f"{directory}/replicator.notes"))
tried("unlink")(lambda: os.unlink(f"{directory}/notes.sock"))
tried("replace")(lambda: os.rename(f"{directory}/w", f"{directory}/other"))
tried("create")(lambda: os.mkdir(f"{directory}/agent.lock.d"))
tried("images")(lambda: os.rename(os.environ["HOLDFAST_IMAGES"], os.environ["HOLDFAST_IMAGES"] + "x"))
tried("others")(lambda: os.symlink("/etc", os.path.dirname(os.environ["HOLDFAST_IMAGES"]) + "/w9"))
found["replicator"] = os.environ["HOLDFAST_REPLICATOR"]
""",
        agent.directory,
    )
    assert found.pop("replicator") == ""
    assert set(found.values()) == {"PermissionError"}, found
    assert [agent.directory.joinpath(name).stat().st_mode & 0o077 for name in names] == [0, 0]
    victim_goes_on(agent)


def test_a_note_counts_only_for_the_senders_own_rank(agent: Agent, victim: Prepare) -> None:
    found = attempts(
        agent,
        "liar",
        """
def note(job, rank, step):
    return json.dumps({"type": "step", "job": job, "generation": 1, "rank": rank, "step": step, "started_at": 1.0,
                       "ended_at": 2.0, "ended_uptime_s": 2.0, "data_s": 0.0, "stall_s": 0.0, "tokens": 1}).encode()
agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for rank in (0, 1):
    tried(f"sent {rank}")(lambda: agent.sendto(note("victim", rank, 7_000_000), os.environ["HOLDFAST_NOTES"]))
child = os.fork()  # a process of this job may speak for it, and not for another one
if not child:
    agent.sendto(note("victim", 0, 7_000_000), os.environ["HOLDFAST_NOTES"])
    agent.sendto(note("liar", 0, 41), os.environ["HOLDFAST_NOTES"])
    os._exit(0)
os.waitpid(child, 0)
agent.sendto(note("liar", 0, 42), os.environ["HOLDFAST_NOTES"])
""",
    )
    assert set(found) == {"sent 0", "sent 1"}
    assert "Error" not in "".join(found.values())
    agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "liar" and e.step == 42)
    victim_goes_on(agent)
    assert max(max(p.step) for p in agent.plane.signals(RankProgress) if p.job == "victim") < 7_000_000
    assert "note of a process refused" in agent.log()


def test_links_among_the_images_lead_nowhere(agent: Agent, victim: Prepare) -> None:
    """The replicator reads, renames and writes there as root."""
    (canary := agent.root / "canary").write_text("precious")
    canary.chmod(0o600)
    (kept := agent.root / "kept").mkdir(0o700)
    (kept / "file").touch()
    shard = kept_shard(agent, "victim")
    before = shard.read_bytes()
    path = script(
        agent.root,
        "links",
        TRAIN.replace(
            "def main(run):",
            f"""
images = os.environ["HOLDFAST_IMAGES"]
for name, target in (("x.image", "{shard}"), ("y.image", "{canary}"), ("y.image.json", "{canary}"),
                     ("a.image.json", "{canary}"), (".x.image.json.tmp", "{canary}"), ("z.image", "/dev/zero"),
                     ("z.image.corrupt", "{kept}"), ("d.image", "{kept}")):
    os.symlink(target, images + "/" + name)
os.mkfifo(images + "/pipe.image")
os.symlink("{kept}", images + "/.b.image.json.tmp")
def main(run):""",
        ),
    )
    start_job(agent.plane, prepare_order("links", path))
    common_step(agent, "links", {0}, tier="disk")  # it can save as any other
    images = agent.memory / "links" / "w0"
    wait_until(  # by name, each has been looked at
        lambda: not [each for each in images.glob("[!.]*.image") if each.is_symlink() or not each.is_file()],
        description="what is not an image is set aside",
    )
    assert canary.read_text() == "precious"
    assert shard.read_bytes() == before
    assert list(kept.iterdir()) == [kept / "file"]
    listed = {shard.key for i in agent.plane.all_of(Inventory) if i.job == "links" for shard in i.shards}
    own = {peek(each) for each in images.glob("[ab].image")}
    assert {key.attempt for key in listed} == {1}
    assert len(own) == 2
    assert agent.plane.ask(Stop("links", 1, forget=True, grace_s=0.0)).ok
    assert list(kept.iterdir()) == [kept / "file"]
    assert canary.read_text() == "precious"
    victim_goes_on(agent)


def test_a_job_gets_only_those_values_that_its_user_may_read(agent: Agent) -> None:
    (key := agent.root / "key").write_text("of the agent")
    key.chmod(0o600)
    (mine := agent.root / "mine").write_text("of the user")
    os.chown(mine, NOBODY, GROUP)
    mine.chmod(0o400)
    sources = (EnvSource("MINE", file=str(mine)), EnvSource("WHO", command="id -u"))
    found = attempts(agent, "values", 'found |= {name: os.environ[name] for name in ("MINE", "WHO")}', env_from=sources)
    assert found == {"MINE": "of the user", "WHO": str(NOBODY)}
    refused = prepare_order("thief", script(agent.root, "thief", ""), env_from=(EnvSource("KEY", file=str(key)),))
    answer = agent.plane.ask(refused)
    assert not answer.ok
    assert f"the file {key} cannot be read by nobody, the user of training" in answer.reason
    assert "of the agent" not in agent.log() + answer.reason


def test_an_error_of_a_script_is_reported_and_its_file_deleted(agent: Agent) -> None:
    start_job(agent.plane, prepare_order("wrong", script(agent.root, "wrong", "raise LookupError('no such thing')")))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "wrong")
    assert exited.error is not None
    assert (exited.error.type, exited.error.message) == ("LookupError", "no such thing")
    wait_until(lambda: not list((agent.directory / "w").glob("*.error.json")), description="no error file is left")


@pytest.mark.parametrize("owner", [0, 23456], ids=["root", "another"])
def test_images_of_an_earlier_user_are_restored_and_replaced(owner: int) -> None:
    """An agent that gets a training user, or another one, goes on with the images in memory."""
    with reachable_directory() as root, agent_of(root, user=str(owner) if owner else "root", replicator=True) as agent:
        order = prepare_order("train", script(root, "train", TRAIN))
        start_job(agent.plane, order)
        common_step(agent, "train", {0}, tier="memory")
        agent.process.kill()
        agent.process.wait()
        wait_until(lambda: not agent_processes(root), description="the end of the agent's processes")
        held = {path: path.stat() for path in (agent.memory / "train" / "w0").glob("*.image")}
        assert {each.st_uid for each in held.values()} == {owner}
        foreign = agent.memory / "train" / "w0" / "c.image"
        shutil.copyfile(next(iter(held)), foreign)
        os.chown(foreign, 34567, 34567)  # of nobody who has worked here
        agent.become(f"{NOBODY}:{GROUP}")
        shards = common_step(agent, "train", {0}, tier="memory")
        start_job(agent.plane, again(agent, order, 2, shards))
        agent.plane.wait_for(RanksStepping, lambda r: r.generation == 2)
        assert f"user {NOBODY} from step {shards[0].key.step}" in agent.worker_log("train", 2, 0)
        common_step(agent, "train", {0}, tier="memory", at_least=shards[0].key.step + 5)
        assert {path.stat().st_uid for path in held} == {NOBODY}
        assert not foreign.exists()
        assert foreign.with_name("c.image.corrupt").stat().st_uid == 34567


def agent_processes(root: Path) -> list[int]:
    mark = f"HOLDFAST_AGENT_TREE={root}/agent"
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if mark in {f"{k}={v}" for k, v in process.environ().items()} else []
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_user_without_an_entry_has_a_home_of_its_own() -> None:
    with reachable_directory() as root, agent_of(root, user="45678") as agent:
        found = attempts(
            agent,
            "homeless",
            """
open(os.path.expanduser("~/cache"), "w").close()
found |= {"home": os.path.expanduser("~"), "user": os.environ["USER"], "ids": [os.getuid(), os.getgid(), *os.getgroups()]}
""",
        )
        assert found == {"home": str(agent.directory / "home"), "user": "45678", "ids": [45678] * 3}
