"""Waiting for descriptors, also for those that `select.select` refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from many_files import from_1024_on

from holdfast.runtime.processes.readable import readable


@pytest.mark.parametrize("high", [False, True])
def test_what_can_be_read_is_readable_and_what_cannot_is_not_after_the_limit(high: bool) -> None:
    reading, writing = os.pipe()
    with from_1024_on(reading) as descriptor:
        waited = descriptor if high else reading
        assert not readable(waited, 0.01)
        os.write(writing, b"x")
        assert readable(waited, None)
        assert os.read(waited, 1) == b"x"
        os.close(writing)
        assert readable(waited, 30.0), "the end of a pipe"
    os.close(reading)


def test_a_process_that_has_ended_is_readable() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        assert not readable(pidfd, 0.0)
        process.kill()
        assert readable(pidfd, 30.0)
        os.close(pidfd)
