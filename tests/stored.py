"""Small real checkpoints in a store, as a fleet's replicators leave them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Header, Image, Manifest, Plan, Reader, Stamp, TensorSpec, spans_of
from holdfast.shards.layout import PAGE
from holdfast.stores import ObjectStore, layout
from holdfast.stores.checksum import combine, crc32c, of_parts

TENSOR_BYTES = 10_000


def shard(
    key: ShardKey, mesh: Mesh, value: int, *, job: str = "gpt", tensor_bytes: int = TENSOR_BYTES
) -> tuple[bytes, Manifest]:
    """A shard file's bytes and its manifest; `value` fills the tensor, the rank is its extra."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "image")
        image = Image.create(path, Plan((TensorSpec("w", "uint8", (tensor_bytes,), tensor_bytes),)))
        assert image.try_lock()
        image.begin(Stamp(key, mesh, created_at=1000.0 + key.step, producer="test"))
        image.view("w")[:] = bytes([value]) * tensor_bytes
        image.write_extra(f"state of rank {key.rank}".encode())
        image.complete()
        image.close()
        with Reader(path) as reader:
            data, header = bytes(reader.data), reader.header
    return data, manifest_of(memoryview(data), header, job)


def manifest_of(data: memoryview, header: Header, job: str) -> Manifest:
    spans = spans_of(len(data), header.tensors_end)
    sums = [crc32c(data[span.offset : span.offset + span.size]) for span in spans]
    pairs = zip(spans, sums, strict=True)
    body = [(value, span.size) for span, value in pairs if PAGE <= span.offset < header.tensors_end]
    digest = f"{combine(body):08x}-{sum(size for _, size in body):x}"
    rank = header.stamp.key.rank
    return Manifest.of(header, job=job, node=f"n{rank}", digest=digest, crc32c=crc32c(data), spans=tuple(sums))


def upload_rank(store: ObjectStore, data: bytes, manifest: Manifest) -> None:
    """One rank's share, in the order of a replicator."""
    view, raw = memoryview(data), manifest.encode()
    tensors, rest = layout.tensors_part(view, manifest), layout.rest_parts(view, manifest)
    store.put(layout.tensors_key(manifest), [tensors], crc32c=layout.tensors_crc32c(manifest), if_absent=True)
    store.put(layout.rest_key(manifest.job, manifest.key), rest, crc32c=layout.rest_crc32c(manifest))
    store.put(layout.rank_manifest_key(manifest.job, manifest.key), [raw], crc32c=of_parts([raw]))


def save(
    store: ObjectStore,
    step: int,
    *,
    job: str = "gpt",
    attempt: int = 1,
    mesh: Mesh | None = None,
    sharded: bool = False,
    ranks: Iterable[int] | None = None,
    tensor_bytes: int = TENSOR_BYTES,
) -> layout.CheckpointManifest | None:
    """A checkpoint of `mesh` (dp 2 × pp 2); only `ranks` of it = one that was never completed."""
    mesh = mesh or Mesh.of({"dp": 2, "pp": 2})
    raws = []
    for rank in range(mesh.world_size) if ranks is None else ranks:
        value = (step + (rank if sharded else mesh.position_of(rank))) % 256
        data, manifest = shard(ShardKey(attempt, step, rank), mesh, value, job=job, tensor_bytes=tensor_bytes)
        upload_rank(store, data, manifest)
        raws.append(manifest.encode())
    if ranks is not None:
        return None
    checkpoint = layout.CheckpointManifest.of(raws)
    raw = checkpoint.encode()
    assert store.put(checkpoint.key, [raw], crc32c=of_parts([raw]), if_absent=True)
    return checkpoint
