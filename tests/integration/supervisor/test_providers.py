"""A machine that nobody can bring back is replaced by the operator's command: over real gRPC, by a real supervisor."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from eventlogs import redis_log
from supervising import PlayedAgent, Running, publish, start_supervisor
from waiting import TIMEOUT_S, wait_until_async

from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.nodes import Check, Preflight
from holdfast.supervisor.leader import term
from holdfast.wire.events import finding_entry

pytestmark = pytest.mark.anyio

# Stands in for a cloud's command: notes what it was asked, once per call.
REPLACE = """
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
print("instance n1 is recreated")
"""


def machine(supervisor: Running, number: int, boot: int = 1) -> PlayedAgent:
    """The agent of the so-manieth machine, which has passed its tests."""
    tested = Preflight(time.time(), 0.1, (Check("disk", True, "9 GB free"),))
    which = {"boot_id": f"boot {number}.{boot}", "machine_id": f"machine {number}"}
    return PlayedAgent("n1", [supervisor.control], f"i{number}.{boot}", preflight=tested, **which)  # type: ignore[arg-type]


async def test_a_condemned_machine_is_replaced_and_the_new_one_has_no_record(redis_url: str, tmp_path: Path) -> None:
    log, script, asked = redis_log(redis_url), tmp_path / "replace.py", tmp_path / "asked"
    script.write_text(REPLACE)
    line = f"{sys.executable} {script} {asked} {{node}} {{hostname}} {{request}} {{reason}}"
    async with anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path, redis_log(redis_url), replace_command=line)

        async def until(what: str, text: str, state: str, boot: str) -> Any:
            async def there() -> Any:
                items = (await supervisor.get("/v1/nodes"))["items"]
                node = next((each for each in items if each["node"] == "n1"), None)
                if node is None or (node["state"], node["boot_id"]) != (state, boot) or text not in node["reason"]:
                    return None
                return node

            return await wait_until_async(there, description=what)

        async with anyio.create_task_group() as first:
            first.start_soon(machine(supervisor, 1).run)
            await until("the node to connect", "", "spare", "boot 1.1")
            now = time.time()
            wrong = Finding(
                id="f-1", kind=FindingKind.SILENT_CORRUPTION, severity=Severity.FATAL, at=now, since=now,
                summary="n1 computes wrong products", node="n1", recommended_actions=(Remedy.REPLACE_NODE,),
            )  # fmt: skip
            await publish(log, finding_entry(wrong))
            await until("the answer", "and will come (instance n1 is recreated)", "cordoned", "boot 1.1")
            first.cancel_scope.cancel()
        (call,) = map(json.loads, asked.read_text().splitlines())
        assert (call[0], call[1], call[3]) == ("n1", "host", "n1 computes wrong products")

        async with anyio.create_task_group() as second:
            second.start_soon(machine(supervisor, 1, boot=2).run)
            await until("the same machine, booted, to stay out", "wrong products", "cordoned", "boot 1.2")
            second.cancel_scope.cancel()
        tasks.start_soon(machine(supervisor, 2).run)
        spare = await until("another machine", "", "spare", "boot 2.1")
        assert spare is not None
        assert spare["reason"] == ""
        assert len(asked.read_text().splitlines()) == 1
        tasks.cancel_scope.cancel()
    await log.aclose()


async def test_a_supervisor_with_a_provider_that_is_not_installed_does_not_start(
    redis_url: str, tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as refused:
        async with anyio.create_task_group() as tasks:
            await start_supervisor(tasks, tmp_path, redis_log(redis_url), provider="acme")
    assert "HOLDFAST_PROVIDER: 'acme' is not valid" in str(refused.value.exceptions[0])


MORE = """
import sys
with open(sys.argv[1], "a") as file:
    file.write(" ".join(sys.argv[2:]) + "\\n")
print("the group has", sys.argv[2], "machines soon")
"""


async def test_nodes_that_a_job_lacks_are_asked_for_and_the_answer_is_recorded(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "DEMAND_S", 0.05)
    script, asked = tmp_path / "more.py", tmp_path / "asked"
    script.write_text(MORE)
    line = f"{sys.executable} {script} {asked} {{wanted}} {{missing}} {{jobs}}"
    settings: dict[str, Any] = {"more_command": line, "more_after_s": 0.0, "more_nodes_max": 8}
    async with anyio.create_task_group() as tasks:
        supervisor = await start_supervisor(tasks, tmp_path, redis_log(redis_url), **settings)
        tasks.start_soon(machine(supervisor, 1).run)

        async def there() -> bool:
            return bool((await supervisor.get("/v1/nodes"))["items"])

        await wait_until_async(there, description="the first node")
        body = {"name": "llm", "script": "/train.py", "nodes": 3, "elastic": {"min_dp": 3}}
        await supervisor.post("/v1/jobs", body)
        await wait_until_async(
            lambda: asked.exists() and "3 2 llm" in asked.read_text(), description="nodes to be asked for"
        )
        headers, said = {"Last-Event-ID": "0"}, ""
        async with supervisor.client() as client, client.stream("GET", "/v1/events", headers=headers) as events:
            with anyio.fail_after(TIMEOUT_S):
                async for text in events.aiter_text():
                    said += text
                    if "the group has 3 machines soon" in said:
                        break
        assert "more nodes are requested, 3 in all, because of 2 nodes missing for llm; 1 there: agreed" in said
        assert len(asked.read_text().splitlines()) <= 2, "what is asked for is not asked for again at once"
        tasks.cancel_scope.cancel()
