"""Where a sequence's blocks go, when it arrives and as it grows: policies without I/O, one chosen per
deployment (`placement` of decode)."""

from services.decode.placement.base import Layout, Next, Piece, Placement, Room
from services.decode.placement.choice import POLICIES, check_policy, placement_of

__all__ = ["POLICIES", "Layout", "Next", "Piece", "Placement", "Room", "check_policy", "placement_of"]
