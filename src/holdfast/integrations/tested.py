"""What an integration checks of its framework before it changes anything: the release, the signatures that it relies on, and
that the framework trains with all ranks."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
from collections.abc import Mapping, Sequence

from holdfast.domain.errors import IncompatibleVersion, InvalidSpec

log = logging.getLogger("holdfast.integrations")


def warn_if_untested(distribution: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Return the installed release of `distribution`; log a warning if its (major, minor) is outside of `tested`, which is
    (first, last) and includes both."""
    release = importlib.metadata.version(distribution)
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in (*release.split("."), "0")[:2])
    first, last = tested
    if not first <= (major, minor) <= last:
        log.warning(
            "%s %s: the integration is tested with %d.%d to %d.%d. Its internals have the expected signatures, so it is used",
            distribution,
            release,
            *first,
            *last,
        )
    return release


def require_signatures(distribution: str, signatures: Mapping[type, Mapping[str, Sequence[str]]]) -> None:
    """Raise `IncompatibleVersion` unless each class has all its methods with exactly these parameters (without `self`).

    The message names every method that differs."""
    differing = []
    methods = [(owner, *method) for owner, expected in signatures.items() for method in expected.items()]
    for owner, name, parameters in methods:
        method = inspect.getattr_static(owner, name, None)
        if method is None:
            differing.append(f"{owner.__name__}.{name} does not exist")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != tuple(parameters):
            differing.append(f"{owner.__name__}.{name} takes ({', '.join(found)}), not ({', '.join(parameters)})")
    if differing:
        try:
            release = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # a source tree in the module path
            release = "of an unknown release"
        raise IncompatibleVersion(
            f"{distribution} {release} differs from what its integration uses: {'; '.join(differing)}. Install a release that "
            "is tested (docs/frameworks.md), or train without the integration: a restart from your own checkpoints remains"
        )


def require_all_ranks(name: str, processes: int, how: str) -> None:
    """Raise `InvalidSpec` if the framework counts another number of processes than the launcher has started.

    Each process would then train a model of its own, and their states would be saved as replicas of one model. `name`: where
    the framework has the number; `how`: what makes it use all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if processes != ranks:
        raise InvalidSpec(
            name,
            processes,
            f"{ranks}, the number of ranks of the run. {how}: otherwise each rank trains a model of its own",
        )
