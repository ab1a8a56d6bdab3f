"""What Prometheus sees: /metrics of the router, and of every other service on its own socket."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.machine import scaled
from tests.system.stack import Stack

SCRAPE_S_MAX = scaled(5.0)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer to `GET /metrics`, parsed."""

    families: Mapping[str, Metric]  # a counter's name with its `_total`, as people write it

    def value(self, name: str, **labels: str) -> float:
        """Of the sample that has these labels, whatever else it has; the sum where there are several. Raises
        KeyError where labels are asked for that no sample has."""
        base = next(name.removesuffix(end) for end in ("_count", "_sum", "") if name.endswith(end))
        family = self.families[name] if name in self.families else self.families[base]
        found = [
            sample.value
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if labels and not found:
            raise KeyError(f"{name} with {labels}")
        return sum(found)


def scrape(stack: Stack, service: str) -> Scrape:
    return parse(fetch(stack, service))


def fetch(stack: Stack, service: str) -> str:
    """`service` as the stack names it; the router answers on its REST port."""
    if service == "router":
        return stack.client.text("/metrics", timeout_s=SCRAPE_S_MAX)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SCRAPE_S_MAX)
        connection.connect(str(stack.runtime / f"{service}.m"))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: metrics\r\n\r\n")
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK"), head
    return body.decode()


def parse(text: str) -> Scrape:
    """The `_created` series, which the client library adds to each counter and histogram, are left out."""
    families = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            families[f"{family.name}_total" if family.type == "counter" else family.name] = family
    return Scrape(families)
