"""Which URLs nobody on the network can read or change."""

from __future__ import annotations

import pytest

from holdfast.domain.hosts import is_protected_url


@pytest.mark.parametrize(
    "url",
    [
        "https://issuer.example",
        "https://10.0.0.1:8443/a?b=c",
        "http://127.0.0.1:80",
        "http://[::1]/keys",
        "http://localhost",
    ],
)
def test_https_and_http_on_a_loopback_address_are_protected(url: str) -> None:
    assert is_protected_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "", "https://", "http://10.0.0.1/keys", "http://issuer.example", "http://127.0.0.1.example", "http://localhost.example",
        "ftp://127.0.0.1/keys", "file:///etc/passwd", "//issuer.example", "https://[", "https://issuer.example:port",
        "https://issuer.example/a b", "https://issuer.example/\n", "https://íssuer.example", "http://127.0.0.1@issuer.example/",
    ],
)  # fmt: skip
def test_other_urls_are_not(url: str) -> None:
    assert not is_protected_url(url)
