"""The example GPT with a pause in each step, as if a device worked meanwhile: its ranks leave the cores to what is tested.

paced_train.py PAUSE_S [ARGUMENTS OF examples/gpt/train.py]

A test that is done with a run that must come to its end makes the file `hurry` in the directory of `--out`: no more pauses.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

SCRIPT = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"

if __name__ == "__main__":
    pause_s = float(sys.argv.pop(1))
    hurry = Path(sys.argv[sys.argv.index("--out") + 1]) / "hurry"
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.0 if hurry.exists() else pause_s))
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
