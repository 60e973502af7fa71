"""The Python of the documentation runs; what cannot run here uses names, arguments and types that exist."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from documented_blocks import NOT_RUN, STAND_INS
from markdown_pages import DOCUMENTS, ROOT, Block
from warm_processes import SCRIPTS, warm

import holdfast.policy
from holdfast.domain.job import PolicySpec
from holdfast.supervisor.policies.script import try_script

PYTHON = [block for block in DOCUMENTS.blocks if block.language == "python"]
TIMEOUT_S = 60.0
# Names that pages use without saying where they come from.
CONVENTIONS = {
    "run": "import holdfast.train as hf\nrun: hf.Run",
    "hf": "import holdfast.train as hf",
    "incident": "from holdfast.policy import Incident\nincident: Incident",
    "job": "from holdfast.policy import JobView\njob: JobView",
    **{name: f"from holdfast.policy import {name}" for name in holdfast.policy.__all__},
}
# Untyped code is fine in an example, and names may come from the text around it.
NOT_ASKED = ",".join(
    (
        *("name-defined", "has-type", "no-redef", "import-not-found", "import-untyped"),
        *("no-untyped-def", "no-untyped-call", "no-any-return", "misc", "unreachable"),
    )
)
REEXPORTED = re.compile(r'Module "torch.* does not explicitly export')  # torch's packages do not say what they export


def is_fragment(block: Block) -> bool:
    """Whether it is the inside of a function, such as a `return` alone."""
    try:
        compile(block.text, block.name, "exec")
    except SyntaxError as error:
        if "outside function" not in str(error):
            raise
        return True
    return False


def unbound(block: Block) -> list[str]:
    """The names that the block uses and does not define, in order."""
    tree = ast.walk(ast.parse(block.text))
    bound, used = set(dir(builtins)), set()
    for node in tree:
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name, alias):
                bound.add(alias or name.partition(".")[0])
    return sorted(used - bound)


def is_policy(block: Block) -> bool:
    return "def decide" in block.text or (is_fragment(block) and "return" in block.text)


def policy_of(block: Block) -> str:
    if not is_fragment(block):
        return block.text
    imports = "from holdfast.policy import *\nfrom holdfast.policy import default\n"
    inside = "".join(f"    {line}\n" for line in block.text.splitlines())
    if "loan" not in block.text:  # an answer to a fault
        inside = f"    if incident.kind == 'loan':\n        return default(incident, job)\n{inside}"
    return f"{imports}\n\ndef decide(incident, job):\n{inside}    return default(incident, job)\n"


RUN = [block for block in PYTHON if block.name in STAND_INS or (not is_policy(block) and not unbound(block))]
RUN = [block for block in RUN if block.name not in NOT_RUN]


def test_every_block_runs_or_has_a_reason_not_to() -> None:
    running = {block.name for block in PYTHON if block in RUN or is_policy(block)}
    names = {block.name for block in PYTHON}
    assert running.isdisjoint(NOT_RUN)
    assert names - running - NOT_RUN.keys() == set(), "give it names in STAND_INS, or a reason in NOT_RUN"
    assert (NOT_RUN.keys() | STAND_INS.keys()) - names == set(), "no page has these blocks any more"
    assert len(names) == len(PYTHON), "two blocks of a page begin with the same line"


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "block.py"
    script.write_text(f"{STAND_INS.get(block.name, '')}\n{block.text}", encoding="utf-8")
    code, out, err = warm(SCRIPTS)([str(script)], tmp_path, dict(os.environ), TIMEOUT_S)
    assert code == 0, f"{block.page}, line {block.line}: {out}{err}"


@pytest.mark.parametrize("block", [block for block in PYTHON if is_policy(block)], ids=lambda block: block.name)
def test_a_policy_answers_every_incident(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text(policy_of(block), encoding="utf-8")
    assert [trial for trial in try_script(PolicySpec(str(script)), deadline_s=30.0) if trial.problem] == []


def test_the_example_of_a_policy_answers_every_incident() -> None:
    script = str(ROOT / "examples/policy.py")
    assert [trial for trial in try_script(PolicySpec(script), deadline_s=30.0) if trial.problem] == []


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of a block → what mypy says about it. One run for all blocks, with the cache of `make lint`."""
    written = {f"documented_{number}.py": block for number, block in enumerate(PYTHON)}
    directory = tmp_path_factory.mktemp("documented")
    for name, block in written.items():
        given = [CONVENTIONS[each] for each in unbound(block) if each in CONVENTIONS]
        inside = f"def fragment():\n{block.text}" if is_fragment(block) else block.text
        inside = re.sub(r"(?m)^(?!def fragment)(?=.)", "    ", inside) if is_fragment(block) else inside
        options = f"# mypy: disable-error-code={NOT_ASKED!r}, allow-untyped-defs, allow-untyped-globals".replace(
            "'", '"'
        )
        (directory / name).write_text("\n".join([options, *given, inside]), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *(str(directory / name) for name in written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said = defaultdict(list)
    for line in done.stdout.splitlines():
        if (found := re.match(r".*?(documented_\d+\.py):\d+: error: (.*)", line)) and not REEXPORTED.match(found[2]):
            said[written[found[1]].name].append(found[2])
    return said


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_names_and_arguments_exist(block: Block, mistakes: dict[str, list[str]]) -> None:
    assert mistakes[block.name] == [], f"{block.page}, line {block.line}"
