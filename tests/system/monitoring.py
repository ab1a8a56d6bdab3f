"""The dashboard and the rules in deploy/monitoring, and the metrics that their expressions name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
# What Prometheus itself adds to each sample.
ADDED = frozenset({"job", "instance"})
_NAME = re.compile(r"\b((?:kvcommons|process)_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")


def expressions() -> Iterator[tuple[str, str]]:
    """Where each stands, and the expression."""
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']!r}", target["expr"]
    for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"rule {rule.get('alert', rule.get('record'))}", rule["expr"]


def metrics_of(expression: str) -> list[tuple[str, frozenset[str]]]:
    """The metrics of an expression, each with the labels that it is asked for."""
    return [
        (name, frozenset(re.findall(r"([a-z_]+)\s*(?:=|!=|=~|!~)\s*\"", labels or "")))
        for name, labels in _NAME.findall(expression)
    ]


def grouped_by(expression: str) -> frozenset[str]:
    """The labels by which its sums are kept apart, `le` of histograms apart."""
    found = re.findall(r"\bby \(([a-z_, ]+)\)", expression)
    return frozenset(label.strip() for labels in found for label in labels.split(",")) - {"le"}
