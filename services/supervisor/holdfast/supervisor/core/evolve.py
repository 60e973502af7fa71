"""The core's name for it."""

from holdfast.domain.evolve import evolve

__all__ = ["evolve"]
