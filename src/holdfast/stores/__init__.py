"""Object stores: the tier that survives the loss of all nodes. `open_store(url)` opens one; `layout` defines checkpoints in
it."""

from holdfast.stores.opening import open_store, parse_url
from holdfast.stores.protocol import ObjectInfo, ObjectStore, Pace, StoreKind, StoreUrl, unpaced

__all__ = ["ObjectInfo", "ObjectStore", "Pace", "StoreKind", "StoreUrl", "open_store", "parse_url", "unpaced"]
