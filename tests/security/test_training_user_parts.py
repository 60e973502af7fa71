"""The parts that keep a training user out, one by one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from agent_harness import START_TIMEOUT_S
from training_users import GROUP, NOBODY, USER, needs_another_user, reachable_directory, reached_by_others

from holdfast.agent.workers import apart
from holdfast.agent.workers.apart import hand_over, open_untrusted
from holdfast.agent.workers.doorkeeper import Doorkeeper
from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.errors import read_error_file
from holdfast.agent.workers.forked import Forked, refuse_foreign
from holdfast.agent.workers.inbox import NotesInbox
from holdfast.agent.workers.recorders import post
from holdfast.agent.workers.senders import Senders
from holdfast.agent.workers.template import Template, TemplateKey
from holdfast.agent.workers.worker import Worker, WorkerIdentity
from holdfast.domain.errors import HoldfastError, IntegrityError, InvalidSpec, Unavailable
from holdfast.domain.notes import SavedNote, Sender, encode
from holdfast.runtime.private import make_passable
from holdfast.runtime.processes.training_user import TrainingUser, training_user
from holdfast.shards import Manifest
from holdfast.shards.opening import open_stored, open_temporary

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
ME = TrainingUser("nobody", NOBODY, GROUP, (GROUP,))


# ---------------------------------------------------------------- who it is


@as_root
def test_a_user_is_named_by_name_or_number_and_group() -> None:
    assert training_user("") is None
    assert training_user("root") is None
    assert training_user("0:54321") is None
    one = training_user("45678")
    assert one is not None
    assert (one.uid, one.gid, one.groups, one.home) == (45678, 45678, (45678,), "")
    other = training_user("nobody:54321")
    assert other is not None
    assert (other.uid, other.gid) == (NOBODY, 54321)
    assert 54321 in other.groups


@as_root
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no-such-user", "this machine has no user 'no-such-user'"),
        ("nobody:no-such-group", "this machine has no group 'no-such-group'"),
        ("nobody:", "the group is empty"),
        (":54321", "this machine has no user ''"),
        ("4294967295", "a uid of at most 4294967294"),
        ("1000:4294967295", "a gid of at most 4294967294"),
        ("-1", "this machine has no user '-1'"),
        ("²", "this machine has no user"),
    ],
)
def test_a_user_that_does_not_exist_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidSpec, match=r"--user \(HOLDFAST_AGENT_USER\)") as refused:
        training_user(text)
    assert why in str(refused.value)


def test_only_root_can_name_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 45678)
    monkeypatch.setattr(os, "getegid", lambda: 45678)
    assert training_user("45678") is None, "it is the agent's own"
    for other in ("0", "45679", "45678:45679"):
        with pytest.raises(InvalidSpec, match="it runs as user 45678, and only root can start workers as another"):
            training_user(other)


@needs_another_user
@pytest.mark.parametrize(
    ("user", "closed", "said"),
    [
        ("no-such-user", False, "this machine has no user 'no-such-user'"),
        (USER, True, "/closed cannot be passed, and "),
    ],
)
def test_an_agent_that_cannot_start_training_ends_with_the_reason(user: str, closed: bool, said: str) -> None:
    with reachable_directory() as root:
        (outer := root / "closed").mkdir(0o700 if closed else 0o755)
        places = {"AGENT_DIR": outer / "agent", "MEMORY_DIR": outer / "memory", "DISK_DIR": outer / "disk"}
        ended = subprocess.run(
            [*(reached_by_others() or ()), sys.executable, "-m", "holdfast.agent"],
            env={**os.environ, "HOLDFAST_SUPERVISOR": "127.0.0.1:1", "HOLDFAST_AGENT_USER": user}
            | {f"HOLDFAST_{name}": str(path) for name, path in places.items()},
            check=False, capture_output=True, text=True, timeout=START_TIMEOUT_S,
        )  # fmt: skip
        assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr


# ---------------------------------------------------------------- files


@as_root
def test_a_directory_is_handed_over_with_its_owners_files_only(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("x")
    (outside := tmp_path / "outside").mkdir()
    (leaf := tmp_path / "w0").mkdir(0o755)
    for name in ("a.image", "named-twice"):
        (leaf / name).touch(0o600)
    os.link(leaf / "named-twice", tmp_path / "second-name")
    (leaf / "link").symlink_to(secret)
    (leaf / "of-another").touch()
    os.chown(leaf / "of-another", 34567, 34567)
    (leaf / "directory").symlink_to(outside)
    hand_over(leaf, ME)
    owners = {path.name: path.lstat().st_uid for path in leaf.iterdir()}
    assert owners == {"a.image": NOBODY, "named-twice": 0, "link": 0, "of-another": 34567, "directory": 0}
    assert (leaf.stat().st_uid, leaf.stat().st_mode & 0o777) == (NOBODY, 0o700)
    assert (secret.stat().st_uid, outside.stat().st_uid) == (0, 0)


@as_root
def test_a_link_in_the_place_of_a_directory_is_not_handed_over(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").mkdir(0o755)
    (tmp_path / "w0").symlink_to(precious)
    with pytest.raises(NotADirectoryError):
        hand_over(tmp_path / "w0", ME)
    assert (precious.stat().st_uid, precious.stat().st_mode & 0o777) == (0, 0o755)


@as_root
def test_what_stands_in_an_agents_directory_is_closed_when_it_becomes_passable(tmp_path: Path) -> None:
    site = Site(tmp_path / "agent", tmp_path / "memory", tmp_path / "disk", tmp_path / "agent" / "notes.sock", "", ME)
    for path in (site.agent_dir, site.memory_dir, site.disk_dir, site.agent_dir / "logs"):
        path.mkdir(mode=0o755)
    (site.agent_dir / "agent.db").touch(0o644)
    (site.agent_dir / "w").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    with pytest.raises(HoldfastError, match="cannot prepare"):
        apart.prepare(site, ME)  # nobody but root can have made this link, and it is not followed
    (site.agent_dir / "w").unlink()
    apart.prepare(site, ME)
    assert (tmp_path / "kept").exists()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (site.agent_dir, *site.agent_dir.iterdir())}
    assert modes == {"agent": 0o711, "logs": 0o700, "agent.db": 0o600, "w": 0o700, "learned": 0o700, "home": 0o700}


@as_root
def test_missing_parents_become_passable_and_existing_ones_stay(tmp_path: Path) -> None:
    (closed := tmp_path / "closed").mkdir(0o700)
    before = os.umask(0o077)
    try:
        make_passable(closed / "new" / "node")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (closed, closed / "new", closed / "new" / "node")] == [
        0o700, 0o711, 0o711,
    ]  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, Path]:
    """What a worker can put in the place of a file, apart from a file of its own."""
    (target := tmp_path / "target").write_text("precious")
    places = {name: tmp_path / name for name in ("link", "dangling", "second-name", "pipe", "socket", "directory")}
    places["link"].symlink_to(target)
    places["dangling"].symlink_to(tmp_path / "nothing")
    os.link(target, places["second-name"])
    os.mkfifo(places["pipe"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places["socket"]))
    places["directory"].mkdir()
    return places


KINDS = ["link", "dangling", "second-name", "pipe", "socket", "directory"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_neither_opened_nor_written(hostile: dict[str, Path], tmp_path: Path, kind: str) -> None:
    path, owners = hostile[kind], frozenset((os.geteuid(),))
    with pytest.raises((IntegrityError, OSError)):
        open_stored(path, owners=owners)
    with pytest.raises(OSError, match=rf"{kind}"):
        open_untrusted(path, os.geteuid())
    assert read_error_file(path, os.geteuid()) is None
    fd = open_temporary(path)
    os.write(fd, b"written")
    os.close(fd)
    assert path.lstat().st_nlink == 1
    assert path.read_text() == "written"
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifests_space_is_not_reserved_elsewhere(hostile: dict[str, Path], tmp_path: Path, kind: str) -> None:
    hostile[kind].rename(tmp_path / ".a.image.json.tmp")
    Manifest.reserve(tmp_path / "a.image.json", 1 << 20)
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@as_root
def test_a_file_of_another_user_is_not_opened(tmp_path: Path) -> None:
    (path := tmp_path / "a.image").write_text("x")
    os.chown(path, 34567, 34567)
    os.close(open_stored(path, owners=frozenset((0, 34567))))
    os.close(open_untrusted(path, 34567))
    with pytest.raises(IntegrityError, match="a file of user 34567"):
        open_stored(path, owners=frozenset((0, NOBODY)))
    with pytest.raises(PermissionError, match=f"not a file of user {NOBODY} alone"):
        open_untrusted(path, NOBODY)


# ---------------------------------------------------------------- messages


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and one that it has started."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
        os.killpg(parent.pid, signal.SIGKILL)


def test_a_sender_is_the_worker_or_its_descendant(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    senders = Senders()
    assert senders.belongs(parent.pid, parent.pid)
    assert senders.belongs(child, parent.pid)
    assert Senders().belongs(child, os.getpid())
    for stranger in (os.getpid(), os.getppid(), 1, 0, -1, 2**22 + 1):
        assert not senders.belongs(stranger, parent.pid)


def test_the_last_words_of_a_process_count_after_its_end(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    senders = Senders()
    assert senders.belongs(child, parent.pid)
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    assert senders.belongs(child, parent.pid)
    assert not senders.belongs(child, os.getpid())
    assert not Senders().belongs(2**22 + 1, parent.pid), "of a process that nobody has seen alive"


def test_only_checked_notes_reach_the_replicator(tmp_path: Path, family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as replicator:
        replicator.bind(str(tmp_path / "notes"))
        replicator.setblocking(False)
        doorkeeper = Doorkeeper(tmp_path / "notes")
        workers: Any = {0: SimpleNamespace(pid=parent.pid)}
        own, other = (SavedNote(Sender("gpt", 1, rank), 10, 1, "a.image", 0.0) for rank in (0, 1))
        assert not doorkeeper.admit(own, os.getpid(), encode(own), workers)
        assert not doorkeeper.admit(other, parent.pid, encode(other), workers), "no such rank is here"
        with pytest.raises(BlockingIOError):
            replicator.recv(1024)
        assert doorkeeper.admit(own, child, encode(own), workers)
        assert replicator.recv(1024) == encode(own)
        assert doorkeeper.refused == 2
        doorkeeper.close()
        assert doorkeeper.admit(own, child, encode(own), workers), "the agent is stopping: nobody reads it any more"


async def _refused(worker: int, reaper: int, said: int, uid: int) -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return await refuse_foreign(Forked(said, worker, reaper, ours), uid)


@pytest.mark.anyio
async def test_a_report_must_not_name_other_processes(family: tuple[subprocess.Popen[str], int]) -> None:
    """Else the agent, as root, would end them for the template."""
    parent, child = family
    with subprocess.Popen(["sleep", "600"]) as bystander:  # noqa: ASYNC220 - it takes milliseconds
        me, other = os.getpid(), os.geteuid() + 1
        for worker, reaper, uid in (
            (child, 1, os.geteuid()),  # nobody's reaper
            (child, me, os.geteuid()),  # the agent itself
            (child, parent.pid, other),  # of another user
        ):
            why = await _refused(os.pidfd_open(worker), os.pidfd_open(reaper), worker, uid)
            assert "not a child of this agent" in why
        assert "not a child" in await _refused(os.open("/dev/null", 0), os.open("/dev/null", 0), child, os.geteuid())
        assert bystander.poll() is None
        assert parent.poll() is None
        pidfds = os.pidfd_open(child), os.pidfd_open(parent.pid)
        assert await _refused(*pidfds, child, os.geteuid()) == ""
        for fd in pidfds:
            os.close(fd)
        # A real reaper that reports somebody else's process ends, and nothing else does.
        why = await _refused(os.pidfd_open(bystander.pid), os.pidfd_open(parent.pid), bystander.pid, os.geteuid())
        assert f"it reports pid {bystander.pid}, which is not a worker" in why
        with suppress(ChildProcessError):
            parent.wait()
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.anyio
@pytest.mark.parametrize("raw", [b"\xff", b"[1]", b'{"type": 3}', b"[" * 50_000, b'{"type": "ready", "import_s": "x"}'])
async def test_a_template_that_sends_anything_else_fails_alone(raw: bytes) -> None:
    class Ended:
        pid = 1

        async def wait(self) -> int:
            return 0

        async def stop(self, grace_s: float) -> int:
            return 0

    template = Template.__new__(Template)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    template.key, template.failure, template.left_out = TemplateKey(), "", {}
    template._user, template._log_path, template._draining = None, Path("/dev/null"), False
    template._ready, template._sending, template._channel = anyio.Event(), anyio.Lock(), ours
    template._checked = anyio.Event()
    template._process = Ended()  # type: ignore[assignment]
    theirs.send(raw)
    theirs.close()
    await template.run()
    with pytest.raises(Unavailable):
        await template.wait_ready()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "raw",
    [b"\xff", b'{"type": "exited"}', b'{"type": "exited", "at": 1, "exit_code": "0", "signal": 1, "uptime_s": 1}'],
)
async def test_a_reapers_link_in_other_hands_ends_no_agent(raw: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    control, other = socket.socketpair()
    identity = WorkerIdentity("gpt", 1, 0, 0, log_path=Path("/dev/null"), error_path=Path("/dev/null"))
    worker = Worker(identity, control, Forked(1, -1, -1, ours))
    theirs.send(raw)
    theirs.close()
    assert not await worker._receive_until("exited")
    assert worker.exit is None
    for each in (ours, control, other):
        each.close()


@pytest.mark.anyio
async def test_a_flight_recorder_of_another_user_is_not_asked(tmp_path: Path) -> None:
    """A link in its place could lead to a service that takes orders from root."""
    asked = False

    def answer() -> None:
        nonlocal asked
        connection, _ = listener.accept()
        with connection:
            asked = bool(connection.recv(1))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, answer)
            assert await post(tmp_path / "s", "ping", "", 5.0, os.geteuid() + 1) is None
    assert not asked


@pytest.mark.parametrize("user", [None, ME], ids=["of the agent", "of another user"])
def test_a_note_cannot_hand_descriptors_to_the_agent(tmp_path: Path, user: TrainingUser | None) -> None:
    taken: list[int] = []
    inbox = NotesInbox(tmp_path / "notes", lambda note, sender, raw: taken.append(sender), user)
    note = encode(SavedNote(Sender("gpt", 1, 0), 10, 1, "a.image", 0.0))
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker, (tmp_path / "file").open("w") as file:
        worker.connect(str(tmp_path / "notes"))
        socket.send_fds(worker, [note], [file.fileno()] * 3)
        inbox.drain()
    assert len(os.listdir("/proc/self/fd")) == before
    assert taken == [0 if user is None else os.getpid()]
    inbox._socket.close()
