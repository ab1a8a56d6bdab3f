"""A deployment's policy, by its name."""

from __future__ import annotations

from kvcommons.errors import InvalidInput
from kvcommons.placement.auto import Auto, Costs
from kvcommons.placement.base import Placement
from kvcommons.placement.fixed import Grow, Local, Offload, Overflow

POLICIES = ("local", "overflow", "offload", "grow", "auto")
HOLDERS_MAX = 16  # of one sequence, that `auto` counts on


def check_policy(name: str) -> None:
    """Raises InvalidInput for a name that is none."""
    if name not in POLICIES:
        raise InvalidInput(f"placement {name!r} is not one of {', '.join(POLICIES)}", param="placement")


def placement_of(name: str, *, costs: Costs, holder_blocks: int) -> Placement:
    """`holder_blocks`: of one sequence, the most on one holder, where it grows over several. Raises
    InvalidInput."""
    check_policy(name)
    if name == "auto":
        return Auto(costs, holder_blocks=holder_blocks, holders_max=HOLDERS_MAX)
    if name == "grow":
        return Grow(holder_blocks=holder_blocks)
    fixed: dict[str, Placement] = {one.name: one for one in (Local(), Overflow(), Offload())}
    return fixed[name]
