"""Writes what a pyproject.toml and some of its extras require, one a line: python requirements.py FILE [EXTRA …]."""

import sys
import tomllib
from pathlib import Path

file, *extras = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]
wanted = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
sys.stdout.writelines(f"{requirement}\n" for requirements in wanted for requirement in requirements)
