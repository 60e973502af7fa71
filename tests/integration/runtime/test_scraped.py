"""`/metrics`: what Prometheus reads from each service, and what happens when the address cannot be had."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from training import WarmStack
from waiting import TIMEOUT_S, wait_until

from holdfast.cli.client import Client
from holdfast.cli.stack_options import StackOptions
from holdfast.runtime.telling.metrics import METRICS

DATA = Path(__file__).parents[2] / "data"
ANY_PORT = "127.0.0.1:0"
SERVICE = """
import json, sys
import structlog
from holdfast.runtime.telling import metrics, telemetry
said = []

def note(logger, name, event):
    said.append(event)
    raise structlog.DropEvent

structlog.configure(processors=[note])
telemetry.configure("holdfast-test", sys.argv[1])
for metric in metrics.METRICS:
    attributes = {name: "a" for name in metric.attributes}
    if metric.kind == "gauge":
        telemetry.show(metric, [(3.5, attributes)])
    else:
        telemetry.record(metric, 2.0, **attributes)
telemetry.observe(metrics.FROZEN, lambda: 9.0)
telemetry.write(None)
print(json.dumps({"on": telemetry.on(), "said": said}), flush=True)
input()
"""


def scrape(url: str) -> dict[str, Metric]:
    """Metric families by name, as Prometheus parses them."""
    answer = httpx.get(url)
    assert answer.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def test_each_metric_has_the_name_that_dashboard_and_alerts_ask_for() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, ANY_PORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        reported = json.loads(process.stdout.readline())
        assert reported["on"]
        [served] = [line["url"] for line in reported["said"] if line["event"] == "metrics are served"]
        families = scrape(served)
        process.communicate("\n", timeout=TIMEOUT_S)
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    for metric in METRICS:
        name = f"{metric.prometheus_name}_sum" if metric.kind == "histogram" else metric.prometheus_name
        assert name in samples, f"{metric.name} is not there as {name}: {sorted(samples)}"
        assert {f"holdfast_{each}" for each in metric.attributes} == set(samples[name].labels)
        assert (
            samples[name].value == {"gauge": 3.5, "counter": 2.0, "histogram": 2.0}[metric.kind]
            or metric.name == "holdfast.frozen"
        )
    assert samples["target_info"].labels["service_name"] == "holdfast-test"
    assert "process_resident_memory_bytes" in samples


@pytest.mark.parametrize("kind", ["in use", "no address of this machine"])
def test_a_service_works_without_its_metrics(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}" if kind == "in use" else "192.0.2.1:9464"
        done = subprocess.run(
            [sys.executable, "-c", SERVICE, listen],
            input="\n",
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
    reported = json.loads(done.stdout)
    assert not reported["on"]
    [warning] = [line for line in reported["said"] if line["event"] == "metrics are not served"]
    assert listen in warning["reason"]
    assert warning["setting"] == "HOLDFAST_METRICS_LISTEN"


def test_every_service_of_a_stack_is_scraped(tmp_path: Path) -> None:
    environment = {
        "HOLDFAST_METRICS_LISTEN": ANY_PORT,
        "HOLDFAST_REPLICATOR_METRICS_LISTEN": ANY_PORT,
        "HOLDFAST_NVML_REPLAY": str(DATA / "nvml/two_gpus.jsonl"),
    }
    logs = {
        "diagnostics": "diagnostics/diagnostics.log",
        "supervisor": "supervisor/supervisor.log",
        "agent": "nodes/node-0/agent.log",
        "checkpoint-replicator": "nodes/node-0/replicator.log",
    }
    with WarmStack(StackOptions(directory=tmp_path / "stack", nodes=1, environment=environment)) as stack:

        def url_of(service: str) -> str:
            file = stack.directory / logs[service]
            lines = file.read_text().splitlines() if file.exists() else []
            served = [line for line in lines if "metrics are served" in line]
            return str(json.loads(served[-1])["url"]) if served else ""

        for service in logs:
            wait_until(lambda: bool(url_of(service)), description=f"the metrics of {service}")  # noqa: B023
            assert "process_resident_memory_bytes" in scrape(url_of(service))
        with Client(stack.api_url) as client:
            wait_until(lambda: len(list(client.nodes())) == 1, description="the node")

        def samples(service: str, family: str) -> list[Sample]:
            found = scrape(url_of(service)).get(family)
            return list(found.samples) if found else []

        wait_until(
            lambda: sum(each.value for each in samples("supervisor", "holdfast_nodes")) == 1,
            description="the node among the supervisor's metrics",
        )  # fmt: skip
        labels = {"holdfast_node": "node-0", "holdfast_gpu": "0"}
        wait_until(
            lambda: any(each.labels == labels for each in samples("agent", "holdfast_gpu_temperature_celsius")),
            description="the recorded GPU",
        )  # fmt: skip
