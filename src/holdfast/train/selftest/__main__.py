"""Test every device that this process sees, and print one JSON object:

{"devices": [{"device": "cuda:0", "products": [{"kind": "tf32", "made": 90, "wrong": 0, "first_wrong": ""}],
              "memory_gb_s": 1502.3}]}

The exit code is 0 also for wrong products, which are a result. A device that raises is reported with `"error"`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from holdfast.train.selftest import quick
from holdfast.train.selftest.gemm import multiply
from holdfast.train.selftest.memory import bandwidth_gb_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="holdfast.train.selftest", description="Test the devices of this machine.")
    parser.add_argument("--budget-s", type=float, default=0.5, help="seconds of products per device")
    parser.add_argument(
        "--within-s",
        type=float,
        default=0.0,
        help="seconds within which to test all devices at the same time, and an all-reduce between them; 0 = one by one",
    )
    arguments = parser.parse_args()
    budget_s = arguments.budget_s
    if arguments.within_s > 0:
        print(json.dumps(quick.run(arguments.within_s)))  # noqa: T201
        return
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        devices = [torch.device("cpu")]
    print(json.dumps({"devices": [_test(device, budget_s) for device in devices]}))  # noqa: T201


def _test(device: torch.device, budget_s: float) -> dict[str, Any]:
    try:
        products = [asdict(products) for products in multiply(device, budget_s)]
        return {"device": str(device), "products": products, "memory_gb_s": round(bandwidth_gb_s(device), 2)}
    except RuntimeError as error:  # torch's only exception for a device that is lost, out of memory or misconfigured
        return {"device": str(device), "error": str(error).splitlines()[0][:500]}


if __name__ == "__main__":
    main()
