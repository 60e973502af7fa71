"""The registry: everything that reads what others have written, with its inputs, function and allowed errors."""

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
