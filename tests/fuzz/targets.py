"""The registry: everything that reads what others have written, each with its inputs, its function and the errors it may raise."""

from __future__ import annotations

from fuzz import file_targets, node_targets, rest_targets, text_targets, wire_targets
from fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    *wire_targets.TARGETS,
    *node_targets.TARGETS,
    *file_targets.TARGETS,
    *text_targets.TARGETS,
    *rest_targets.TARGETS,
)
