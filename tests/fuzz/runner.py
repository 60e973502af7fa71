"""Runs targets: batches of inputs from a seed, and what they found.

One batch has one seed, derived from the seed of the run, the target's name and the batch's number. So a find is repeated by
its batch alone.
"""

from __future__ import annotations

import faulthandler
import re
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from fuzz.bounds import bounded
from fuzz.target import Target
from hypothesis import HealthCheck, Phase
from hypothesis.errors import HypothesisWarning

BATCH = 200  # inputs of a target before the next one's turn
MESSAGE_CHARS_MAX, EXAMPLE_CHARS_MAX = 500, 2000
_RUN = re.compile(r"(.{1,8}?)\1{24,}")
HUNG_S = 180.0  # wall time of one input in C code, which no signal interrupts; then the process ends with a traceback


@dataclass(frozen=True, slots=True)
class Find:
    """`error`: type and message. `example`: the smallest input that was found for it."""

    target: str
    seed: int
    error: str
    example: str

    @property
    def command(self) -> str:
        return f"make fuzz ARGS='--only \"{self.target}\" --batch {self.seed}'"


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch did. `finds`: one for each kind of failure."""

    inputs: int
    finds: tuple[Find, ...] = ()


def seed_of(seed: int, target: Target, number: int) -> int:
    return zlib.crc32(f"{seed}/{target.name}/{number}".encode())


def run_batch(target: Target, seed: int, inputs: int = BATCH, last_input: Path | None = None) -> Batch:
    """Try about `inputs` inputs, the same for the same seed. `last_input`: file that says what is tried now, for a process that
    does not come back."""
    count = max(1, round(inputs * target.share))
    tried = 0
    failed: dict[str, Any] = {}  # type of an error → the input that raised it last, which is the smallest

    def test(value: Any) -> None:
        nonlocal tried
        tried += 1
        if last_input is not None:
            last_input.write_text(f"{target.name}, batch {seed}, input {tried}:\n{value!r}\n", errors="replace")
        try:
            attempt(target, value)
        except Exception as error:
            failed[type(error).__name__] = value
            raise

    settings = hypothesis.settings(
        max_examples=count,
        database=None,  # nothing of one run is part of another
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=True,
        print_blob=False,
    )
    run: Callable[[], None] = settings(hypothesis.seed(seed)(hypothesis.given(value=target.strategy)(test)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)  # about the length of inputs, which it would print
            run()
    except ExceptionGroup as group:
        return Batch(tried, tuple(_find(target, seed, error, failed) for error in group.exceptions))
    except Exception as error:
        return Batch(tried, (_find(target, seed, error, failed),))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Batch(tried)


def attempt(target: Target, value: Any) -> None:
    """Have the target read one value. Raises what is not allowed, `TooSlow` and `TooLarge`."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    with bounded(target.cpu_s_max, target.growth_bytes_max):
        try:
            target.read(value)
        except target.allowed:
            pass


def _find(target: Target, seed: int, error: Exception, failed: Mapping[str, Any]) -> Find:
    kind = type(error).__name__
    value = failed.get(kind, "an input could not be made: a fault of the target's own strategy")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return Find(target.name, seed, f"{kind} at {where}: {str(error)[:MESSAGE_CHARS_MAX]}", shown(value))


def shown(value: Any) -> str:
    """The value as Python text, with long runs of one piece shortened."""
    text = _RUN.sub(lambda run: f"{run[1]}…{len(run[0]) // len(run[1])} times…", repr(value)[: 1 << 20])
    return text if len(text) <= EXAMPLE_CHARS_MAX else f"{text[:EXAMPLE_CHARS_MAX]}… ({len(text)} characters)"
