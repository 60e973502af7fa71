"""`holdfast checkpoints` on an object store alone: the real command, real files; and what a supervisor adds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import stored
from commands import Shell

from holdfast.domain.generations import ShardKey
from holdfast.shards import Reader
from holdfast.stores import layout
from holdfast.stores.fake_gcs import FakeGcs
from holdfast.stores.file import FileStore
from holdfast.stores.gcs import GcsStore

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def shell(tmp_path: Path, store: FileStore) -> Iterator[Shell]:
    shell = Shell(tmp_path, {"HOLDFAST_STORE": store.url, "HOLDFAST_API": NOBODY})
    yield shell
    shell.assert_nothing_runs()


@pytest.fixture
def saved(store: FileStore) -> FileStore:
    """Three complete steps, one that was never completed, and another job."""
    for step in (100, 200):
        stored.save(store, step)
    stored.save(store, 400, ranks=(0, 1))
    stored.save(store, 300, attempt=2)
    stored.save(store, 50, job="llama")
    return store


def test_list(shell: Shell, saved: FileStore) -> None:
    result = shell("checkpoints", "list", "gpt")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["300", "400", "200", "100"]
    assert lines[0][-2:] == ["newest", "complete"]
    assert lines[1][-1] == "incomplete"
    assert f"no supervisor answers at {NOBODY}" in result.err
    rows = json.loads(shell("checkpoints", "list", "gpt", "--json").out)
    assert [(row["step"], row["attempt"], row["complete"], row["newest"]) for row in rows] == [
        (300, 2, True, True),
        (400, 1, False, False),
        (200, 1, True, False),
        (100, 1, True, False),
    ]
    assert rows[0]["mesh"] == {"dp": 2, "pp": 2}


@pytest.mark.parametrize("command", [["list"], ["show"], ["verify"], ["prune", "--keep", "1"], ["fetch", "--to", "x"]])
def test_an_unknown_job(shell: Shell, saved: FileStore, command: list[str]) -> None:
    result = shell("checkpoints", *command, "nope")
    assert result.code == 2
    assert f"error: no checkpoints of nope in {saved.url}; it has checkpoints of: gpt, llama" in result.err


def test_nowhere_to_look(tmp_path: Path) -> None:
    shell = Shell(tmp_path, {"HOLDFAST_API": NOBODY})
    result = shell("checkpoints", "list", "gpt")
    assert result.code == 2
    assert "no supervisor answers" in result.err
    assert "--store" in result.err
    result = shell("checkpoints", "show", "gpt")
    assert result.code == 2
    assert "--store" in result.err
    result = shell("checkpoints", "show", "gpt", "--store", "s3://bucket")
    assert result.code == 2
    assert "gs://bucket/prefix" in result.err


def test_not_mounted(shell: Shell, tmp_path: Path) -> None:
    result = shell("checkpoints", "list", "gpt", "--store", f"file://{tmp_path}/absent/store")
    assert result.code == 2
    assert "mounted" in result.err


def test_show(shell: Shell, saved: FileStore) -> None:
    shown = json.loads(shell("checkpoints", "show", "gpt", "--json").out)
    assert (shown["step"], shown["attempt"], shown["sharded"]) == (300, 2, False)
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
    assert "dp 2 × pp 2" in shell("checkpoints", "show", "gpt", "--step", "100").out
    result = shell("checkpoints", "show", "gpt", "--step", "400")
    assert result.code == 2
    assert "incomplete: 2 ranks are uploaded" in result.err
    assert "complete ones: 300 (attempt 2), 200 (attempt 1), 100 (attempt 1)" in result.err


def test_verify(shell: Shell, saved: FileStore, tmp_path: Path) -> None:
    result = shell("checkpoints", "verify", "gpt", "--all")
    assert result.code == 0
    assert result.out.count("intact") == 3
    broken = next(tmp_path.glob("store/gpt/a000000000001-s000000000100/p0-*"))
    with broken.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe")
    assert shell("checkpoints", "verify", "gpt").code == 0  # the newest
    result = shell("checkpoints", "verify", "gpt", "--all")
    assert result.code == 1
    assert "step 100 (attempt 1): damaged" in result.out
    assert f"{broken.name} is corrupt" in result.out
    reports = json.loads(shell("checkpoints", "verify", "gpt", "--step", "100", "--json").out)
    assert len(reports[0]["damaged"]) == 1


def test_prune_asks_first(shell: Shell, saved: FileStore) -> None:
    result = shell("checkpoints", "prune", "gpt", "--keep", "1")
    assert result.code == 1
    assert "Delete 2 of 4 checkpoints?" in result.out
    assert len(layout.steps(saved, "gpt")) == 3


def test_prune(shell: Shell, saved: FileStore, tmp_path: Path) -> None:
    yesterday = time.time() - 25 * 3600
    for path in tmp_path.glob("store/gpt/a000000000001-s000000000400/*"):
        os.utime(path, (yesterday, yesterday))
    report = json.loads(shell("checkpoints", "prune", "gpt", "--keep", "2", "--yes", "--json").out)
    assert [row["step"] for row in report["deleted"]] == [400, 100]
    assert layout.steps(saved, "gpt") == [(2, 300), (1, 200)]
    assert len(layout.survey(saved, "gpt")) == 2
    assert "nothing to delete" in shell("checkpoints", "prune", "gpt", "--keep", "2", "--yes").out
    assert layout.steps(saved, "llama") == [(1, 50)]


def test_fetch(shell: Shell, saved: FileStore, tmp_path: Path) -> None:
    result = shell("checkpoints", "fetch", "gpt", "--step", "200", "--to", "here")
    assert result.code == 0, result.err
    assert "4 shards in here/a1/s200" in result.out
    with Reader(tmp_path / "here/a1/s200/rank-3.shard", expected=ShardKey(1, 200, 3)) as reader:
        assert bytes(reader.view("w")) == bytes([201]) * stored.TENSOR_BYTES
    result = shell("checkpoints", "fetch", "gpt", "--to", "one", "--rank", "2")
    assert [path.name for path in sorted((tmp_path / "one/a2/s300").iterdir())] == ["rank-2.json", "rank-2.shard"]
    result = shell("checkpoints", "fetch", "gpt", "--to", "none", "--rank", "9")
    assert result.code == 2
    assert "no rank 9" in result.err


def test_export_refuses_a_directory_with_something_in_it(shell: Shell, saved: FileStore, tmp_path: Path) -> None:
    result = shell("checkpoints", "export", "gpt", "--to", ".")
    assert result.code == 2
    assert "is empty" in result.err


def test_cloud_storage(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGcs() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        store = GcsStore("bucket", "runs")
        stored.save(store, 10)
        result = shell("checkpoints", "verify", "gpt", "--store", store.url)
        assert result.code == 0, result.err
        assert "step 10 (attempt 1): intact" in result.out
        store.close()


# ---------------------------------------------------------------- with a supervisor


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """A supervisor that knows what the nodes of gpt hold."""
    items = [
        {
            "attempt": 2,
            "step": 350,
            "mesh": {"dp": 2, "pp": 2},
            "tiers": {"memory": 4, "disk": 3, "store": False},
            "complete": True,
            "newest": True,
        },
        {
            "attempt": 2,
            "step": 300,
            "mesh": {"dp": 2, "pp": 2},
            "tiers": {"memory": 0, "disk": 4, "store": True},
            "complete": True,
            "newest": False,
        },
    ]

    answers = {
        "/v1/jobs/gpt/checkpoints": {"items": items, "next_cursor": None},
        "/v1/jobs/gpt": {"name": "gpt", "spec": {"checkpoint": {"store": f"file://{tmp_path}/store"}}},
        "/v1/jobs/bare/checkpoints": {"items": [], "next_cursor": None},
        "/v1/jobs/bare": {"name": "bare", "spec": {"checkpoint": {"store": None}}},
    }

    class Supervisor(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.partition("?")[0])
            raw = json.dumps(body or {"detail": "there is no such job"}).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json" if body else "application/problem+json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Supervisor) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_nodes_hold(shell: Shell, saved: FileStore, api: str) -> None:
    rows = json.loads(shell("checkpoints", "list", "gpt", "--api", api, "--json").out)
    assert [row["step"] for row in rows] == [350, 300, 400, 200, 100]
    assert [row["newest"] for row in rows] == [True, False, False, False, False]
    assert (rows[1]["disk"], rows[1]["store"], rows[1]["bytes"] > 0) == (4, "complete", True)
    shown = shell("checkpoints", "list", "gpt", "--api", api)
    assert "4 of 4" in shown.out
    assert "3 of 4" in shown.out
    assert shown.err == ""


def test_nodes_alone(shell: Shell, api: str) -> None:
    """The store has nothing of the job yet."""
    result = shell("checkpoints", "list", "gpt", "--api", api)
    assert result.code == 0, result.err
    assert "350" in result.out
    assert "checkpoints in the object store are not shown: no checkpoints of gpt" in result.err


def test_the_job_s_own_store(saved: FileStore, tmp_path: Path, api: str) -> None:
    shell = Shell(tmp_path, {"HOLDFAST_API": api})
    assert [row["step"] for row in json.loads(shell("checkpoints", "list", "gpt", "--json").out)] == [
        350,
        300,
        400,
        200,
        100,
    ]
    assert "step 300 (attempt 2): intact" in shell("checkpoints", "verify", "gpt").out
    result = shell("checkpoints", "verify", "bare")
    assert result.code == 2
    assert "bare has no object store" in result.err
    result = shell("checkpoints", "list", "bare")
    assert (result.code, result.err) == (0, "")
    assert "no checkpoints of bare yet" in result.out
    result = shell("checkpoints", "list", "nope")
    assert result.code == 2
    assert "there is no such job" in result.err


def test_a_job_that_the_supervisor_has_forgotten(shell: Shell, saved: FileStore, api: str) -> None:
    result = shell("checkpoints", "list", "llama", "--api", api)
    assert result.code == 0
    assert "50" in result.out
    assert "there is no such job" in result.err
