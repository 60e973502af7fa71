"""The shard format: one file, the same bytes as memory image, disk file and peer copy. Standard library only."""

from holdfast.shards.image import Image
from holdfast.shards.images import ImageSet, Skipped, Staged
from holdfast.shards.layout import Header, Stamp
from holdfast.shards.manifest import CHUNK_BYTES, Manifest, Span, spans_of, sync_directory
from holdfast.shards.reader import Reader, peek
from holdfast.shards.slots import Envelope, Plan, Slot, TensorSpec

__all__ = [
    "CHUNK_BYTES",
    "Envelope",
    "Header",
    "Image",
    "ImageSet",
    "Manifest",
    "Plan",
    "Reader",
    "Skipped",
    "Slot",
    "Span",
    "Staged",
    "Stamp",
    "TensorSpec",
    "peek",
    "spans_of",
    "sync_directory",
]
