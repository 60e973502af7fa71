"""The lines that a training script needs: they are put where the steps are, or the reason is given why that is not known."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from holdfast.cli.demo.course import examples
from holdfast.cli.script_changes import Change, Ready, Unclear, Uses, changes
from holdfast.cli.script_frameworks import FRAMEWORKS

ADDED = ("import holdfast", ".attach()", ".begin_step(", ".end_step(")


def changed(text: str, tmp_path: Path) -> str:
    """The script after its diff was applied with `patch`."""
    script = tmp_path / "train.py"
    script.write_bytes(text.encode())
    found = changes(text, script.name)
    assert isinstance(found, Change), found
    done = subprocess.run(
        ["patch", "--binary", "-p0"], cwd=tmp_path, input=found.diff.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    result = script.read_bytes().decode()
    ast.parse(result)
    kept = [line.rstrip("\r\n") for line in result.splitlines() if not any(part in line for part in ADDED)]
    assert kept == [line.rstrip("\r\n") for line in text.splitlines()]  # nothing else has changed
    return result


def test_a_loop_with_a_counter(tmp_path: Path) -> None:
    text = dedent(
        """\
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = 3
        while step < 10:
            optimizer.step()
            step += 1
        """
    )
    assert changed(text, tmp_path) == dedent(
        """\
        import torch
        import holdfast.train as hf

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = 3
        run = hf.attach()
        while step < 10:
            run.begin_step(step)
            optimizer.step()
            run.end_step()
            step += 1
        """
    )


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        ("for step in range(100):\n    optimizer.step()", "step"),
        ("for step in range(start, 100):\n    optimizer.step()", "step"),
        ("for step in range(0, 100, 2):\n    optimizer.step()", "run.steps_finished"),
        ("for epoch in range(3):\n    for step in range(100):\n        optimizer.step()", "run.steps_finished"),
        ("for batch in loader:\n    optimizer.step()", "run.steps_finished"),
        ("for batch in loader:\n    optimizer.step()\n    done += 1", "done"),
        (
            "for epoch in range(3):\n    done = 0\n    for batch in loader:\n        optimizer.step()\n        done += 1",
            "run.steps_finished",
        ),
        ("for batch in loader:\n    optimizer.step()\n    done += 1\n    other += 1", "run.steps_finished"),
        ("for batch in loader:\n    scaler.step(optimizer)", "run.steps_finished"),
        ("for batch in loader:\n    with amp():\n        self.optim.step()", "run.steps_finished"),
    ],
)
def test_the_number_of_a_step(loop: str, number: str, tmp_path: Path) -> None:
    result = changed(f"{loop}\n", tmp_path)
    assert f"run.begin_step({number})" in result


def test_an_optimizer_is_known_by_its_class(tmp_path: Path) -> None:
    assert "run.end_step()" in changed("a = AdamW(parameters)\nfor batch in loader:\n    a.step()\n", tmp_path)


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    text = (
        "for number, batch in enumerate(loader):\n    loss(batch)\n    if number % 4 == 3:\n        optimizer.step()\n"
    )
    assert changed(text, tmp_path).splitlines() == [
        "import holdfast.train as hf",
        "run = hf.attach()",
        "run.begin_step(run.steps_finished)",
        "for number, batch in enumerate(loader):",
        "    loss(batch)",
        "    if number % 4 == 3:",
        "        optimizer.step()",
        "        run.end_step()",
        "        run.begin_step(run.steps_finished)",
    ]


def test_a_function_that_steps_is_looked_for_in_its_caller(tmp_path: Path) -> None:
    text = "def train_step(batch):\n    optimizer.step()\n\n\nfor batch in loader:\n    loss = train_step(batch)\n"
    assert changed(text, tmp_path).splitlines()[-5:] == [
        "run = hf.attach()",
        "for batch in loader:",
        "    run.begin_step(run.steps_finished)",
        "    loss = train_step(batch)",
        "    run.end_step()",
    ]


def test_of_two_optimizers_in_a_loop_the_last_ends_the_step(tmp_path: Path) -> None:
    text = "for batch in loader:\n    optim_d.step()\n    optim_g.step()\n"
    assert changed(text, tmp_path).endswith("    optim_d.step()\n    optim_g.step()\n    run.end_step()\n")


STEP = "optimizer.step()\n"


@pytest.mark.parametrize(
    "step",
    [
        f"    if amp:\n        scaler.step(optimizer)\n        scaler.update()\n    else:\n        {STEP}",
        f"    if a:\n        {STEP}    elif b:\n        if c:\n            {STEP}    else:\n        {STEP}",
        f"    try:\n        {STEP}    except RuntimeError:\n        {STEP}",
        f"    optim_d.step()\n    match kind:\n        case 1:\n            {STEP}        case _:\n            {STEP}",
    ],
    ids=["amp", "elif", "except", "match"],
)
def test_a_step_ends_after_every_way_to_take_it(step: str, tmp_path: Path) -> None:
    """Otherwise a script that takes the other way would begin a step and never end it."""
    text = f"for batch in loader:\n{step}    scheduler.step()\n"
    assert changed(text, tmp_path) == (
        "import holdfast.train as hf\nrun = hf.attach()\nfor batch in loader:\n"
        f"    run.begin_step(run.steps_finished)\n{step}    run.end_step()\n    scheduler.step()\n"
    )


def test_names_that_the_script_uses_are_left_to_it(tmp_path: Path) -> None:
    text = "import wandb\nimport huggingface as hf\n\nrun = wandb.init()\nfor batch in loader:\n    optimizer.step()\n"
    result = changed(text, tmp_path)
    assert "import holdfast.train as holdfast_train" in result
    assert "holdfast_run.begin_step(holdfast_run.steps_finished)" in result


@pytest.mark.parametrize(
    "text",
    [
        "import torch\r\nfor batch in loader:\r\n    optimizer.step()\r\n",
        "import torch\nfor batch in loader:\n    optimizer.step()",  # the last line has no end
        "import torch\nfor batch in loader:\n\toptimizer.step()  # with a tab\n",
        'print("\u2028 ü \x0c")\nfor batch in loader:\n    print("ü"), optimizer.step()\n',
    ],
    ids=["crlf", "no-newline", "tab", "separators"],
)
def test_the_text_around_is_kept(text: str, tmp_path: Path) -> None:
    result = changed(text, tmp_path) if "\u2028" not in text else _patched(text, tmp_path)
    assert "run.end_step()" in result
    assert ("\r\n" in text) == ("import holdfast.train as hf\r\n" in result)


def _patched(text: str, tmp_path: Path) -> str:
    """As `changed`, for a text whose lines `str.splitlines` counts otherwise than Python."""
    found = changes(text, "train.py")
    assert isinstance(found, Change)
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=found.diff.encode(), capture_output=True, check=True)
    return (tmp_path / "train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("for batch in loader: print(batch)\n", "no call of an optimizer's step"),
        ("optimizer.step()\n", "in no loop"),
        ("for a in b:\n    optimizer.step()\nfor c in d:\n    optimizer.step()\n", "several loops (lines 2, 4)"),
        ("for batch in loader: optimizer.step()\n", "several statements in a line"),
        ("for batch in loader:\n    optimizer.step(); print()\n", "several statements in a line"),
        ("for batch in loader\n", "not valid Python"),
        ("", "no call of an optimizer's step"),
        ("for batch in loader:\n    scheduler.step()\n", "no call of an optimizer's step"),
    ],
)
def test_unclear_scripts_are_refused_with_the_reason(text: str, reason: str) -> None:
    found = changes(text, "train.py")
    assert isinstance(found, Unclear)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("script", "framework"),
    [
        ("hf_trainer.py", "Hugging Face Trainer"),
        ("lightning_autoencoder.py", "Lightning"),
        ("fabric_language_model.py", "Lightning Fabric"),
        ("accelerate_loop.py", "Accelerate"),
        ("deepspeed_cifar.py", "DeepSpeed"),
    ],
)
def test_a_framework_is_recognised(script: str, framework: str) -> None:
    text = (examples() / "frameworks" / script).read_text()
    without = "\n".join(line for line in text.splitlines() if "holdfast" not in line)
    found = changes(without, script)
    assert isinstance(found, Uses)
    assert found.framework.name == framework


@pytest.mark.parametrize(
    "script", ["gpt/train.py", "fsdp/train.py", "frameworks/hf_trainer.py", "torchrun/train_checkpoints.py"]
)
def test_a_script_that_uses_holdfast_needs_nothing(script: str) -> None:
    assert changes((examples() / script).read_text(), script) == Ready()


def test_megatron_lm_is_not_megatron_bridge() -> None:
    script = "from megatron.{} import pretrain\npretrain()\n"
    bridge = changes(script.format("bridge.training.pretrain"), "train.py")
    assert isinstance(bridge, Uses)
    assert bridge.framework.name == "Megatron-Bridge"
    assert isinstance(changes(script.format("training"), "train.py"), Unclear)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_the_lines_of_a_framework_are_those_of_the_documentation(framework: object) -> None:
    page = (Path(__file__).parents[3] / "docs/frameworks.md").read_text()
    assert f"## {framework.name}\n" in page  # type: ignore[attr-defined]
    for line in framework.lines:  # type: ignore[attr-defined]
        assert line.partition("  ")[0] in page
