"""What a tenant may use of the service, and what it has used. Decisions only: the time is passed in.

Rates are token buckets that hold a minute's worth: who was away for a minute may have all of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

from kvcommons.errors import QuotaExceeded

OTHERS = "*"  # in the settings: each tenant that is not named

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What the settings say of a tenant. None: no bound of its own. Each router keeps them by itself, but for
    `sessions`, which are counted where they lie."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    requests_per_minute: Annotated[int, Ge(1)] | None = None
    # Of prompts what has to be computed, and what is generated: what was found in the cache is free.
    tokens_per_minute: Annotated[int, Ge(1)] | None = None
    sessions: Annotated[int, Ge(1)] | None = None  # that there are, branches and forks too
    queue_share: Annotated[float, Gt(0), Le(1)] = 1.0  # of the choices that may wait


@dataclass(slots=True, kw_only=True)
class TenantUsage:
    """What a tenant has used since the router started."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts'
    completion_tokens: int = 0


class Rate:
    """So many a minute. It may be overdrawn, and is made up for before anything else is let in."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def left(self, now_s: float) -> int:
        """What may be used now; at least 0."""
        self._refill(now_s)
        return max(0, int(self._level))

    def use(self, count: float, now_s: float) -> None:
        """A negative one gives back."""
        self._refill(now_s)
        self._level = min(self._level - count, float(self.per_minute))

    def wait_s(self, count: float, now_s: float) -> float:
        """How long until `count` may be used; 0 where it may now."""
        self._refill(now_s)
        return max(0.0, count - self._level) * _MINUTE_S / self.per_minute

    def _refill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._level = min(self._level + passed_s * self.per_minute / _MINUTE_S, float(self.per_minute))
        self._at_s = now_s


class _Account:
    """Of one tenant."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.quota = quota
        self.usage = TenantUsage()
        self.requests = _rate(quota.requests_per_minute, now_s)
        self.tokens = _rate(quota.tokens_per_minute, now_s)


class Quotas:
    """By tenant, of those that have been here; tenants are those of the file of keys."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._accounts: dict[str, _Account] = {}

    def of(self, tenant: str) -> Quota:
        return self._quotas.get(tenant) or self._quotas.get(OTHERS) or Quota()

    def admit(self, tenant: str, now_s: float) -> None:
        """A request comes. Raises QuotaExceeded, with the time after which to try again."""
        account = self._account(tenant, now_s)
        for rate, what in ((account.requests, "requests"), (account.tokens, "tokens")):
            wait_s = rate.wait_s(1, now_s) if rate is not None else 0.0
            if rate is not None and wait_s > 0:
                account.usage.refused += 1
                raise QuotaExceeded(
                    f"the tenant {tenant!r} has {rate.per_minute} {what} a minute here, and has used them: "
                    f"try again in {wait_s:.1f} s, or ask the operator for more (quotas)",
                    retry_after_ms=int(wait_s * 1000) + 1,
                )
        account.usage.requests += 1
        if account.requests is not None:
            account.requests.use(1, now_s)

    def reserve(self, tenant: str, prompt_tokens: int, now_s: float) -> TokenReservation:
        """For a prompt, all of which may have to be computed. Settle it."""
        return TokenReservation(self._account(tenant, now_s), prompt_tokens, now_s)

    def usage(self, tenant: str, now_s: float) -> tuple[TenantUsage, int | None, int | None]:
        """Since the start, and what is left of requests and tokens; None where they have no bound."""
        account = self._account(tenant, now_s)
        requests, tokens = account.requests, account.tokens
        return (
            account.usage,
            requests.left(now_s) if requests is not None else None,
            tokens.left(now_s) if tokens is not None else None,
        )

    def _account(self, tenant: str, now_s: float) -> _Account:
        if tenant not in self._accounts:
            self._accounts[tenant] = _Account(self.of(tenant), now_s)
        return self._accounts[tenant]


class TokenReservation:
    """Tokens of one request. Settled once, with what it came to; 0 where nothing was computed."""

    def __init__(self, account: _Account, tokens: int, now_s: float) -> None:
        self._account = account
        self._tokens = tokens
        self._settled = False
        if account.tokens is not None:
            account.tokens.use(tokens, now_s)

    def settle(self, *, prompt: int, cached: int, completion: int, now_s: float) -> None:
        if self._settled:
            return
        self._settled = True
        account = self._account
        if account.tokens is not None:
            account.tokens.use(prompt - cached + completion - self._tokens, now_s)
        account.usage.prompt_tokens += prompt
        account.usage.cached_tokens += cached
        account.usage.completion_tokens += completion


def _rate(per_minute: int | None, now_s: float) -> Rate | None:
    return Rate(per_minute, now_s) if per_minute is not None else None
