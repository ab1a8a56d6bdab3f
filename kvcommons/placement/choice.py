"""A deployment's policy, by its name."""

from __future__ import annotations

from kvcommons.errors import InvalidInput
from kvcommons.placement.auto import Auto, Costs
from kvcommons.placement.base import Placement
from kvcommons.placement.fixed import Grow, Local, Offload, Overflow

PolicyClass = type[Local | Overflow | Offload | Grow | Auto]
POLICIES: dict[str, PolicyClass] = {one.name: one for one in (Local, Overflow, Offload, Grow, Auto)}
HOLDERS_MAX = 16  # of one sequence, that `auto` counts on


def policy_class(name: str) -> PolicyClass:
    """Raises InvalidInput for a name that is none."""
    if name not in POLICIES:
        raise InvalidInput(f"placement {name!r} is not one of {', '.join(POLICIES)}", param="placement")
    return POLICIES[name]


def placement_of(name: str, *, costs: Costs, holder_blocks: int) -> Placement:
    """`holder_blocks`: of one sequence, the most on one holder, where it grows over several. Raises
    InvalidInput."""
    policy = policy_class(name)
    if issubclass(policy, Auto):
        return policy(costs, holder_blocks=holder_blocks, holders_max=HOLDERS_MAX)
    if issubclass(policy, Grow):
        return policy(holder_blocks=holder_blocks)
    return policy()
