"""What each tenant has had of the machine, beside the others who want it at the same time. Pure."""

from __future__ import annotations

from collections import Counter


class TenantShares:
    """Seconds of the whole machine, by tenant, as in start-time fair queueing (Goyal, Vin and Cheng, 1996):
    only those count that have a request waiting or running, and whoever comes is no further behind than the
    one of them that has had least. So nobody saves up by staying away, and nobody pays for having been
    alone."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()  # that wait or run
        self._used_s: dict[str, float] = {}
        self._started_s: dict[str, float] = {}  # when a request of the tenant started last
        self._least_s = 0.0

    def join(self, tenant: str) -> None:
        """A request of this tenant came."""
        if not self._requests:
            self._used_s.clear()
            self._started_s.clear()
            self._least_s = 0.0
        if not self._requests[tenant]:
            self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), self._least_s)
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One is done, or was given up."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            self._update()

    def start(self, tenant: str, seconds: float, now_s: float) -> None:
        """A request starts, and will likely have so much of the machine."""
        self._started_s[tenant] = now_s
        self.use(tenant, seconds)

    def use(self, tenant: str, seconds: float) -> None:
        """It has had so much more of the machine than was thought."""
        self._used_s[tenant] += seconds
        self._update()

    def delay_s(self, tenant: str, oldest_s: float) -> float:
        """By how much its requests come after those of others that are as urgent: how long the others could
        have the machine until each has had as much; and how long the oldest one that waits, which came at
        `oldest_s`, had waited when another one of the same tenant started. For that it waited on its own
        account, as if it had been sent only then."""
        ahead_s = (self._used_s[tenant] - self._least_s) * len(self._requests)
        return ahead_s + max(self._started_s.get(tenant, oldest_s) - oldest_s, 0.0)

    def _update(self) -> None:
        self._least_s = min((self._used_s[one] for one in self._requests), default=0.0)
