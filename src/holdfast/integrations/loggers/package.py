"""Imports the package of a logger, when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.domain.distribution import install_command


def imported(module: str, extra: str) -> Any:
    """Return the module. Raises `ModuleNotFoundError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] not in (package, extra):
            raise  # the package is there; something that it needs is not
        raise ModuleNotFoundError(
            f"logging to {extra} needs a package that is missing ({error.name}): {install_command(extra)}",
            name=error.name,
        ) from error
