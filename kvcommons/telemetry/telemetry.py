"""What a process measures with: its metrics registry, its tracer, its log of events; passed in wherever they
are used."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvcommons.telemetry.events import Observe, unobserved
from kvcommons.telemetry.trace import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    service: str
    instance_id: str
    registry: CollectorRegistry
    tracer: Tracer
    observe: Observe = unobserved  # called with what happens to blocks

    @classmethod
    def off(cls, service: str, instance_id: str = "") -> Telemetry:
        """A registry of its own that nobody scrapes, a tracer that only passes ids on."""
        return cls(
            service=service,
            instance_id=instance_id or service,
            registry=CollectorRegistry(),
            tracer=Tracer.off(),
        )
