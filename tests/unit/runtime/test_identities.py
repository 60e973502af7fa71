"""Identities as URIs, and the mapping of a SPIFFE issuer's URIs."""

from __future__ import annotations

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.identities import Identity, Role, identities_in, parse_spiffe, parse_uri

SPIFFE = "spiffe://example.org"


@pytest.mark.parametrize(
    ("uri", "identity"),
    [
        ("holdfast://main/supervisor", Identity("main", Role.SUPERVISOR)),
        ("holdfast://a.b-c_9/agent/node-1", Identity("a.b-c_9", Role.AGENT, "node-1")),
        ("holdfast://main/agent/rack%201%2Fnode", Identity("main", Role.AGENT, "rack 1/node")),
        ("holdfast://main/operator/*", Identity("main", Role.OPERATOR, "*")),
    ],
)
def test_a_uri_and_its_identity(uri: str, identity: Identity) -> None:
    assert parse_uri(uri) == identity
    assert identity.uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "holdfast://main", "holdfast:///supervisor", "holdfast://main/", "holdfast://main/Supervisor",
        "holdfast://main/supervisor/", "holdfast://main/supervisor/x", "holdfast://main/agent", "holdfast://main/agent/",
        "holdfast://main/agent/a/b", "holdfast://main/agent/%2A", "holdfast://main/agent/%00", "holdfast://ma in/supervisor",
        "https://main/supervisor", "holdfast://main/agent/" + "n" * 2048,
    ],
)  # fmt: skip
def test_what_is_no_identity(uri: str) -> None:
    with pytest.raises(InvalidSpec, match="agent/NODE"):
        parse_uri(uri)


def test_a_wildcard_stands_for_each_name_of_its_role_only() -> None:
    identity = parse_uri("holdfast://main/agent/*")
    assert identity.stands_for(Role.AGENT, "n1")
    assert not identity.stands_for(Role.OPERATOR, "n1")
    assert not parse_uri("holdfast://main/agent/n1").stands_for(Role.AGENT, "n2")


@pytest.mark.parametrize(
    ("mapping", "uri", "identity"),
    [
        (f"{SPIFFE}/ns/hf/sa/sup=supervisor", f"{SPIFFE}/ns/hf/sa/sup", Identity("main", Role.SUPERVISOR)),
        (f"{SPIFFE}/node/{{name}}=agent/{{name}}", f"{SPIFFE}/node/n1", Identity("main", Role.AGENT, "n1")),
        (f"{SPIFFE}/ns/{{name}}/sa/diag=diagnostics", f"{SPIFFE}/ns/x/sa/diag", Identity("main", Role.DIAGNOSTICS)),
        (f"{SPIFFE}/sa/trainer=agent/*", f"{SPIFFE}/sa/trainer", Identity("main", Role.AGENT, "*")),
        (f"{SPIFFE}/node/{{name}}=agent/{{name}}", f"{SPIFFE}/node/", None),
        (f"{SPIFFE}/node/{{name}}=agent/{{name}}", f"{SPIFFE}/node/*", None),
        (f"{SPIFFE}/node/{{name}}=agent/{{name}}", f"{SPIFFE}/node/n1/x", None),
        (f"{SPIFFE}/node/{{name}}=agent/{{name}}", "spiffe://example.com/node/n1", None),
    ],
)
def test_a_spiffe_uri_and_its_identity(mapping: str, uri: str, identity: Identity | None) -> None:
    other = f"{SPIFFE}/other=operator/x,\n"
    found = identities_in(["https://example.org", uri], "main", parse_spiffe(other + mapping))
    assert found == ((identity,) if identity else ())


@pytest.mark.parametrize(
    "mapping",
    [
        "supervisor", f"{SPIFFE}/a", f"{SPIFFE}/a=", f"{SPIFFE}/a=king", f"{SPIFFE}/a=agent", f"{SPIFFE}/a=agent/{{name}}",
        f"{SPIFFE}/{{name}}/{{name}}=agent/{{name}}", f"{SPIFFE}/{{name}}=supervisor/{{name}}", "spiffe://{name}/a=supervisor",
        "spiffe:///a=supervisor", "https://a/b=supervisor",
    ],
)  # fmt: skip
def test_a_mapping_that_is_none_is_named(mapping: str) -> None:
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_TLS_SPIFFE.*expected pattern=role"):
        parse_spiffe(f"{SPIFFE}/b=supervisor {mapping}")
