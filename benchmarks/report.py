"""The form that every benchmark's result has, as JSON, as a table and as a picture."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles, stdev

from rich.console import Console
from rich.table import Table

Row = Mapping[str, str | int | float]
# Student's t for 95%, by degrees of freedom from 1; for more than these the last one is a little wide.
_STUDENT = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
    2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
)  # fmt: skip
_WIDE = 10_000  # a terminal of so many columns holds every table


def describe_machine() -> dict[str, str | int | float]:
    """Processor, cores and memory, as the operating system gives them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def command_line() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`ratios` answer the question, `rows` show how; `machine` and `command` let another repeat it."""

    title: str
    ratios: Mapping[str, float]
    rows: Sequence[Row]
    machine: Mapping[str, str | int | float] = field(default_factory=describe_machine)
    command: str = field(default_factory=command_line)

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def print(self, console: Console) -> None:
        """Down the page go figures, or the things compared: what makes the table narrower. A file or a pipe
        has no width: nothing is cut there."""
        wide = console.options.update(max_width=_WIDE)
        tables = self._tables()
        widths = [console.measure(one, options=wide).maximum for one in tables]
        width = min(widths)
        table = tables[widths.index(width)]
        if not console.is_terminal:
            console.width = max(console.width, width)
        console.print(table)
        for name, ratio in self.ratios.items():
            console.print(f"{name}: [bold]{ratio:.3g}[/bold]")

    def _tables(self) -> tuple[Table, Table]:
        """Things down the page, and figures."""
        things, figures = (Table(title=self.title, title_justify="left") for _ in range(2))
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        for name in names:
            things.add_column(name, justify="left" if name == names[0] else "right")
        for row in self.rows:
            things.add_row(*(_cell(row.get(name, "")) for name in names))
        figures.add_column(names[0])
        for row in self.rows:
            figures.add_column(_cell(row[names[0]]), justify="right")
        for name in names[1:]:
            figures.add_row(name, *(_cell(row.get(name, "")) for row in self.rows))
        return things, figures


def p50(values: Sequence[float]) -> float:
    return median(values)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; of few values, their greatest."""
    return max(values) if len(values) < 100 else quantiles(values, n=100, method="inclusive")[98]


def geometric(ratios: Sequence[float]) -> tuple[float, float]:
    """The mean, and the factor either way that it lies within, 19 times of 20."""
    logs = [math.log(one) for one in ratios]
    if len(logs) < 2:
        return math.exp(fmean(logs)), math.inf
    factor = _STUDENT[min(len(logs) - 2, len(_STUDENT) - 1)]
    return math.exp(fmean(logs)), math.exp(factor * stdev(logs) / len(logs) ** 0.5)


def _cell(value: str | int | float) -> str:
    if isinstance(value, float):
        return (
            f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
        )
    return f"{value:,}" if isinstance(value, int) else value
