"""A `holdfast` command that starts a stack, whose processes are forks (`warm_stack`): warm_command.py demo --short"""

from __future__ import annotations

from training import run_warm

from holdfast.cli.main import main
from holdfast.cli.stack import LocalStack

if __name__ == "__main__":
    LocalStack._run = run_warm  # type: ignore[method-assign, assignment]
    main()
