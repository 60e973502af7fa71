"""Detects the training framework of a script by its imports and calls, and has the lines that use Holdfast's integration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with an integration. `module`: of its import; `marks`: calls by which a script is known to use it."""

    name: str
    module: str
    marks: tuple[str, ...]
    lines: tuple[str, ...]  # lines to add to the script; empty: none are needed
    section: str  # of docs/frameworks.md


FRAMEWORKS = (
    Framework(
        "Hugging Face Trainer",
        "transformers",
        ("Trainer", "Seq2SeqTrainer"),
        ("from holdfast.integrations.transformers import attach", "attach(trainer)        # before trainer.train()"),
        "hugging-face-trainer",
    ),
    Framework(
        "Lightning Fabric",
        "lightning",
        ("Fabric",),
        (
            "from holdfast.integrations.fabric import attach",
            "run = attach(fabric, state)        # state: as for fabric.save; then run.batches(loader) and run.step()",
        ),
        "lightning-fabric",
    ),
    Framework("Lightning", "lightning", ("Trainer",), (), "lightning"),
    Framework(
        "DeepSpeed",
        "deepspeed",
        ("initialize",),
        (
            "from holdfast.integrations.deepspeed import attach",
            "run = attach(engine)        # after deepspeed.initialize; then run.batches(loader)",
        ),
        "deepspeed",
    ),
    Framework(
        "Megatron-Bridge",
        "megatron.bridge",
        ("pretrain",),
        (
            "from holdfast.integrations.megatron_bridge import attach",
            "pretrain(config, forward_step, callbacks=attach(config))",
        ),
        "megatron-bridge",
    ),
    Framework(
        "Accelerate",
        "accelerate",
        ("Accelerator",),
        (
            "from holdfast.integrations.accelerate import attach",
            "run = attach(accelerator)        # after accelerator.prepare; then run.batches(loader) and run.step()",
        ),
        "accelerate",
    ),
)


def framework_of(tree: ast.Module) -> Framework | None:
    """The first framework of the table that the script imports and calls."""
    modules = {module + "." for module in imported(tree)}
    called = {last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return next(
        (
            each
            for each in FRAMEWORKS
            if any(module.startswith(f"{each.module}.") for module in modules) and called.intersection(each.marks)
        ),
        None,
    )


def imported(tree: ast.Module) -> Iterator[str]:
    """Each imported module, and `module.name` of names imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`; empty if the node is not a name."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(attr=name):
            return name
    return ""
