"""The chart, rendered by helm: every combination of values is valid, and the renderings that are kept are up to date."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import certificates
import charts
import kube_schemas
import pytest
import redis_users
import yaml
from charts import CHART, KEPT, NAMESPACE, RELEASE, RENDERED, VALUES
from kube_api import KubeApi, serving

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.settings import ServiceSettings, read_settings
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.tls import Tls
from holdfast.supervisor.settings import SupervisorSettings

SAN = {"DNS": "dnsNames", "IP": "ipAddresses", "URI": "uris"}  # OpenSSL's names of them → cert-manager's

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.core,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("helm") is None, reason="not installed: helm (make kubernetes-test)"),
]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], check=False, capture_output=True, text=True, timeout=120)


def template(directory: Path, values: dict[str, Any], release: str = RELEASE) -> subprocess.CompletedProcess[str]:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return helm("template", release, str(CHART), "--namespace", NAMESPACE, "--values", str(path))


@pytest.mark.parametrize("name", VALUES)
def test_every_rendering_is_valid_safe_and_consistent(tmp_path: Path, name: str) -> None:
    done = template(tmp_path, VALUES[name])
    assert done.returncode == 0, done.stderr
    manifests = charts.load(done.stdout)
    charts.check(manifests)
    kinds = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    own_redis = not name.startswith("external-redis")
    assert (("StatefulSet", "holdfast-redis") in kinds) is own_redis
    assert (("NetworkPolicy", "holdfast-redis") in kinds) is (own_redis and name != "small")
    certificates = {each for kind, each in kinds if kind == "Certificate"}
    roles = ("supervisor", "diagnostics", "agent") if name == "everything" else ()
    assert certificates == {f"holdfast-{role}-tls" for role in roles}
    assert (("PodDisruptionBudget", "holdfast-supervisor") in kinds) is (name != "small")
    assert (("Secret", "holdfast-tokens") in kinds) is (name != "external-redis")


@pytest.mark.parametrize("name", KEPT)
def test_kept_renderings_are_what_helm_renders(tmp_path: Path, name: str) -> None:
    """UPDATE=1 make kubernetes-test writes them anew."""
    manifests = charts.load(template(tmp_path, VALUES[name]).stdout)
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    path = RENDERED / f"{name}.yaml"
    if os.environ.get("UPDATE"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", VALUES)
def test_services_would_start_with_their_environment(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the settings that each service reads, with secrets and certificates as files."""
    for variable in [each for each in os.environ if each.startswith("HOLDFAST_")]:
        monkeypatch.delenv(variable)
    for manifest in charts.load(template(tmp_path, VALUES[name]).stdout):
        if manifest["kind"] != "StatefulSet" or manifest["metadata"]["name"] == "holdfast-redis":
            continue
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        digest = VALUES[name].get("image", {}).get("digest", "")
        assert container["image"].endswith(f":7@{digest}" if digest else ":0.1.0")
        assert container["command"] == ["python", "-m", f"holdfast.{container['name']}"]
        with monkeypatch.context() as patch:
            for each in container["env"]:
                patch.setenv(each["name"], each.get("value") or "redis://secret")
            settings: ServiceSettings = read_settings(charts.SETTINGS[container["name"]])
        assert settings.fleet == VALUES[name].get("fleet", "main")
        assert str(settings.join_token_file) == "/etc/holdfast/fleet/join-token"
        assert (settings.tls_cert is not None) is bool(VALUES[name].get("tls"))
        if isinstance(settings, SupervisorSettings):
            assert len(settings.diagnostics_endpoints) == VALUES[name].get("diagnostics", {}).get("replicas", 2)
            assert settings.api_token.get_secret_value()
            assert settings.returns is not None
            assert settings.replacements is not None


def test_tokens_are_different_each_time_that_nothing_is_there(tmp_path: Path) -> None:
    def tokens() -> set[str]:
        found = [
            each for each in yaml.safe_load_all(template(tmp_path, {}).stdout) if each and each["kind"] == "Secret"
        ]
        assert found[0]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        return {str(value) for value in found[0]["data"].values()}

    first, second = tokens(), tokens()
    assert len(first | second) == 8


def test_tokens_that_are_there_are_kept(tmp_path: Path) -> None:
    """Helm looks them up. What is missing, since an earlier chart did not have it, is made."""
    api = KubeApi()
    kept = {"join-token": base64.b64encode(b"j" * 48).decode(), "api-token": base64.b64encode(b"a" * 48).decode()}
    api.objects["secrets", NAMESPACE, "holdfast-tokens"] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": "holdfast-tokens",
            "namespace": NAMESPACE,
            "labels": {"app.kubernetes.io/managed-by": "Helm"},  # it came from this release
            "annotations": {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE},
        },
        "data": kept,
    }
    config = tmp_path / "config"
    with serving(api, config):
        done = helm(
            *(
                "template",
                RELEASE,
                str(CHART),
                "--namespace",
                NAMESPACE,
                "--dry-run=server",
                "--disable-openapi-validation",
            ),
            *("--kubeconfig", str(config)),
        )
    assert done.returncode == 0, done.stderr
    (secret,) = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "Secret"]
    assert secret["data"].items() >= kept.items()
    assert {len(base64.b64decode(secret["data"][f"redis-{user}-password"])) for user in charts.SETTINGS} == {48}


@pytest.mark.parametrize(
    ("values", "release", "reason"),
    [
        ({"ingress": {"enabled": True}}, RELEASE, "the name under which the API is reached"),
        ({}, "a" * 41, "at most 40 characters"),
        ({"supervisor": {"settings": {"NODE_HOLD_S": 300}}}, RELEASE, "want string"),
        ({"supervisor": {"setings": {}}}, RELEASE, "'setings' not allowed"),
        ({"tls": {"certManager": {"issuer": "ca"}}}, RELEASE, "set tls.mode to certManager"),
        ({"tls": {"mode": "certManager"}}, RELEASE, "set tls.certManager.issuer"),
        ({"tls": {"existingSecret": "mine"}}, RELEASE, "set tls.mode to secret"),
        ({"tls": {"mode": "secret", "secrets": {"supervisor": "mine"}}}, RELEASE, "set tls.secrets.diagnostics"),
        (
            {"tls": {"mode": "secret", "existingSecret": "mine", "certManager": {"issuer": "ca"}}},
            RELEASE,
            "set tls.mode to",
        ),
        (
            {"fleet": "a..b", "tls": {"mode": "certManager", "certManager": {"issuer": "ca"}}},
            RELEASE,
            "without two dots",
        ),
    ],
)
def test_wrong_values_are_refused_with_a_reason(
    tmp_path: Path, values: dict[str, Any], release: str, reason: str
) -> None:
    done = template(tmp_path, values, release)
    assert done.returncode != 0
    assert reason in done.stderr


def test_services_and_agents_accept_certificates_as_the_chart_asks_for_them(tmp_path: Path) -> None:
    """Issued here with the names of the Certificates; each is good for its role, and for no other."""
    certificates.make(tmp_path)
    rendering = charts.load(template(tmp_path, VALUES["everything"]).stdout)
    loaded: dict[str, Tls] = {}
    for spec in (each["spec"] for each in rendering if each["kind"] == "Certificate"):
        leaf = spec["secretName"].split("-")[1]
        names = [f"{kind}:{name}" for kind, key in SAN.items() for name in spec.get(key, [])]
        certificates.issue_for(tmp_path, leaf, *names)
        settings = ServiceSettings(fleet="blue", **{**certificates.files(tmp_path, leaf)})  # type: ignore[arg-type]
        tls = settings.tls
        assert tls is not None
        loaded[leaf] = tls
    assert loaded.keys() == {"supervisor", "diagnostics", "agent"}
    for leaf, tls in loaded.items():
        assert tls.accepts.required, "nobody without an identity is let in"
        for role, name in (
            (Role.SUPERVISOR, ""),
            (Role.DIAGNOSTICS, ""),
            (Role.AGENT, "machine-7"),
            (Role.OPERATOR, "ada"),
        ):
            if role == leaf:
                tls.require(role, name=name)
                continue
            with pytest.raises(InvalidSpec, match="a certificate for holdfast://blue/"):
                tls.require(role, name=name)


def test_redis_starts_with_the_script_that_the_tests_of_its_users_start(tmp_path: Path) -> None:
    """And the fault that shuts it down is a right of the supervisors only where the setting allows the fault."""
    for setting, faults in (("no", "no"), ("restarted", "yes")):
        values = {"supervisor": {"settings": {"FAULT_REDIS_KILL": setting}}}
        rendering = [each for each in yaml.safe_load_all(template(tmp_path, values).stdout) if each]
        [script] = [each["data"] for each in rendering if each["kind"] == "ConfigMap"]
        assert script == {"redis.sh": redis_users.SCRIPT.read_text()}
        [redis] = [
            container
            for manifest in rendering
            for pod in kube_schemas.pods(manifest)
            for container in kube_schemas.containers(pod)
            if container["name"] == "redis"
        ]
        given = kube_schemas.environment(redis)
        assert given == {
            "REDIS_FLEET": "main",
            "REDIS_SUPERVISOR_PASSWORD_FILE": "/etc/holdfast/passwords/supervisor",
            "REDIS_DIAGNOSTICS_PASSWORD_FILE": "/etc/holdfast/passwords/diagnostics",
            "REDIS_RUN": "/run/holdfast",
            "REDIS_FAULTS": faults,
        }
        assert {each["mountPath"] for each in redis["volumeMounts"]} >= {
            "/etc/holdfast/passwords",
            "/run/holdfast",
            "/data",
        }


def test_values_of_an_earlier_chart_render_as_the_defaults(tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` takes the old chart's defaults in place of the new one's: a value may be missing."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    values = yaml.safe_load((chart / "values.yaml").read_text())
    values["tls"] = {"existingSecret": "", "certManager": {"issuer": "", "issuerKind": "Issuer"}}
    del values["redis"]["externalUrlKeys"], values["redis"]["externalPasswordKeys"], values["image"]["digest"]
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", RELEASE, str(chart), "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    assert charts.load(done.stdout) == charts.load(template(tmp_path, {}).stdout)
    issuer = "--set=tls.certManager.issuer=ca"
    for option in (issuer, "--set=tls.existingSecret=mine"):
        refused = helm("template", RELEASE, str(chart), "--namespace", NAMESPACE, option)
        assert refused.returncode != 0
        assert "set tls.mode to" in refused.stderr, "TLS is not turned off without a word"
    done = helm("template", RELEASE, str(chart), "--namespace", NAMESPACE, issuer, "--set=tls.mode=certManager")
    assert done.returncode == 0, done.stderr


def test_helm_finds_nothing_to_say_against_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
