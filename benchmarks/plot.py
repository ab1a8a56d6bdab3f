"""Pictures of results. matplotlib is imported when one is drawn: the command line starts without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import Row


def stacked_times(path: Path, title: str, rows: Sequence[Row], parts: Sequence[str], label: str) -> None:
    """A bar a row, divided into `parts` (columns in milliseconds)."""
    stacked_bars(path, title, rows, parts, label, "milliseconds to the first token (medians)", " ms")


def stacked_bars(
    path: Path,
    title: str,
    rows: Sequence[Row],
    parts: Sequence[str],
    label: str,
    axis: str,
    unit: str = "",
) -> None:
    """A bar a row, divided into `parts` (columns); with a unit, the sum is written beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.6 * len(rows)), layout="constrained")
    names = [str(row[label]) for row in rows]
    left = [0.0] * len(rows)
    for part in parts:
        widths = [max(0.0, float(row.get(part, 0.0))) for row in rows]
        axes.barh(names, widths, left=left, label=part.removesuffix(unit or " %"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, total in enumerate(left if unit else []):
        axes.text(total, position, f" {total:,.0f}{unit}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


Curves = tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]


def curves(path: Path, title: str, groups: Sequence[Curves | None], *, columns: int = 1) -> None:
    """In rows of so many: of each group its title, its unit, and by name what goes over what. Where a group
    is None stands what the lines are called; else in the first one."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = -(-len(groups) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(9, 1 + 2.2 * rows), layout="constrained", squeeze=False
    )
    places = list(grid.flat)
    legend = places[groups.index(None) if None in groups else 0]
    for axes in places[len(groups) :]:
        axes.axis("off")
    for axes, group in zip(places, groups, strict=False):
        if group is None:
            axes.axis("off")
            continue
        subtitle, unit, lines = group
        for name, points in lines.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        axes.set_title(subtitle, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    named = next(axes for axes in places if axes.lines)
    legend.legend(*named.get_legend_handles_labels(), frameon=False, loc="center" if None in groups else None)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def panels(
    path: Path, title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str
) -> None:
    """One above the other: of each group its title and its bars, named and in `unit`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    heights = [1.0 + len(bars) for _, bars in groups]
    figure, all_axes = plt.subplots(
        len(groups),
        figsize=(9, 1 + 0.4 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, (subtitle, bars) in zip(all_axes[:, 0], groups, strict=True):
        names, values = [name for name, _ in bars], [value for _, value in bars]
        axes.barh(names, values)
        for position, value in enumerate(values):
            axes.text(value, position, f" {value:,.0f}", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_xlabel(unit)
        axes.set_title(subtitle, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
