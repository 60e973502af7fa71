"""What `make fuzz` has found, one test for each: inputs that raised another error than the documented one, or took too long."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certificates
import pytest
from starlette.datastructures import Headers

from holdfast.agent.checks import preflight_checks
from holdfast.agent.records import Unreadable, read_record
from holdfast.agent.workers import ft_messages
from holdfast.cli import chaos
from holdfast.cli.slurm import chain, ending
from holdfast.domain import old_evidence, template
from holdfast.domain.errors import IntegrityError, InvalidSpec, MalformedMessage, PolicyError
from holdfast.domain.findings import FindingKind
from holdfast.domain.hosts import host_and_port
from holdfast.domain.job import PolicySpec
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.strangers import Strangers
from holdfast.runtime.trust import revocation, tls
from holdfast.runtime.trust.api_tokens import read_tokens_file
from holdfast.shards.slots import read_index
from holdfast.stores.opening import parse_url
from holdfast.supervisor.api import session
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.policies.script import PolicyScript
from holdfast.train.environment import Environment
from holdfast.train.warm.build_locks import Holder
from holdfast.wire import jobfile
from holdfast.wire.flight_recorder import parse_pickle

DEEP = b"[" * 100_000
MANY_DIGITS = "9" * 5000


def test_a_signature_that_is_not_ascii_is_a_wrong_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        envelope = b"\x80".ljust(64, b"-") + b'{"job":"llm"}'
        theirs.sendall(b"HFD1" + len(envelope).to_bytes(4, "big") + envelope)
        received = frames.receive_request(ours, "c", lambda _: "secret", Strangers(), within_s=5.0)
    assert not received.signed_by("secret", "c")


def test_a_pickle_of_a_launcher_cannot_allocate_a_memo_of_gigabytes() -> None:
    raw = b"\x80\x04K\x01r" + (1 << 26).to_bytes(4, "little") + b"."
    with pytest.raises(MalformedMessage, match="LONG_BINPUT 67108864"):
        ft_messages.decode(raw)


@pytest.mark.parametrize("raw", [b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.", b"\x80\x04})" + b"2\x86" * 60 + b"Ns."])
def test_tuples_in_tuples_of_a_dump_are_not_hashed(raw: bytes) -> None:
    """40 pairs of pairs took hours, in C code."""
    began_s = time.process_time()
    with pytest.raises(MalformedMessage, match="take too long to compare"):
        parse_pickle(raw)
    assert time.process_time() - began_s < 1.0


def test_a_dump_with_shared_tuples_is_read() -> None:
    import pickle

    pair = ("1", "dp")
    dump = {
        "version": "2.10",
        "pg_config": {},
        "pg_status": {},
        "entries": [{"process_group": pair, (pair, pair): pair}] * 50,
    }
    for protocol in (0, 2, 4, 5):
        assert parse_pickle(pickle.dumps(dump, protocol)) == dump


@pytest.mark.parametrize("answer", ["b'{}'", "b'[]'", "b'\\x80'", "b'[' * 60_000"])
def test_what_a_script_writes_to_the_pipe_of_answers_is_a_policy_error(answer: str) -> None:
    lines = (
        "import os",
        f"raw = {answer} + bytes([10])",
        "for fd in range(3, 20):",
        "    try:",
        "        os.write(fd, raw)",
    )
    source = "\n".join((*lines, "    except OSError:", "        pass"))
    with PolicyScript(PolicySpec("p.py", source=source)) as script, pytest.raises(PolicyError, match="wrote no answer"):
        script.load()


def test_an_unknown_key_of_a_variable_is_named() -> None:
    """It was an internal error: a traceback of the command, and 500 of the API."""
    body = {"name": "g", "script": "/t.py", "nodes": 1, "env_from": {"S": {"filee": "/secret"}}}
    with pytest.raises(InvalidSpec, match=r"env_from\.S\.filee: .* did you mean 'file'"):
        jobfile.parse_job(body)


def test_a_job_file_with_a_text_that_is_tagged_as_a_date(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: !!timestamp soon\n")
    with pytest.raises(InvalidSpec, match="YAML"):
        jobfile.load_job(tmp_path / "job.yaml")


def test_a_job_file_with_a_number_that_cannot_be_printed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"name: a\nscript: /t.py\nnodes: 0x{'f' * 9000}\n")
    with pytest.raises(InvalidSpec, match=r"nodes: <integer of 36000 bits> is not valid"):
        jobfile.load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("sizes", [[0.5, 0, 8, 0, 0], [0, 0, True, 0, 0]])
def test_an_index_of_a_shard_has_whole_numbers(sizes: list[Any]) -> None:
    with pytest.raises(IntegrityError, match="not an integer"):
        read_index(json.dumps([["w", "uint8", [8], sizes, None]]).encode(), 1 << 20)


def test_a_snapshot_that_an_upgrade_cannot_read_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        snapshot.load({"format": b"4", "nodes/n1": b'""'})


@pytest.mark.parametrize(
    "text",
    ["h:99999", "h:" + MANY_DIGITS, "h:\u0663", "a..b:80", "a" * 70 + ":80", "h\0:80", ":80", "h", ""],
)
def test_an_address_that_no_socket_accepts(text: str) -> None:
    """Agents report addresses to each other: a port of 99999 raised OverflowError where OSError was expected."""
    assert host_and_port(text) is None


def test_addresses_that_sockets_accept() -> None:
    assert [host_and_port(text) for text in ("h:0", "10.0.0.5:8471", "[::1]:65535")] == [
        ("h", 0),
        ("10.0.0.5", 8471),
        ("::1", 65535),
    ]


def test_an_address_of_a_store_with_half_of_a_pair_of_brackets() -> None:
    with pytest.raises(InvalidSpec, match="store"):
        parse_url("gs://[bucket/prefix")


def test_an_origin_with_half_of_a_pair_of_brackets_is_another_one() -> None:
    """It was answered with 500, without a token."""
    assert not session._same_origin(Headers({"origin": "http://[", "host": "test"}))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        b'{"tokens": [{"name": "ada", "role": "admin", "digest": "%s", "created_at": 1, "expires_at": NaN}]}'
        % (b"a" * 64),
        b'{"tokens": [{"name": "\\ud800", "role": "admin", "digest": "%s", "created_at": 1}]}' % (b"a" * 64),
    ],
    ids=["deep", "a token that never expires", "a name that no answer can contain"],
)
def test_a_file_of_tokens_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_bytes(content)
    with pytest.raises(InvalidSpec):
        read_tokens_file(tmp_path / "tokens.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates"))


def damaged_der(pem: bytes, at: bytes, into: bytes) -> bytes:
    import base64

    first, *body, last = pem.splitlines()
    der = base64.b64decode(b"".join(body))
    assert at in der
    return b"\n".join((first, base64.b64encode(der.replace(at, into, 1)), last, b""))


EC_KEY = bytes.fromhex("2a8648ce3d0201")  # the object identifier of this kind of key


def test_a_key_of_an_unknown_kind_is_refused(folder: Path) -> None:
    key = damaged_der((folder / "ours.key").read_bytes(), EC_KEY, EC_KEY[:-1] + b"\x7f")
    with pytest.raises(InvalidSpec, match="a PEM file with a"):
        tls.require_pair((folder / "ours.pem").read_bytes(), key, folder / "ours.pem")


def test_a_ca_with_a_key_of_an_unknown_kind_is_refused(folder: Path) -> None:
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    ca = x509.load_pem_x509_certificate((folder / "ours-ca.pem").read_bytes())
    key: Any = load_pem_private_key((folder / "ours-ca.key").read_bytes(), None)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    crl = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(at)
        .next_update(at)
        .sign(key, SHA256())
    )
    (folder / "crl.pem").write_bytes(crl.public_bytes(Encoding.PEM))
    (folder / "odd-ca.pem").write_bytes(
        damaged_der((folder / "ours-ca.pem").read_bytes(), EC_KEY, EC_KEY[:-1] + b"\x7f")
    )
    assert revocation.Revocations(folder / "crl.pem", folder / "ours-ca.pem")
    with pytest.raises(InvalidSpec, match="a CRL in PEM, and certificates of the CA"):
        revocation.Revocations(folder / "crl.pem", folder / "odd-ca.pem")


def test_a_record_of_a_fault_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(DEEP)
    with pytest.raises(Unreadable):
        read_record(tmp_path / "record")


def test_records_of_slurm_with_numbers_that_are_too_large(tmp_path: Path) -> None:
    (tmp_path / ending.FILE).write_text('{"slurm_job": "1", "ends_at": 1%s}' % ("0" * 400))
    assert ending.read(tmp_path, "1") is None
    (tmp_path / chain.FILE).write_text(
        '{"id": "c", "job": "j", "slurm_jobs": [], "ended": [{"slurm_job": "1", "code": Infinity}]}'
    )
    with pytest.raises(InvalidSpec):
        chain.newest(tmp_path)


# ---------------------------------------------------------------- texts and messages on a node


@pytest.mark.parametrize(
    "report", ["[" * 100_000, '{"devices": [""]}', '{"devices": " "}'], ids=["deep", "no device", "a text"]
)
@pytest.mark.parametrize(
    "read",
    [preflight_checks.devices, lambda report: preflight_checks.quick(report, gpus=1)],
    ids=["suspect", "before a job"],
)
def test_an_answer_of_a_self_test_that_cannot_be_read_is_no_result(
    read: Callable[[str], list[Any]], report: str
) -> None:
    (check,) = read(report)
    assert check.ok is None
    assert "cannot be read" in check.detail


@pytest.mark.parametrize("mesh", ['{"dp": ""}', '{"dp": true}', "[" * 100_000], ids=["a text", "a truth value", "deep"])
def test_a_mesh_in_the_environment_that_is_none(mesh: str) -> None:
    with pytest.raises(InvalidSpec, match="HOLDFAST_MESH"):
        Environment.read({"HOLDFAST_MESH": mesh})


def test_a_message_of_a_template_that_is_nested_too_deeply() -> None:
    with pytest.raises(ValueError, match="not a template message"):
        template.decode(DEEP)


def test_a_holder_of_a_build_lock_with_an_infinite_generation() -> None:
    assert Holder.decode(b'{"holdfast": {"job": "j", "generation": Infinity, "rank": 0, "boot": "b"}}') is None


@pytest.mark.parametrize("weight", [MANY_DIGITS, "\u0663" * 5000])
def test_a_weight_of_thousands_of_digits(weight: str) -> None:
    with pytest.raises(InvalidSpec, match="--mix"):
        chaos.parse_mix(f"crash={weight}")


def test_evidence_with_a_count_of_thousands_of_digits() -> None:
    assert old_evidence.attribution(FindingKind.REPEATED_EXCEPTION, {"tries": MANY_DIGITS}).tries == 0
