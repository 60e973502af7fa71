"""Write the schemas of the REST API, which the dashboard's types are made from: `python openapi.py FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.supervisor.api.app import build


class _Described:
    """What `build` reads of a backend to describe the API."""

    class identity:  # noqa: N801
        version = "1"


def main(path: Path) -> None:
    backend: Any = _Described
    document = build(backend).openapi()
    schemas = {name: _bare(schema) for name, schema in document["components"]["schemas"].items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    bare = {"openapi": document["openapi"], "info": document["info"], "paths": {}, "components": {"schemas": schemas}}
    path.write_text(json.dumps(bare, indent=1, sort_keys=True))


def _bare(schema: Any) -> Any:
    """Without prose, which would make the types ten times as long. A property may be called like it."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    prose = {key for key in ("title", "description") if isinstance(schema.get(key), str)}
    return {key: _bare(value) for key, value in schema.items() if key not in prose}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
