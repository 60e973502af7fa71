"""All keys of Holdfast in Redis, each with its limit.

    holdfast:{<fleet>}:stream:<name>         bounded: about `stream_length_max` entries
    holdfast:{<fleet>}:stream:<name>.dead    bounded likewise: the dead-letter stream
    holdfast:{<fleet>}:lease:<name>          TTL: the leader, as "<epoch> <holder>"
    holdfast:{<fleet>}:candidate:<name>      TTL: the last holder that requested the lease without success
    holdfast:{<fleet>}:commit:<name>         permanent: token of the last commit, which the next commit must contain
    holdfast:{<fleet>}:epoch:<name>          permanent: one integer per lease; fences must outlive every holder
    holdfast:{<fleet>}:parts:<name>          permanent: one hash per lease, whose fields each commit replaces or removes
    holdfast:{<fleet>}:renewal:<name>        permanent: the last renewal, as "<time of the holder> <µs of the server's clock>"
    holdfast:{<fleet>}:snapshot:<name>       format of an earlier version; removed by the first commit of parts

The braces are a hash tag: on a Redis Cluster all keys of a fleet share a slot, so that one script can access all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.runtime.trust.fleet import fleet_name

DEAD_SUFFIX = ".dead"

_WITHOUT_TTL = re.compile(r"holdfast:\{[A-Za-z0-9._-]{1,64}\}:(stream|commit|epoch|parts|renewal|snapshot):.+")


def may_stay(key: str) -> bool:
    """Whether `key` may live without a TTL: a bounded stream or one of the permanent keys above."""
    return _WITHOUT_TTL.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one fleet. Raises `InvalidSpec` for a name that would break the hash tag."""

    fleet: str

    def __post_init__(self) -> None:
        fleet_name(self.fleet)

    def stream(self, name: str) -> str:
        return self._key("stream", name)

    def dead(self, name: str) -> str:
        return self._key("stream", name + DEAD_SUFFIX)

    def lease(self, name: str) -> str:
        return self._key("lease", name)

    def commit(self, name: str) -> str:
        return self._key("commit", name)

    def candidate(self, name: str) -> str:
        return self._key("candidate", name)

    def epoch(self, name: str) -> str:
        return self._key("epoch", name)

    def parts(self, name: str) -> str:
        return self._key("parts", name)

    def renewal(self, name: str) -> str:
        return self._key("renewal", name)

    def snapshot(self, name: str) -> str:
        return self._key("snapshot", name)

    def stream_name(self, key: str) -> str:
        """Return the stream's name from its key."""
        return key.removeprefix(self._key("stream", ""))

    def _key(self, kind: str, name: str) -> str:
        return f"holdfast:{{{self.fleet}}}:{kind}:{name}"
