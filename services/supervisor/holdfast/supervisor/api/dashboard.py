"""The dashboard at `/`: static files beside this package, no build step and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

FILES = Path(__file__).parent.parent / "dashboard"


def mount(app: FastAPI) -> None:
    """Behind every other route."""
    app.mount("/", StaticFiles(directory=FILES, html=True), name="dashboard")
