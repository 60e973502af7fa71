"""No rank of a short script leaves while another one still forms the group. Ranks of an earlier version are not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from train_workers import Workers

from holdfast.train import rendezvous

# The slow rank looks up its peers only when the others have done their work and ended, or had the time to do so.
SLOW_TO_FORM = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast.train as hf
from holdfast.train import wiring

here, slow = Path(__file__).parent, int(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def others_run():
    return any(not (here / f"left-{other}").exists() for other in range(world) if other != slow)

class SlowStore(dist.Store):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.store = dist.TCPStore(*args, **kwargs)
    def set(self, key, value):
        self.store.set(key, value)
    def add(self, key, amount):
        return self.store.add(key, amount)
    def check(self, keys):
        return self.store.check(keys)
    def get(self, key):
        return self.store.get(key)
    def wait(self, keys, *timeout):
        deadline = time.monotonic() + 0.5
        while others_run() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.store.wait(keys, *timeout)

if rank == slow:
    wiring.TCPStore = SlowStore

def main(run):
    with run.step(run.restore({})):
        pass

hf.launch(main)
(here / f"left-{rank}").touch()
"""


@pytest.mark.parametrize(("world", "slow"), [(2, 1), (3, 1), (3, 2)])
def test_the_others_end_only_when_a_slow_rank_has_formed_the_group(tmp_path: Path, world: int, slow: int) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_TO_FORM)
    with Workers(tmp_path, mesh={"dp": world}, script=script, args=[str(slow)]) as workers:
        assert workers.finish() == [0] * world, "\n".join(workers.log(rank) for rank in range(world))


# As a version that counts nobody. The others would wait for longer than the test does.
OLD_AMONG_NEW = """
import os, sys
import torch.distributed as dist
import holdfast.train as hf
from holdfast.train import rendezvous, wiring

class Silent:
    def __init__(self, *_):
        pass
    done = wait = wait_to_leave = lambda *_, **__: None

rendezvous.LEAVE_S_MAX = 3600.0
if os.environ["RANK"] == sys.argv[1]:
    wiring.Formation = Silent

def main(run):
    with run.step(run.restore({})):
        dist.barrier()

hf.launch(main)
"""


@pytest.mark.parametrize(("world", "old"), [(2, 0), (2, 1), (3, 1)])
def test_nobody_waits_for_a_rank_that_does_not_count_itself(tmp_path: Path, world: int, old: int) -> None:
    script = tmp_path / "old.py"
    script.write_text(OLD_AMONG_NEW)
    with Workers(tmp_path, mesh={"dp": world}, script=script, args=[str(old)]) as workers:
        assert workers.finish() == [0] * world, "\n".join(workers.log(rank) for rank in range(world))


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, length_s: float) -> None:
        self.now += length_s


@pytest.mark.parametrize("ran_s", [0.0, 50.0, 1000.0])
def test_rank_0_waits_for_a_silent_rank_for_a_time_after_it_has_formed_the_group(
    ran_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    formation = rendezvous.Formation(HashStore(), 0, 2)
    formation.done(connected=False)
    clock.now = ran_s
    formation.wait_to_leave()
    assert clock.now == pytest.approx(max(ran_s, rendezvous.LEAVE_S_MAX), abs=2 * rendezvous.POLL_S)
