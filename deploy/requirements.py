"""Prints what a pyproject.toml and some of its extras require, one a line: python requirements.py FILE [EXTRA …]."""

import sys
import tomllib
from pathlib import Path

file, *extras = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]
for requirement in project["dependencies"] + [one for extra in extras for one in project["optional-dependencies"][extra]]:
    print(requirement)
