"""Measures upload and download of one object of an object store, which has the state's size, but at most half a GB.

* `holdfast`: `holdfast.stores` with a gs:// URL, on the fake Cloud Storage server that ships with the package;
* `ceiling`, `ceiling_parallel`: the same server with only `http.client`, with one stream and with as many parallel ranges as
  the store reads. Uploads use one stream;
* `file`: `holdfast.stores` with a file:// URL on the local disk, fsynced, for comparison.

The fake server in Python limits the rate, not the network, so the results show the overhead of the client.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from urllib.parse import urlsplit

from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.results import OURS, Measured, TrialFailed
from benchmarks.checkpoint.scratch import Scratch
from holdfast.stores import open_store
from holdfast.stores.checksum import crc32c

BYTES_MAX = 512 << 20
BUCKET = "bench"
KEY = "shard"
STREAMS = 4  # GcsOptions' default
RANGE_BYTES = 64 << 20
EMULATOR = "STORAGE_EMULATOR_HOST"
TIMEOUT_S = 60.0
ROUNDS = 3
UP = "store_up_gb_s"
DOWN = "store_down_gb_s"

Way = tuple[str, str, Callable[[], object]]  # measure, contender, timed function


def installed() -> bool:
    """Whether the extra `gcs` is installed."""
    try:
        return importlib.util.find_spec("google.cloud.storage") is not None
    except ModuleNotFoundError:
        return False


def measure(request: Request, place: Scratch) -> Measured:
    """Run one trial: the ways alternate, `ROUNDS` times. Raises TrialFailed."""
    nbytes = min(request.nbytes, BYTES_MAX)
    source, target = _mapped(nbytes), _mapped(nbytes)
    source[:] = bytes(nbytes)  # faults in every page
    for start in range(0, nbytes - 8, 1 << 20):  # so that all pieces differ
        source[start : start + 8] = start.to_bytes(8, "little")
    crc = crc32c(source)
    values: Measured = []
    with ExitStack() as stack:
        ways = _ways(stack, place, source, target, crc)
        for measure, name, work in ROUNDS * ways:
            if measure == DOWN:
                target[:] = bytes(nbytes)
            values.append((measure, name, _rate(nbytes, work)))
            if measure == DOWN and crc32c(target) != crc:
                raise TrialFailed(f"{name}: the downloaded bytes differ from the uploaded ones")
    return values


def _ways(stack: ExitStack, place: Scratch, source: memoryview, target: memoryview, crc: int) -> list[Way]:
    """Return the ways in an order in which every object is uploaded before it is downloaded."""

    def through(name: str, url: str) -> list[Way]:
        store = stack.enter_context(closing(open_store(url)))
        return [
            (UP, name, lambda: store.put(KEY, [source], crc32c=crc)),
            (DOWN, name, lambda: store.read_into(KEY, target)),
        ]

    ways = through("file", f"file://{place.disk}/store")
    if installed():
        endpoint = stack.enter_context(_fake_server(place))
        ways += [
            (UP, "ceiling", lambda: _put(endpoint, source)),
            (DOWN, "ceiling", lambda: _get(endpoint, target, 1)),
            (DOWN, "ceiling_parallel", lambda: _get(endpoint, target, STREAMS)),
            *through(OURS, f"gs://{BUCKET}/checkpoints"),
        ]
    return ways


def _mapped(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - began) / 1e9


@contextmanager
def _fake_server(place: Scratch) -> Iterator[str]:
    """Run the server in a separate process, and set its address in the environment for the client library."""
    with (
        (place.sockets / "fake-gcs.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "holdfast.stores.fake_gcs"], stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            if not endpoint:
                raise TrialFailed(f"the fake server does not start: {(place.sockets / 'fake-gcs.log').read_text()}")
            os.environ[EMULATOR] = endpoint
            yield endpoint
        finally:
            os.environ.pop(EMULATOR, None)
            server.kill()


# ---------------------------------------------------------------- the server's own ceiling


def _put(endpoint: str, source: memoryview) -> None:
    """Upload with a resumable upload, in one piece."""
    with closing(_connection(endpoint)) as connection:
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&name={KEY}"
        connection.request("POST", path, body=json.dumps({"name": KEY}))
        begun = connection.getresponse()
        begun.read()
        session = urlsplit(begun.headers["Location"])
        last = len(source) - 1
        headers = {"Content-Range": f"bytes 0-{last}/{last + 1}", "Content-Length": str(last + 1)}
        connection.request("PUT", f"{session.path}?{session.query}", body=source, headers=headers)
        _insist(connection.getresponse(), 200).read()


def _get(endpoint: str, target: memoryview, streams: int) -> None:
    """Download the object in `streams` parallel ranges; with one stream, in one request."""
    piece = len(target) if streams == 1 else RANGE_BYTES

    def one(start: int) -> None:
        place = target[start : start + piece]
        with closing(_connection(endpoint)) as connection:
            headers = {"Range": f"bytes={start}-{start + len(place) - 1}"}
            connection.request("GET", f"/download/storage/v1/b/{BUCKET}/o/{KEY}?alt=media", headers=headers)
            response = _insist(connection.getresponse(), 206)
            while place:
                place = place[response.readinto(place) :]

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(0, len(target), piece)))


def _connection(endpoint: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=TIMEOUT_S, blocksize=1 << 20)


def _insist(response: http.client.HTTPResponse, status: int) -> http.client.HTTPResponse:
    if response.status != status:
        raise TrialFailed(f"the fake server answers {response.status}: {response.read(300)!r}")
    return response
