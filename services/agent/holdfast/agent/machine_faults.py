"""Injected faults of the whole machine: lost packets and a clock that jumps. A process of its own causes and ends each.

    python -m holdfast.agent.machine_faults KIND RECORD FOR_S VALUES

Theory. Such a fault would outlive an agent that is killed, and could shut its node out. So the agent causes none itself: the
process does, says what it did, and waits until `FOR_S` are over, its standard input ends (the agent has ended, however, or ends
the fault early), or it is told to end (SIGTERM, SIGINT, SIGHUP). Then it undoes the fault. It is in a session of its own, so
what is sent to the agent's terminal or process group does not reach it. What it has changed is on record before it is changed:
if this process is killed, the agent undoes it, and if both are, the next agent of the directory does (`undo`).
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.agent import clock_jump, lossy_link
from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.faults import FaultKind

START_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 30.0
LOOK_S: Final = 0.5  # a signal is seen within it
UNDO_TRIES: Final = 60
UNDO_AGAIN_S: Final = 1.0

_CAUSE: Final[Mapping[FaultKind, Callable[[Path, dict[str, Any]], None]]] = {
    FaultKind.LOSSY_LINK: lambda record, values: lossy_link.lose(record, values["interface"], values["percent"]),
    FaultKind.CLOCK_JUMP: lambda record, values: clock_jump.jump(record, values["offset_s"]),
}
_UNDO: Final[Mapping[FaultKind, Callable[[Path], bool]]] = {
    FaultKind.LOSSY_LINK: lossy_link.undo,
    FaultKind.CLOCK_JUMP: clock_jump.undo,
}


def record_of(kind: FaultKind, agent_dir: Path) -> Path:
    return agent_dir / f"injected-{kind}.json"


def undo(kind: FaultKind, agent_dir: Path) -> bool:
    """Put right what was left behind; returns whether there was anything. Raises `HoldfastError` if it could not be."""
    return _UNDO[kind](record_of(kind, agent_dir))


class MachineFault:
    """The process, as the agent sees it. The methods block."""

    def __init__(self, kind: FaultKind, agent_dir: Path, for_s: float, **values: Any) -> None:
        """Returns when the fault is there. Raises `Conflict` with the reason if it is not."""
        words = (kind.value, str(record_of(kind, agent_dir)), repr(for_s), json.dumps(values))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent.machine_faults", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Conflict(f"no process can be started that ends the fault: {error.strerror}") from error
        refusal = self._answer()
        if refusal is not None:
            self.end()
            raise Conflict(refusal)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until the process has ended: the fault is undone, or the process was killed."""
        self._process.wait()

    def end(self) -> None:
        """Have the fault undone now, and wait for that; the process is killed if it takes too long."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str | None:
        """Why there is no fault; None if there is one."""
        assert self._process.stdout is not None
        said, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if said else b""
        try:
            refusal: str | None = json.loads(line)["refused"]
        except (ValueError, KeyError):
            return "the process that causes and ends the fault did not start; the agent's log has the reason"
        return refusal


def main(kind: FaultKind, record: Path, for_s: float, values: dict[str, Any]) -> int:
    """Returns the exit code: 1 if there was no fault, 2 if it could not be undone."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    deadline_s = time.monotonic() + for_s
    try:
        _CAUSE[kind](record, values)
    except HoldfastError as error:
        _say(str(error))
        return 1
    _say(None)
    while not told and (left_s := deadline_s - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], min(left_s, LOOK_S))
        if readable:  # nobody writes: it has ended
            break
    for _ in range(UNDO_TRIES):
        try:
            _UNDO[kind](record)
        except HoldfastError as error:
            sys.stderr.write(f"{error}\n")
            time.sleep(UNDO_AGAIN_S)
        else:
            return 0
    return 2


def _say(refused: str | None) -> None:
    with contextlib.suppress(OSError):  # an agent that has ended does not read it; the fault ends at once
        sys.stdout.write(json.dumps({"refused": refused}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(FaultKind(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])))
