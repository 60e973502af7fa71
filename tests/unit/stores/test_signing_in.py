"""Production's way in, without a network: whose credentials sign what, through which proxy, and what a refusal means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.domain.errors import InvalidSpec

google_auth: Any = pytest.importorskip("google.auth", reason="the extra gcs is not installed")

from google.auth.credentials import AnonymousCredentials  # noqa: E402

from holdfast.stores import gcs, gcs_http  # noqa: E402
from holdfast.stores.patience import Transient  # noqa: E402

exceptions: Any = pytest.importorskip("google.auth.exceptions")


class Credentials(AnonymousCredentials):
    problem: Exception | None = None

    def before_request(self, request: object, method: str, url: str, headers: dict[str, str]) -> None:
        if self.problem is not None:
            raise self.problem
        headers["authorization"] = f"Bearer for {method} {url}"


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Credentials]:
    untyped: Any = Credentials  # as its base's constructor is
    made: Credentials = untyped()
    asked: list[Any] = []

    def default(*, scopes: tuple[str, ...]) -> tuple[Credentials, str]:
        asked.append(scopes)
        return made, "project"

    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(google_auth, "default", default)
    yield made
    assert asked == [("https://www.googleapis.com/auth/devstorage.read_write",)]


def test_bulk_requests_are_signed_by_the_library_s_credentials(credentials: Credentials) -> None:
    client, authorize = gcs._sign_in()
    headers: dict[str, str] = {}
    authorize("GET", f"{client.api_endpoint}/x", headers)
    assert headers == {"authorization": "Bearer for GET https://storage.googleapis.com/x"}
    client.close()


@pytest.mark.parametrize(
    ("problem", "meaning"),
    [(exceptions.TransportError("no route"), Transient), (exceptions.RefreshError("revoked"), InvalidSpec)],
)
def test_credentials_that_do_not_work(credentials: Credentials, problem: Exception, meaning: type[Exception]) -> None:
    client, authorize = gcs._sign_in()
    credentials.problem = problem
    with pytest.raises(meaning, match=str(problem)):
        authorize("GET", "https://storage.googleapis.com/x", {})
    client.close()


def test_nothing_is_sent_when_a_store_is_opened(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials.problem = AssertionError("a request was made")
    store = gcs.GcsStore("bucket", "a/b")
    assert store.url == "gs://bucket/a/b"
    store.close()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, ("proxy", 3128)),
        ({"https_proxy": "proxy:3128"}, ("proxy", 3128)),
        ({"https_proxy": "http://proxy:3128", "no_proxy": ".googleapis.com"}, None),
        ({"http_proxy": "http://proxy:3128"}, None),
    ],
)
def test_proxies_are_the_environment_s(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[str, int] | None
) -> None:
    for name in ("https_proxy", "http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gcs_http._proxy("https", "storage.googleapis.com") == expected


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9023", "ftp://x", "http://"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(InvalidSpec, match="endpoint of the object store"):
        gcs_http.Connections(endpoint, lambda method, url, headers: None, timeout_s=1.0)
