"""Opens a store by its URL. To add a kind of store, create a module and add a `StoreKind` to `KINDS`, or install a plug-in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from holdfast import plugins
from holdfast.domain.errors import InvalidSpec, PluginError
from holdfast.plugins import Group
from holdfast.stores.protocol import ObjectStore, StoreKind, StoreUrl

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)


def _open_file(url: StoreUrl) -> ObjectStore:
    from holdfast.stores.file import FileStore

    return FileStore(Path(url.prefix))


def _open_gcs(url: StoreUrl) -> ObjectStore:
    from holdfast.stores.gcs import GcsStore  # imported only when used, because it needs an extra

    return GcsStore(url.bucket, url.prefix)


KINDS: Mapping[str, StoreKind] = {
    "gs": StoreKind("gs://bucket/prefix", lambda url: _BUCKET.fullmatch(url.bucket) is not None, _open_gcs),
    "file": StoreKind(
        "file:///directory with an absolute path",
        lambda url: not url.bucket and url.prefix.startswith("/"),
        _open_file,
    ),
}


def open_store(url: str) -> ObjectStore:
    """Open `gs://bucket/prefix`, `file:///dir` or a URL of a plug-in's scheme. Opening does no I/O, so an unreachable store
    fails at its first use.

    Raises InvalidSpec for another URL, or if a package that the store needs is not installed.
    """
    parsed = parse_url(url)
    return _kind(parsed.scheme, url).open(parsed)


def parse_url(url: str) -> StoreUrl:
    """Parse a URL, without I/O. Raises InvalidSpec if it is not a store's URL."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket without its counterpart
        raise InvalidSpec("store", url, _expected()) from None
    path = unquote(parts.path)
    kind = _kind(parts.scheme, url)
    is_directory = parts.scheme == "file" and path.startswith("/")
    prefix = str(PurePosixPath("/", path.lstrip("/"))) if is_directory else path.strip("/")
    parsed = StoreUrl(parts.scheme, parts.netloc, prefix)
    malformed = parts.query or parts.fragment or "\0" in path or ".." in PurePosixPath(path).parts
    if malformed or not kind.is_valid(parsed):
        raise InvalidSpec("store", url, _expected())
    return parsed


def _kind(scheme: str, url: str) -> StoreKind:
    """Return the kind of a URL. Raises InvalidSpec for a scheme that neither Holdfast nor an installed plug-in supports."""
    if (own := KINDS.get(scheme)) is not None:
        return own
    plugin = plugins.find(Group.STORES, scheme)
    if plugin is None:
        raise InvalidSpec("store", url, _expected())
    try:
        return plugins.load(plugin, StoreKind)
    except PluginError as error:
        raise InvalidSpec("store", url, f"a store that can be opened ({error})") from error


def _expected() -> str:
    own = [kind.example for kind in KINDS.values()]
    return ", or ".join(own + [f"{plugin.name}://… of {plugin}" for plugin in plugins.installed(Group.STORES)])
