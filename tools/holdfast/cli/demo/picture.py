"""The demo's picture: world size and tokens per second over time, with the incidents marked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from holdfast.cli.demo.report import Report
from holdfast.domain.distribution import install_command

FIGURE_INCHES = (11.0, 5.2)
DPI = 130
LABEL_ROWS = 5
LABEL_STEP = 0.055  # fraction of the height


def draw(report: Report, path: Path) -> str:
    """Write a PNG. Returns where it is, or how to get one if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"no timeline.png without matplotlib: {install_command('demo')}"
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rate, world) = plt.subplots(2, 1, sharex=True, figsize=FIGURE_INCHES, height_ratios=[3, 1.2])
    times = [point[0] for point in report.tokens_per_s]
    rate.plot(times, [point[1] for point in report.tokens_per_s], color="#2a6f97", linewidth=1.4)
    rate.fill_between(times, [point[1] for point in report.tokens_per_s], color="#2a6f97", alpha=0.15)
    rate.set_ylabel("tokens/s")
    steps = [*report.world_sizes, [report.wall_s, report.world_sizes[-1][1]]]
    world.step([point[0] for point in steps], [point[1] for point in steps], where="post", color="#444444")
    world.set_ylabel("ranks")
    world.set_xlabel("seconds since submission")
    world.set_ylim(0, max(point[1] for point in steps) + 1.5)
    ceiling = max(point[1] for point in report.tokens_per_s) * (1 + LABEL_STEP * LABEL_ROWS)
    rate.set_ylim(0, ceiling)
    for number, incident in enumerate(report.incidents):
        for axis in (rate, world):
            axis.axvline(incident["fault_at_s"], color="#c1121f", linewidth=0.9, linestyle="--")
            if incident["first_step_at_s"] is not None:
                axis.axvspan(
                    incident["fault_at_s"], incident["first_step_at_s"], color="#c1121f", alpha=0.12, linewidth=0
                )
        label = f" {incident['kind'].replace('_', ' ')} → {str(incident['action']).replace('_', ' ')}"
        height = ceiling * (1 - LABEL_STEP * (number % LABEL_ROWS))  # labels of adjacent incidents must not overlap
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # lines of the next incident
        rate.text(
            incident["fault_at_s"], height, label, fontsize=8, verticalalignment="top", color="#780000", bbox=behind
        )
    for axis in (rate, world):
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0)
    rate.set_title(
        f"One run, {len(report.incidents)} incidents, goodput {report.goodput['job']:.1%}", loc="left", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return str(path)
