"""Whatever lies in a shard's place: the replicator starts, says so, and the other jobs' and ranks' checkpoints go on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import HoldfastError, IncompatibleVersion, IntegrityError, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import Configure, EndJob, TroubleKind
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine, Tiers
from holdfast.replicator.keeping import Keeper
from holdfast.replicator.threads import Pace, Threads
from holdfast.replicator.tiers import find, survey
from holdfast.replicator.tiers.files import ASIDE_MAX, FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.troubles import TROUBLES_MAX, Troubles
from holdfast.replicator.view import Held, Tier
from holdfast.shards import ImageSet, Manifest, Plan, Staged, TensorSpec, peek
from holdfast.shards.layout import BODY_OFFSET, COMPLETE, MAGIC, PAGE, Stamp
from holdfast.shards.opening import open_stored
from holdfast.shards.sealed import seal

JOB, OTHER = "llm", "other"
KEY = ShardKey(1, 10, 0)
NBYTES = 64 << 10
PLAN = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
HUGE = "9" * 5000
STAMP = {
    "attempt": 1, "step": 10, "rank": 0, "mesh": [["dp", 2]], "parent": None, "created_at": 1000.0, "producer": "test",
}  # fmt: skip


def save(root: Path, job: str, step: int = 10, rank: int = 0) -> Path:
    images = ImageSet(root / "memory" / job / f"w{rank}")
    staged = images.stage(PLAN, 1, step, rank, {"dp": 2}, lambda image: None, b"rest")
    images.close()
    assert isinstance(staged, Staged)
    return staged.path


def tiers_of(root: Path) -> Tiers:
    images = ImageTier(root / "memory", "a", Checksummer(1), overflow=root / "disk")
    staged = FileTier("memory", root / "memory", "staged", warm=WarmFiles(root / "memory"))
    return Tiers(images, staged, FileTier("disk", root / "disk"))


def save_everywhere(root: Path, job: str) -> None:
    """An image with its manifest, a disk copy, and what the last life knew of the job."""
    save(root, job)
    tiers = tiers_of(root)
    (seen,) = tiers.images.scan(job)
    tiers.images.commit(job, seen)
    with tiers.images.open(job, KEY) as shard:
        for tier in (tiers.disk, tiers.staged):
            tier.put(job, shard, Pace(0))


@asynccontextmanager
async def started(root: Path) -> AsyncIterator[Engine]:
    """An engine that has looked at what is there; in its next life it does so again."""
    threads = Threads(urgent=1, transfers=1, background=1)
    try:
        engine = Engine(tiers_of(root), root / "disk", threads)
        await engine.start()
        yield engine
    finally:
        threads.close()


def resealed(stamp: bytes, **numbers: int) -> bytes:
    """A header page that vouches for itself, with anything as its stamp and as its numbers."""
    given = {"layout": 2, "sequence": 1, "index": 64, "crc": 0, "tensors_end": 2 * PAGE, "extra": 0} | numbers
    body = struct.pack(
        "<IIQQIQQ", given["layout"], len(stamp), given["sequence"], given["index"], given["crc"],
        given["tensors_end"], given["extra"],
    )  # fmt: skip
    return (MAGIC + COMPLETE + struct.pack("<I", zlib.crc32(body + stamp)) + body + stamp).ljust(PAGE, b"\0")


def stamped(**fields: object) -> bytes:
    return json.dumps(STAMP | fields).encode()


STAMPS = {
    "no json": b"\xff\xfe{",
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "no fields": b"{}",
    "nested": b"[" * 3900,
    "5,000 digits": b'{"attempt": ' + HUGE[:3900].encode() + b"}",
    "infinite": stamped(step=1e400).replace(b"Infinity", b"1e999"),
    "negative": stamped(step=-1),
    "huge": stamped(step=10**30),
    "huge rank": stamped(rank=2**40),
    "no number": stamped(attempt="one"),
    "no mesh": stamped(mesh=[]),
    "mesh of nothing": stamped(mesh=[["dp", 0]]),
    "mesh of numbers": stamped(mesh=[1, 2]),
    "no parent": stamped(parent=[1]),
    "parent infinite": stamped(parent=[1e400, 1]).replace(b"Infinity", b"1e999"),
    "no date": stamped(created_at=float("nan")),
    "half a character in the mesh": stamped(mesh=[["\ud800", 2]]),
    "half a character in the producer": stamped(producer="\udfff"),
    "a mesh of 3,800 digits": stamped(mesh=[["dp", 7]]).replace(b"7", HUGE[:3800].encode()),
    "a mesh of more ranks than there are": stamped(mesh=[["dp", 10**5], ["pp", 10**5]]),
    "a mesh of 100 dimensions": stamped(mesh=[[str(number), 1] for number in range(100)]),
    "a parent of 3,800 digits": stamped(parent=[7, 1]).replace(b"7", HUGE[:3800].encode()),
}
HEADERS = {
    "index beyond the end": {"index": 2**63},
    "tensors in the header": {"tensors_end": 0},
    "larger than any file": {"tensors_end": 2**62},
    "extra beyond the end": {"extra": 2**63},
    "index larger than any": {"index": 2**40, "tensors_end": 2**41},
}


@pytest.mark.parametrize("stamp", STAMPS.values(), ids=STAMPS)
def test_a_stamp_that_cannot_be_decoded_is_an_integrity_error(stamp: bytes) -> None:
    with pytest.raises(IntegrityError):
        Stamp.decode(stamp)


def write(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def truncate(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, min(size, path.stat().st_size))


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at % len(raw)] ^= 0x10
        path.write_bytes(raw)

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


ANY = {
    "empty": write(b""),
    "one byte": truncate(1),
    "half a page": truncate(PAGE // 2),
    "a page and a bit": truncate(PAGE + 100),
    "zeroes": write(b"\0" * 3 * PAGE),
    "noise": write(bytes(range(256)) * 64),
    "a directory": instead(directory),
    "a dangling link": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to a directory": instead(lambda path: path.symlink_to("/proc")),
    "a pipe": instead(os.mkfifo),
    "a flipped bit": flip(BODY_OFFSET + 70),
}
PAGES = {f"stamp: {name}": write(resealed(stamp) + b"\0" * PAGE) for name, stamp in STAMPS.items()} | {
    f"header: {name}": write(resealed(stamped(), **numbers) + b"\0" * PAGE) for name, numbers in HEADERS.items()
}
MANIFESTS = {
    f"manifest: {name}": write(raw)
    for name, raw in {
        "null": seal("manifest", {"schema": 1}),
        "5,000 digits": b'{"manifest":{"schema":' + HUGE.encode() + b'},"self":1}',
        "nested": b"[" * 100_000,
        "other member": seal("checkpoint", {"schema": 1}),
    }.items()
}
CONFIGURATIONS = {
    "config: a list": write(b"[]"),
    "config: 5,000 digits": write(b'{"config": ' + HUGE.encode() + b"}"),
    "config: nested": write(b"[" * 100_000),
}


def altered(**fields: object) -> Callable[[Path], None]:
    """The manifest that is there, with other values, and a checksum that is right."""

    def damage(path: Path) -> None:
        known = json.loads(path.read_bytes())["manifest"]
        path.write_bytes(seal("manifest", known | fields))

    return damage


MANIFESTS |= {
    f"manifest: {name} is {value!r:.20}": altered(**{name: value})
    for name, values in {
        "step": (-1, 10**30, "ten", None, 1e300), "rank": (2**40,),
        "mesh": ([], [["dp", 0]], [["dp", 1e400]], 7, [["\ud800", 1]], [["dp", 10**300]]),

        "size": (2**80, 0), "tensors_end": (0, 2**70), "span_crc32c": ([], ["x"], None), "created_at": ("now", float("nan")),
        "job": (3, "another"), "digest": (None,), "parent": ([1], "ab", [1e400, 0], [10**300, 1]), "node": ("\ud800",),
        "producer": ("\udfff",),
    }.items()
    for value in values
}  # fmt: skip
EVERY = [
    *(("memory/llm/w0/a.image", name, damage) for name, damage in (ANY | PAGES).items()),
    *(("memory/llm/w0/a.image.json", name, damage) for name, damage in (ANY | MANIFESTS).items()),
    *(("disk/llm/a1/s10/rank-0.shard", name, damage) for name, damage in ANY.items()),
    *(("disk/llm/a1/s10/rank-0.json", name, damage) for name, damage in (ANY | MANIFESTS).items()),
    *(("memory/llm/staged/a1/s10/rank-0.shard", name, damage) for name, damage in ANY.items()),
    *(("memory/llm/staged/a1/s10/rank-0.json", name, damage) for name, damage in (ANY | MANIFESTS).items()),
    *(("disk/llm/job.json", name, damage) for name, damage in (ANY | CONFIGURATIONS).items()),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    for job in (JOB, OTHER):
        save_everywhere(root, job)

    async def configure() -> None:
        async with started(root) as engine:
            for job in (JOB, OTHER):
                await engine.configure(Configure(job, 1, 1, Mesh.of({"dp": 2}), (0,), (), 2, "secret"))

    anyio.run(configure)
    return root


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "damage"),
    [(path, damage) for path, _, damage in EVERY],
    ids=[f"{path}: {name}" for path, name, _ in EVERY],
)
async def test_a_stored_file_that_cannot_be_read_is_out_of_the_way_and_the_others_go_on(
    whole: Path, tmp_path: Path, path: str, damage: Callable[[Path], None]
) -> None:
    root = tmp_path / "node"
    shutil.copytree(whole, root)
    damage(root / path)
    everything = {Held(tier, KEY) for tier in Tier}
    for _ in range(2):  # and it can be started again
        async with started(root) as engine:
            assert set(engine.jobs[OTHER].held) == everything, "another job's checkpoints"
            held = engine.jobs[JOB].held
            assert len(held) >= len(everything) - 1, f"only what is damaged is lost: {engine.jobs[JOB].troubles.all()}"
            engine.jobs[JOB].inventory()
            for each in list(held):
                try:
                    engine.tiers[each.tier].open(JOB, each.key).close()
                except IntegrityError as error:  # what is found when it is opened
                    await engine.quarantine(engine.jobs[JOB], each, str(error))
    save(root, JOB, 20)
    async with started(root) as engine:
        job = engine.jobs[JOB]
        new = ShardKey(1, 20, 0)
        assert Held(Tier.IMAGE, new) in job.held, job.troubles.all()
        with engine.tiers.images.open(JOB, new) as shard:
            for tier in (engine.tiers.disk, engine.tiers.staged):
                tier.put(JOB, shard, Pace(0))
        # And the very place of the damaged copy takes one again.
        if Held(Tier.IMAGE, KEY) in job.held:
            with engine.tiers.images.open(JOB, KEY) as shard:
                for tier in (engine.tiers.disk, engine.tiers.staged):
                    tier.put(JOB, shard, Pace(0))
                    tier.open(JOB, KEY).close()


def names_in(directory: Path) -> list[str]:
    return os.listdir(directory)


@pytest.mark.anyio
@pytest.mark.parametrize("name", [*ANY, *PAGES])
async def test_a_damaged_image_is_set_aside_once_counted_and_named(whole: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "node"
    shutil.copytree(whole, root)
    image = root / "memory" / JOB / "w0" / "a.image"
    (ANY | PAGES)[name](image)
    async with started(root) as engine:
        (trouble,) = engine.jobs[JOB].troubles.all()
        assert trouble.kind is TroubleKind.SET_ASIDE
        assert trouble.place in (
            str(image),
            "step 10 of rank 0 (attempt 1) in image",
        )  # found at once, or at its commit
        assert trouble.reason
        assert {"a.image", "a.image.corrupt"} & set(names_in(image.parent)) == {"a.image.corrupt"}
        await engine.refresh(engine.jobs[JOB])
        assert engine.jobs[JOB].troubles.all() == (trouble,)


@pytest.mark.anyio
async def test_an_image_of_another_release_is_left_alone_and_named(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "node"
    shutil.copytree(whole, root)
    image = root / "memory" / JOB / "w0" / "a.image"
    image.write_bytes(resealed(stamped(), layout=9) + b"\0" * PAGE)
    with pytest.raises(IncompatibleVersion):
        peek(image)
    async with started(root) as engine:
        (trouble,) = engine.jobs[JOB].troubles.all()
        assert trouble.kind is TroubleKind.LEFT_ALONE
        assert image.exists()


@pytest.mark.anyio
async def test_a_file_that_may_not_be_read_is_left_alone_and_named(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps only for as long as somebody has the wrong rights: it may be the newest checkpoint there is."""
    root = tmp_path / "node"
    shutil.copytree(whole, root)

    def refused(path: Path, flags: int = os.O_RDONLY, *, owners: None = None) -> int:
        if f"/{JOB}/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_stored(path, flags)

    before = sorted(path for path in root.rglob("*") if path.is_file())
    for module in ("shards.reader", "shards.manifest", "replicator.jobs", "replicator.tiers.files"):
        monkeypatch.setattr(f"holdfast.{module}.open_stored", refused)
    async with started(root) as engine:
        troubles = engine.jobs[JOB].troubles.all()
        assert {trouble.kind for trouble in troubles} == {TroubleKind.LEFT_ALONE}
        assert len(troubles) == len({trouble.place for trouble in troubles}) == 4
        assert len(engine.jobs[OTHER].held) == 3
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before


def test_an_image_that_somebody_holds_is_not_taken_away(tmp_path: Path) -> None:
    images = ImageSet(tmp_path / "memory" / JOB / "w0")
    images.prepare(PLAN)
    image = images.images[0]
    write(resealed(b"{}") + b"\0" * PAGE)(image.path)
    tier = tiers_of(tmp_path).images
    assert image.try_lock()
    assert tier.look(JOB) == ([], [])
    assert image.path.exists()
    image.unlock()
    assert [each.path for each in tier.look(JOB)[1]] == [image.path]
    images.close()


def test_what_was_set_aside_does_not_fill_the_disk(tmp_path: Path) -> None:
    save(tmp_path, JOB)
    tiers = tiers_of(tmp_path)
    (seen,) = tiers.images.scan(JOB)
    tiers.images.commit(JOB, seen)
    for step in range(3 * ASIDE_MAX):
        path = tiers.disk.path(JOB, ShardKey(1, step, 0))
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
        write(b"no manifest")(path.with_suffix(".json"))
    found, damaged = tiers.disk.look(JOB)
    assert (found, len(damaged)) == ([], 3 * ASIDE_MAX)
    assert all(each.aside for each in damaged)
    assert len(list((tmp_path / "disk").rglob("*.corrupt"))) == ASIDE_MAX
    assert len(list((tmp_path / "disk" / JOB / "a1").iterdir())) == ASIDE_MAX


@pytest.mark.parametrize("name", ["a directory", "a dangling link", "a link to itself", "a pipe", "noise"])
def test_a_half_arrived_part_may_be_anything(whole: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "node"
    shutil.copytree(whole, root)
    tiers = tiers_of(root)
    with tiers.images.open(JOB, KEY) as shard:
        for tier in (tiers.disk, tiers.staged):
            tier.delete(JOB, KEY)
            part = tier.path(JOB, KEY).with_name(f".rank-0.shard.{shard.manifest.crc32c:08x}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            ANY[name](part)
            tier.drop_unfinished(JOB, CheckpointId(1, 5))
            tier.put(JOB, shard, Pace(0))
            assert tier.shards(JOB) == [shard.manifest]
            tier.sweep(JOB)
            assert tier.shards(JOB) == [shard.manifest]


def test_the_manifest_says_integrity_error_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    source = whole / "disk" / JOB / "a1" / "s10" / "rank-0.json"
    for damage in MANIFESTS.values():
        path = tmp_path / "rank-0.json"
        shutil.copyfile(source, path)
        damage(path)
        try:
            Manifest.read(path).domain_mesh()
        except HoldfastError:
            continue


def test_every_trouble_of_a_file_is_begun_once_however_many_there_are() -> None:
    """More than are kept: those that made way for others are still known."""
    with capture_logs() as logs:
        troubles = Troubles(JOB)
        troubles.begin(TroubleKind.TIER_FAILS, "disk", "full")
        for look in range(3):
            new = [troubles.begin(TroubleKind.LEFT_ALONE, f"/dev/shm/{number}.image", "x") for number in range(40)]
            assert new == [look == 0] * 40
    assert len(logs) == 41
    assert TroubleKind.TIER_FAILS in {each.kind for each in troubles.all()}, "what is going on makes way last"
    assert len(troubles.all()) == TROUBLES_MAX
    assert len(troubles.places(TroubleKind.LEFT_ALONE)) == 40
    assert troubles.end(TroubleKind.LEFT_ALONE, "/dev/shm/0.image") is False
    assert troubles.begin(TroubleKind.LEFT_ALONE, "/dev/shm/0.image", "x"), "it is back"


def test_a_trouble_is_of_text_that_a_message_has_room_for() -> None:
    troubles = Troubles(JOB)
    troubles.begin(TroubleKind.LEFT_ALONE, Path(os.fsdecode(b"/dev/shm/\xff.image")), "\ud800")
    (trouble,) = troubles.all()
    assert (trouble.place, trouble.reason) == ("/dev/shm/\\udcff.image", "\\ud800")


def test_a_start_deletes_its_own_unfinished_files_and_nobody_elses(tmp_path: Path) -> None:
    tier = tiers_of(tmp_path).disk
    directory = tmp_path / "disk" / JOB / "a1" / "s10"
    directory.mkdir(parents=True)
    ours = ["rank-1.shard", "rank-2.json", ".rank-3.shard.fresh.part", ".rank-3.json.tmp"]
    theirs = ["notes.json", "weights.shard", "rank-1.shard.bak", ".swp.tmp", "rank-one.shard"]
    for name in (*ours, *theirs):
        (directory / name).write_text("x")
    assert tier.sweep(JOB) == len(ours)
    assert sorted(names_in(directory)) == sorted(theirs)


def test_a_search_follows_no_links_and_names_what_it_passes_over(tmp_path: Path) -> None:
    (tmp_path / "a1" / "s1").mkdir(parents=True)
    (tmp_path / "a1" / "s1" / "rank-0.shard").touch()
    (tmp_path / "a2").symlink_to("a1")
    (tmp_path / "a3").symlink_to("nowhere")
    (tmp_path / "a4").touch()
    (tmp_path / "a1" / "s2").symlink_to("s1")
    found, passed = survey(tmp_path, "a*/s*/rank-*.shard")
    assert found == find(tmp_path, "a*/s*/rank-*.shard") == [tmp_path / "a1" / "s1" / "rank-0.shard"]
    assert [each.path for each in passed] == [tmp_path / "a2", tmp_path / "a1" / "s2"]
    assert survey(tmp_path, "nowhere/*") == ([], [])


@pytest.mark.anyio
async def test_data_that_cannot_be_deleted_is_said_and_the_other_tiers_are_deleted(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of somebody else in it. The end of the retention must not end the replicator."""
    root = tmp_path / "node"
    shutil.copytree(whole, root)

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    async def idle(name: str) -> None:
        pass

    async with started(root) as engine:
        monkeypatch.setattr("holdfast.replicator.tiers.images.remove", refused)
        with pytest.raises(Unavailable, match="data of job llm on this node could not be deleted"):
            await engine.forget(JOB, idle)
        assert not (root / "disk" / JOB).exists()
        await engine.end(EndJob(OTHER, 1))
        await Keeper(engine, idle, 60.0).look(61.0)
        assert OTHER not in engine.jobs
