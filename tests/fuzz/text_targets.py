"""Texts that people and other programs give: command lines, settings, addresses, answers of a policy or of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import typer
from fuzz.mutations import documents, json_texts, texts, written
from fuzz.target import Target
from hypothesis import strategies as st
from joserfc import jws, jwt
from joserfc.jwk import ECKey
from pydantic_settings import BaseSettings

from holdfast.agent.settings import AgentSettings
from holdfast.cli import chaos, durations, torchrun
from holdfast.cli.kubernetes import quantities
from holdfast.cli.slurm import tools
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.domain import old_evidence
from holdfast.domain.errors import InvalidSpec, MalformedMessage, PolicyError, Unavailable
from holdfast.domain.incidents import Action
from holdfast.domain.job import PolicySpec
from holdfast.kubernetes import machines
from holdfast.replicator.settings import ReplicatorSettings
from holdfast.runtime.settings import read_settings, require_address
from holdfast.runtime.trust import identities, oidc, oidc_keys
from holdfast.stores.opening import parse_url
from holdfast.supervisor.api import session
from holdfast.supervisor.api.backend import number_of
from holdfast.supervisor.policies.script import PolicyScript
from holdfast.supervisor.settings import SupervisorSettings
from holdfast.wire import records, resume

BAD = (InvalidSpec,)
NUMBERS = ("30s", "2m", "1.5h", "7d", "10")


def _torchrun() -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries(
        {
            "nnodes": texts("2", "1:4"),
            "nproc": texts("8", "gpu", "auto", "cpu"),
            "script": texts("train.py", "a.b.c", "dir/x.sh"),
            "tee": texts("3", "0:1,1:3"),
            "ranks": texts("all", "0,7"),
        }
    )


def _torchrun_read(given: dict[str, str]) -> None:
    """Each option is refused on its own."""
    uses: tuple[Callable[[], object], ...] = (
        lambda: torchrun.body(
            given["script"],
            [],
            nnodes=given["nnodes"],
            nproc_per_node=given["nproc"],
            max_restarts=3,
            name="",
            policy="",
            spares=0,
        ),
        lambda: torchrun.shown_ranks(given["ranks"], ""),
        lambda: torchrun.shown_ranks("", given["tee"]),
    )
    for use in uses:
        try:
            use()
        except InvalidSpec:
            continue


def _settings(kind: type[BaseSettings]) -> Callable[[], st.SearchStrategy[Mapping[str, str]]]:
    """Environments with strange values for some of the service's settings."""

    def made() -> st.SearchStrategy[Mapping[str, str]]:
        names = [f"HOLDFAST_{name.upper()}" for name in kind.model_fields]
        usual = (
            "1",
            "0.5",
            "true",
            "127.0.0.1:8470",
            "/tmp/x",
            "a,b",
            "file:///x",
            "spiffe://a/b=supervisor",
            "info",
            '["a"]',
            '{"a": 1}',
        )
        return st.dictionaries(
            st.sampled_from(names),
            texts(*usual).map(lambda text: text.replace("\0", "").encode(errors="replace").decode()),
            max_size=5,
        )

    return made


def _settings_read(kind: type[BaseSettings]) -> Callable[[Mapping[str, str]], object]:
    def read(environment: Mapping[str, str]) -> None:
        kept = {name: value for name, value in environment.items() if len(value) < 100_000}
        with _environment(kept):
            read_settings(kind)

    return read


@contextmanager
def _environment(values: Mapping[str, str]) -> Any:
    without = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with mock.patch.dict(os.environ, {**without, **values}, clear=True):
        yield


# ---------------------------------------------------------------- policies, Kubernetes


class _Said(PolicyScript):
    """A script's process that says these bytes and ends."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(PolicySpec("p.py", source="x"), deadline_s=1.0)
        read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            os.write(write, raw)
        except BlockingIOError:
            pass
        os.close(write)
        self._process: Any = mock.Mock(stdout=os.fdopen(read, "rb", buffering=0), stdin=None)


def _answered(raw: bytes) -> None:
    script = _Said(raw)
    try:
        try:
            records.loads(script._answer(1.0, "decide()"), Action)
        except MalformedMessage:
            pass
    finally:
        script.close()


def _answers() -> st.SearchStrategy[bytes]:
    action = {
        "kind": "restart",
        "reason": "why",
        "nodes": ["n1"],
        "dp": 2,
        "within_s": 5.0,
        "before": [],
        "fallbacks": [{"kind": "stop", "reason": "x"}],
    }
    return json_texts({"ok": action}, {"error": "x"}).map(lambda raw: raw[:60_000] + b"\n")


def _objects() -> st.SearchStrategy[Any]:
    about = {
        "name": "n1",
        "namespace": "ml",
        "uid": "u",
        "labels": {"topology.kubernetes.io/zone": "a", "cloud.google.com/scheduled-maintenance-time": "1790000000"},
        "annotations": {},
    }
    node = {
        "kind": "Node",
        "metadata": about,
        "spec": {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/out-of-service"}]},
    }
    return documents(node, {"kind": "Pod", "metadata": about, "spec": {"nodeName": "n1"}})


def _folded(found: Any) -> None:
    """As the watch passes it on: objects are JSON objects."""
    if not isinstance(found, dict):
        return
    for event in (
        machines.Put(found),
        machines.Deleted(found),
        machines.Listed("Node", (found,)),
        machines.Listed("Pod", (found,), "ml"),
    ):
        try:
            machines.fold(machines.Cluster(), event, machines.Rules())
        except MalformedMessage:
            continue


_ISSUER = "https://a.example"
_OIDC_KEY = ECKey.generate_key("P-256", {"kid": "k1"})
_CLAIMS = {
    "iss": _ISSUER, "aud": ["holdfast", "other"], "sub": "ada", "exp": 100, "nbf": 1, "iat": 1, "azp": "holdfast",
    "email": "a@b.c", "email_verified": True, "groups": ["a"],
}  # fmt: skip


class _Keys(oidc_keys.IssuerKeys):
    def find(self, wanted: oidc_keys.KeyWanted) -> Any:
        return _OIDC_KEY if wanted.kid == "k1" and wanted.algorithm == "ES256" else None


def _tokens() -> st.SearchStrategy[str]:
    """Damaged texts of a token, and tokens with damaged claims that the issuer has signed."""
    valid = jwt.encode({"alg": "ES256", "kid": "k1"}, _CLAIMS, _OIDC_KEY, algorithms=["ES256"])
    signed = json_texts(_CLAIMS).map(
        lambda text: jws.serialize_compact({"alg": "ES256", "kid": "k1"}, text, _OIDC_KEY, algorithms=["ES256"])
    )
    return st.one_of(texts(valid), signed)


def _found(token: str) -> None:
    rules = oidc.OidcRules(_ISSUER, ("holdfast",), oidc.parse_roles("groups:a=operator, a.b:c=viewer"), "email")
    oidc.OidcTokens(rules, _Keys(_ISSUER)).find(token, 50.0)


def _key_sets() -> st.SearchStrategy[Any]:
    return documents(
        {"keys": [_OIDC_KEY.as_dict(private=False), {"kty": "RSA", "n": "u" * 400, "e": "AQAB", "use": "sig"}]}
    )


TARGETS = (
    Target("time to wait", lambda: texts(*NUMBERS), durations.seconds, (typer.BadParameter,)),
    Target("period", lambda: texts(*NUMBERS), durations.period, (typer.BadParameter,)),
    Target("mix of faults", lambda: texts("crash=3,hang=1"), chaos.parse_mix, BAD),
    Target("torchrun's options", _torchrun, _torchrun_read, share=0.5),
    Target(
        "size of a pod", lambda: texts("64Gi", "1.5G", "500"), lambda text: quantities.bytes_of("--memory", text), BAD
    ),
    Target("processors of a pod", lambda: texts("16", "500m", "1.5"), lambda text: quantities.cpu("--cpu", text), BAD),
    Target("address of a store", lambda: texts("file:///a/b", "gs://bucket/prefix"), parse_url, BAD),
    Target("checkpoint to resume", lambda: texts("gs://b/p/llm@175/1200", "file:///d/llm"), resume.parse, BAD),
    Target(
        "identity",
        lambda: texts("holdfast://main/agent/node-1", "spiffe://a/node/n1"),
        lambda text: identities.identities_in([text], "main"),
        BAD,
    ),
    Target(
        "rules of SPIFFE",
        lambda: texts("spiffe://a/node/{name}=agent/{name}, spiffe://a/b=supervisor"),
        lambda text: [rule.match("spiffe://a/node/n", "main") for rule in identities.parse_spiffe(text)],
        BAD,
    ),
    Target("address to listen on", lambda: texts("127.0.0.1:8470", "[::1]:0"), require_address, (ValueError,)),
    Target(
        "settings of a supervisor", _settings(SupervisorSettings), _settings_read(SupervisorSettings), BAD, share=0.5
    ),
    Target("settings of an agent", _settings(AgentSettings), _settings_read(AgentSettings), BAD, share=0.5),
    Target(
        "settings of diagnostics", _settings(DiagnosticsSettings), _settings_read(DiagnosticsSettings), BAD, share=0.5
    ),
    Target(
        "settings of a replicator", _settings(ReplicatorSettings), _settings_read(ReplicatorSettings), BAD, share=0.5
    ),
    Target(
        "cookie of a session",
        lambda: written(texts("99999999999.nonce.mac", "9999999999.hf_aaaa", "9999999999.eyJh.eyJi.c")),
        lambda text: session.token_of(text, ("secret",), 5.0),
    ),
    Target(
        "roles of OIDC claims",
        lambda: texts('groups:a=operator, "x:y":b c=viewer, a.b:CN=x,OU=y=admin, *=submitter'),
        lambda text: oidc.role_of({"groups": ["a"], "x:y": "b c", "a": {"b": []}}, oidc.parse_roles(text)),
        BAD,
    ),
    Target(
        "URL of an OIDC issuer",
        lambda: texts("https://a.example/realms/x", "http://[::1]:80"),
        oidc.require_issuer,
        BAD,
    ),
    Target("OIDC token", _tokens, _found, (oidc.InvalidToken,)),
    Target(
        "keys of an OIDC issuer", _key_sets, lambda found: oidc_keys.keys_in(found, "https://a.example"), (Unavailable,)
    ),
    Target("cursor of a page", lambda: texts("12345"), number_of, BAD),
    Target("states of Slurm's nodes", lambda: texts("n1|idle|none\nn2|drained*|bad disk\n"), tools.parse_states),
    Target("answer of a policy", _answers, _answered, (PolicyError,)),
    Target("object of Kubernetes", _objects, _folded),
    Target(
        "evidence of earlier versions",
        lambda: st.dictionaries(
            st.sampled_from(["blame", "tries", "nodes", "prior_user", "signal", "line"]), texts("3", "0.5", "node")
        ),
        lambda found: old_evidence.attribution("repeated_exception", found),
    ),
)
