"""Which certificate the API is served with, and by which name clients reach it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.api_certificate import (
    API_CERT,
    API_KEY,
    ApiCertificate,
    Use,
    choose,
    covers,
    host_for_clients,
)
from holdfast.runtime.trust.tls import CERT, KEY

OWN, SERVICE, NONE = (Path("own.pem"), Path("own.key")), (Path("service.pem"), Path("service.key")), (None, None)
OF_OWN, OF_SERVICE = ApiCertificate(*OWN, (API_CERT, API_KEY)), ApiCertificate(*SERVICE, (CERT, KEY))


@pytest.mark.parametrize(("use", "own", "service", "loopback", "chosen"), [
    ("auto", NONE, NONE, False, None),
    ("auto", NONE, SERVICE, False, OF_SERVICE),
    ("auto", NONE, SERVICE, True, None),  # only this machine reaches it
    ("auto", OWN, SERVICE, False, OF_OWN),
    ("auto", OWN, NONE, True, OF_OWN),  # somebody has asked for it
    ("on", NONE, SERVICE, True, OF_SERVICE),
    ("on", OWN, SERVICE, True, OF_OWN),
    ("off", OWN, SERVICE, False, None),
])  # fmt: skip
def test_the_certificate_of_the_api(
    use: Use,
    own: tuple[Path | None, Path | None],
    service: tuple[Path | None, Path | None],
    loopback: bool,
    chosen: ApiCertificate | None,
) -> None:
    assert choose(use, own, service, loopback=loopback) == chosen


def test_what_cannot_be_served_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match=API_KEY):
        choose("auto", (OWN[0], None), SERVICE, loopback=False)
    with pytest.raises(InvalidSpec, match=API_CERT):
        choose("off", (None, OWN[1]), NONE, loopback=True)
    with pytest.raises(InvalidSpec, match="HOLDFAST_API_TLS: 'on'"):
        choose("on", NONE, NONE, loopback=False)


@pytest.mark.parametrize(("host", "names", "expected"), [
    ("10.0.0.5", ("head-1", "10.0.0.5"), "10.0.0.5"),  # where it listens, if the certificate has it
    ("0.0.0.0", ("localhost", "127.0.0.1", "head-1"), "head-1"),  # the host name
    ("0.0.0.0", ("*.example.org", "api.example.org"), "api.example.org"),
    ("0.0.0.0", ("localhost", "127.0.0.1"), "localhost"),  # only this machine can check it
    ("10.0.0.5", ("localhost", "head-2"), "head-2"),
    ("0.0.0.0", ("*.example.org",), "0.0.0.0"),  # a pattern is no name
    ("0.0.0.0", (), "0.0.0.0"),
    ("::", ("10.1.2.3", "localhost"), "10.1.2.3"),
])  # fmt: skip
def test_the_host_of_the_url_is_one_for_which_the_certificate_is_valid(
    host: str, names: tuple[str, ...], expected: str
) -> None:
    assert host_for_clients(host, names, "head-1") == expected


@pytest.mark.parametrize(("name", "host", "valid"), [
    ("head-1", "HEAD-1", True), ("*.example.org", "a.example.org", True), ("*.example.org", "a.b.example.org", False),
    ("*.example.org", "example.org", False), ("127.0.0.1", "127.0.0.1", True), ("::1", "0:0:0:0:0:0:0:1", True),
    ("10.0.0.1", "10.0.0.10", False),
])  # fmt: skip
def test_names_are_compared_as_clients_compare_them(name: str, host: str, valid: bool) -> None:
    assert covers((name,), host) is valid
