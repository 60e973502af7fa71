"""Object stores: the tier that survives the loss of all nodes. `open_store(url)` opens one; `layout` defines checkpoints in
it."""

from holdfast.stores.opening import open_store
from holdfast.stores.protocol import ObjectInfo, ObjectStore, Pace, StoreUrl, parse_url, unpaced

__all__ = ["ObjectInfo", "ObjectStore", "Pace", "StoreUrl", "open_store", "parse_url", "unpaced"]
