from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.runtime.settings import ServiceSettings, read_settings


class Example(ServiceSettings):
    redis_url: str
    capacity: int = Field(default=1, ge=1)


def test_reads_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    monkeypatch.setenv("HOLDFAST_CAPACITY", "8")
    monkeypatch.setenv("HOLDFAST_SOMEBODY_ELSES", "1")
    settings = read_settings(Example)
    assert (settings.redis_url, settings.capacity, settings.tls) == ("redis://x", 8, None)
    with pytest.raises(ValidationError):
        settings.capacity = 9


def test_every_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_REDIS_URL", raising=False)
    monkeypatch.setenv("HOLDFAST_CAPACITY", "zero")
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", "loud")
    with pytest.raises(InvalidSpecs) as caught:
        read_settings(Example)
    assert sorted(str(caught.value).splitlines()) == [
        "HOLDFAST_CAPACITY: 'zero' is not valid; expected a valid integer, unable to parse string as an integer",
        "HOLDFAST_LOG_LEVEL: 'loud' is not valid; expected 'debug', 'info', 'warning' or 'error'",
        "HOLDFAST_REDIS_URL: None is not valid; expected a value: it is required",
    ]


def test_half_of_tls_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    monkeypatch.setenv("HOLDFAST_TLS_CERT", str(tmp_path / "cert.pem"))
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_TLS_KEY.*certificate, key and CA together"):
        read_settings(Example)


def test_a_certificate_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    for part in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"HOLDFAST_TLS_{part}", str(tmp_path / part))
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_TLS_CERT.*readable PEM file"):
        _ = read_settings(Example).tls
