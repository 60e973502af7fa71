"""Exact products: the constants are those of whole numbers, any wrong bit shows, and a device that fails is an answer."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until
from warm_processes import SCRIPTS, warm

from holdfast.train.selftest import gemm, memory, quick
from holdfast.train.selftest.__main__ import main

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", range(gemm.VARIANTS))
def test_the_constants_are_those_of_whole_numbers(variant: int) -> None:
    """In 64-bit integers, where nothing is ever rounded: by no unit that is tested."""
    a, b = gemm.factors(variant)
    whole = a @ b
    assert int(whole.abs().max()) < 2**24, "not exact in a 32-bit accumulator"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        block = gemm.rounded(whole, dtype)
        assert bool(block.isfinite().all())
        assert gemm.block_hash(block) == gemm.GOLDEN[dtype, variant]


def test_a_healthy_device_makes_no_wrong_product() -> None:
    (products,) = gemm.multiply(CPU, 0.05)
    assert (products.kind, products.wrong, products.first_wrong) == ("float32", 0, "")
    assert products.made >= gemm.VARIANTS


def test_one_wrong_bit_in_a_grid_of_blocks_is_found_where_it_is() -> None:
    block = gemm.reference(0, torch.float32)
    product = block.repeat(2, 3)
    product.view(torch.int32)[700, 1100] ^= 1
    assert gemm.wrong_elements(product, block).nonzero().tolist() == [[700, 1100]]


def test_a_device_that_computes_wrongly_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gemm.factors(0)
    wrong = a.clone()
    wrong[3, 5] += 1
    monkeypatch.setattr(gemm, "factors", lambda variant: (wrong, b))
    (products,) = gemm.multiply(CPU, 0.0)
    assert products.wrong == products.made == 1
    assert "wrong hash" in products.first_wrong


def test_settings_of_the_process_are_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    gemm.multiply(CPU, 0.0)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_memory_has_a_speed() -> None:
    assert memory.bandwidth_gb_s(CPU) > 0.1


def test_the_program_prints_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["selftest", "--budget-s", "0.0"])
    main()
    (device, *_) = json.loads(capsys.readouterr().out)["devices"]
    assert device["products"][0]["wrong"] == 0
    assert device["memory_gb_s"] > 0


# ---------------------------------------------------------------- the quick test


def forked(directory: Path, program: str, *arguments: str) -> Any:
    """What it prints, in another process: it forks, and what this one has imported may have threads."""
    script = directory / "program.py"
    script.write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended, out, err = warm(SCRIPTS)([str(script), *arguments], directory, environment, 100.0)
    assert ended == 0, out + err
    return json.loads(out)


def quickly(directory: Path, within_s: float) -> dict[str, Any]:
    program = "import runpy\nrunpy.run_module('holdfast.train.selftest', run_name='__main__', alter_sys=True)\n"
    report: dict[str, Any] = forked(directory, program, "--within-s", str(within_s))
    return report


def test_the_quick_test_of_a_machine_without_gpus_forms_an_all_reduce_on_the_loop_back(tmp_path: Path) -> None:
    report = quickly(tmp_path, 20.0)
    (device,) = report["devices"]
    assert (device["device"], device["unfinished"], device["products"][0]["wrong"]) == ("cpu", "", 0)
    assert report["all_reduce"] == {"ranks": quick.CPU_RANKS, "wrong": 0, "unfinished": ""}


def test_the_quick_test_ends_when_its_time_is_over(tmp_path: Path) -> None:
    report = quickly(tmp_path, 0.001)
    assert report["devices"][0]["unfinished"]
    assert "products" not in report["devices"][0]


def in_forks(directory: Path, code: str) -> list[dict[str, Any]]:
    """What `quick._collect` makes of these tests, in another process."""
    program = f"""
import json, os, signal, time, torch
from holdfast.train.selftest import quick
{textwrap.dedent(code)}
found = quick._collect(tests, time.monotonic() + within_s)
print(json.dumps(found))
"""
    found: list[dict[str, Any]] = forked(directory, program)
    return found


def test_what_a_device_has_found_counts_although_another_one_hangs_raises_or_is_taken(tmp_path: Path) -> None:
    found = in_forks(
        tmp_path,
        """
        within_s = 3.0
        def well(say): say("products", []); say("memory_gb_s", 1.0)
        def hangs(say): say("products", []); time.sleep(600)
        def raises(say): raise RuntimeError("CUDA error: uncorrectable ECC error\\nmore")
        def full(say): raise torch.OutOfMemoryError("CUDA out of memory")
        def bug(say): raise KeyError("x")
        def dies(say): os.kill(os.getpid(), signal.SIGSEGV)
        tests = [well, hangs, raises, full, bug, dies]
        """,
    )
    assert found[0] == {"products": [], "memory_gb_s": 1.0, "ended": True}
    assert found[1] == {"products": [], "unfinished": quick.NOT_ENDED}
    assert found[2] == {"error": "CUDA error: uncorrectable ECC error"}
    assert found[3] == {"unfinished": "CUDA out of memory"}
    assert found[4] == {"unfinished": "KeyError: 'x'"}
    assert found[5] == {"unfinished": quick.NOT_ENDED}


def test_none_of_its_processes_outlives_the_quick_test(tmp_path: Path) -> None:
    found = in_forks(
        tmp_path,
        """
        within_s = 0.5
        def hangs(say):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("pid", os.getpid())
            time.sleep(600)
        tests = [hangs, hangs]
        """,
    )
    places = [Path("/proc", str(each["pid"])) for each in found]
    wait_until(lambda: not any(place.exists() for place in places), description="the end of the tests")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_sum_is_found(tmp_path: Path, wrong: int) -> None:
    """Two processes, one of which adds a number that it should not have."""
    (first, second) = in_forks(
        tmp_path,
        f"""
        within_s = 20.0
        store = os.memfd_create("store")
        real = quick.dist.all_reduce
        def rank(number):
            def test(say):
                def reduce(share):
                    share[7] += {wrong} * number
                    real(share)
                quick.dist.all_reduce = reduce
                where = f"/proc/self/fd/{{store}}"
                say("all_reduce", quick._all_reduce(number, 2, torch.device("cpu"), where, 20.0))
            return test
        tests = [rank(0), rank(1)]
        """,
    )
    assert (first["all_reduce"], second["all_reduce"]) == (wrong, wrong)
