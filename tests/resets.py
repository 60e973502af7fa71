"""A directory that stands for a node's GPUs: device files, and a command in nvidia-smi's place (`nvidia_smi.py`)."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

COMMAND = Path(__file__).with_name("nvidia_smi.py")


@dataclass(frozen=True, slots=True)
class StandInGpus:
    directory: Path

    @classmethod
    def make(cls, directory: Path, count: int) -> StandInGpus:
        (directory / "dev").mkdir(parents=True)
        for gpu in range(count):
            (directory / "dev" / f"nvidia{gpu}").touch()
        return cls(directory)

    @property
    def devices(self) -> Path:
        return self.directory / "dev"

    @property
    def command(self) -> str:
        """For `HOLDFAST_GPU_RESET_COMMAND`."""
        return shlex.join([sys.executable, str(COMMAND), str(self.directory)]) + " --gpu-reset -i {gpu}"

    def behave(self, mode: str) -> None:
        """What the command does: "fails", "hangs", "takes SECONDS"; "" = it resets at once."""
        (self.directory / "mode").write_text(mode)

    @property
    def resets(self) -> list[str]:
        """The GPUs of each reset that was made, in order."""
        path = self.directory / "resets"
        return path.read_text().split() if path.exists() else []
