"""Object stores: the tier that survives every node. `open_store(url)` gives one, `layout` says what a checkpoint is in it."""

from holdfast.stores.opening import open_store
from holdfast.stores.protocol import ObjectInfo, ObjectStore, Pace, StoreUrl, parse_url, unpaced

__all__ = ["ObjectInfo", "ObjectStore", "Pace", "StoreUrl", "open_store", "parse_url", "unpaced"]
