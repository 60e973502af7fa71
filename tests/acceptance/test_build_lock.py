"""A rank that is killed while it builds a C++ extension does not block the next start of the job."""

from __future__ import annotations

from pathlib import Path

from training import cluster

# What torch.utils.cpp_extension does around a build, without a compiler. The first builder is killed in it.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.file_baton import FileBaton
out = Path(sys.argv[1])
dist.init_process_group("gloo")
baton = FileBaton(str(out / "lock"))
if baton.try_acquire():
    if not (out / "killed").exists():
        (out / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (out / "built").touch()
    baton.release()
else:
    baton.wait()
assert (out / "built").exists()
dist.barrier()
"""


def test_a_rank_killed_in_a_build_does_not_block_the_next_start(tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text(SCRIPT)
    with cluster(tmp_path / "stack", nodes=1, workers_per_node=2) as run:
        run.client.submit(
            {
                "name": "build",
                "script": str(script),
                "args": [str(tmp_path)],
                "nodes": 1,
                "nproc_per_node": 2,
                "mesh": {"dp": 2},
            }
        )
        assert run.wait_end("build", 180)["phase"] == "completed"
    assert (tmp_path / "killed").exists()
    assert not (tmp_path / "lock").exists()
