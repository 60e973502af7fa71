"""The command line: `python -m benchmarks.soak --help`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from benchmarks.soak import __doc__ as about
from benchmarks.soak import report as reports
from benchmarks.soak.report import Report
from benchmarks.soak.rig import Rig
from benchmarks.soak.soak import Soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(about or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--nodes", type=int, default=5, choices=range(3, 8), help="number of nodes; one of them is a spare"
    )
    parser.add_argument(
        "--only",
        default="",
        help="kinds of fault, comma-separated, * for any text, as in *_amid: in a phase of an incident; default: all that are "
        "possible on this machine",
    )
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="REPORT",
        help="only print the table of what is lost when a part dies, from these report.json files",
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="with --table: write the table into this page, between its marks"
    )
    options = parser.parse_args()
    if options.table:
        table = reports.table([json.loads(path.read_text()) for path in options.table])
        if options.into is None:
            print(table)
        else:
            options.into.write_text(reports.with_table(options.into.read_text(), table))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(0 if run(options.minutes, options.seed, options.nodes, options.only, options.out) else 1)


def run(minutes: float, seed: int, nodes: int, only: str, out: Path) -> bool:
    """Run a soak. Returns whether it passed. Writes `out`/report.json and `out`/logs/."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    logs = out.absolute() / time.strftime("logs-%H%M%S")
    report = Report(seed, minutes, nodes)
    rig = Rig(nodes, logs)
    say(f"seed {seed}, {minutes:g} minutes, {nodes} nodes; logs in {logs}")
    try:
        with rig:
            soak = Soak(rig, report, say, only=tuple(filter(None, only.split(","))))
            soak.run()
        soak.look_for_leftovers()
    except BaseException as error:
        report.broken_off = report.broken_off or f"ended by {error!r}"
        raise
    finally:
        rig.clean()
        (out / "report.json").write_text(reports.dumps(report))
    summary = report.to_json()
    for name in ("faults", "skipped", "pause_s_by_kind", "findings"):
        summary.pop(name)
    say(json.dumps(summary))
    say("passed" if report.passed else f"FAILED: {out / 'report.json'} lists the errors; logs are in {logs}")
    return report.passed


if __name__ == "__main__":
    main()
