"""The pool whose threads may be left behind."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import pytest
from waiting import TIMEOUT_S

from holdfast.replicator.daemons import DaemonPool
from holdfast.replicator.threads import Threads

HANGS = """
import threading
from holdfast.replicator.daemons import DaemonPool
started = threading.Event()
DaemonPool(1, "hung").submit(lambda: (started.set(), threading.Event().wait()))
started.wait()
"""


def test_it_works_like_any_other() -> None:
    begun: list[str] = []
    with DaemonPool(2, "pool", lambda: begun.append(threading.current_thread().name)) as pool:
        assert list(pool.map(lambda x: x * x, range(50))) == [x * x for x in range(50)]
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
    assert set(begun) <= {"pool_0", "pool_1"}
    assert begun
    with pytest.raises(RuntimeError, match="takes no work any more"):
        pool.submit(print)


def test_threads_are_reused_and_bounded() -> None:
    with DaemonPool(3, "pool") as pool:
        together = threading.Barrier(3)
        names = {future.result() for future in [pool.submit(lambda: (together.wait(), name())[1]) for _ in range(3)]}
        assert len(names) == 3
        assert {pool.submit(name).result() for _ in range(20)} <= names


def name() -> str:
    return threading.current_thread().name


def test_what_waits_can_be_cancelled() -> None:
    pool = DaemonPool(1, "pool")
    release, started = threading.Event(), threading.Event()

    def run() -> bool:
        started.set()
        return release.wait(TIMEOUT_S)

    running = pool.submit(run)
    waiting = pool.submit(print)
    assert started.wait(TIMEOUT_S)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    release.set()
    assert running.result()


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=30, check=False).returncode == 0


@pytest.mark.anyio
async def test_a_retrieval_that_no_caller_waits_for_is_cancelled() -> None:
    threads = Threads(urgent=1, transfers=1, background=1)
    cancelled, begun, ended = threading.Event(), anyio.Event(), threading.Event()

    def fetch() -> None:
        anyio.from_thread.run_sync(begun.set, token=token)
        if cancelled.wait(10):
            ended.set()

    token = anyio.lowlevel.current_token()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: threads.retrieval(fetch, cancelled=cancelled))
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(ended.wait, 10)
    threads.close()
