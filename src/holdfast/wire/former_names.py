"""Names that stored fields and types had in earlier versions, for `records`, which reads both and writes today's names only."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.domain.findings import Finding
from holdfast.domain.incidents import Incident
from holdfast.domain.nodes import Preflight

# Dataclass → {name in earlier versions: today's name}.
FIELDS: Mapping[type, Mapping[str, str]] = {
    Finding: {"ladder": "recommended_actions"},
    Incident: {
        "ladder": "recommended_actions",
        "t_fault": "fault_at",
        "t_detected": "detected_at",
        "t_decided": "decided_at",
        "t_prepared": "prepared_at",
        "t_first_step": "first_step_at",
    },
    Preflight: {"took_s": "duration_s"},
}
# Members of unions: tag in earlier versions → today's class name.
TAGS: Mapping[str, str] = {"Warm": "PrepareTemplate"}
