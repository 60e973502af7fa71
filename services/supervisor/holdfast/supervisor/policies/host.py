"""The process that a policy runs in: `python -m holdfast.supervisor.policies.host NAME`, or `plugin:NAME` for an installed one.

Reads the script's text as a line of JSON ("" = the text of the file NAME), then one question per line, and writes one answer
per line. What the script prints goes to standard error. Ends with its parent: a thread watches the pipe, also while the
script is in an endless loop.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FunctionType, ModuleType
from typing import Any

from holdfast import plugins
from holdfast.domain.errors import PluginError
from holdfast.domain.incidents import Action
from holdfast.plugins import POLICY_PREFIX, Group
from holdfast.supervisor.policies import sandbox
from holdfast.supervisor.policies.script import Question
from holdfast.wire import records


@dataclass(frozen=True, slots=True)
class Policy:
    """`where`: the job's name for it. `file`: the file of its lines, for messages; empty if unknown."""

    where: str
    file: str
    decide: Callable[..., Any]


def load(policy: str, text: str | bytes) -> Policy:
    """A script's `decide`. Raises whatever the script raises, and TypeError if there is no function."""
    module = ModuleType("holdfast_policy_script")
    module.__file__ = policy
    sys.modules[module.__name__] = module  # dataclasses in the script look themselves up there
    exec(compile(text, policy, "exec"), module.__dict__)
    decide = getattr(module, "decide", None)
    if decide is None:
        raise TypeError("it defines no decide(incident, job)")
    if not callable(decide):
        raise TypeError(f"decide is {type(decide).__name__}, not a function decide(incident, job)")
    return Policy(policy, policy, decide)


def _load_plugin(policy: str) -> Policy:
    name = policy.removeprefix(POLICY_PREFIX)
    plugin = plugins.find(Group.POLICIES, name)
    if plugin is None:
        there = ", ".join(found.name for found in plugins.installed(Group.POLICIES)) or "none"
        raise TypeError(f"no installed package brings a policy of that name; installed: {there}")
    decide = plugins.load(plugin, FunctionType)
    return Policy(policy, decide.__code__.co_filename, decide)


def explain(where: str, file: str, error: BaseException) -> str:
    """`file:line: Type: message`, with the innermost line of the script."""
    line = next(
        (frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == file),
        None,
    )
    if isinstance(error, SyntaxError):
        line = error.lineno
    place = f"{where}:{line}" if line is not None else where
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return (
        f"{place}: {message}"
        if isinstance(error, TypeError | PluginError) and line is None
        else f"{place}: {type(error).__name__}: {message}"
    )


def answer(policy: Policy, raw: bytes) -> dict[str, object]:
    question = records.loads(raw, Question)
    try:
        action = policy.decide(question.incident, question.job)
    except Exception as error:
        return {"error": explain(policy.where, policy.file, error)}
    if not isinstance(action, Action):
        return {"error": f"{policy.where}: decide() returned {action!r:.200}, not an Action such as restart('why')"}
    try:
        return {"ok": json.loads(records.dumps(action, Action))}
    except (TypeError, ValueError) as error:
        return {"error": f"{policy.where}: decide() returned an Action that makes no sense: {error}"}


def main() -> None:
    wanted = sys.argv[1]
    questions: SimpleQueue[bytes] = SimpleQueue()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # print() in a script must not become an answer

    def read() -> None:
        for line in sys.stdin.buffer:
            questions.put(line)
        os._exit(0)  # the parent has ended; the script may be in an endless loop

    def write(message: dict[str, object]) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    if not (first := sys.stdin.buffer.readline()):
        return  # the parent has ended
    try:
        # The operator has installed plug-ins, so they are imported outside of the sandbox. No code of a script runs there. The
        # reader thread starts inside the sandbox as well, because a script can change the functions that it calls.
        plugin = _load_plugin(wanted) if wanted.startswith(POLICY_PREFIX) else None
        text = b"" if plugin else json.loads(first) or Path(wanted).read_bytes()
        sandbox.enter()
        threading.Thread(target=read, daemon=True).start()
        policy = plugin or load(wanted, text)
    except BaseException as error:  # a script may well call sys.exit()
        write({"error": explain(wanted, wanted, error)})
        return
    write({"ok": "loaded"})
    while True:
        write(answer(policy, questions.get()))


if __name__ == "__main__":
    main()
