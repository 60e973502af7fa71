"""`holdfast ca`: what it makes is private, has the right names, and is what services read; and what `doctor` says of it."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from holdfast.cli import doctor
from holdfast.cli.ca import app
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.renewal import renewed
from holdfast.runtime.trust.revocation import Revocations
from holdfast.runtime.trust.tls import Tls


def ca(*arguments: str) -> str:
    """What the command prints. Raises what it refuses with."""
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, HoldfastError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    ca("init", "--dir", str(tmp_path / "ca"), "--fleet", "west")
    return tmp_path / "ca"


def issued(directory: Path, out: Path, *arguments: str) -> Tls:
    ca("issue", *arguments, "--dir", str(directory), "--out", str(out))
    loaded = Tls.load(cert=out / "tls.crt", key=out / "tls.key", ca=out / "ca.crt", demand="required")
    assert loaded is not None
    loaded.require_pair()
    return loaded


def serial(directory: Path) -> str:
    listed = json.loads(ca("list", "--json", "--dir", str(directory)))
    return str(listed[-1]["serial"])


def test_keys_are_readable_by_their_user_only(directory: Path, tmp_path: Path) -> None:
    issued(directory, tmp_path / "out", "agent/n1")
    for key in (directory / "ca.key", tmp_path / "out" / "tls.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_a_certificate_has_the_identities_and_names_that_were_asked_for(directory: Path, tmp_path: Path) -> None:
    made = issued(directory, tmp_path / "out", "supervisor", "agent/n 1", "--host", "head-1", "--host", "10.0.0.5")
    assert made.identities == (Identity("west", Role.SUPERVISOR), Identity("west", Role.AGENT, "n 1"))
    names = x509.load_pem_x509_certificate(made.cert).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == ["head-1", "localhost"]
    assert [str(each) for each in names.value.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1"]
    (row,) = json.loads(ca("list", "--json", "--dir", str(directory)))
    assert (row["state"], row["identities"]) == ("valid", ["supervisor", "agent/n%201"])


def test_a_service_without_a_name_for_agents_is_warned_about(directory: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "only agents of this machine" in ca("issue", "diagnostics", "--dir", str(directory), "--out", out)
    assert "only agents" not in ca("issue", "agent/n1", "--dir", str(directory), "--out", out)


def test_issuing_into_the_same_directory_renews(directory: Path, tmp_path: Path) -> None:
    before = issued(directory, tmp_path / "out", "agent/n1", "--days", "1")
    ca("issue", "agent/n1", "--dir", str(directory), "--out", str(tmp_path / "out"))
    after = renewed(before)
    assert after.cert != before.cert
    assert len(json.loads(ca("list", "--json", "--dir", str(directory)))) == 2


def test_a_revoked_certificate_is_in_the_list_that_services_read(directory: Path, tmp_path: Path) -> None:
    issued(directory, tmp_path / "out", "agent/n1")
    first = serial(directory)
    revocations = Revocations(directory / "crl.pem", directory / "ca.crt")
    assert int(first, 16) not in revocations
    issued(directory, tmp_path / "other", "agent/n2")
    assert "crl.pem" in ca("revoke", first[:8].upper(), "--dir", str(directory))
    revocations.refresh()
    assert int(first, 16) in revocations
    assert int(serial(directory), 16) not in revocations
    states = {each["serial"]: each["state"] for each in json.loads(ca("list", "--json", "--dir", str(directory)))}
    assert states == {first: "revoked", serial(directory): "valid"}


def test_a_list_that_cannot_be_used_leaves_the_one_before(directory: Path, tmp_path: Path) -> None:
    issued(directory, tmp_path / "out", "agent/n1")
    ca("revoke", serial(directory), "--dir", str(directory))
    revocations = Revocations(directory / "crl.pem", directory / "ca.crt")
    Authority.create(tmp_path / "foreign", "west", 1)
    foreign = (tmp_path / "foreign" / "crl.pem").read_bytes()
    for content in (b"", foreign):
        (directory / "crl.pem").write_bytes(content)
        revocations.refresh()
        assert int(serial_of_first(directory), 16) in revocations
        with pytest.raises(InvalidSpec, match="HOLDFAST_TLS_CRL"):
            Revocations(directory / "crl.pem", directory / "ca.crt")
    (directory / "crl.pem").unlink()
    revocations.refresh()
    assert int(serial_of_first(directory), 16) in revocations


def serial_of_first(directory: Path) -> str:
    return Authority(directory).records()[0].serial


def test_a_second_ca_does_not_replace_the_first(directory: Path) -> None:
    before = (directory / "ca.key").read_bytes()
    with pytest.raises(Conflict, match="choose another --dir"):
        ca("init", "--dir", str(directory))
    assert (directory / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("issue", "king", "--out", "x"), "expected supervisor, diagnostics, agent/NODE"),
        (("issue", "agent", "--out", "x"), "agent/NODE"),
        (("issue", "agent/n1", "--out", "x", "--days", "9999"), "no longer than the CA is valid"),
        (("issue", "supervisor", "--host", "höst", "--out", "x"), "a DNS name or an IP address"),
        (("issue", "agent/n1", "--out", "/dev/null/x"), "--out"),
        (("revoke", "12"), "no certificate whose serial number begins with '12'"),
        (("revoke", "abcdef12"), "holdfast ca list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(directory: Path, arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises((InvalidSpec, NotFound)) as refusal:
        ca(*arguments, "--dir", str(directory))
    assert reason in str(refusal.value)
    assert Authority(directory).revoked() == frozenset()


def test_a_directory_without_a_whole_ca_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holdfast ca init"):
        ca("list", "--dir", str(tmp_path / "none"))
    Authority.create(tmp_path / "foreign", "west", 1)
    (directory / "ca.key").write_bytes((tmp_path / "foreign" / "ca.key").read_bytes())
    with pytest.raises(InvalidSpec, match=r"ca\.key is the key of ca\.crt"):
        ca("list", "--dir", str(directory))
    (directory / "ca.key").write_text("")
    with pytest.raises(InvalidSpec, match="a directory with a CA"):
        ca("list", "--dir", str(directory))


def test_a_damaged_line_of_the_list_is_named(directory: Path, tmp_path: Path) -> None:
    issued(directory, tmp_path / "out", "agent/n1")
    with (directory / "issued.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InvalidSpec, match=r"issued\.jsonl:2"):
        ca("list", "--dir", str(directory))


@pytest.mark.parametrize(
    ("age_days", "level"), [(0, "ok"), (19, "ok"), (21, "note"), (28, "problem"), (31, "problem"), (-1, "problem")]
)
def test_doctor_warns_before_a_certificate_expires(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_days: int, level: str
) -> None:
    """Of a certificate for 30 days: a note when a third of its life is left, a problem when a tenth is."""
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.delenv(f"HOLDFAST_TLS_{name}", raising=False)
    assert list(doctor._certificates()) == [], "nothing is configured"
    issued(directory, tmp_path / "out", "agent/n1")
    for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
        monkeypatch.setenv(f"HOLDFAST_TLS_{name}", str(tmp_path / "out" / file))
    later = (datetime.now(UTC) + timedelta(days=age_days)).timestamp()
    monkeypatch.setattr("holdfast.cli.doctor.time.time", lambda: later)
    found = {each.what: each for each in doctor._certificates()}
    assert (found["certificate"].level, found["identities"].level) == (level, "ok")
    assert bool(found["certificate"].advice) is (level != "ok")


def test_doctor_names_a_key_of_another_certificate(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued(directory, tmp_path / "out", "agent/n1")
    issued(directory, tmp_path / "other", "agent/n1")
    files = {"CERT": tmp_path / "out/tls.crt", "KEY": tmp_path / "other/tls.key", "CA": tmp_path / "out/ca.crt"}
    for name, file in files.items():
        monkeypatch.setenv(f"HOLDFAST_TLS_{name}", str(file))
    (check,) = doctor._certificates()
    assert (check.level, "the certificate of the key" in check.found) == ("problem", True)


def test_serial_numbers_that_begin_alike_are_not_confused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0xABCDEF01, 0xABCDEF02])
    monkeypatch.setattr("holdfast.runtime.trust.authority.x509.random_serial_number", lambda: next(numbers))
    made = Authority(directory)
    for _ in range(2):
        made.issue([Identity("west", Role.DIAGNOSTICS)], ["localhost"], 1)
    with pytest.raises(Conflict, match="2 certificates begin with 'abcdef'"):
        made.revoke("abcdef")
    made.revoke("abcdef01")
    with pytest.raises(Conflict, match="revoked already"):
        made.revoke("abcdef01")
