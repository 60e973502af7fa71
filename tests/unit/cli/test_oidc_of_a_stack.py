"""`holdfast up` with the settings of an OIDC issuer: what is passed on, to whom, and what it counts for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.protection import require_protection, settings_for_parts, shown
from holdfast.cli.stack_options import StackOptions, not_passed_on, settings_of
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust import oidc, oidc_keys

ISSUER = {
    oidc.ISSUER: "https://issuer.example",
    oidc.AUDIENCE: "holdfast",
    oidc.ROLES: "*=viewer",
    oidc.NAME: "email",
    oidc_keys.CA: "ca.pem",
}
TLS = dict.fromkeys(("HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA"), "x.pem")


def test_all_of_it_is_passed_on_to_the_supervisor_alone(tmp_path: Path) -> None:
    passed = settings_for_parts(ISSUER)
    assert passed == ISSUER | {oidc_keys.CA: str(Path("ca.pem").absolute())}
    assert not_passed_on(ISSUER) == []
    assert passed.items() <= shown(passed).items(), "a stack with other settings is not taken over"
    options = StackOptions(directory=tmp_path, environment=passed)
    assert settings_of(options, "supervisor", "") == passed
    for part in ("diagnostics", "agent", "node-0"):
        assert not any("OIDC" in name for name in settings_of(options, part, "")), part


def test_half_of_it_is_refused_before_anything_starts() -> None:
    for name in (oidc.AUDIENCE, oidc.ROLES, oidc.ISSUER):
        with pytest.raises(InvalidSpec, match=name):
            settings_for_parts({each: value for each, value in ISSUER.items() if each != name})


def test_an_issuer_protects_the_api_as_a_token_does(tmp_path: Path) -> None:
    require_protection("0.0.0.0", ISSUER | TLS)
    with pytest.raises(InvalidSpec, match="HOLDFAST_TLS_CERT"):
        require_protection("0.0.0.0", ISSUER)
    with pytest.raises(InvalidSpec, match="HOLDFAST_API_TOKEN"):
        require_protection("0.0.0.0", TLS)
    options = StackOptions(directory=tmp_path, environment=ISSUER)
    assert not options.makes_token
    assert replace(options, environment={}).makes_token
