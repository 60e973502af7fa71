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


ROOTLESS = ("0", "root", "")


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_is_root_or_can_become_it(service: str) -> None:
    """Ours by the image's user (`test_images_run_as_a_user_by_number`), others by the file, whatever their image says."""
    about = SERVICES[service]
    assert about["cap_drop"] == ["ALL"]
    assert about["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & about.keys()
    if not about["image"].startswith("holdfast/"):
        assert about["user"].partition(":")[0] not in ROOTLESS
    else:
        assert "user" not in about


def test_images_run_as_a_user_by_number() -> None:
    """Each target that is built; what comes after USER needs no root."""
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    named = {stage.splitlines()[0].split(" AS ")[1]: stage for stage in stages}
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} == {
        "services",
        "trainer",
    }
    assert re.findall(r"^USER (.*)$", named["services"], re.MULTILINE) == ["10001:10001"]
    assert named["trainer"].startswith("services AS trainer")
    assert "USER" not in named["trainer"]
    after = named["services"].partition("USER 10001:10001")[2] + named["trainer"]
    assert not re.search(r"^RUN", after, re.MULTILINE)


def test_only_those_that_need_it_write_to_their_own_file_system() -> None:
    """Workers write where their scripts want; the image of Grafana keeps its database in it."""
    writable = {name for name, service in SERVICES.items() if not service.get("read_only")}
    assert writable == {
        "node-0",
        "node-1",
        "node-2",
        "node-3",
        "spare",
        "job",
        "collector",
        "jaeger",
        "prometheus",
        "grafana",
    }


def test_each_password_is_in_the_hands_of_its_user_and_of_its_server() -> None:
    holders: dict[str, set[str]] = {}
    for name in SERVICES:
        for source, _ in mounts(name):
            if source.startswith("password-"):
                holders.setdefault(source, set()).add(name)
    assert holders == {
        "password-supervisor": {"passwords", "redis", "supervisor-a", "supervisor-b"},
        "password-diagnostics": {"passwords", "redis", "diagnostics"},
        "password-grafana": {"passwords", "grafana"},
        "password-api": {"passwords", "supervisor-a", "supervisor-b", "job"},
    }
    for name, service in SERVICES.items():
        readers = [
            volume for volume in service.get("volumes", []) if volume.startswith("password-") and name != "passwords"
        ]
        assert all(volume.endswith(":ro") for volume in readers), name
        for user in ("supervisor", "diagnostics"):
            url = f"redis://{user}@redis:6379/0?password_file=/var/lib/passwords/{user}/password"
            assert (service.get("environment", {}).get("HOLDFAST_REDIS_URL") == url) is name.startswith(user), name
    assert "redis://" not in (ROOT / ".env").read_text()


def test_the_user_of_the_image_may_write_each_password() -> None:
    """A fresh volume has the owner of the directory that it is mounted on, if the image has that directory."""
    made = (ROOT / "deploy" / "Dockerfile").read_text()
    for _, target in mounts("passwords"):
        assert re.search(rf"install -d -o holdfast -g holdfast (?:\S+ |\\\n *)*{target}\s", made), target


def test_each_supervisor_has_the_token_of_the_api_and_no_node_has() -> None:
    for name, service in SERVICES.items():
        serves = name.startswith("supervisor")
        assert (
            "HOLDFAST_API_TOKEN=$$(cat /var/lib/passwords/api/password)" in str(service.get("command"))
        ) is serves, name
        has_file = "HOLDFAST_API_TOKEN_FILE" in service.get("environment", {})
        assert has_file is (serves or name == "job"), name


def test_the_network_of_redis_leads_nowhere_else() -> None:
    assert COMPOSE["networks"]["control"] == {"internal": True}
    assert SERVICES["passwords"]["network_mode"] == "none"


def test_grafana_asks_for_a_password() -> None:
    given = SERVICES["grafana"]["environment"]
    assert given["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert "GF_AUTH_DISABLE_LOGIN_FORM" not in given
    assert not [name for name in given if "ANONYMOUS" in name and name != "GF_AUTH_ANONYMOUS_ENABLED"]
    source = {target: source for source, target in mounts("grafana")}["/run/passwords"]
    assert (source, given["GF_SECURITY_ADMIN_PASSWORD__FILE"]) == ("password-grafana", "/run/passwords/password")
    assert "GF_SECURITY_ADMIN_PASSWORD" not in given


def test_what_has_no_login_is_published_on_loopback_only() -> None:
    for name in ("grafana", "prometheus", "jaeger"):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    published = {name for name, service in SERVICES.items() if service.get("ports")}
    assert published == {"grafana", "prometheus", "jaeger", "supervisor-a", "supervisor-b"}
    assert VARIABLES["PUBLISH"] == "127.0.0.1"


def test_every_variable_is_set_and_every_setting_is_used() -> None:
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)(?::\?[^}]*)?\}", (ROOT / "docker-compose.yml").read_text()))
    assert used <= VARIABLES.keys(), "docker-compose.yml asks for what .env does not set"
    assert VARIABLES.keys() - used == {"COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"}, ".env sets what nobody reads"


def test_profiles_that_are_on_exist_and_chaos_is_not_among_them() -> None:
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert set(VARIABLES["COMPOSE_PROFILES"].split(",")) <= profiles - {"chaos"}
    assert SERVICES["chaos"]["profiles"] == ["chaos"]
    holders = [name for name in SERVICES if "/var/run/docker.sock" in dict(mounts(name))]
    assert holders == ["chaos"], "who has the engine's socket has the machine"


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
