"""Opens a store by its URL. To add a kind of store, create a module, and add a case here and in `parse_url`."""

from __future__ import annotations

from pathlib import Path

from holdfast.stores.protocol import ObjectStore, parse_url


def open_store(url: str) -> ObjectStore:
    """`gs://bucket/prefix` or `file:///dir`. Nothing is read or written yet, so an unreachable store shows at its first use.

    Raises InvalidSpec for another URL, or when the extra that the store needs is not installed.
    """
    parsed = parse_url(url)
    match parsed.scheme:
        case "file":
            from holdfast.stores.file import FileStore

            return FileStore(Path(parsed.prefix))
        case "gs":
            from holdfast.stores.gcs import GcsStore

            return GcsStore(parsed.bucket, parsed.prefix)
        case other:
            raise AssertionError(f"parse_url let {other} pass")
