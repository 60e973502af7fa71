"""The bytes that `torch.save` writes around the payload of one tensor.

With this prefix and suffix, the slot of a tensor in a shard is a file that `torch.load`, and therefore a plain
`torch.distributed.checkpoint`, can read. They depend on the shape and the type alone, so they are written when an image is
created, and never in a save. The archive's checksum of the payload is that of zero bytes: torch does not check it, and the
checksums of the manifest cover every byte of the shard."""

from __future__ import annotations

import os
import struct
import zipfile
from functools import lru_cache

import torch

from holdfast.domain.errors import Conflict
from holdfast.shards import Envelope

_PAYLOAD = "archive/data/0"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: 26 bytes, then the sizes of its name and of its extra field


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """Raises Conflict if this build of torch writes an archive with a layout other than prefix, payload, suffix."""
    # skip_data leaves a hole in place of the payload, so that no memory is used for a large tensor.
    tensor = torch.empty(shape, dtype=dtype)
    with os.fdopen(os.memfd_create("envelope", os.MFD_CLOEXEC), "w+b") as file:
        with torch.serialization.skip_data():
            torch.save(tensor, file)
        file.flush()
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo(_PAYLOAD)
        if entry.file_size != tensor.nbytes or entry.compress_type != zipfile.ZIP_STORED:
            raise Conflict(f"torch {torch.__version__} does not store tensors as plain bytes: {entry}")
        header = os.pread(file.fileno(), _LOCAL_HEADER.size, entry.header_offset)
        payload = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        prefix = os.pread(file.fileno(), payload, 0)
        after = payload + tensor.nbytes
        return Envelope(prefix, os.pread(file.fileno(), size - after, after))
