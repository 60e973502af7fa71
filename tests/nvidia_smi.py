"""In nvidia-smi's place: `python nvidia_smi.py DIRECTORY --gpu-reset -i 0,1`.

It behaves as nvidia-smi does: refuses with exit code 3 while a process has a device open, takes its time, fails, hangs.
DIRECTORY has the device files (`dev/nvidia0` …) and `mode`, what it does instead of the reset ("fails", "hangs", "takes
SECONDS"). Each reset that was made is a line in `resets`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

IN_USE = 3


def users(device: Path) -> list[int]:
    """Processes that have the device open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                targets = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
            except OSError:
                continue
            if str(device) in targets:
                found.append(int(process.name))
    return found


def main(directory: Path, option: str, _: str, gpus: str) -> int:
    assert option == "--gpu-reset", option
    for gpu in gpus.split(","):
        if users(directory / "dev" / f"nvidia{gpu}"):
            print(f"GPU {gpu} is currently in use by another process.")
            return IN_USE
    mode, _, seconds = (
        (directory / "mode").read_text().partition(" ") if (directory / "mode").exists() else ("", "", "")
    )
    if mode == "fails":
        print(f"Unable to reset GPU {gpus}: Unknown Error")
        return 255
    if mode == "hangs":
        time.sleep(3600)
    time.sleep(float(seconds or 0.0))
    with (directory / "resets").open("a") as resets:
        resets.write(f"{gpus}\n")
    print(f"GPU {gpus} was successfully reset.\nAll done.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
