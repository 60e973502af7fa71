"""deploy/: every file, port, variable and name that one part speaks of is there in the other. Reads files, starts nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from containers.images import ROOT, settings

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VARIABLES = settings()
ENGINE_SOCKET = ("chaos", "/var/run/docker.sock")
COLLECTOR = yaml.safe_load((DEPLOY / "observability/collector.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "observability/prometheus.yaml").read_text())
GRAFANA = DEPLOY / "observability/grafana"
DATA_SOURCES: list[dict[str, Any]] = yaml.safe_load((GRAFANA / "datasources/holdfast.yaml").read_text())["datasources"]


def mounts(service: str) -> Iterator[tuple[str, str]]:
    """Source and target of everything that is mounted into a service."""
    for volume in SERVICES[service].get("volumes", []):
        source, target, *_ = volume.split(":")
        yield source, target


def host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "//" in address else f"//{address}")
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


# ---------------------------------------------------------------- docker-compose.yml and .env


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists(service: str) -> None:
    for source, _ in mounts(service):
        if source.startswith("."):
            assert (ROOT / source).exists(), f"{service} mounts {source}"
        else:
            assert source in COMPOSE["volumes"] or (service, source) == ENGINE_SOCKET, f"{service} mounts {source}"


def test_only_supervisors_and_diagnostics_share_a_network_with_redis() -> None:
    beside = {name for name, service in SERVICES.items() if "control" in service.get("networks", ())}
    assert beside == {"redis", "diagnostics", "supervisor-a", "supervisor-b"}
    assert SERVICES["redis"]["networks"] == ["control"]
    assert "ports" not in SERVICES["redis"]


def test_every_variable_is_set_and_every_setting_is_used() -> None:
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)(?::\?[^}]*)?\}", (ROOT / "docker-compose.yml").read_text()))
    assert used <= VARIABLES.keys(), "docker-compose.yml asks for what .env does not set"
    assert VARIABLES.keys() - used == {"COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"}, ".env sets what nobody reads"


def test_profiles_that_are_on_exist_and_chaos_is_not_among_them() -> None:
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert set(VARIABLES["COMPOSE_PROFILES"].split(",")) <= profiles - {"chaos"}
    assert SERVICES["chaos"]["profiles"] == ["chaos"]


def test_the_core_waits_for_nothing_of_a_profile() -> None:
    for name, service in SERVICES.items():
        if not service.get("profiles"):
            assert not [one for one in service.get("depends_on", {}) if SERVICES[one].get("profiles")], name


# ---------------------------------------------------------------- the collector


def test_pipelines_name_what_is_declared_and_all_of_it() -> None:
    for kind in ("receivers", "processors", "exporters"):
        named = {name for pipeline in COLLECTOR["service"]["pipelines"].values() for name in pipeline[kind]}
        assert named == COLLECTOR[kind].keys(), kind
    for pipeline in COLLECTOR["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter", "it can only refuse what nobody has taken yet"


def test_services_reach_the_collector_and_it_reaches_jaeger() -> None:
    listens = host_and_port(COLLECTOR["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])
    assert host_and_port(VARIABLES["OTLP_ENDPOINT"]) == ("collector", listens[1])
    assert host_and_port(COLLECTOR["exporters"]["otlp/jaeger"]["endpoint"]) == ("jaeger", 4317)
    assert {"collector", "jaeger"} <= SERVICES.keys()


def test_the_collector_reads_the_file_that_is_mounted() -> None:
    [(source, target)] = mounts("collector")
    assert ROOT / source == DEPLOY / "observability/collector.yaml"
    assert SERVICES["collector"]["command"] == [f"--config={target}"]


# ---------------------------------------------------------------- Prometheus


def test_prometheus_reads_the_collector_and_the_alert_rules() -> None:
    [scraped] = PROMETHEUS["scrape_configs"]
    _, port = host_and_port(COLLECTOR["exporters"]["prometheus"]["endpoint"])
    assert scraped["static_configs"] == [{"targets": [f"collector:{port}"]}]
    assert scraped["honor_labels"], "else `job` and `instance` are the collector's"
    targets = {target: ROOT / source for source, target in mounts("prometheus")}
    [rules] = PROMETHEUS["rule_files"]
    assert targets[rules] == DEPLOY / "grafana/alerts.yml"
    [config] = [flag for flag in SERVICES["prometheus"]["command"] if flag.startswith("--config.file=")]
    assert targets[config.partition("=")[2]] == DEPLOY / "observability/prometheus.yaml"


# ---------------------------------------------------------------- Grafana


@pytest.mark.parametrize("source", DATA_SOURCES, ids=lambda source: str(source["uid"]))
def test_a_data_source_is_a_service_at_its_port(source: dict[str, Any]) -> None:
    host, port = host_and_port(source["url"])
    assert host == source["type"]
    assert any(published.endswith(f":{port}") for published in SERVICES[host]["ports"])


def test_the_dashboard_is_provisioned_and_finds_its_data_source() -> None:
    targets = {target: ROOT / source for source, target in mounts("grafana")}
    [provider] = yaml.safe_load((GRAFANA / "dashboards/holdfast.yaml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert targets[home] == DEPLOY / "grafana/dashboard.json"
    assert str(Path(home).parent) == provider["options"]["path"]
    for kind in ("datasources", "dashboards"):
        assert targets[f"/etc/grafana/provisioning/{kind}"] == GRAFANA / kind
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    [asked] = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert [source["type"] for source in DATA_SOURCES if source.get("isDefault")] == [asked]
