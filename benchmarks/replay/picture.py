"""A bar a policy: what came from DRAM and from disk. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.replay import Outcome, Setting
from benchmarks.replay.trace import Trace


def draw(path: Path, trace: Trace, setting: Setting, outcomes: Sequence[Outcome]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.4 * len(outcomes)), layout="constrained")
    names = [outcome.label for outcome in outcomes]
    dram = [100 * outcome.dram_hit_rate for outcome in outcomes]
    disk = [100 * outcome.disk_hit_rate for outcome in outcomes]
    axes.barh(names, dram, label="found in DRAM")
    if setting.capacity.disk_blocks:
        axes.barh(names, disk, left=dram, label="found on disk")
    for position, outcome in enumerate(outcomes):
        hits = 100 * outcome.block_hit_rate
        axes.text(hits, position, f" {hits:.1f}%", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(1.0, *(100 * outcome.block_hit_rate for outcome in outcomes)))
    axes.set_xlabel("blocks found in a run from the first, % of all blocks asked for")
    capacity = f"{setting.capacity.dram_blocks:,} blocks in DRAM"
    if setting.capacity.disk_blocks:
        capacity += f", {setting.capacity.disk_blocks:,} on disk"
    known = "" if setting.look_ahead is None else f", next {setting.look_ahead:,} requests known"
    axes.set_title(f"{trace.name}: {capacity}{known}", loc="left")
    if setting.capacity.disk_blocks:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
