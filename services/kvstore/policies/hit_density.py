"""The scheduler-aware policy: queued blocks stay, the rest goes by what each may still be worth.

AttentionStore (§3.3.2) exempts what the queue will use and takes, of the exempt, the item whose next use is
furthest. What no queued job wants goes by hit density here (`hazard.py`): a block that waits for a client who
thinks is worth more when clients usually come back after about so long, and more when it was used often
before. The wait begins when the last job that wants the block is served, and ends when the next one joins
the queue; so the curve learns before that one is served.

Only leaves go: a block that another one in the tier continues stays. So a session's blocks go together, the
deepest first, and what is shared by many goes last.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic

from services.kvstore.policies.base import K
from services.kvstore.policies.hazard import EPOCH_JOBS, ReuseCurve

_LENGTHS = (3, 16, 64)  # a run with more blocks is of another class
_USES_MAX = 5  # blocks that were used more often are all alike
_LEARN_EPOCHS = 8  # between two looks at the curve


class _Node(Generic[K]):
    """A block, in the tier or remembered."""

    __slots__ = ("children", "epoch", "held", "jobs", "key", "kind", "parent", "uses")

    def __init__(self, key: K) -> None:
        self.key = key
        self.parent: _Node[K] | None = None
        self.children = 0  # of those in the tier
        self.held = False
        self.uses = -1  # before the last one
        self.kind = 0
        self.epoch = 0  # in which the last job that wanted it was served
        self.jobs: list[int] = []  # in the queue that want it, soonest first


def _stands(entry: tuple[int, int, _Node[Any]]) -> bool:
    """Whether an entry of the heap of queued leaves still says what is the case."""
    node = entry[2]
    return node.held and not node.children and bool(node.jobs) and node.jobs[0] == -entry[0]


def _familiarity(run: Sequence[_Node[Any] | None]) -> int:
    """Of the run's blocks, how many came before: 0, the first at most (a conversation begins); 1, fewer than
    half; 2, more. Who has come back is likelier to do so again, and it tells at the first look at a block
    that this turn has added."""
    new = (depth for depth, node in enumerate(run) if node is None or node.uses < 0)
    known = next(new, len(run))
    return 0 if known <= 1 else 1 if 2 * known < len(run) else 2


class HitDensity(Generic[K]):
    """`remembered`: blocks outside the tier of which it is still known when they were used."""

    def __init__(self, *, remembered: int = 1 << 15) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._remembered = remembered
        self._held = 0
        self._curve = ReuseCurve()
        self._densities: dict[int, list[float]] = {}
        self._epoch = 0
        self._arrived = 0
        self._queued: set[int] = set()
        self._cohorts: dict[tuple[int, int], OrderedDict[_Node[K], None]] = {}  # (class, epoch) -> leaves
        self._order: list[tuple[float, int, int]] = []  # heap of (density, class, epoch)
        self._wanted: list[tuple[int, int, _Node[K]]] = []  # heap of queued leaves, furthest use first
        self._pushes = 0

    def expect(self, job: int, run: Sequence[K]) -> None:
        self._comes(run, job)
        self._queued.add(job)

    def _comes(self, run: Sequence[K], waits: int | None) -> None:
        """A job wants the run: one that `waits` by this number, or is served at once (None)."""
        if self._arrived % EPOCH_JOBS == 0:
            self._begin_epoch()
        self._arrived += 1
        epoch, nodes = self._epoch, self._nodes
        again: dict[tuple[int, int], int] = {}  # blocks that waited for this use, by class and epoch
        begun: dict[int, int] = {}  # blocks that wait for the next one from now on, by class
        parent: _Node[K] | None = None
        last = len(run) - 1
        known = [nodes.get(key) for key in run]
        origin = 8 * (_USES_MAX + 1) * _familiarity(known) + 2 * sum(last >= limit for limit in _LENGTHS)
        for depth, (key, node) in enumerate(zip(run, known, strict=True)):
            if node is None:
                node = nodes[key] = _Node(key)
            elif node.uses >= 0 and not node.jobs:
                before = (node.kind, node.epoch)
                again[before] = again.get(before, 0) + 1
            is_leaf = node.held and not node.children
            if is_leaf:
                self._hide(node)
            if node.parent is not parent:
                self._link(node, parent)
            node.uses += 1
            kind = node.kind = origin + 8 * min(node.uses, _USES_MAX) + (depth == last)
            if waits is not None:
                insort(node.jobs, waits)
            elif not node.jobs:
                node.epoch = epoch
                begun[kind] = begun.get(kind, 0) + 1
            if is_leaf:
                self._show(node)
            parent = node
        for (kind, since), blocks in again.items():
            self._curve.reused(kind, since, epoch, blocks)
        for kind, blocks in begun.items():
            self._curve.entered(kind, epoch, blocks)

    def forget(self, job: int, run: Sequence[K]) -> None:
        if job not in self._queued:
            return
        self._queued.discard(job)
        begun: dict[int, int] = {}  # blocks that no job wants any more, by class
        for key in run:
            node = self._nodes.get(key)
            if node is None or job not in node.jobs:
                continue
            node.jobs.remove(job)
            if not node.jobs:
                node.epoch = self._epoch
                begun[node.kind] = begun.get(node.kind, 0) + 1
            if node.held and not node.children:
                self._show(node)
        for kind, blocks in begun.items():
            self._curve.entered(kind, self._epoch, blocks)

    def move(self, job: int, to: int, run: Sequence[K]) -> None:
        if job not in self._queued:
            return
        self._queued.discard(job)
        self._queued.add(to)
        for key in run:
            node = self._nodes.get(key)
            if node is not None and job in node.jobs:
                node.jobs.remove(job)
                insort(node.jobs, to)
                self._show(node)

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        if job in self._queued:
            self.forget(job, run)
        else:
            self._comes(run, None)

    def admit(self, block: K, after: K | None = None) -> None:
        node = self._node(block)
        if node.held:
            return
        if after is not None and node.parent is None and node.uses < 0:
            self._continue(node, self._node(after))
        node.held = True
        self._held += 1
        if node.parent is not None:
            self._hide(node.parent)
            node.parent.children += 1
        self._show(node)

    def _node(self, block: K) -> _Node[K]:
        node = self._nodes.get(block)
        if node is None:
            node = self._nodes[block] = _Node(block)
            node.epoch = self._epoch
        return node

    def _continue(self, node: _Node[K], parent: _Node[K]) -> None:
        """A block that no run has named yet. Of an answer that is being made, it is as new as those of the
        run; of those that are found at start nothing else is known."""
        node.parent = parent
        if parent.uses < 0:
            return
        node.uses = 0
        node.kind = parent.kind - 8 * min(parent.uses, _USES_MAX) - parent.kind % 2
        self._curve.entered(node.kind, self._epoch, 1)

    def remove(self, block: K) -> None:
        node = self._nodes.get(block)
        if node is None or not node.held:
            return
        self._hide(node)
        node.held = False
        self._held -= 1
        if node.parent is not None:
            node.parent.children -= 1
            self._show(node.parent, next_to_go=True)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        while self._order:
            _, kind, epoch = self._order[0]
            leaves = self._cohorts.get((kind, epoch))
            if not leaves:
                heapq.heappop(self._order)
                self._cohorts.pop((kind, epoch), None)
                continue
            found = next((leaf for leaf in leaves if not pinned(leaf.key)), None)
            return found.key if found is not None else self._unpinned_elsewhere(pinned)
        return self._furthest(pinned)

    def _unpinned_elsewhere(self, pinned: Callable[[K], bool]) -> K | None:
        """All leaves of the cohort that is worth least are in use: the cohorts after it, then the queued."""
        for _, kind, epoch in sorted(self._order)[1:]:
            for leaf in self._cohorts.get((kind, epoch), ()):
                if not pinned(leaf.key):
                    return leaf.key
        return self._furthest(pinned)

    def _furthest(self, pinned: Callable[[K], bool]) -> K | None:
        """Of the leaves that queued jobs want, the one whose next use is the furthest."""
        passed, found = [], None
        while self._wanted and found is None:
            entry = self._wanted[0]
            if _stands(entry):
                if not pinned(entry[2].key):
                    found = entry[2].key
                    break
                passed.append(entry)
            heapq.heappop(self._wanted)
        for entry in passed:
            heapq.heappush(self._wanted, entry)
        return found

    def _show(self, node: _Node[K], *, next_to_go: bool = False) -> None:
        """Puts a block that may go where `victim` looks. After a session's last block its others are next."""
        if not node.held or node.children:
            return
        if node.jobs:
            self._pushes += 1
            heapq.heappush(self._wanted, (-node.jobs[0], self._pushes, node))
            if len(self._wanted) > 4 * self._held + 64:
                self._wanted = [entry for entry in self._wanted if _stands(entry)]
                heapq.heapify(self._wanted)
            return
        cohort = (node.kind, node.epoch)
        leaves = self._cohorts.get(cohort)
        if leaves is None:
            leaves = self._cohorts[cohort] = OrderedDict()
            heapq.heappush(self._order, (self._density(*cohort), *cohort))
        leaves[node] = None
        if next_to_go:
            leaves.move_to_end(node, last=False)

    def _hide(self, node: _Node[K]) -> None:
        """Takes it away from there. In the heap of queued leaves, what is stale is passed over."""
        leaves = self._cohorts.get((node.kind, node.epoch))
        if leaves is not None:
            leaves.pop(node, None)

    def _link(self, node: _Node[K], parent: _Node[K] | None) -> None:
        """The block continues another one than before: a truncated session lost its oldest blocks."""
        if node.held and node.parent is not None:
            node.parent.children -= 1
            self._show(node.parent)
        node.parent = parent
        if node.held and parent is not None:
            self._hide(parent)
            parent.children += 1

    def _density(self, kind: int, epoch: int) -> float:
        densities = self._densities.get(kind)
        if densities is None:  # nothing is known of this class yet: the older, the less
            return 1.0 / (1 << 20) / (1 + self._epoch - epoch)
        return densities[self._curve.bin(self._epoch - epoch)]

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._curve.advance(self._epoch)
        if self._epoch % _LEARN_EPOCHS == 0:
            self._densities = self._curve.densities(len(self._queued))
            self._trim()
        self._cohorts = {cohort: leaves for cohort, leaves in self._cohorts.items() if leaves}
        self._order = [(self._density(*cohort), *cohort) for cohort in self._cohorts]
        heapq.heapify(self._order)

    def _trim(self) -> None:
        """Forgets the oldest blocks that are neither in the tier nor wanted."""
        if len(self._nodes) - self._held <= 2 * self._remembered:
            return
        gone = [node for node in self._nodes.values() if not node.held and not node.jobs]
        gone.sort(key=lambda node: node.epoch)
        for node in gone[: len(gone) - self._remembered]:
            if node.uses >= 0:
                self._curve.dropped(node.kind, node.epoch, self._epoch, 1)
            del self._nodes[node.key]
