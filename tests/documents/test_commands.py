"""The commands of the documentation name what exists, and those that need nothing run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import Shell
from documented_commands import Wrong, check_line, check_span, commands
from markdown_pages import DOCUMENTS, ROOT, SHELL, Block

SHELL_BLOCKS = [block for block in DOCUMENTS.blocks if block.language in (SHELL, "sh", "bash", "console")]
LINES = sorted({line.strip() for block in SHELL_BLOCKS for line in commands(block.text) if line.strip()})
SPANS = sorted(
    {
        (page.name, span)
        for page in DOCUMENTS.pages
        for span in page.spans()
        if re.match(r"(holdfast|make|python) ", span)
    }
)
LANGUAGES = {SHELL, "sh", "bash", "python", "yaml", "mermaid", "text"}  # of `text`: drawings, formats, output
# Documented lines that need no stack, in an order that works.
RUN = (
    "holdfast ca init",
    "holdfast ca issue supervisor diagnostics --host head-1 --out head-1",
    "holdfast ca issue agent/node-1 --out node-1",
    "holdfast ca list",
    "holdfast tokens create ada --role submitter --days 90 --file tokens.json",
    "holdfast tokens list --file tokens.json",
    "holdfast tokens revoke ada --file tokens.json",
    "holdfast policy check policy.py",
    "holdfast policy actions",
    "holdfast slurm submit job.yaml --spares 1 --time 24:00:00 --dry-run -- --partition=gpu --gpus-per-node=8",
)
DOCTOR_FOUND = 1  # its exit code where something is missing, as on most machines


@pytest.mark.parametrize("block", DOCUMENTS.blocks, ids=lambda block: f"{block.page}:{block.line}")
def test_a_block_names_its_language(block: Block) -> None:
    assert block.language in LANGUAGES
    assert block.language != "text" or not re.search(r"^(holdfast|make|python) ", block.text, re.M), (
        "these are commands"
    )


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_what_exists(line: str) -> None:
    check_line(line)


@pytest.mark.parametrize(("page", "span"), SPANS)
def test_a_command_in_the_text_names_what_exists(page: str, span: str) -> None:
    check_span(span)


@pytest.mark.parametrize(
    "line",
    [
        "holdfast runn train.py",
        "holdfast run --no-such-option train.py",
        "holdfast jobs",
        "holdfast jobs stop",
        "make no-such-target",
        "make soak NO_SUCH=1",
        "make bench-core ARGS=--no-such",
        "make demo ARGS='--no-such'",
        "python -m holdfast.no_such_module",
        "pip install holdfast",
        "pip install '.[no-such]'",
        "torchrun --nproc-per-node 2 examples/no_such.py",
        "docker compose kill no-such",
        "docker compose exec supervisor-a holdfast no-such",
        "helm install holdfast deploy/kubernetes/chart --set no.such=1",
        "curl http://127.0.0.1:8470/v1/no-such",
        "HOLDFAST_NO_SUCH=1 holdfast up",
        "holdfast jobs list | no-such-program",
    ],
)
def test_a_wrong_line_is_reported(line: str) -> None:
    with pytest.raises(Wrong):
        check_line(line)


@pytest.mark.parametrize("span", ["holdfast jobs list|no-such", "holdfast run --no-such", "make no-such"])
def test_a_wrong_command_in_the_text_is_reported(span: str) -> None:
    with pytest.raises(Wrong):
        check_span(span)


def test_what_needs_nothing_runs(tmp_path: Path) -> None:
    documented = {" ".join(shlex.split(line, comments=True)) for line in LINES} | {span for _, span in SPANS}
    (job,) = (block.text for block in DOCUMENTS.blocks if block.page == "docs/slurm.md" and block.language == "yaml")
    (tmp_path / "train.py").write_text("")
    shell = Shell(tmp_path, {"HOME": str(tmp_path)})
    assert "holdfast init train.py" in documented
    assert shell("init", "train.py").code == 0
    (tmp_path / "job.yaml").write_text(job.replace("/shared/", f"{tmp_path}/"))
    (tmp_path / "policy.py").write_text((ROOT / "examples/policy.py").read_text())
    for line in RUN:
        assert line in documented, line
        result = shell(*shlex.split(line)[1:])
        assert result.code == 0, f"{line}: {result.out}{result.err}"
    assert "holdfast run" in shell("--help").out
    assert shell("doctor").code in (0, DOCTOR_FOUND)
