"""Policy scripts that are of no use: file name → (its text, None = there is no such file; what the error must say)."""

from __future__ import annotations

POLICIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "imports.py": ("import no_such_module\n", ("imports.py:1", "ModuleNotFoundError", "no_such_module")),
    "syntax.py": ("def decide(\n", ("syntax.py:1", "SyntaxError")),
    "lacks.py": ("def decided(): ...\n", ("lacks.py", "it defines no decide(incident, job)")),
    "number.py": ("decide = 7\n", ("number.py", "decide is int, not a function")),
    "nonsense.py": (
        "def decide(incident, job):\n    return 'restart'\n",
        ("decide() returned 'restart', not an Action",),
    ),
    "nothing.py": ("def decide(incident, job):\n    pass\n", ("decide() returned None, not an Action",)),
    "raises.py": ("def decide(incident, job):\n    return job.no_such\n", ("raises.py:2", "AttributeError", "no_such")),
    "exits.py": ("import sys\nsys.exit(3)\n", ("exits.py:2", "SystemExit")),
    "arguments.py": ("def decide():\n    pass\n", ("arguments.py", "takes 0 positional arguments")),
    "forever.py": ("def decide(incident, job):\n    while True:\n        pass\n", ("decide() took longer than 1 s",)),
    "missing.py": (None, ("missing.py",)),
}
