"""What an operator allows to be broken: off by default, with bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.injection.faults import MachineFaultRules
from holdfast.agent.settings import AgentSettings
from holdfast.domain.errors import InvalidSpecs
from holdfast.runtime.settings import read_settings
from holdfast.supervisor.fault_rules import OwnFaultRules
from holdfast.supervisor.settings import SupervisorSettings


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = {"SUPERVISOR": "127.0.0.1:1", "REDIS_URL": "redis://127.0.0.1:1"}
    directories = dict.fromkeys(("AGENT_DIR", "MEMORY_DIR", "DISK_DIR", "DATA_DIR"), str(tmp_path)[:80])
    for name, value in {**needed, **directories}.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)


def test_nothing_is_allowed_by_default() -> None:
    assert read_settings(AgentSettings).machine_faults == MachineFaultRules(link="", loss_percent_max=30, clock_s_max=0)
    assert read_settings(SupervisorSettings).own_faults == OwnFaultRules(redis_kill="no", leader_kill="no")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (AgentSettings, "FAULT_LINK", "eth0/1"),
        (AgentSettings, "FAULT_LINK", "a-name-too-long-for-linux"),
        (AgentSettings, "FAULT_LOSS_PERCENT_MAX", "100"),
        (AgentSettings, "FAULT_LOSS_PERCENT_MAX", "0"),
        (AgentSettings, "FAULT_CLOCK_S_MAX", "-1"),
        (AgentSettings, "FAULT_CLOCK_S_MAX", "1e6"),
        (SupervisorSettings, "FAULT_REDIS_KILL", "true"),
        (SupervisorSettings, "FAULT_REDIS_KILL", "standby"),
        (SupervisorSettings, "FAULT_LEADER_KILL", "yes"),
    ],
)
def test_other_values_are_refused_by_their_name(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, value: str
) -> None:
    monkeypatch.setenv(f"HOLDFAST_{name}", value)
    with pytest.raises(InvalidSpecs, match=f"HOLDFAST_{name}: '?{value}"):
        read_settings(kind)
