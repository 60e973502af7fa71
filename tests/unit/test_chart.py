"""The chart without helm: its values and their schema, and renderings that `make kubernetes-test` keeps up to date."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import charts
import jsonschema
import kube_schemas
import pod_security
import pytest
import yaml
from charts import CHART, KEPT, RENDERED, SETTINGS
from kube_schemas import READERS, environment
from typer.main import get_command

from holdfast.cli.kubernetes import job_source
from holdfast.cli.kubernetes.commands import IMAGE
from holdfast.cli.kubernetes.manifests import API_TOKEN_KEY, JOIN_TOKEN_KEY
from holdfast.cli.kubernetes.submission import CONTROL_PORT
from holdfast.cli.main import application

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As helm merges values: mappings by key, everything else replaced."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result


@pytest.mark.parametrize("name", charts.VALUES)
def test_values_keep_to_their_schema(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(merged(VALUES, charts.VALUES[name]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"supervisors": {}},
        {"supervisor": {"replica": 3}},
        {"supervisor": {"settings": {"NODE_HOLD": "3"}}},
        {"supervisor": {"settings": {"REDIS_URL": "redis://elsewhere"}}},  # the chart sets it
        {"fleet": "my fleet"},
        {"redis": {"externalUrl": "redis.example.com"}},
        {"tls": {"certManager": {"issuerKind": "CA"}}},
        {"tls": {"mode": "cert-manager"}},
        {"tls": {"secrets": {"agent": "mine"}}},
        {"tls": {"certManager": {"duration": "30d"}}},
        {"redis": {"externalUrlKeys": {"supervisors": "url"}}},
        {"networkPolicy": {"jobNamespaces": ["Team A"]}},
    ],
    ids=str,
)
def test_misspelt_values_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(merged(VALUES, wrong))


def test_every_value_has_a_default_and_every_default_is_in_the_schema() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        if "properties" not in schema or path.endswith("resources"):
            return
        assert schema["properties"].keys() - {"global"} == values.keys(), path
        for key, value in values.items():
            if isinstance(value, dict):
                compare(schema["properties"][key], value, f"{path}.{key}")

    compare(SCHEMA, VALUES, "")


@pytest.mark.parametrize("part", SETTINGS)
def test_settings_that_may_be_given_are_those_that_exist_and_that_the_chart_does_not_set(part: str) -> None:
    rendering = charts.load((RENDERED / "everything.yaml").read_text())
    ours = {
        name.removeprefix("HOLDFAST_")
        for manifest in rendering
        for pod in kube_schemas.pods(manifest)
        for container in kube_schemas.containers(pod)
        if container["name"] == part
        for name in environment(container)
        if name not in {f"HOLDFAST_{given}" for given in charts.EVERYTHING[part]["settings"]}
    }
    names = {name.upper() for name in SETTINGS[part].model_fields} - ours - {"JOIN_TOKEN", "READY_FILE", "STOP_SIGNAL"}
    assert set(SCHEMA["properties"][part]["properties"]["settings"]["propertyNames"]["enum"]) == names


def test_templates_set_only_variables_that_exist() -> None:
    for path in (CHART / "templates").glob("*"):
        for name in re.findall(r"\bHOLDFAST_[A-Z_]+\b", path.read_text()):
            known = frozenset().union(*READERS.values())
            assert name in known or name == "HOLDFAST_", f"{path.name}: {name}"


@pytest.mark.parametrize("name", KEPT)
def test_kept_renderings_are_valid_safe_and_consistent(name: str) -> None:
    charts.check(charts.load((RENDERED / f"{name}.yaml").read_text()))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("pod", {"hostNetwork": True}), ("pod", {"hostPID": True}), ("pod", {"hostIPC": True}),
        ("pod", {"securityContext": {"runAsNonRoot": False}}), ("pod", {"securityContext": {"runAsUser": 0}}),
        ("pod", {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
        ("pod", {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}),
        ("pod", {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}),
        ("pod", {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}),
        ("pod", {"securityContext": {"windowsOptions": {"hostProcess": True}}}),
        ("pod", {"volumes": [{"name": "socket", "hostPath": {"path": "/var/run/docker.sock"}}]}),
        ("pod", {"ephemeralContainers": [{"name": "debug"}]}),
        ("container", {"privileged": True}), ("container", {"allowPrivilegeEscalation": True}),
        ("container", {"capabilities": {"drop": []}}), ("container", {"capabilities": {"drop": ["ALL"], "add": ["SYSLOG"]}}),
        ("container", {"procMount": "Unmasked"}), ("container", {"runAsUser": 0}), ("container", {"runAsNonRoot": False}),
        ("container", {"seccompProfile": {"type": "Unconfined"}}),
        ("ports", {"hostPort": 8471}), ("probe", {"host": "elsewhere"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_control_of_the_restricted_standard_is_checked(where: str, change: dict[str, Any]) -> None:
    """Of the pods of supervisors, which keep to it, with one change."""
    rendering = charts.load((RENDERED / "defaults.yaml").read_text())
    pod = next(
        pod for each in rendering for pod in kube_schemas.pods(each) if kube_schemas.component(pod) == "supervisor"
    )
    assert pod_security.violations(pod) == []
    [container] = pod["spec"]["containers"]
    match where:
        case "pod":
            pod["spec"] = merged(pod["spec"], change)
        case "container":
            container["securityContext"] |= change
        case "ports":
            container["ports"][0] |= change
        case _:
            container["livenessProbe"]["httpGet"] |= change
    assert pod_security.violations(pod)


def test_chart_images_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == metadata.version("holdfast-training") == IMAGE.rpartition(":")[2]


def test_the_acceptance_script_is_a_script_and_its_job_a_job(tmp_path: Path) -> None:
    script = charts.ROOT / "deploy" / "kubernetes" / "accept.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False, timeout=30).returncode == 0
    text = script.read_text()
    found = re.search(r'job\.yaml" << EOF\n(.*?)^EOF$', text, re.DOTALL | re.MULTILINE)
    assert found is not None
    (tmp_path / "job.yaml").write_text(found[1].replace("$job", "accept"))
    assert job_source.load(tmp_path / "job.yaml").spec.nodes == 2
    commands = getattr(get_command(application()), "commands", {})
    assert set(re.findall(r"\bholdfast ([a-z]+) ", text)) <= commands.keys()


def test_the_control_plane_is_where_jobs_look_for_it() -> None:
    """`holdfast kubernetes` knows the chart only by these names."""
    rendering = {
        (each["kind"], each["metadata"]["name"]): each for each in charts.load((RENDERED / "defaults.yaml").read_text())
    }
    ports = {port["name"]: port["port"] for port in rendering["Service", "holdfast-supervisor"]["spec"]["ports"]}
    assert ports["control"] == CONTROL_PORT
    assert {port["port"] for port in rendering["Service", "holdfast-api"]["spec"]["ports"]} == {8470}
    assert rendering["StatefulSet", "holdfast-supervisor"]["spec"]["replicas"] == 2
    assert {JOIN_TOKEN_KEY, API_TOKEN_KEY} <= rendering["Secret", "holdfast-tokens"]["data"].keys()
    policy = rendering["NetworkPolicy", "holdfast-supervisor"]["spec"]["ingress"]
    agents = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "agent"}
    assert {"podSelector": {"matchLabels": agents}} in policy[0]["from"]
    assert policy[0]["ports"] == [{"port": "control", "protocol": "TCP"}]
