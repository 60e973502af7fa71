"""Makes cert_manager.json: a strict JSON Schema of cert-manager's Certificate, without references.

    npm pack @kubernetes-models/cert-manager@6.0.0 && tar xzf kubernetes-models-cert-manager-6.0.0.tgz
    python tests/kubernetes/data/make_cert_manager_schema.py package > tests/kubernetes/data/cert_manager.json

The package's type declarations are generated from cert-manager's Go types. They name fields, types and listed values, but not
defaults and what cert-manager's webhook checks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

START = "cert-manager.io/v1/Certificate.d.ts"
SIMPLE = {"string": "string", "boolean": "boolean", "number": "integer"}  # each number of this API is a Go int
LEFT_OUT = ("metadata", "status")  # Kubernetes' own, and not part of what is applied


def main(package: Path) -> None:
    schema = _schema(package, package / START)
    for name in LEFT_OUT:
        del schema["properties"][name]
    schema["properties"]["metadata"] = {"type": "object"}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    sys.stdout.write(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


def _schema(package: Path, file: Path) -> dict[str, Any]:
    """Return the schema of the type that a file declares first."""
    text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
    files = {name: (file.parent / path) for name, path in re.findall(r"import \{ (\w+) \} from \"(\.[^\"]+)\"", text)}
    if (listed := re.search(r"export type \w+ = ([^;]+);", text)) and "interface" not in text:
        return _type(package, files, listed[1])
    body = re.search(r"export interface \w+(?: extends ([\w, ]+))? \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    if body is None:
        raise SystemExit(f"{file}: no interface and no list of values")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for base in re.findall(r"\w+", body[1] or ""):
        if base in files:
            inherited = _schema(package, files[base].with_suffix(".d.ts"))
            properties |= inherited["properties"]
            required += inherited["required"]
    for name, optional, kind in re.findall(r'^    "(\w+)"(\??): (\{.*?\}|[^{;]*);$', body[2], re.MULTILINE | re.DOTALL):
        properties[name] = {} if name in LEFT_OUT else _type(package, files, kind)
        if not optional:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type(package: Path, files: dict[str, Path], kind: str) -> dict[str, Any]:
    kind = kind.strip()
    if kind in SIMPLE:
        return {"type": SIMPLE[kind]}
    if element := re.fullmatch(r"Array<(.*)>", kind, re.DOTALL):
        return {"type": "array", "items": _type(package, files, element[1])}
    if value := re.fullmatch(r"\{\s*\[key: string\]: (.*?);?\s*\}", kind, re.DOTALL):
        return {"type": "object", "additionalProperties": _type(package, files, value[1])}
    if re.fullmatch(r'"[^"]*"(\s*\|\s*"[^"]*")*', kind):
        return {"type": "string", "enum": re.findall(r'"([^"]*)"', kind)}
    if kind in files:
        path = files[kind]
        return _schema(package, path.with_suffix(".d.ts"))
    raise SystemExit(f"a type that this program does not know: {kind}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
