"""Injects faults of the whole machine: lost packets and a clock that jumps. A separate process causes and ends each fault.

    python -m holdfast.agent.injection.machine_faults KIND RECORD FOR_S VALUES

Theory. Such a fault would outlive a killed agent and could disconnect its node. So the agent does not cause it. The process
causes the fault, prints the result, and waits until `FOR_S` seconds have passed, its standard input is closed (because the
agent has ended, or ends the fault early), or it receives SIGTERM, SIGINT or SIGHUP. Then it undoes the fault. It runs in its
own session, so it does not receive signals that are sent to the agent's terminal or process group. A record of the change is
written before the change. If this process is killed, the agent undoes the fault. If both are killed, the next agent of the
directory undoes it (`undo`).
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.agent.injection import clock_jump, lossy_link
from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.faults import FaultKind
from holdfast.runtime.processes.readable import readable

START_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 30.0
LOOK_S: Final = 0.5  # a signal is noticed within this time
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
    """Undo a fault that is still in effect. Returns whether there was one. Raises `HoldfastError` if that fails."""
    return _UNDO[kind](record_of(kind, agent_dir))


class MachineFault:
    """The agent's handle of the process. The methods block."""

    def __init__(self, kind: FaultKind, agent_dir: Path, for_s: float, **values: Any) -> None:
        """Start the process. Returns when the fault is in effect. Raises `Conflict` with the reason if it is refused."""
        words = (kind.value, str(record_of(kind, agent_dir)), repr(for_s), json.dumps(values))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent.injection.machine_faults", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Conflict(f"the process that causes and ends the fault cannot be started: {error.strerror}") from error
        refusal = self._answer()
        if refusal is not None:
            self.end()
            raise Conflict(refusal)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until the process has ended, because the fault is undone or the process was killed."""
        self._process.wait()

    def end(self) -> None:
        """Let the process undo the fault now, and wait for its end. Kills the process after `END_TIMEOUT_S`."""
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
        """Return why the fault was refused; None if it is in effect."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline() if readable(self._process.stdout, START_TIMEOUT_S) else b""
        try:
            refusal: str | None = json.loads(line)["refused"]
        except (ValueError, KeyError):
            return "the process that causes and ends the fault did not start; the agent's log has the reason"
        return refusal


def main(kind: FaultKind, record: Path, for_s: float, values: dict[str, Any]) -> int:
    """Return the exit code: 1 if the fault was refused, 2 if it could not be undone."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    deadline_s = time.monotonic() + for_s
    try:
        _CAUSE[kind](record, values)
    except HoldfastError as error:
        _print_answer(str(error))
        return 1
    _print_answer(None)
    while not received and (left_s := deadline_s - time.monotonic()) > 0:
        if readable(sys.stdin.buffer, min(left_s, LOOK_S)):  # the agent never writes, so this is the end of the input
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


def _print_answer(refused: str | None) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, so the fault ends at once
        sys.stdout.write(json.dumps({"refused": refused}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(FaultKind(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])))
