"""Results as a terminal shows them."""

import io

import pytest
from rich.console import Console

from benchmarks.report import Report

NAMES = ("prompts", "at once", "tokens/s without", "tokens/s with", "ratio", "low", "high", "same answers")


def printed(rows: int, *, width: int, terminal: bool) -> str:
    report = Report(
        title="made up",
        ratios={},
        rows=[{NAMES[0]: f"agent sessions {at}", **dict.fromkeys(NAMES[1:], 3.25)} for at in range(rows)],
    )
    file = io.StringIO()
    report.print(Console(file=file, width=width, force_terminal=terminal, no_color=True))
    return file.getvalue()


@pytest.mark.parametrize(("width", "terminal"), [(100, True), (40, False)])
def test_as_many_things_as_figures_take_a_line_each(width: int, terminal: bool) -> None:
    """Names of figures are shorter than those of things. A file holds a table that is as wide as it is."""
    text = printed(len(NAMES), width=width, terminal=terminal)
    assert "…" not in text
    assert [line.count("3.250") for line in text.splitlines() if "3.250" in line] == [7] * len(NAMES)


def test_few_things_have_figures_down_the_page() -> None:
    lines = printed(2, width=80, terminal=True).splitlines()
    assert [line for line in lines if "tokens/s without" in line and line.count("3.250") == 2]
