"""Files that somebody else may have written or damaged: checkpoints, jobs, tokens, certificates, tables, records."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import certificates
import stored
import yaml
from fuzz import scratch
from fuzz.mutations import damaged, documents, dumped, json_texts, texts, written
from fuzz.target import Target
from hypothesis import strategies as st
from supervising import job_body

from holdfast.cli import job_environment, stack_record
from holdfast.cli.api_token import read as read_api_token
from holdfast.cli.policy import _read as read_questions
from holdfast.cli.slurm import chain, ending
from holdfast.diagnostics import flight_dumps
from holdfast.diagnostics.catalogue import xid
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IncompatibleVersion,
    IntegrityError,
    InvalidSpec,
    NotFound,
)
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.runtime.trust import revocation, tls
from holdfast.runtime.trust.api_tokens import ApiRole, ApiToken, read_tokens_file
from holdfast.runtime.trust.fleet import read_tokens
from holdfast.shards import Manifest, Reader
from holdfast.shards.layout import PAGE, Header, Stamp, pack_header, parse_header
from holdfast.shards.manifest import DIGEST_BYTES
from holdfast.shards.sealed import seal
from holdfast.shards.slots import read_index
from holdfast.stores.layout import CheckpointManifest
from holdfast.stores.memory import InMemory
from holdfast.wire import jobfile, yamlfile

SLOW_YAML_S = 10.0  # its scanner compares each bracket with those before it, for up to 1,024 characters
STORED = (IntegrityError, IncompatibleVersion)


def in_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """`read` of a file with these bytes."""

    def written_then_read(raw: bytes) -> object:
        path = scratch.directory() / name
        path.write_bytes(raw)
        return read(path)

    return written_then_read


# ---------------------------------------------------------------- shards and manifests


@cache
def _shard() -> tuple[bytes, Manifest]:
    return stored.shard(ShardKey(1, 20, 0), Mesh.of({"dp": 2}), 7, tensor_bytes=5000)


def _index() -> list[Any]:
    data = _shard()[0]
    header = parse_header(data[:PAGE])
    assert header is not None
    rows: list[Any] = json.loads(data[PAGE : PAGE + header.index_size])
    return rows


def _sealed(member: str, fields: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Documents that whoever wrote them has given the right checksum, and damaged ones."""
    edited = documents(fields).map(lambda document: seal(member, document) if _is_plain(document) else dumped(document))
    return st.one_of(edited, edited, edited, damaged(edited))


def _is_plain(document: Any) -> bool:
    return isinstance(document, dict)


def _manifests() -> st.SearchStrategy[bytes]:
    """Beside its fields, a manifest has the digests of its spans."""
    manifest = _shard()[1]
    digests = [bytes(DIGEST_BYTES * len(manifest.spans)), b"", b"no whole digests"]
    texts = st.one_of(st.sampled_from(digests).map(lambda raw: base64.b64encode(raw).decode()), st.text(max_size=8))
    fields = documents(json.loads(manifest.encode())["manifest"]).filter(_is_plain)
    whole = st.builds(lambda document, text: seal("manifest", document, {"blake3": text}), fields, texts)
    return st.one_of(_sealed("manifest", json.loads(manifest.encode())["manifest"]), whole, damaged(whole))


def _checkpoints() -> st.SearchStrategy[bytes]:
    checkpoint = stored.save(InMemory(), 20, mesh=Mesh.of({"dp": 2}), tensor_bytes=1000)
    assert checkpoint is not None
    return _sealed("checkpoint", json.loads(dumped(asdict(checkpoint))))


def _stamps() -> st.SearchStrategy[bytes]:
    header = parse_header(_shard()[0][:PAGE])
    assert header is not None
    return json_texts(json.loads(header.stamp.encode()))


def _images() -> st.SearchStrategy[bytes]:
    """Shards with another stamp, header or index, all with right checksums, and damaged ones."""
    data, _ = _shard()
    header = parse_header(data[:PAGE])
    assert header is not None
    sizes = st.sampled_from([0, 1, PAGE, header.index_size, header.tensors_end, 2**31, 2**40, 2**63, 2**64 - 1])

    def with_index(raw: bytes) -> bytes:
        raw = raw[: 4 * PAGE]
        made = Header(
            header.stamp, 1, len(raw), zlib.crc32(raw), max(header.tensors_end, PAGE + len(raw)), header.extra_size
        )
        return _with_header(made, raw.ljust(max(0, len(data) - PAGE), b"\0"))

    def with_sizes(pair: tuple[int, int, int]) -> bytes:
        made = Header(header.stamp, 1, pair[0] % 2**64, header.index_crc, pair[1] % 2**64, pair[2] % 2**64)
        return _with_header(made, data[PAGE:])

    indexes = json_texts(_index()).map(with_index)
    return st.one_of(damaged(st.just(data)), indexes, indexes, st.tuples(sizes, sizes, sizes).map(with_sizes))


def _with_header(header: Header, rest: bytes) -> bytes:
    return (b"HFSHARD\0COMPLETE" + pack_header(header)).ljust(PAGE, b"\0") + rest


def _read_image(path: Path) -> None:
    with Reader(path, ShardKey(1, 20, 0)) as reader:
        for spec, view in reader.items():
            assert len(view) == spec.nbytes
        assert isinstance(reader.extra, bytes)


# ---------------------------------------------------------------- jobs

_JOB: dict[str, Any] = {
    **job_body(), "nproc_per_node": 2, "mesh": {"dp": 2, "pp": 2}, "elastic": {"min_dp": 1, "max_dp": 3},
    "spares": 1,
    "args": ["--lr", "1e-3"], "env": {"A": "b"}, "env_from": {"S": {"file": "/secret"}}, "cwd": "/work", "preload": ["a.b:c"],
    "checkpoint": {"interval_steps": 10, "store": "file:///store", "tiers": ["memory", "disk"]},
    "policy": {"file": "/p.py", "params": {"x": 1}},
    "hang": {"factor": 3.0}, "limits": {"restarts_without_progress_max": 3}, "priority": 5, "chaos": True,
}  # fmt: skip


@cache
def _jobs() -> tuple[dict[str, Any], ...]:
    """Valid bodies: one with what all jobs have, one with every key that has a default, and one of the first's keys."""
    whole = json.loads(json.dumps(jobfile.to_body(jobfile.parse_job(job_body()))))
    return whole, job_body(), _JOB


def _job_files() -> st.SearchStrategy[bytes]:
    as_yaml = [yaml.safe_dump(each).encode() for each in _jobs()]
    bombs = (
        b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(_nine_times(c) for c in range(98, 106)),
        b"name: &a [*a]\n", b"? [a, b]\n: c\n", b"name: !!python/object/apply:os.system [ls]\n",
        b"name: 2026-99-99\n", b"<<: [a]\n", b"a: !!binary '*'\n",
        b"a: 1e400\nb: 0x" + b"f" * 9000, b"a: 190:20:30\n", b"{" * 3000, b"- " * 3000, b"a: |\n" + b" x\n" * 9000,
        b"!!set {a, b}\n", b"name: !!timestamp x\n",
    )  # fmt: skip
    edited = documents(*_jobs()).map(lambda document: json.dumps(document).encode())
    return st.one_of(
        edited,
        edited,
        damaged(st.sampled_from(as_yaml)),
        damaged(st.sampled_from(as_yaml)),
        st.sampled_from(bombs),
        damaged(st.sampled_from(bombs)),
    )


def _nine_times(letter: int) -> bytes:
    """A list of nine aliases of the list before, which has nine of the one before that."""
    return b"%c: &%c [%s]\n" % (letter, letter, b",".join([b"*%c" % (letter - 1)] * 9))


def _parsed(body: Any) -> None:
    """A job that is accepted can be written as a body that gives the same job."""
    if not isinstance(body, dict):
        return
    spec = jobfile.parse_job(body)
    assert jobfile.parse_job(jobfile.to_body(spec)) == spec
    assert jobfile.parse_job(jobfile.to_request(spec)) == spec


# ---------------------------------------------------------------- tokens and certificates


def _tokens_files() -> st.SearchStrategy[bytes]:
    token = asdict(ApiToken("ada", ApiRole.VIEWER, "a" * 64, 1.0, 2.0))
    return json_texts({"tokens": [token, {**token, "name": "bob"}]})


def _tokens(path: Path) -> None:
    """What is read decides about requests, and its names are written into answers and lines of the log."""
    for token in read_tokens_file(path):
        token.is_over(5.0)
        token.name.encode()
        assert token.expires_at == token.expires_at, "a time that no time is after"


@cache
def _certificates() -> Path:
    folder = scratch.directory() / "certificates"
    folder.mkdir()
    certificates.make(folder)
    certificates.issue(folder, "agent", "holdfast://main/agent/node-1")
    _write_crl(folder)
    return folder


def _write_crl(folder: Path) -> None:
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    ca = x509.load_pem_x509_certificate((folder / "ours-ca.pem").read_bytes())
    key: Any = load_pem_private_key((folder / "ours-ca.key").read_bytes(), None)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    revoked = x509.RevokedCertificateBuilder().serial_number(77).revocation_date(at).build()
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(at)
        .next_update(at.replace(year=2027))
    )
    crl = builder.add_revoked_certificate(revoked).sign(key, SHA256())
    (folder / "crl.pem").write_bytes(crl.public_bytes(Encoding.PEM))


def _pems(name: str) -> Callable[[], st.SearchStrategy[bytes]]:
    """A PEM file with damaged text, or with damaged content in an intact frame."""

    def made() -> st.SearchStrategy[bytes]:
        import base64

        raw = (_certificates() / name).read_bytes()
        lines = raw.splitlines()
        der = base64.b64decode(b"".join(lines[1:-1]))
        framed = damaged(st.just(der), often=False).map(
            lambda each: b"\n".join((lines[0], base64.b64encode(each), lines[-1], b""))
        )
        return st.one_of(damaged(st.just(raw)), framed, framed)

    return made


def _certificate(pem: bytes) -> None:
    path = scratch.directory() / "leaf.pem"
    tls.lifetime_of(pem, "HOLDFAST_TLS_CERT", path)
    tls.own_identities(path, pem, "main", ())


# ---------------------------------------------------------------- tables and records of commands


def _xid_tables() -> st.SearchStrategy[bytes]:
    rows = "xid,name,proposed_class,proposed_first_action\n79,off the bus,hw_bus,REPLACE_NODE\n13,engine,app,RESTART_PROCESS\n"
    return written(texts(rows, '"xid",proposed_first_action\n"7\n9",WATCH\n')).map(str.encode)


def _dumps(path: Path) -> None:
    flight_dumps.describe(flight_dumps.read(path.parent))


def _dump_files() -> st.SearchStrategy[bytes]:
    from fuzz.node_targets import _dumps as as_json
    from fuzz.node_targets import _pickled_dumps as as_pickle

    return st.one_of(as_json(), as_pickle())


def _dump_directory(raw: bytes) -> None:
    directory = scratch.directory() / "dumps"
    directory.mkdir(exist_ok=True)
    (directory / "dump_0").write_bytes(raw)
    _dumps(directory / "dump_0")


def _questions() -> st.SearchStrategy[bytes]:
    from fuzz.wire_targets import _record

    from holdfast.supervisor.published import PolicyAsked

    return _record(PolicyAsked)()


CHAIN = {"id": "c", "job": "j", "slurm_jobs": ["1"], "ended": [{"slurm_job": "1", "code": 0}]}
STACK = {
    "flags": {"nodes": 2},
    "path": "/x",
    "memory": "/dev/shm/x",
    "endpoints": {"supervisor": {"api": "http://h:1"}},
}

TARGETS = (
    Target("shard", _images, in_file(_read_image, "rank-0.image"), (*STORED, Conflict)),
    Target("shard's stamp", _stamps, Stamp.decode, STORED),
    Target("shard's index", lambda: json_texts(_index()), lambda raw: read_index(raw, 1 << 20), STORED),
    Target("manifest of a shard", _manifests, lambda raw: Manifest.decode(raw).encode(), STORED),
    Target("manifest of a checkpoint", _checkpoints, lambda raw: CheckpointManifest.decode(raw).encode(), STORED),
    Target(
        "job file", _job_files, in_file(jobfile.load_job, "job.yaml"), (InvalidSpec,), cpu_s_max=SLOW_YAML_S, share=0.5
    ),
    Target(
        "YAML file", _job_files, in_file(yamlfile.read, "any.yaml"), (InvalidSpec,), cpu_s_max=SLOW_YAML_S, share=0.5
    ),
    Target("body of a job", lambda: documents(*_jobs()), _parsed, (InvalidSpec,)),
    Target(
        "body of a policy",
        lambda: documents("plugin:x", {"file": "/p", "params": {"a": 1}, "source": "x"}),
        jobfile.parse_policy,
        (InvalidSpec,),
    ),
    Target("file of API tokens", _tokens_files, in_file(_tokens, "tokens.json"), (InvalidSpec,)),
    Target(
        "file of an API token",
        lambda: damaged(st.just(b"hf_" + b"a" * 64)),
        in_file(read_api_token, "api-token"),
        (HoldfastError,),
    ),
    Target(
        "file of join tokens",
        lambda: damaged(st.just(b"a" * 64 + b"\n" + b"b" * 64 + b"\n")),
        in_file(lambda path: read_tokens("", path), "join-token"),
        (InvalidSpec,),
    ),
    Target(
        "CRL",
        _pems("crl.pem"),
        in_file(lambda path: revocation._serials(path, _certificates() / "ours-ca.pem"), "crl.pem"),
        (InvalidSpec,),
    ),
    Target(
        "CA of a CRL",
        _pems("ours-ca.pem"),
        in_file(lambda path: revocation._serials(_certificates() / "crl.pem", path), "ca.pem"),
        (InvalidSpec,),
    ),
    Target("certificate", _pems("agent.pem"), _certificate, (InvalidSpec,)),
    Target("serial number of a certificate", _pems("agent.pem"), revocation.serial_of, (ValueError,)),
    Target(
        "key of a certificate",
        _pems("agent.key"),
        lambda raw: tls.require_pair((_certificates() / "agent.pem").read_bytes(), raw, Path("key")),
        (InvalidSpec,),
    ),
    Target("table of Xids", _xid_tables, in_file(xid.load, "overrides.csv"), (InvalidSpec,), share=0.3),
    Target(
        "file of variables",
        lambda: damaged(st.just(b"# x\nexport A='b'\nC=d e\n")),
        in_file(job_environment.read_file, "env"),
        (InvalidSpec,),
    ),
    Target(
        "record of a stack",
        lambda: json_texts(STACK),
        in_file(lambda path: stack_record.read(path.parent), stack_record.FILE),
    ),
    Target(
        "record of Slurm's jobs",
        lambda: json_texts(CHAIN),
        in_file(lambda path: chain.newest(path.parent), chain.FILE),
        (InvalidSpec, NotFound),
    ),
    Target(
        "announced end of Slurm's job",
        lambda: json_texts({"slurm_job": "1", "ends_at": 5.0}),
        in_file(lambda path: ending.read(path.parent, "1"), ending.FILE),
    ),
    Target("dump of a flight recorder", _dump_files, _dump_directory, (NotFound,), share=0.5),
    Target(
        "exported questions",
        _questions,
        in_file(lambda path: read_questions(path, 0.0), "questions.jsonl"),
        (InvalidSpec,),
        share=0.3,
    ),
)
