"""The control session of an agent without anything else of an agent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from supervising import facts

from holdfast.agent.connection.executor import Executor
from holdfast.agent.connection.log_reads import LogReads
from holdfast.agent.connection.reports import Reports
from holdfast.agent.connection.session import Session
from holdfast.domain.orders import Hello
from holdfast.domain.rank_reads import MeasuredRanks
from holdfast.runtime.trust.fleet import Membership
from holdfast.runtime.trust.tls import Tls
from holdfast.wire.control import encode_beat


def lone_session(
    endpoints: Sequence[str],
    node: str,
    *,
    reports: Reports | None = None,
    membership: Membership | None = None,
    tls: Tls | None = None,
) -> Session:
    return Session(
        endpoints=endpoints,
        hello=lambda: Hello(facts(node)),
        inventories=lambda: (),
        executor=cast(Executor, SimpleNamespace(epoch=0, greet=lambda _: True)),
        reports=reports or Reports(),
        on_diagnostics=lambda _: None,
        on_peers=lambda _: None,
        on_present_peers=lambda _: None,
        on_saved_by_all=lambda _: None,
        beat=lambda stepping: encode_beat(time.time(), first_steps=stepping),
        log_reads=LogReads(Path("no logs")),
        read_gpus=tuple,
        read_ranks=lambda _: MeasuredRanks(),
        membership=membership,
        tls=tls,
    )
