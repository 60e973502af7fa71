"""The process that a policy script runs in: `python -m holdfast.supervisor.policies.host FILE`.

Reads one question per line, writes one answer per line. What the script prints goes to standard error. Ends with its parent:
a thread watches the pipe, also while the script computes for ever.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from holdfast.domain.incidents import Action
from holdfast.supervisor.policies.script import Question
from holdfast.wire import records


def load(path: Path) -> Callable[..., Any]:
    """The script's `decide`. Raises whatever the script raises, and TypeError when there is nothing to call."""
    module = ModuleType("holdfast_policy_script")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses in the script look themselves up there
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    decide = getattr(module, "decide", None)
    if decide is None:
        raise TypeError("it defines no decide(incident, job)")
    if not callable(decide):
        raise TypeError(f"decide is {type(decide).__name__}, not a function decide(incident, job)")
    return decide  # type: ignore[no-any-return]


def explain(path: Path, error: BaseException) -> str:
    """`file:line: Type: message`, the innermost line that is in the script."""
    line = next(
        (frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == str(path)),
        None,
    )
    if isinstance(error, SyntaxError):
        line = error.lineno
    where = f"{path}:{line}" if line is not None else str(path)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return (
        f"{where}: {message}"
        if isinstance(error, TypeError) and line is None
        else f"{where}: {type(error).__name__}: {message}"
    )


def answer(path: Path, decide: Callable[..., Any], raw: bytes) -> dict[str, object]:
    question = records.loads(raw, Question)
    try:
        action = decide(question.incident, question.job)
    except Exception as error:
        return {"error": explain(path, error)}
    if not isinstance(action, Action):
        return {"error": f"{path}: decide() returned {action!r:.200}, not an Action such as restart('why')"}
    try:
        return {"ok": json.loads(records.dumps(action, Action))}
    except (TypeError, ValueError) as error:
        return {"error": f"{path}: decide() returned an Action that makes no sense: {error}"}


def main() -> None:
    path = Path(sys.argv[1])
    questions: SimpleQueue[bytes] = SimpleQueue()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # print() in a script must not become an answer

    def read() -> None:
        for line in sys.stdin.buffer:
            questions.put(line)
        os._exit(0)  # the parent is gone; the script may be in the middle of an endless loop

    def write(message: dict[str, object]) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    threading.Thread(target=read, daemon=True).start()
    try:
        decide = load(path)
    except BaseException as error:  # a script may well call sys.exit()
        write({"error": explain(path, error)})
        return
    write({"ok": "loaded"})
    while True:
        write(answer(path, decide, questions.get()))


if __name__ == "__main__":
    main()
