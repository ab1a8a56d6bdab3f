"""Which instances to leave out after a failed call. No I/O: the clock comes in."""

from __future__ import annotations

from collections.abc import Container

# A dead instance leaves the registry when its lease runs out; until then suspicion stands in.
SUSPECT_S = 5.0
# News younger than this may have been under way when the call failed. What comes later is a sign of life:
# heartbeats come every second, and a view passes them on within a fraction of one.
STALE_NEWS_S = 1.5


class Suspicions:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def suspect(self, instance_id: str, now: float) -> None:
        """`now` in seconds of a monotonic clock, here and below."""
        self._since[instance_id] = now

    def holds(self, instance_id: str, now: float) -> bool:
        since = self._since.get(instance_id)
        return since is not None and now - since < SUSPECT_S

    def heard(self, instance_id: str, now: float) -> None:
        """A changed record of the instance came in: it has sent a heartbeat."""
        since = self._since.get(instance_id)
        if since is not None and now - since >= STALE_NEWS_S:
            del self._since[instance_id]

    def forget_all_but(self, present: Container[str], now: float) -> None:
        """Drops those that have lapsed and are gone from the registry, so that the table stays small."""
        self._since = {
            name: since for name, since in self._since.items() if name in present or now - since < SUSPECT_S
        }
