"""All kinds of fault: importing the modules of kinds registers them, in this order, in which a seed draws them."""

from benchmarks.soak import process_kinds, environment_kinds, phase_kinds  # noqa: F401, I001 - imported for their declarations
from benchmarks.soak.field import KINDS, STRIKES

__all__ = ["KINDS", "STRIKES"]
