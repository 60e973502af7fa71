"""Object stores: the tier that survives every node. `open_store(url)` gives one, `layout` says what a checkpoint is in it."""

from holdfast.stores.opening import open_store, parse_url
from holdfast.stores.protocol import ObjectInfo, ObjectStore, Pace, StoreKind, StoreUrl, unpaced

__all__ = ["ObjectInfo", "ObjectStore", "Pace", "StoreKind", "StoreUrl", "open_store", "parse_url", "unpaced"]
