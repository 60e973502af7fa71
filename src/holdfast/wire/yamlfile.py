"""Reads YAML with the line of every key and item, so that an error can name the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.domain.errors import InvalidSpec, InvalidSpecs

FILE_CHARS_MAX = 1024 * 1024

KeyPath = tuple[str | int, ...]  # ("elastic", "min_dp"), ("args", 0)


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping read from a file, and the line of each key and item in it."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int]  # from 1

    def where(self, key: KeyPath) -> str:
        """Return `file:line` of `key`, or of the innermost existing key around it."""
        while key not in self.lines:
            key = key[:-1]
        return f"{self.path}:{self.lines[key]}"


def read(path: Path) -> Document:
    """Read one YAML mapping. Raises `InvalidSpec` with file and line if the file is unreadable, not YAML, not a mapping, or has
    a key twice."""
    text = _text(path)
    try:
        return _parse(path, text)
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error
    except (ValueError, OverflowError, RecursionError, AttributeError) as error:
        # An impossible number, brackets without end; AttributeError: a text that is tagged as a date
        raise InvalidSpec("file", path.name, f"YAML ({error})", str(path)) from error


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidSpec("file", str(path), f"a readable YAML file ({reason})") from error
    if len(text) > FILE_CHARS_MAX:
        raise InvalidSpec("file", str(path), f"at most {FILE_CHARS_MAX} characters, not {len(text)}")
    return text


def _parse(path: Path, text: str) -> Document:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise InvalidSpec("file", text[:40], "a mapping of keys to values, such as `name: my-job`", f"{path}:1")
        lines, repeated = _lines(root, path)
        if repeated:
            raise InvalidSpecs(repeated)
        return Document(path, loader.construct_document(root), lines)
    finally:
        loader.dispose()


def _not_yaml(path: Path, error: yaml.YAMLError) -> InvalidSpec:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return InvalidSpec("file", path.name, f"YAML ({problem})", f"{path}:{mark.line + 1}" if mark else str(path))


def _lines(root: yaml.MappingNode, path: Path) -> tuple[dict[KeyPath, int], list[InvalidSpec]]:
    """Return the line of every key, and errors for keys that occur twice in one mapping, of which YAML silently takes the
    last."""
    lines: dict[KeyPath, int] = {(): root.start_mark.line + 1}
    repeated: list[InvalidSpec] = []
    seen: set[int] = set()  # an alias is one node at many places, which is walked once to limit the time
    todo: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    while todo:
        above, node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for part, line, value in _parts(node):
            key = (*above, part)
            if key in lines:
                repeated.append(
                    InvalidSpec(dotted(key), part, f"each key once; first on line {lines[key]}", f"{path}:{line}")
                )
            else:
                lines[key] = line
                todo.append((key, value))
    return lines, repeated


def _parts(node: yaml.Node) -> list[tuple[str | int, int, yaml.Node]]:
    match node:
        case yaml.MappingNode():
            return [(str(key.value), key.start_mark.line + 1, value) for key, value in node.value]
        case yaml.SequenceNode():
            return [(index, item.start_mark.line + 1, item) for index, item in enumerate(node.value)]
        case _:
            return []


def dotted(key: KeyPath) -> str:
    """Return the path as text: `elastic.min_dp`, `args[0]`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
