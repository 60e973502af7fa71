"""Checks names that become parts of paths. A name from outside is used in a path only after this check."""

from __future__ import annotations

import re

from holdfast.domain.errors import InvalidSpec

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def job_name(name: str) -> str:
    """Return `name` if it is a valid directory name. Raises InvalidSpec otherwise."""
    if not is_job_name(name):
        raise InvalidSpec("job", name, "letters, digits, dot, dash and underscore, starting with a letter or digit")
    return name


def is_job_name(name: str) -> bool:
    return _JOB.fullmatch(name) is not None
