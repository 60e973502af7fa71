"""Mistakes in a job file, from pydantic's errors: key, value, accepted values and line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, get_args

from pydantic import (
    BaseModel,
)

from holdfast.domain.errors import InvalidSpec
from holdfast.wire.job_sections import JobFile
from holdfast.wire.yamlfile import KeyPath, dotted

Where = Callable[[KeyPath], str]


def located(problem: InvalidSpec, where: Where) -> InvalidSpec:
    key = tuple(problem.field.split("."))
    return InvalidSpec(problem.field, problem.value, problem.expected, where(key))


def line_of(problem: InvalidSpec) -> int:
    return int(problem.where.rpartition(":")[2] or 0)


def problem_of(detail: Any, where: Where) -> InvalidSpec:
    key: KeyPath = tuple(part for part in detail["loc"] if part != "[key]")
    value: object = detail["input"]
    match detail["type"]:
        case "missing":
            value, expected = None, "a value: it is required"
        case "extra_forbidden":
            expected = _known_keys(key)
        case _:
            expected = _expected(detail["msg"])
    return InvalidSpec(dotted(key), value, expected, where(key))


def _expected(message: str) -> str:
    """Convert pydantic's "Input should be greater than or equal to 1" to "at least 1"."""
    message = re.sub(r"^(Value error, |Input should be |\w+ should (be |have )?)", "", message)
    return message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as `Policy | str | None` or `dict[str, Source]`; None if it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)


def _known_keys(key: KeyPath) -> str:
    """Return the accepted keys, or the most similar one, for an unknown key."""
    model: type[BaseModel] = JobFile
    for part in key[:-1]:
        if (field := model.model_fields.get(str(part))) is not None:  # else the name of a variable, as in env_from
            model = _model_in(field.annotation) or model
    names = list(model.model_fields)
    near = difflib.get_close_matches(str(key[-1]), names, n=1)
    return f"a known key; did you mean {near[0]!r}?" if near else f"one of the keys {', '.join(names)}"
