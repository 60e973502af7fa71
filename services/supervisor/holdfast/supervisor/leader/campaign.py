"""Leadership: campaign for the lease, lead a term, and campaign again when it ends.

If the event log is lost, the leader stops acting immediately. Agents keep training, their sessions end with "not the leader",
and the next term (here or on a standby) begins from the committed state. Each term has a new holder name, and thus a new
epoch. A write whose outcome an earlier term does not know is therefore fenced, however late the server executes it.
"""

from __future__ import annotations

import random
import uuid
from importlib.metadata import version

import anyio
import structlog

from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import StaleEpoch, Unavailable
from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import Lease, LostData
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.telling.refusal_log import Repeats
from holdfast.supervisor.agents.sessions import Sessions
from holdfast.supervisor.leader.kept import Kept
from holdfast.supervisor.leader.term import Parts, Term
from holdfast.supervisor.picture import Picture, Standby

CAMPAIGN_S = 0.2  # how often a standby requests the lease
SAY_AGAIN_S = 30.0  # the warning about a missing lease is repeated after this time with the same reason
RELEASE_TIMEOUT_S = 0.5

log = structlog.get_logger("holdfast.supervisor.leader.campaign")


def holder_name(supervisor: str, api: str) -> str:
    """Name of one holder of the lease: another one for each campaign. It says where the supervisor's API answers, and its
    version."""
    return f"{supervisor}#{uuid.uuid4().hex[:12]}-{version(DISTRIBUTION)}#{api}"


def standby_of(holder: str) -> Standby:
    """Return what a holder says of itself; "" for what its version does not say."""
    *_, mark, api = f"##{holder}".rsplit("#", 2)
    return Standby(api, mark.partition("-")[2]) if api.startswith(("https://", "http://")) else Standby()


class Leader:
    """Runs until cancelled. `sessions` and `picture` return None while this supervisor is a standby."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._log = parts.event_log
        self._term: Term | None = None
        self._kept = Kept()
        self._trouble = ""  # why the last request for the lease, or the last term, failed

    def sessions(self) -> Sessions | None:
        return self._term.sessions if self._term is not None else None

    def agents(self) -> Sessions:
        """Whom agents are asked through. Raises `Unavailable` while this supervisor does not lead."""
        sessions = self.sessions()
        if sessions is None:
            raise Unavailable("this supervisor does not lead, so no agent is connected to it; ask again in a second")
        return sessions

    def picture(self) -> Picture | None:
        return self._term.picture if self._term is not None else None

    @property
    def trouble(self) -> str:
        """Why no decisions are made here although this supervisor leads or could lead; empty if it decides, or another one
        leads."""
        if self._term is not None and self._term.picture is not None:
            return self._term.trouble
        return self._trouble

    def now(self) -> float:
        """The time of the state while this supervisor leads, which may differ from this machine's clock; otherwise that clock.
        Unix seconds."""
        picture = self.picture()
        return picture.at if picture is not None else self._parts.clock()

    async def standby(self) -> Standby:
        """Return the supervisor that has asked for the lease in vain within the last seconds. Raises `Unavailable`."""
        return standby_of(await self._log.candidate(LEADER_LEASE))

    def frozen(self, length_s: float) -> None:
        """This process was frozen for `length_s`. A term whose lease has expired meanwhile ends by itself."""
        if self._term is not None:
            self._term.frozen(length_s)

    async def run(self) -> None:
        """Run until cancelled. Raises errors that no other supervisor could handle either: an unreadable snapshot, a bug."""
        backoff = Backoff(first_s=0.02, max_s=0.5)
        self._kept.led = await self._parts.history.leader() is not None
        while True:
            lease, asked_at_s = await self._campaign()
            try:
                await self._lead(lease, asked_at_s)
            except* (StaleEpoch, Unavailable) as lost:
                log.warning("stepping down", epoch=lease.epoch, reason="; ".join(sorted(_messages(lost))))
                unavailable, _ = lost.split(Unavailable)
                self._trouble = "; ".join(sorted(_messages(unavailable))) if unavailable is not None else ""
                if anyio.current_time() - asked_at_s > self._parts.times.ttl_s:
                    backoff.reset()
            await backoff.sleep()

    async def _campaign(self) -> tuple[Lease, float]:
        """Wait for the lease. Returns it with the loop's time just before the request."""
        holder = holder_name(self._parts.supervisor, self._parts.api)
        waiting = False
        repeats = Repeats(SAY_AGAIN_S, anyio.current_time)
        ttl_s = self._parts.times.ttl_s
        lost_since_s: float | None = None
        while True:
            asked_at_s = anyio.current_time()
            waited_s = 0.0 if lost_since_s is None else asked_at_s - lost_since_s
            begin = waited_s >= self._kept.patience_s(asked_at_s, ttl_s)
            try:
                lease = await self._log.acquire(LEADER_LEASE, holder, ttl_s, begin=begin)
            except Unavailable as error:
                if not isinstance(error, LostData):
                    lost_since_s = None
                elif lost_since_s is None:
                    self._kept.lost, lost_since_s = True, asked_at_s
                self._trouble = str(error)
                if repeats.is_due(str(error)):
                    log.warning("no lease", reason=str(error))
            else:
                if lease is not None:
                    return lease, asked_at_s
                self._trouble, lost_since_s = "", None
                if not self._kept.is_of(self._log.newest_epoch(LEADER_LEASE)):
                    self._kept.another_leads()
                    if not waiting:
                        log.info("standby", supervisor=self._parts.supervisor, reason="another supervisor leads")
                        waiting = True
            await anyio.sleep(CAMPAIGN_S * random.uniform(0.75, 1.0))

    async def _lead(self, lease: Lease, asked_at_s: float) -> None:
        self._term = Term(self._parts, lease=lease, leased_at_s=asked_at_s, kept=self._kept)
        try:
            await self._term.run()
        finally:
            self._term = None
            await self._release(lease)

    async def _release(self, lease: Lease) -> None:
        """Release the lease, so that a standby need not wait for it to expire. It expires if this fails."""
        with anyio.move_on_after(RELEASE_TIMEOUT_S, shield=True):
            try:
                await self._log.release(lease)
            except Unavailable as error:
                log.info("the lease could not be released and will expire", reason=str(error))


def _messages(group: BaseExceptionGroup[BaseException]) -> set[str]:
    found: set[str] = set()
    for error in group.exceptions:
        found |= _messages(error) if isinstance(error, BaseExceptionGroup) else {str(error)}
    return found
