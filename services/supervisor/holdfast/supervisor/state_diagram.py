"""Draws the states of a job from the table in core/model/lifecycle.py into a document.

`python -m holdfast.supervisor.state_diagram docs/architecture.md` writes the diagram between the two marker lines. `--check`
writes nothing, and fails if the diagram in the document is not that of the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from holdfast.runtime.documents import write_or_check, written_between
from holdfast.supervisor.core.model.lifecycle import TRANSITIONS, Cause, Doing

BEGIN, END = "<!-- the states of a job, by make state-diagram -->", "<!-- end of the states of a job -->"
# Transitions from all states of a group to the same state are drawn once.
_GROUPS = {
    "Unfinished": (Cause.STOP, Cause.FAIL),
    "Finished": (Cause.SUBMIT,),
}


def diagram() -> str:
    """The diagram in Mermaid's syntax, which GitHub and most Markdown readers draw."""
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in _lines()), "```"])


def _lines() -> Iterator[str]:
    drawn: dict[type[Doing], set[Cause]] = {state: set() for state in TRANSITIONS}
    yield f"[*] --> Pending: {Cause.SUBMIT.value.removesuffix(' again')}"
    for group, causes in _GROUPS.items():
        states = [state for state, legal in TRANSITIONS.items() if legal.keys() >= set(causes)]
        yield f"state {group} {{"
        yield from (f"    {state.__name__}" for state in states)
        yield "}"
        for cause in causes:
            (name,) = {TRANSITIONS[state][cause].__name__ for state in states}
            yield f"{group} --> {name}: {cause}"
        for state in states:
            drawn[state].update(causes)
    for state, legal in TRANSITIONS.items():
        for cause, target in legal.items():
            if cause not in drawn[state]:
                yield f"{state.__name__} --> {target.__name__}: {cause}"


def drawn_into(text: str) -> str:
    """`text` with the present diagram between its markers. Raises ValueError if it has no markers."""
    return written_between(text, BEGIN, END, f"{diagram()}\n")


def main() -> int:
    return write_or_check(
        "holdfast.supervisor.state_diagram",
        __doc__,
        drawn_into,
        "the states of a job in {document} are not those of core/model/lifecycle.py: run make state-diagram",
    )


if __name__ == "__main__":
    sys.exit(main())
