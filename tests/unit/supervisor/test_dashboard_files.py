"""The built dashboard: what is served, with which headers, and that it is what its sources say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from holdfast.supervisor.api.dashboard import FILES

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "services/supervisor/dashboard"
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml", "http://www.w3.org/1998/Math/MathML"}


@pytest.mark.anyio
async def test_the_dashboard_is_served_with_a_policy_that_allows_nothing_from_elsewhere(api: Any) -> None:
    page = await api.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name, kind in (("app.js", "javascript"), ("index.css", "text/css")):
        assert name in page.text
        answer = await api.http.get(f"/{name}")
        assert kind in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
    assert "<script>" not in page.text, "an inline script would be refused by the policy"
    assert (await api.http.get("/../settings.py")).status_code == 404
    assert "content-security-policy" not in (await api.http.get("/docs")).headers, "that page has inline scripts"


def test_the_built_files_name_no_other_host() -> None:
    for path in FILES.iterdir():
        if path.suffix in (".js", ".css", ".html"):
            named = set(re.findall(r"""https?://[^\s"'`)]+""", path.read_text()))
            assert named <= NAMESPACES, path.name
    assert not list(FILES.glob("*.map"))


def test_bundled_libraries_come_with_their_licences_in_the_wheel(tmp_path: Path) -> None:
    bundled = json.loads((SOURCES / "package.json").read_text())["dependencies"]
    text = (FILES / "LICENSES.txt").read_text()
    for name in bundled:
        assert re.search(rf"^{name} \d+\.\d+\.\d+ \(MIT\)$", text, re.MULTILINE), name
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    packed = set(zipfile.ZipFile(wheel).namelist())
    for name in ("index.html", "app.js", "index.css", "build.json", "LICENSES.txt"):
        assert f"holdfast/supervisor/dashboard/{name}" in packed
    assert not [name for name in packed if "node_modules" in name or name.endswith(".tsx")]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "check.py"), str(FILES / "build.json")]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_built_files_are_what_the_sources_say_and_a_changed_source_is_found(tmp_path: Path) -> None:
    assert check(SOURCES).returncode == 0, "run make dashboard"
    copy = tmp_path / "dashboard"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
    assert check(copy).returncode == 0
    (copy / "src" / "more.ts").write_text("export {};\n")
    changed = check(copy)
    assert changed.returncode == 1
    assert "make dashboard" in changed.stderr
    (copy / "src" / "more.ts").unlink()
    lock = copy / "package-lock.json"
    lock.write_text(lock.read_text().replace("preact", "preakt", 1))
    assert check(copy).returncode == 1
