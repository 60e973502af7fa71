"""The demo's stand-in for `nvidia-smi --gpu-reset`: resets nothing, takes a second, and prints a message. Needs no GPU."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

TAKES_S = 1.0


def command() -> str:
    """Return the command line for `HOLDFAST_GPU_RESET_COMMAND`."""
    return shlex.join([sys.executable, str(Path(__file__).resolve())]) + " {gpu}"


if __name__ == "__main__":
    time.sleep(TAKES_S)
    print(f"stand-in of the demo for nvidia-smi --gpu-reset -i {sys.argv[1]}: no GPU was touched")
