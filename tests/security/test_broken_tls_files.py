"""Files of mutual TLS that cannot be used: each service ends at once, with one message that names the setting and the file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import certificates
import pytest
from warm_processes import STACK, warm

from holdfast.log.embedded import EmbeddedRedis
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.tls import CA, CERT, KEY, Tls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = certificates.make(tmp_path_factory.mktemp("broken"))
    subprocess.run(
        ["openssl", "pkey", "-in", made / "ours.key", "-aes256", "-passout", "pass:x", "-out", made / "encrypted.key"],
        check=True,
        capture_output=True,
    )
    (made / "text.pem").write_text("this is no certificate\n")
    (made / "directory.pem").mkdir()
    return made


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis.url


# What is wrong, the three files, and the setting and the file that the message names.
FAULTS = {
    "key of another certificate": ("ours.pem", "foreign.key", "ours-ca.pem", CERT, "foreign.key"),
    "encrypted key": ("ours.pem", "encrypted.key", "ours-ca.pem", KEY, "encrypted.key"),
    "file that cannot be read": ("ours.pem", "directory.pem", "ours-ca.pem", KEY, "directory.pem"),
    "CA without a certificate": ("ours.pem", "ours.key", "text.pem", CA, "text.pem"),
}


# All check by the same two functions: each fault once, and each service with those that only one of them finds.
@pytest.mark.parametrize(("service", "fault"), [
    *(("replicator", fault) for fault in FAULTS),
    *((service, fault) for service in ("agent", "diagnostics", "supervisor") for fault in list(FAULTS)[:1]),
])  # fmt: skip
def test_a_service_ends_with_one_message(
    folder: Path, redis_url: str, tmp_path: Path, service: str, fault: str
) -> None:
    cert, key, ca, variable, file = FAULTS[fault]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        CERT: str(folder / cert),
        KEY: str(folder / key),
        CA: str(folder / ca),
        "HOLDFAST_REDIS_URL": redis_url,
        "HOLDFAST_DATA_DIR": str(tmp_path / "data"),
        "HOLDFAST_NODE": "node-0",
        "HOLDFAST_SUPERVISOR": "127.0.0.1:1",
        "HOLDFAST_AGENT_DIR": str(tmp_path / "agent"),
        "HOLDFAST_MEMORY_DIR": str(tmp_path / "memory"),
        "HOLDFAST_DISK_DIR": str(tmp_path / "disk"),
        "HOLDFAST_REPLICATOR_SOCKET": str(tmp_path / "replicator.sock"),
        "HOLDFAST_REPLICATOR_NOTES": str(tmp_path / "notes.sock"),
        **{f"HOLDFAST_{name}_LISTEN": "127.0.0.1:0" for name in ("API", "SUPERVISOR", "DIAGNOSTICS")},
    }
    code, out, err = warm(STACK)([f"holdfast.{service}"], Path.cwd(), environment, 60.0)
    assert code == 2, out + err
    [message] = [line for line in err.splitlines() if line.startswith("holdfast ")]
    assert message.startswith(f"holdfast {service}: {variable}")
    assert str(folder / file) in message
    assert "Traceback" not in out + err


def test_a_ca_that_has_signed_by_another_one_is_accepted(folder: Path) -> None:
    """The file of the certificate has the one between, as `holdfast ca issue --intermediate` and most CAs make it."""
    from cryptography import x509

    between = folder / "between"
    (folder / "ca.ext").write_text("basicConstraints=critical,CA:TRUE")
    certificates._sign(between, folder / "ours-ca", folder / "ca.ext")
    leaf = certificates._sign(folder / "below", between, folder / "san")
    assert len(x509.load_pem_x509_certificates(leaf.read_bytes())) == 1
    assert not _loaded(folder, leaf.read_bytes()).signed_by_its_ca
    assert _loaded(folder, leaf.read_bytes() + Path(f"{between}.pem").read_bytes()).signed_by_its_ca


def test_a_chain_that_leads_in_a_circle_ends(folder: Path) -> None:
    """And so does one of certificates that have signed each other, which a file may have a hundred of."""
    pem = (folder / "foreign.pem").read_bytes() + (folder / "foreign-ca.pem").read_bytes() * 200
    key = folder / "foreign.key"
    (folder / "circle.pem").write_bytes(pem)
    loaded = Tls.load(cert=folder / "circle.pem", key=key, ca=folder / "ours-ca.pem")
    assert loaded is not None
    assert not loaded.signed_by_its_ca


def test_another_ca_than_that_of_the_own_certificate_is_used_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Services and nodes may have CAs of their own: then each side has the CA file of the other."""
    settings = ServiceSettings.model_validate(
        certificates.files(folder, "ours") | {"tls_ca": folder / "foreign-ca.pem"}
    )
    assert settings.tls_as(Role.SUPERVISOR) is not None
    said = capsys.readouterr().out
    assert "the CA has not signed this side's own certificate" in said
    assert str(folder / "foreign-ca.pem") in said
    assert ServiceSettings.model_validate(certificates.files(folder, "ours")).tls_as(Role.SUPERVISOR) is not None
    assert "has not signed" not in capsys.readouterr().out


def _loaded(folder: Path, cert: bytes) -> Tls:
    (folder / "chain.pem").write_bytes(cert)
    loaded = Tls.load(cert=folder / "chain.pem", key=folder / "below.key", ca=folder / "ours-ca.pem")
    assert loaded is not None
    return loaded
