"""Certificates in a mounted Secret: the kubelet replaces all files at once, at any moment."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from random import Random

import certificates
import grpc
import pytest
from kubelet_volume import KubeletVolume

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust import tls as tls_module
from holdfast.runtime.trust.renewal import renewed, server_credentials
from holdfast.runtime.trust.tls import Tls

SETS = 3
SWAPS = 150
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """Certificate, key and CA of several issues, each by a CA of its own, for the same supervisor."""
    found = []
    for number in range(SETS):
        folder = tmp_path_factory.mktemp(f"issue-{number}")
        certificates.make(folder)
        certificates.issue(folder, "supervisor", "holdfast://main/supervisor")
        names = {"tls.crt": "supervisor.pem", "tls.key": "supervisor.key", "ca.crt": "ours-ca.pem"}
        found.append({name: (folder / source).read_bytes() for name, source in names.items()})
    return found


@pytest.fixture
def volume(tmp_path: Path, sets: list[Files]) -> KubeletVolume:
    volume = KubeletVolume(tmp_path / "tls")
    volume.write(sets[0])
    return volume


def load(volume: KubeletVolume) -> Tls:
    cert, key, ca = (volume.directory / name for name in ("tls.crt", "tls.key", "ca.crt"))
    loaded = Tls.load(cert=cert, key=key, ca=ca, fleet="main", demand="auto")
    assert loaded is not None
    return loaded


def read(tls: Tls) -> Files:
    return {"tls.crt": tls.cert, "tls.key": tls.key, "ca.crt": tls.ca}


@pytest.mark.parametrize("after_reads", [1, 2])
def test_a_swap_while_the_files_are_read_gives_one_whole_set(
    volume: KubeletVolume, sets: list[Files], after_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and at a renewal. Before, the certificate was of one set and the key of the next."""
    _swap_after(after_reads, monkeypatch, lambda: volume.write(sets[1]))
    tls = load(volume)
    assert read(tls) == sets[1]
    volume.write(sets[2])
    _swap_after(after_reads, monkeypatch, lambda: volume.write(sets[0]))
    assert read(renewed(tls)) == sets[0]


def test_a_directory_that_is_deleted_while_it_is_read_is_read_again(
    volume: KubeletVolume, sets: list[Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is resolved, the link is replaced, the old directory is deleted, and only then the file is opened."""
    original = tls_module.read_pem
    swapped = False

    def late(variable: str, path: Path) -> bytes:
        nonlocal swapped
        if not swapped:
            swapped = True
            resolved = path.resolve()
            volume.write(sets[1])
            return original(variable, resolved)
        return original(variable, path)

    monkeypatch.setattr(tls_module, "read_pem", late)
    assert read(load(volume)) == sets[1]


def test_files_that_are_missing_are_named_and_not_read_for_ever(volume: KubeletVolume, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_TLS_KEY.*No such file"):
        Tls.load(cert=volume.directory / "tls.crt", key=tmp_path / "none", ca=volume.directory / "ca.crt")


@pytest.mark.parametrize("seed", range(3))
def test_every_set_that_is_read_is_whole_however_often_it_is_replaced(
    volume: KubeletVolume, sets: list[Files], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that replaces the files once or twice at any point of each reading."""
    random = Random(seed)
    original = tls_module.read_pem
    written = 0
    due: list[int] = []  # reads until each replacement

    def replace() -> None:
        nonlocal written
        written += 1
        volume.write(sets[written % SETS])

    def disturbed(variable: str, path: Path) -> bytes:
        for _ in range(due.count(0)):
            replace()
        due[:] = [left - 1 for left in due if left > 0]
        return original(variable, path)

    monkeypatch.setattr(tls_module, "read_pem", disturbed)
    tls = load(volume)
    for _ in range(SWAPS):
        due[:] = [random.randrange(6) for _ in range(random.randint(1, 2))]
        tls = renewed(tls)
        assert read(tls) in sets
        assert read(load(volume)) in sets
    monkeypatch.undo()
    assert read(renewed(tls)) == sets[written % SETS]
    assert written > SWAPS


def test_a_server_presents_the_certificate_of_the_new_directory(volume: KubeletVolume, sets: list[Files]) -> None:
    """The next handshake does; no process is restarted."""
    with serving(load(volume)) as port:
        for files in (sets[0], sets[1], sets[2], sets[0]):
            volume.write(files)
            assert presented(volume, port) == ssl.PEM_cert_to_DER_cert(files["tls.crt"].decode())


@contextmanager
def serving(tls: Tls) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    port = server.add_secure_port("localhost:0", server_credentials(tls))
    server.start()
    yield port
    server.stop(None).wait()


def presented(volume: KubeletVolume, port: int) -> bytes | None:
    """Return the certificate of the server, to a client with the files of the volume."""
    context = ssl.create_default_context(cafile=str(volume.directory / "ca.crt"))
    context.load_cert_chain(volume.directory / "tls.crt", volume.directory / "tls.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("localhost", port), 20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert(binary_form=True)


def _swap_after(reads: int, monkeypatch: pytest.MonkeyPatch, swap: Callable[[], None]) -> None:
    """Call `swap` once, after so many files have been read."""
    original = tls_module.read_pem
    count = 0

    def counted(variable: str, path: Path) -> bytes:
        nonlocal count
        content = original(variable, path)
        count += 1
        if count == reads:
            swap()
        return content

    monkeypatch.setattr(tls_module, "read_pem", counted)
