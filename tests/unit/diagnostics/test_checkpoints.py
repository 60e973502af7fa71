"""A rank that cannot save, or a tier that takes nothing: a warning for each trouble, again while it lasts."""

from __future__ import annotations

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.checkpoints import Checkpoints
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.replication import TroubleKind
from holdfast.domain.signals import CheckpointTrouble

T0 = 1_700_000_000.0


def trouble(kind: str = TroubleKind.SAVES_MISSED.value, at: float = T0, rank: int | None = 3) -> CheckpointTrouble:
    return CheckpointTrouble("n1", at, "gpt", kind, "rank 3", "3 in a row: no image is free", rank)


def watch(*signals: CheckpointTrouble) -> list[Finding]:
    detector = Alone(Checkpoints())
    return [finding for signal in signals for finding in detector.observe(signal, T0 + 5.0)]


def test_a_rank_whose_saves_are_missed_is_a_warning_with_the_reason() -> None:
    (finding,) = watch(trouble(), trouble())  # an agent that reconnects sends it again
    assert (finding.kind, finding.severity) == (FindingKind.CHECKPOINT, Severity.WARNING)
    assert (finding.node, finding.job, finding.rank, finding.since) == ("n1", "gpt", 3, T0)
    assert finding.summary == "Saves of rank 3 on n1 are missed (job gpt): 3 in a row: no image is free"


def test_the_same_trouble_later_is_another_finding() -> None:
    assert len({finding.id for finding in watch(trouble(), trouble(at=T0 + 600))}) == 2


def test_a_trouble_that_lasts_is_said_again_under_its_id() -> None:
    detector = Alone(Checkpoints())
    said = [detector.observe(trouble(), T0 + after) for after in (5.0, 305.0, 610.0)]
    assert [len(findings) for findings in said] == [1, 0, 1]
    (first,), (second,) = said[0], said[2]
    assert (second.id, second.since, second.repeat) == (first.id, first.since, 1)


def test_every_kind_has_words_and_one_of_a_newer_agent_is_said_too() -> None:
    kinds = [*(kind.value for kind in TroubleKind), "of the future"]
    summaries = {finding.summary for finding in watch(*(trouble(kind, rank=None) for kind in kinds))}
    assert len(summaries) == len(kinds)
    assert all("n1" in summary and "rank 3" in summary for summary in summaries)
