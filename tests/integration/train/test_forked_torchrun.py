"""The torchrun of these tests, which is a fork, has the processes and the modules of one that a user starts (`warm_stack`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from leftovers import MARK, marked
from ports import reserve_port
from waiting import TIMEOUT_S, wait_until
from warm_processes import STACK, WarmProcess, warm

SCRIPT = """
import json, os, sys, time
from pathlib import Path
path = Path(sys.argv[1], os.environ["RANK"])
said = {"argv": sys.argv, "first": sys.path[0], "modules": sorted(sys.modules), "through": sys.stdout.write_through}
path.with_suffix(".new").write_text(json.dumps(said))
path.with_suffix(".new").replace(path)
if sys.argv[2] == "fails":
    sys.exit(7)
while True:
    time.sleep(0.02)
"""
OF_SERVICES = ("grpc", "pydantic", "redis", "structlog", "anyio", "fastapi", "holdfast.agent", "holdfast.supervisor")


@contextmanager
def torchrun(directory: Path, how: str) -> Iterator[WarmProcess]:
    script, environment = directory / "train.py", {**os.environ, MARK: str(directory)}
    script.write_text(SCRIPT)
    with reserve_port() as port, (directory / "log").open("wb") as log:
        address = ["--nproc-per-node", "2", "--master-port", str(port.getsockname()[1])]
        command = ["torch.distributed.run", *address, str(script), str(directory), how]
        launcher = warm(STACK).start(command, directory, environment, log.fileno(), log.fileno())
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait(TIMEOUT_S)
        for each in marked(str(directory)):
            each.kill()


def test_ranks_are_children_of_torchrun_in_sessions_of_their_own_and_outlive_it(tmp_path: Path) -> None:
    with torchrun(tmp_path, "waits") as launcher:
        paths = [tmp_path / rank for rank in ("0", "1")]
        wait_until(lambda: all(path.exists() for path in paths), description="both ranks")
        ranks = [each for each in psutil.Process(launcher.pid).children() if "-u" in each.cmdline()]
        assert len(ranks) == 2, [each.cmdline() for each in psutil.Process(launcher.pid).children(recursive=True)]
        for rank in ranks:
            assert [*filter(None, rank.cmdline())][1:] == ["-u", str(tmp_path / "train.py"), str(tmp_path), "waits"]
            assert os.getsid(rank.pid) == rank.pid
        for path in paths:
            said = json.loads(path.read_text())
            assert said["argv"] == [str(tmp_path / "train.py"), str(tmp_path), "waits"]
            assert (said["first"], said["through"]) == (str(tmp_path), True)
            assert not set(said["modules"]) & {*OF_SERVICES, "holdfast.train.warm.template"}
        launcher.kill()
        launcher.wait(TIMEOUT_S)
        alone = {each.pid for each in ranks}
        wait_until(lambda: {each.pid for each in marked(str(tmp_path))} == alone, description="its helper's end")


def test_the_exit_code_of_a_rank_is_in_the_report_of_torchrun(tmp_path: Path) -> None:
    with torchrun(tmp_path, "fails") as launcher:
        assert launcher.wait(TIMEOUT_S) == 1
        assert "exitcode  : 7 (pid: " in (tmp_path / "log").read_text()
