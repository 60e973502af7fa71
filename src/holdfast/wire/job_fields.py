"""Limits and types of the fields of a job file: which texts and numbers are accepted, and what the error expects instead."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import LEARN_IMPORTS

NODES_MAX = 100_000
WORKERS_MAX = 1_024  # per node
RANKS_MAX = 1_000_000  # limit of the detectors
PRIORITY_MAX = 1_000
ITEMS_MAX = 1_000  # each of arguments, variables and modules
POLICY_CHARS_MAX = 65_536
NAME_CHARS_MAX = 63
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def job_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("1 to 63 lower-case letters, digits and hyphens, a letter or digit first and last")
    return text


def module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("a module's dotted name, such as transformers.models.llama")
    return text


NOT_LEARNED = "none"  # in `preload`: nothing is learned


def preloaded(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `preload` of a job from that of its file: modules are learned in addition, unless the file says otherwise."""
    named = tuple(name for name in names if name not in (LEARN_IMPORTS, NOT_LEARNED))
    return named if not names or NOT_LEARNED in names else (LEARN_IMPORTS, *named)


def learned_or_not(names: list[str]) -> list[str]:
    if LEARN_IMPORTS in names and NOT_LEARNED in names:
        raise ValueError(f"either {LEARN_IMPORTS} or {NOT_LEARNED}")
    return names


def preload_body(preload: tuple[str, ...]) -> list[str]:
    """The reverse of `preloaded`."""
    return [*preload] if LEARN_IMPORTS in preload or not preload else [NOT_LEARNED, *preload]


def preloaded_name(text: str) -> str:
    module, colon, function = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or (colon and not function.isidentifier()):
        raise ValueError("a module's dotted name, such as transformers.models.llama, or module:function")
    return text


def program(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("the path of a program, or its name if it is in PATH")
    return text


def variable_name(text: str) -> str:
    if not text or "=" in text or "\0" in text:
        raise ValueError("the name of an environment variable")
    return text


def parameter_name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("a name such as max_swaps")
    return text


def scalar(value: object) -> object:
    if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("a string, a finite number, true or false")
    return value


def _text(value: object) -> object:
    """Accept unquoted numbers for text of the process, but not yes and no, which YAML reads as True and False."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[int, Field(ge=1)]
SUSPECT_TEST_S_MAX = 60.0
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AUTO = "auto"  # in the file; the spec has 0 instead


def steps_or_auto(value: object) -> object:
    if value == AUTO:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("auto, or a number of steps of at least 1")
    return value


def seconds_or_auto(value: object) -> object:
    if value == AUTO:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("auto, or a number of seconds greater than 0")
    return float(value)


def shown_auto(value: float) -> float | str:
    return value or AUTO


def or_auto(check: Callable[[object], object], kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Return the validator, the serialiser and the schema of a number for which `auto` may be given."""
    number = {int: "integer", float: "number"}[kind]
    known = {"anyOf": [{"const": AUTO}, {"type": number, "exclusiveMinimum": 0}], "default": AUTO}
    # Names `kind`, not the return type of `shown_auto`: an int where the serialiser expects a float would cause a warning.
    shown: Any = kind | Literal["auto"]
    return BeforeValidator(check), PlainSerializer(shown_auto, return_type=shown), WithJsonSchema(known)


def canonical(parse: Callable[[str], object]) -> AfterValidator:
    """Validate a text by `parse`, and replace it by the canonical text of the result; empty stays empty."""

    def check(text: str) -> str:
        try:
            return str(parse(text)) if text else ""
        except InvalidSpec as error:
            raise ValueError(error.expected) from error

    return AfterValidator(check)


NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
