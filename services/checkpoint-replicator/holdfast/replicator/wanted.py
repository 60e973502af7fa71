"""Which shard is wanted: the values by which a manifest that is offered for it is accepted or refused."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.generations import RankRestore, ShardKey
from holdfast.replicator.names import label
from holdfast.shards import Manifest


@dataclass(frozen=True, slots=True)
class Wanted:
    """`digest` and `root` as in `RankRestore`; "" = not known, so that every value is accepted."""

    key: ShardKey
    digest: str = ""
    root: str = ""

    @classmethod
    def of(cls, restore: RankRestore) -> Wanted:
        return cls(restore.shard, restore.digest, restore.root)

    @classmethod
    def like(cls, manifest: Manifest) -> Wanted:
        """Another copy of this shard."""
        return cls(manifest.key, manifest.digest, manifest.root)

    def differs(self, offered: Manifest) -> str:
        """Return why a shard with this manifest is not the wanted one; "" if it is."""
        if offered.key != self.key:
            return f"it is {label(offered.key)}, not {label(self.key)}"
        if self.digest and offered.digest != self.digest:
            return f"its digest is {offered.digest}, not {self.digest}"
        if self.root and offered.root != self.root:
            return f"its root is {offered.root or 'not known'}, not {self.root}: its bytes or its manifest were changed"
        return ""
