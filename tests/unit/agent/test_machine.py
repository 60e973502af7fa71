"""Machines are distinguished by its firmware's number, and firmware without one says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.host.machine import boot_id, machine_id


def machine_id_of(tmp_path: Path, uuid: str | bytes) -> str:
    path = tmp_path / "product_uuid"
    path.write_bytes(uuid if isinstance(uuid, bytes) else uuid.encode())
    return machine_id(path)


def test_the_same_number_is_the_same_machine_however_it_is_written(tmp_path: Path) -> None:
    one = machine_id_of(tmp_path, "a1b2c3d4-0000-1111-2222-333344445555")
    assert one == machine_id_of(tmp_path, "A1B2C3D4-0000-1111-2222-333344445555\n")
    assert one != machine_id_of(tmp_path, "a1b2c3d4-0000-1111-2222-333344445556")


@pytest.mark.parametrize(
    "uuid",
    [
        "",
        "\n",
        "00000000-0000-0000-0000-000000000000",
        "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
        "03000200-0400-0500-0006-000700080009",
        b"\xff\xfe",
    ],
)
def test_a_number_that_many_machines_have_is_none(tmp_path: Path, uuid: str | bytes) -> None:
    assert machine_id_of(tmp_path, uuid) == ""


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert machine_id(tmp_path / "nothing") == ""
    assert boot_id(tmp_path) == ""
