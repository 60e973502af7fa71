"""The Python of docs/frameworks.md, and of README's section on frameworks, compiles, imports what there is, and calls what
exists; the page names the installed releases."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import holdfast.train as hf

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    text
    for page in (PAGE, README)
    for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if "holdfast.integrations" in text or page is PAGE
]
RELEASES = ("transformers", "accelerate", "lightning", "torchdata", "deepspeed", "torchtitan", "megatron-core")


@pytest.mark.parametrize("text", BLOCKS, ids=lambda text: text.splitlines()[0])
def test_a_block_uses_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    for framework in re.findall(
        r"holdfast\.integrations\.(transformers|lightning|fabric|accelerate|deepspeed|megatron)", text
    ):
        if find_spec("lightning" if framework == "fabric" else framework) is None:
            pytest.skip(f"{framework} is not installed: make frameworks-test")
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    if "megatron_bridge" in text:
        return  # Bridge needs a GPU: tests/frameworks/test_megatron.py makes the call
    names: dict[str, object] = {}
    exec(compile(ast.Module(imports, []), "docs/frameworks.md", "exec"), names)
    if "accelerate" in text:
        from holdfast.integrations.accelerate import AcceleratedRun

        run: type = AcceleratedRun
    elif "integrations.fabric" in text:
        from holdfast.integrations.fabric import FabricRun

        run = FabricRun
    elif "deepspeed" in text:
        from holdfast.integrations.deepspeed import DeepSpeedRun

        run = DeepSpeedRun
    else:
        run = hf.Run
    called = set(re.findall(r"\brun\.(\w+)", text))
    assert not [name for name in called if not hasattr(run, name)]


@pytest.mark.parametrize("name", RELEASES)
def test_the_page_names_the_release_that_is_installed_here(name: str) -> None:
    if find_spec(name.removesuffix("-core")) is None:
        pytest.skip(f"{name} is not installed: make frameworks-test")
    assert f"{name} {importlib.metadata.version(name)}" in PAGE
