"""What is shown for a worker, and that it stops before the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.train.warm import title

# The file alone: the package imports torch.
IMPORT = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("title", {title.__file__!r})
title = module_from_spec(spec)
spec.loader.exec_module(title)
"""
PROGRAM = f"""
import sys
from pathlib import Path
{IMPORT}
title.set_title(sys.argv[1], sys.argv[2])
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode())
print(Path("/proc/self/environ").read_bytes().split(b"\\0")[0].decode())
"""


def shown(directory: Path, job: str, rank: str) -> tuple[str, str]:
    """The command line of a process that has set its title, and the first variable of its environment."""
    program = directory / "p.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), job, rank],
        capture_output=True,
        text=True,
        env={"HOLDFAST_FIRST": "kept"},
        check=True,
    )
    words, first = done.stdout.splitlines()
    return words, first


def test_the_job_and_the_rank_are_shown(tmp_path: Path) -> None:
    assert shown(tmp_path, "gpt", "3") == ("holdfast: gpt rank 3", "HOLDFAST_FIRST=kept")


@pytest.mark.parametrize("job", ["a" * 63, "é" * 63])
def test_of_a_long_name_as_much_as_there_is_room_for_and_the_rank(tmp_path: Path, job: str) -> None:
    words, first = shown(tmp_path, job, "12345")
    assert first == "HOLDFAST_FIRST=kept"
    assert words.startswith(f"holdfast: {job[:10]}")


def test_a_path_with_less_room_than_the_name_needs_leaves_the_rank(tmp_path: Path) -> None:
    program = f"{IMPORT}\ntitle.set_title('j' * 5000, '7')\nprint(open('/proc/self/cmdline').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\0\n").endswith("j rank 7")
