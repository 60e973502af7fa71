"""What another user of the machine may prepare where an agent keeps checkpoints, and what a supervisor's order may name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.agent.directory import claimed, remove_images
from holdfast.domain.errors import HoldfastError, InvalidSpec, MalformedMessage
from holdfast.domain.orders import Order, RebootNode, ResetGpu, RestartAgent, Stop
from holdfast.runtime.private import make_private
from holdfast.wire.control import decode_order, encode_order

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """As /dev/shm is: everybody may create something, and remove only what is theirs."""
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(0o1777)
    return place


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_an_agent_makes_is_its_users_alone(everybodys: Path) -> None:
    memory, directory = everybodys / "holdfast" / "node-0", everybodys / "agent"
    with claimed(directory, memory, directory / "disk"):
        assert {mode(path) for path in (memory, directory, directory / "disk")} == {0o700}


def test_an_agents_directory_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    directory, disk = tmp_path / "agent", tmp_path / "volume"
    for path in (directory, disk):
        path.mkdir()
        path.chmod(0o755)
    with claimed(directory, tmp_path / "memory", disk):
        assert mode(directory) == 0o700
        assert mode(disk) == 0o755, "it may be a volume that others use as well"


@needs_root
def test_a_directory_of_another_user_is_refused(everybodys: Path) -> None:
    (everybodys / "agent").mkdir()
    os.chown(everybodys / "agent", SOMEBODY, SOMEBODY)
    with (
        pytest.raises(
            InvalidSpec, match=rf"a path without parts of other users: .*/agent belongs to user {SOMEBODY}, and this"
        ),
        claimed(everybodys / "agent", everybodys / "memory", everybodys / "disk"),
    ):
        pass
    assert not (everybodys / "memory").exists()


@needs_root
@pytest.mark.parametrize("name", ["node-0", "jobs/node-0"])
def test_nor_one_below_it(everybodys: Path, name: str) -> None:
    """Who has `holdfast` can put a symbolic link in the place of `holdfast/node-0` at any time."""
    (everybodys / "holdfast").mkdir()
    os.chown(everybodys / "holdfast", SOMEBODY, SOMEBODY)
    with pytest.raises(InvalidSpec, match=rf"/holdfast belongs to user {SOMEBODY}, and this process runs as user 0"):
        make_private(everybodys / "holdfast" / name)
    assert not list((everybodys / "holdfast").iterdir())


@needs_root
def test_a_volume_that_somebody_else_mounted_is_used(tmp_path: Path) -> None:
    """Of a place where not everybody may create something, whoever manages the machine has decided."""
    (tmp_path / "volume").mkdir()
    os.chown(tmp_path / "volume", SOMEBODY, SOMEBODY)
    (tmp_path / "volume").chmod(0o777)
    make_private(tmp_path / "volume" / "node-0")
    assert mode(tmp_path / "volume" / "node-0") == 0o700


@needs_root
def test_a_link_of_another_user_is_refused(everybodys: Path, tmp_path: Path) -> None:
    (precious := tmp_path / "precious").mkdir(mode=0o755)
    (everybodys / "agent").symlink_to(precious)
    make_private(everybodys / "agent")  # this user's own: another disk
    os.chown(everybodys / "agent", SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(InvalidSpec, match=rf"/agent belongs to user {SOMEBODY}"):
        make_private(everybodys / "agent")
    assert mode(precious) == 0o755


def test_images_are_not_removed_through_a_link(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").touch()
    (memory := tmp_path / "memory").mkdir()
    (memory / "gpt").symlink_to(precious)
    with pytest.raises(HoldfastError, match="the images of gpt cannot be removed"):
        remove_images(memory, "gpt")
    assert (precious / "file").exists()


@pytest.mark.parametrize("name", ["../../x", "..", "/etc", "a/b", "", ".hidden", "a\x00b", "a" * 200])
def test_an_order_for_a_job_whose_name_is_a_path_is_refused(name: str) -> None:
    order = encode_order(1, "c-1", Stop(name, 1, forget=True, grace_s=0.0)).command
    with pytest.raises(MalformedMessage, match=r"command\.stop\.job: .* is not a valid name of a job"):
        decode_order(order)


@pytest.mark.parametrize(
    "order", [ResetGpu(""), RebootNode("xid"), RestartAgent("frozen")], ids=lambda each: type(each).__name__
)
def test_an_order_for_a_node_is_of_no_job(order: Order) -> None:
    assert decode_order(encode_order(1, "c-1", order).command) == order
