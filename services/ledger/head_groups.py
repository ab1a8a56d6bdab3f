"""Attention pools that have a part of the KV heads each (Lamina, section 5.2), put together: a group is one
lender once all of its parts are there. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from kvcommons.pb import ledger_pb2 as pb


class HeadGroups:
    """By name."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, pb.Instance]] = {}  # each one's pools by id

    def take(self, pool: pb.Instance) -> None:
        """What it says of itself now."""
        self._groups.setdefault(pool.heads.group, {})[pool.id] = pool

    def drop(self, pool: pb.Instance) -> None:
        group = self._groups.get(pool.heads.group, {})
        group.pop(pool.id, None)
        if not group:
            self._groups.pop(pool.heads.group, None)

    def lender(self, name: str) -> pb.Instance | None:
        """The group as one instance: see Instance.members. None while something is wrong with it."""
        ready = _ready(self._groups.get(name, {}))
        if not ready or _shortfall(name, ready):
            return None
        members = sorted(ready.values(), key=lambda pool: pool.heads.number)
        whole = pb.Instance()
        whole.CopyFrom(members[0])
        whole.members.extend(members)
        whole.load.total_blocks = min(pool.load.total_blocks for pool in members)
        whole.load.free_blocks = min(pool.load.free_blocks for pool in members)
        whole.load.lendable_blocks = min(pool.load.lendable_blocks for pool in members)
        return whole

    def shortfall(self, model: bytes) -> str:
        """What is wrong with groups in which a pool has this model, and what to do; empty: nothing."""
        found = []
        for name, group in sorted(self._groups.items()):
            if any(pool.model.fingerprint == model for pool in group.values()):
                found.append(_shortfall(name, _ready(group)))
        return "; ".join(one for one in found if one)


def _ready(group: Mapping[str, pb.Instance]) -> dict[str, pb.Instance]:
    """One that is loading or about to end is not there, nor is one that was killed: of two at one address
    only the later lives."""
    living: dict[tuple[str, str], pb.Instance] = {}
    for pool in sorted(group.values(), key=lambda one: one.started_ms):
        living[pool.host, pool.control_address] = pool
    return {pool.id: pool for pool in living.values() if pool.load.ready}


def _shortfall(name: str, pools: Mapping[str, pb.Instance]) -> str:
    """The first thing that is wrong with a group, for people."""
    by_part: dict[str, list[str]] = {}
    for pool in pools.values():
        by_part.setdefault(_part(pool), []).append(pool.id)
    counts = {pool.heads.parts for pool in pools.values()}
    if len(counts) > 1:
        listed = ", ".join(f"{pool.id} {_part(pool)}" for pool in _in_order(pools))
        return (
            f"head group {name!r} has parts of different numbers ({listed}): divide it into as many for all"
        )
    if len({pool.model.fingerprint for pool in pools.values()}) > 1:
        listed = ", ".join(f"{pool.id} {pool.model.fingerprint.hex()[:12]}" for pool in _in_order(pools))
        return (
            f"head group {name!r} has parts of different models ({listed}): start all with one model, dtype "
            "and block size"
        )
    for part, ids in sorted(by_part.items()):
        if len(ids) > 1:
            return (
                f"head group {name!r} has part {part} more than once ({', '.join(sorted(ids))}): give each "
                "pool a part of its own; one that was killed is forgotten within its lease"
            )
    parts = counts.pop() if counts else 0
    missing = [f"{number}/{parts}" for number in range(parts) if f"{number}/{parts}" not in by_part]
    if missing or not pools:
        return f"head group {name!r} lacks {', '.join(missing) or 'all parts'}: start a pool for each"
    return ""


def _in_order(pools: Mapping[str, pb.Instance]) -> list[pb.Instance]:
    return sorted(pools.values(), key=lambda pool: (pool.heads.parts, pool.heads.number, pool.id))


def _part(pool: pb.Instance) -> str:
    return f"{pool.heads.number}/{pool.heads.parts}"
