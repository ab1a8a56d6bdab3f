"""Classes of service: what a request is promised, and who may ask for it. Decisions only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

from kvcommons.errors import InvalidInput, Overloaded, PermissionDenied

DEFAULT = "default"  # the class that is always there, and that every tenant may ask for
AUTO = "auto"  # what a request says that leaves its class to the settings
OTHERS = "*"  # in the entitlements: tenants that are not named
# What OpenAI's clients send beside those two. Where no class has such a name, the request is served as
# DEFAULT.
OPENAI_TIERS = ("flex", "priority", "scale")
TIER_CHARS_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RETRY_AFTER_S_MIN = 1
_RETRY_AFTER_S_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassObjectives:
    """What the settings say of a class. None: no objective for the first token; between tokens, decode's own
    (`tbt_objective_s`)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    ttft_s: Annotated[float, Gt(0)] | None = None  # from a request's arrival to its first token
    tbt_s: Annotated[float, Ge(0.001), Le(3600)] | None = None  # between tokens: chunks beside them keep it
    # Where the first token is expected later than that: the request is refused, or served without objectives.
    unmet: Literal["refuse", "best_effort"] = "best_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    name: str
    objectives: ClassObjectives = ClassObjectives()

    def meets(self, ttft_s: float) -> bool:
        """Whether a first token after so long is as its objective has it."""
        return self.objectives.ttft_s is None or ttft_s <= self.objectives.ttft_s

    def too_fast(self, token_s: float) -> str:
        """Why it cannot be kept where a token takes so long at least; empty where it can."""
        objective_s = self.objectives.tbt_s
        if objective_s is None or token_s <= objective_s:
            return ""
        return (
            f"the class {self.name!r} promises a token every {objective_s:g} s, and one takes {token_s:.3g} "
            "s here at least"
        )

    def expecting(self, ttft_s: float, *, token_s: float = 0.0) -> ServiceClass:
        """As what a request of this class is served whose first token is expected so long after its arrival,
        and whose tokens take `token_s` each at least. Raises Overloaded, with the time after which to try
        again, where that refuses it."""
        why, late_s = self.too_fast(token_s), float(_RETRY_AFTER_S_MAX)
        if not why and not self.meets(ttft_s):
            objective_s = self.objectives.ttft_s or 0.0
            late_s = ttft_s - objective_s
            why = (
                f"the class {self.name!r} promises the first token within {objective_s:g} s, and this "
                f"request's is expected after {ttft_s:.3g} s"
            )
        if not why:
            return self
        if self.objectives.unmet == "best_effort":
            return BEST_EFFORT
        raise Overloaded(
            f"{why}: try again later, or with another service_tier",
            param="service_tier",
            retry_after_ms=int(1000 * min(max(late_s, _RETRY_AFTER_S_MIN), _RETRY_AFTER_S_MAX)),
        )


BEST_EFFORT = ServiceClass(name=DEFAULT)


class ServiceClasses:
    """Finds the class of a request."""

    def __init__(
        self, classes: Mapping[str, ClassObjectives], entitlements: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`entitlements`: the classes that a tenant may ask for beside DEFAULT; the first one is what it has
        where it asks for none. Without any, every tenant may ask for each, and has DEFAULT.

        Raises InvalidInput for names that cannot be used, and for classes that are not there.
        """
        self._classes = {name: ServiceClass(name=name, objectives=one) for name, one in classes.items()}
        self._classes.setdefault(DEFAULT, BEST_EFFORT)
        for name in classes:
            if name == AUTO or not _NAME.fullmatch(name):
                raise InvalidInput(
                    f"router service_classes: no class can be called {name!r}: a name has up to "
                    f"{TIER_CHARS_MAX} letters, digits, dots, dashes and underscores, and {AUTO!r} is what a "
                    "request says that leaves its class to the settings",
                    param="service_classes",
                )
        for tenant, names in (entitlements or {}).items():
            if not names:
                raise InvalidInput(
                    f"router entitlements: {tenant!r} has no class: name at least one ({DEFAULT!r} is always "
                    "there), or leave it out",
                    param="entitlements",
                )
            for name in names:
                if name not in self._classes:
                    raise InvalidInput(
                        f"router entitlements: {tenant!r} has the class {name!r}, which service_classes does "
                        f"not have{self._nearest(name, self._classes)}",
                        param="entitlements",
                    )
        everything = (DEFAULT, *(name for name in self._classes if name != DEFAULT))
        self._entitlements = {OTHERS: everything} if not entitlements else dict(entitlements)

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self._classes.values())

    def of(self, tenant: str, asked: str | None) -> ServiceClass:
        """`asked`: the request's `service_tier`.

        Raises InvalidInput for a name that is neither a class nor one of OpenAI's, and PermissionDenied for
        a class that the tenant may not ask for.
        """
        own = self._entitlements.get(tenant) or self._entitlements.get(OTHERS, (DEFAULT,))
        if asked is None or asked == AUTO:
            return self._classes[own[0]]
        if asked == DEFAULT or asked in own:
            return self._classes[asked]
        if asked in self._classes:
            permitted = ", ".join(dict.fromkeys((*own, DEFAULT)))
            raise PermissionDenied(
                f"service_tier: this key may not ask for {asked!r}, only for {permitted}",
                param="service_tier",
            )
        if asked in OPENAI_TIERS:
            return self._classes[DEFAULT]
        raise InvalidInput(
            f"service_tier: there is no class {asked!r}{self._nearest(asked, (AUTO, DEFAULT, *own))}",
            param="service_tier",
        )

    @staticmethod
    def _nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        return f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(dict.fromkeys(known))}"
