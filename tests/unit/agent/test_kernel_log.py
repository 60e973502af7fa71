"""Xid lines in every form that drivers write, garbage, and a log that is rotated under the reader."""

from __future__ import annotations

import csv
import json
import os
from functools import partial
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until_async

from holdfast.agent.collectors.kernel_lines import gpu_named, is_garbled, parse_record, recognise
from holdfast.agent.collectors.kernel_log import KernelLog, gpu_of
from holdfast.domain.faults import xid_line
from holdfast.domain.signals import KernelEvent, KernelLine, NodeSignal
from holdfast.runtime.kernel_records import kernel_record
from holdfast.runtime.processes.survivors import BOOT_ID

DATA = Path(__file__).parents[2] / "data/kernel/lines.csv"
LINES = list(csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()))
XID_79 = "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("text", "xid", "pci"),
    [
        (XID_79, 79, "0000:18:00"),
        (
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python, Ch 00000008, intr 00000000. MMU Fault",
            31,
            "0000:3b:00",
        ),
        ("[ 12.3] NVRM: Xid (0000:03:00): 13, Graphics Exception: ESR 0x404490=0x80000001", 13, "0000:03:00"),
        (
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000)",
            149,
            "0009:01:00",
        ),
        (
            "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (Reset)",
            154,
            "0000:9b:00",
        ),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", 79, "0000:18:00.0"),
        ("NVRM: The NVIDIA GPU has fallen off the bus and is not responding to commands.", 79, ""),
        ("Out of memory: Killed process 4242 (python) total-vm:1kB", None, ""),
        ("nvme nvme0: I/O 5 QID 2 timeout, aborting", None, ""),
    ],
)
def test_lines_that_matter(text: str, xid: int | None, pci: str) -> None:
    found = recognise(text)
    assert found is not None
    assert (found.xid, found.pci) == (xid, pci)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "usb 1-1: new device",
        "NVRM: loading NVIDIA UNIX Module",
        "Xid (PCI:0000:18:00): 79",
        "NVRM: Xid (oops): 79,",
    ],
)
def test_lines_that_do_not(text: str) -> None:
    assert recognise(text) is None


@pytest.mark.parametrize(
    "prefix",
    [
        "", "[ 12.3] ", "[   12.345678] ", "[   12.345678][ T1234] ", "[123456.789012][  C17] ", "<4>[   12.345678] ", "<4>",
        "Nov 24 10:00:00 node-7 kernel: ", "Nov  4 10:00:00 node-7 kernel: [   12.345678] ",
        "2026-11-24T10:00:00.123456+00:00 node-7.rack kernel: [   12.345678] ", "2026-11-24T10:00:00Z node-7 kernel: ",
        # dmesg with -T in four languages, --time-format iso, reltime and delta, -d, -x
        "[Tue Nov 24 10:00:00 2026] ", "[Di Nov  4 10:00:00 2026] ", "[mar. nov. 24 10:00:00 2026] ",
        "[二 11月 24 10:00:00 2026] ",
        "2026-11-24T10:00:00,123456+00:00 ", "[Nov24 10:00] ", "[  +0.000012] ", "[   12.345678 <    0.000012>] ",
        "kern  :err   : [   12.345678] ", "kern  :warn  : [Tue Nov 24 10:00:00 2026] ",
        # journalctl -o short-precise, short-full, short-monotonic and short-unix; RFC 5424
        "Nov 24 10:00:00.123456 node-7 kernel: ", "Tue 2026-11-24 10:00:00 CET n7 kernel: ", "[   12.345678] node-7 kernel: ",
        "1795514400.123456 node-7 kernel: ", "<3>1 2026-11-24T10:00:00.123456+00:00 node-7 kernel - - - ",
    ],
)  # fmt: skip
def test_what_stands_before_the_kernels_message(prefix: str) -> None:
    for row in LINES:
        if row["event"] and not row["text"].startswith("["):
            found = recognise(prefix + row["text"])
            assert found is not None, prefix + row["text"]
            assert (found.event.value, str(found.xid or ""), found.pci) == (row["event"], row["xid"], row["pci"])


FORGED = [
    # a library with such a name, in the kernel's message about the crash of a program with any name
    "python[42]: segfault at 0 ip 00007f00 sp 00007ffd error 4 in libx NVRM: Xid (PCI:0000:18:00): 79, .so[7f00+1000]",
    "NVRM: Xid (PCI:[42]: segfault at 0 ip 00007f00 sp 00007ffd error 4 in 0000:18:00): 79, .so[7f00+1000]",
    "NVRM: Xid (01:0[4]: segfault at 0 ip 0 sp 0 error 4 in x): 79, .so[7f00+1000]",
    "NVRM: [42]: segfault at 0 ip 00007f00 sp 00007ffd error 4 in fallen off the bus[7f00+1000]",
    "NVRM: [42] general protection fault ip:7f00 sp:7ffd error:0 in fallen off the bus[7f00+1000]",
    "traps: NVRM: Xid (1): [42] trap invalid opcode ip:7f00 sp:7ffd error:0 in x): 79, [7f00+1000]",
    "watchdog: [42]: segfault at 0 ip 0 sp 0 error 4 in soft lockup",
    "INFO: task a:1 [42]: segfault at 0 ip 0 sp 0 error 4 in blocked for more than 9 seconds",
    "nvme nvme0: [42]: segfault at 0 ip 0 sp 0 error 4 in timeout",
    "mlx5_core a[42]: segfault at 0 ip 0 sp 0 error 4 in health compromised",
    "python[42]: segfault at 0 ip 00007f00 sp 00007ffd error 4 in libx in libnccl.so[7f00+1000]",
    "oom-kill:[42]: segfault at 0 ip 0 sp 0 error 4 in x",
    "Oops: 0000 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "kernel BUG at ! invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "a 00:00.0: AER:[42]: segfault at 0 ip 0 sp 0 error 4 in device recovery failed",
    # threads and files in other messages
    "INFO: rcu_preempt detected stalls by NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
    'audit: type=1400 comm="NVRM: Xid (PCI:0000:18:00): 79, "',
    "EXT4-fs error (device sda): ext4_lookup:1: comm x: deleted inode NVRM: Xid (PCI:0000:18:00): 79, ",
    "python: some program prints Out of memory: Killed process 1 (x)",
    "x Memory cgroup out of memory: Killed process 1",
    # what a program says in a log of all programs
    "Nov 24 10:00:00 node-7 python[42]: NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
    "Tue 2026-11-24 10:00:00 CET node-7 python[42]: NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
    "user  :notice: [   12.345678] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
    "[Tue Nov 24 10:00:00 2026] python kernel: NVRM: Xid (PCI:0000:18:00)[42]: segfault at 0 ip 0 sp 0 error 4 in 79, ",
    "Nov 24 10:00:00 node-7 python: Nov 24 10:00:00 node-7 kernel: NVRM: Xid (PCI:0000:18:00): 79, ",
]


@pytest.mark.parametrize("text", FORGED)
def test_words_that_a_program_has_put_into_a_message_are_not_the_kernels(text: str) -> None:
    found = recognise(parse_record(f"3,812,55123,-;{text}").text)
    assert found is None or (found.event in (KernelEvent.NCCL_SEGFAULT, KernelEvent.FILE_SYSTEM) and not found.xid), (
        text
    )
    if "libnccl" in text:
        assert found is None
    assert not gpu_named(text)


@pytest.mark.parametrize(
    ("raw", "counts"),
    [
        (f"3,812,55,-;{XID_79}", True), (f"7,812,55,-;{XID_79}", True), (XID_79, True), (f"<3>{XID_79}", True),
        (f"11,812,55,-;{XID_79}", False), (f"30,812,55,-;{XID_79}", False), (f"<30>{XID_79}", False),
        (f"{10**19},812,55,-;{XID_79}", False),
        (f"11,812,55,-;{xid_line(79)}", True), (f"<12>{xid_line(94)}", True),
        (f"11,812,55,-;{xid_line(79)} not", False),
    ],
)  # fmt: skip
def test_only_the_kernel_and_who_says_that_it_is_injected_are_heard(raw: str, counts: bool) -> None:
    """/dev/kmsg gives what a program writes there the facility of users."""
    assert parse_record(raw).is_of_the_kernel is counts


@pytest.mark.parametrize("row", LINES, ids=[row["text"][:40] for row in LINES])
def test_recorded_lines(row: dict[str, str]) -> None:
    found = recognise(row["text"])
    if not row["event"]:
        assert found is None
        return
    assert found is not None
    assert (found.event.value, str(found.xid or ""), found.pci) == (row["event"], row["xid"], row["pci"])


def test_unreadable_lines_are_distinguished_from_lines_of_others() -> None:
    for garbled in (
        '{"message": "NVRM: Xid (PCI:0000:18:00): 79, pid=1"}',
        "NVRM: Xid (oops): 79,",
        "\ufffd\ufffd",
        "a\x00b",
        "NVRM: Xid (PCI:0000:18:00): lost",
    ):
        assert is_garbled(garbled)
        assert recognise(garbled) is None
    for row in LINES:
        assert not is_garbled(row["text"])


@given(st.text())
def test_garbage_is_read_without_complaint(text: str) -> None:
    recognise(parse_record(text).text)


def test_records_of_the_kernel_and_bare_lines() -> None:
    record = parse_record(f"3,812,55123,-;{XID_79}\n SUBSYSTEM=pci\n")
    assert (record.text, record.sequence) == (XID_79, 812)
    assert parse_record("6,339,514,-,caller=T1;a;b").text == "a;b"
    assert parse_record(XID_79).sequence is None


def test_a_gpu_is_found_by_its_address(tmp_path: Path) -> None:
    for minor, pci in enumerate(("0000:18:00.0", "0000:3B:00.0")):
        (tmp_path / pci).mkdir()
        (tmp_path / pci / "information").write_text(f"Model: \t\t H200\nDevice Minor: \t {minor}\n")
    assert gpu_of("0000:3b:00", tmp_path) == 1
    assert gpu_of("0000:18:00.0", tmp_path) == 0
    assert gpu_of("0000:99:00", tmp_path) is None
    assert gpu_of("0000:18:00", tmp_path / "no driver") is None


def line(xid: int) -> str:
    return f"NVRM: Xid (PCI:0000:18:00): {xid}, words\n"


@pytest.mark.anyio
async def test_a_file_is_followed_from_its_end_through_rotation_truncation_and_half_lines(tmp_path: Path) -> None:
    path, seen, position = tmp_path / "kernel.log", list[int | None](), tmp_path / "position.json"

    def take(signal: NodeSignal) -> None:
        assert isinstance(signal, KernelLine)
        seen.append(signal.xid)

    path.write_text(line(1))  # before our time
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(KernelLog("n", path, position).run, take)
        await wait_until_async(position.exists, description="the first look")
        with path.open("a") as log:
            log.write("noise\n" + line(2) + line(3)[:20])
            log.flush()
            await wait_until_async(lambda: seen == [2], description="a whole line")
            log.write(line(3)[20:])
        await wait_until_async(lambda: seen == [2, 3], description="the line's other half")
        with path.open("a") as log:
            log.write(line(3))  # the rotation may come before it is read
        path.rename(tmp_path / "kernel.log.1")
        path.write_text(line(4))
        await wait_until_async(lambda: seen == [2, 3, 3, 4], description="the rotated file's line")
        path.write_text("")  # truncated; nobody can see that before it has grown again, unless it is looked at now
        await wait_until_async(lambda: '"position": 0' in position.read_text(), description="the truncation to be seen")
        path.write_text(line(5))
        await wait_until_async(lambda: seen == [2, 3, 3, 4, 5], description="the line after truncation")
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_sentence_over_three_lines_names_its_gpu(tmp_path: Path) -> None:
    path, seen = tmp_path / "kernel.log", list[NodeSignal]()
    path.touch()
    words = "The NVIDIA GPU 0000:9b:00.0|(PCI ID: 10de:2330) installed in this system has|fallen off the bus and is not"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(KernelLog("n", path, tmp_path / "position.json").run, seen.append)
        await wait_until_async((tmp_path / "position.json").exists, description="the first look")
        with path.open("a") as log:
            log.write(
                "".join(f"NVRM: {part}\n" for part in words.split("|")) + "x\n" * 4 + "NVRM: fallen off the bus\n"
            )
        await wait_until_async(lambda: len(seen) == 2, description="both lines")
        tasks.cancel_scope.cancel()
    assert [signal.pci for signal in seen if isinstance(signal, KernelLine)] == ["0000:9b:00.0", ""]


@pytest.mark.anyio
async def test_garbage_is_counted_and_the_next_line_still_read(tmp_path: Path) -> None:
    path, seen = tmp_path / "kernel.log", list[NodeSignal]()
    path.touch()
    log = KernelLog("n", path, tmp_path / "position.json")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.run, seen.append)
        await wait_until_async((tmp_path / "position.json").exists, description="the first look")
        with path.open("ab") as file:
            file.write(b"\xff\xfe\x00\n" + b"NVRM: Xid (oops): 79,\n" + b"z" * 20_000 + b"\n" + line(5).encode())
        await wait_until_async(lambda: len(seen) == 1, description="the line after the garbage")
        tasks.cancel_scope.cancel()
    assert log.garbled == 2


@pytest.mark.anyio
async def test_a_second_reader_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    path, seen = tmp_path / "kernel.log", list[int | None]()
    path.touch()

    def take(signal: NodeSignal) -> None:
        assert isinstance(signal, KernelLine)
        seen.append(signal.xid)

    for xid in (1, 2, 3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(KernelLog("n", path, tmp_path / "position.json").run, take)
            await wait_until_async((tmp_path / "position.json").exists, description="the first look")
            with path.open("a") as log:
                log.write(line(xid))
            await wait_until_async(partial(seen.__contains__, xid), description=f"xid {xid}")
            await wait_until_async(
                lambda: f'"position": {path.stat().st_size}' in (tmp_path / "position.json").read_text(),
                description="the position to be kept",
            )
            tasks.cancel_scope.cancel()
    assert seen == [1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
async def test_a_device_that_is_no_kernel_log_stops_nothing_else(tmp_path: Path, device: str) -> None:
    """It never blocks: an agent with `--kernel-log /dev/null` did nothing else, and could not be ended."""
    collector = KernelLog("n1", Path(device), tmp_path / "position.json")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, lambda _: pytest.fail("a signal"))
        for _ in range(10):
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_device_in_which_programs_write_too(tmp_path: Path) -> None:
    """A terminal in the place of /dev/kmsg: a device of characters, of which a read gives one record."""
    device, end = os.openpty()
    position, seen = tmp_path / "position.json", list[NodeSignal]()
    position.write_text(json.dumps({"place": BOOT_ID.read_text().strip(), "position": 1}))
    collector = KernelLog("n", Path(os.ttyname(end)), position)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run, seen.append)
            records = [(11, XID_79), (30, XID_79), (11, xid_line(94)), (3, "x\u2028" + XID_79), (4, XID_79)]
            for number, (priority, text) in enumerate(records, 2):
                os.write(device, f"{priority},{number},55,-;{text}\n".encode())
            await wait_until_async(lambda: len(seen) == 2, description="the injected Xid, and the kernel's")
            tasks.cancel_scope.cancel()
    finally:
        os.close(device)
        os.close(end)
    assert [signal.xid for signal in seen if isinstance(signal, KernelLine)] == [94, 79]


@pytest.mark.anyio
async def test_a_line_of_a_file_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    """What others take for the end of a line may be in the name of a file, which would begin a line of its own."""
    path, seen = tmp_path / "kernel.log", list[NodeSignal]()
    path.touch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(KernelLog("n", path, tmp_path / "position.json").run, seen.append)
        await wait_until_async((tmp_path / "position.json").exists, description="the first look")
        with path.open("ab") as log:
            for end in ("\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"):
                log.write(f"python[42]: segfault at 0 ip 0 sp 0 error 4 in lib{end}{XID_79}\n".encode())
            log.write(kernel_record(xid_line(48), device=False))
            log.write(line(49).replace("\n", "\r\n").encode())
        await wait_until_async(lambda: len(seen) == 2, description="the last line")
        tasks.cancel_scope.cancel()
    assert [signal.xid for signal in seen if isinstance(signal, KernelLine)] == [48, 49]
