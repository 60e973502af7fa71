from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.stores import open_store, parse_url
from holdfast.stores.file import FileStore


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket.of-us_1/a/b/", "gs://bucket.of-us_1/a/b"),
        ("file:///mnt/checkpoints", "file:///mnt/checkpoints"),
        ("file:///mnt//checkpoints/", "file:///mnt/checkpoints"),
        ("file:///a%20b", "file:///a b"),
    ],
)
def test_addresses(url: str, normal: str) -> None:
    assert str(parse_url(url)) == normal


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/mnt/checkpoints",
        "s3://bucket",
        "gs://",
        "gs:///a",
        "gs://Bucket",
        "gs://b/../c",
        "gs://bucket?x=1",
        "file://host/mnt",
        "file:relative",
        "file:///a/../b",
        "file:///a%00b",
        "http://bucket",
    ],
)
def test_no_addresses(url: str) -> None:
    with pytest.raises(InvalidSpec, match="gs://bucket/prefix"):
        parse_url(url)


def test_a_directory(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, FileStore)
    assert store.url == f"file://{tmp_path}/store"
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object) -> object:
        if name.startswith("google.cloud"):
            raise ImportError(name)
        return real(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "holdfast.stores.gcs", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidSpec, match=r"holdfast-training\[gcs\]"):
        open_store("gs://bucket/dir")


def test_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nowhere.json"))
    with pytest.raises(InvalidSpec, match="gcloud auth application-default login"):
        open_store("gs://bucket/dir")
