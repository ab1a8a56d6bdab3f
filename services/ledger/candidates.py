"""Who may lend: the contract protocol's first step (Infinite-LLM, section 4.4). No I/O.

Creditors are kept sorted by what they can lend, all of a model and those of each host, so that a choice costs
a few comparisons however many there are. Between two heartbeats of a creditor, what it was already named for
is taken off: debtors that ask at once are spread over the creditors, not sent to the same one.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.head_groups import HeadGroups

LENDERS = frozenset({"decode", "attention_pool"})
CANDIDATES_MAX = 3
# What was refused, or promised to others, counts until the creditor's next heartbeat. One that beats at
# another replica, with nothing changed, is not heard here: a heartbeat must have come by this time.
REFUSAL_S = 2.0
# Who answers its debtors far too late is a last candidate for so long: those who said so ask it no more, and
# cannot tell when it has recovered.
SLOW_S = 30.0
# In what order creditors are named.
_LENDS, _BORROWS, _SLOW = range(3)

_Entry = tuple[int, float, str]  # blocks less than none, so that the most come first; a lot; instance id


@dataclass(slots=True)
class _Creditor:
    instance: pb.Instance
    entry: _Entry
    rank: int
    promised_blocks: int = 0

    @property
    def left(self) -> int:
        """Blocks. One that has been named for all it has stays in the list, at its end: it is a guess."""
        return max(1, self.instance.load.lendable_blocks - self.promised_blocks)


class Candidates:
    """Chooses creditors; remembers who refused. `now` is in seconds of one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known: dict[str, pb.Instance] = {}
        self._creditors: dict[str, _Creditor] = {}  # those that can lend, and have not refused
        self._groups = HeadGroups()  # each a creditor, under its first part's id
        self._grouped: dict[str, str] = {}  # by group, the id under which it was offered
        # Sorted, by model and rank, and those of each host.
        self._of_model: dict[tuple[bytes, int], list[_Entry]] = {}
        self._of_host: dict[tuple[bytes, int, str], list[_Entry]] = {}
        self._pools: dict[str, bytes] = {}  # fingerprints of attention pools, by id
        self._refused: dict[str, float] = {}  # when
        self._slow: dict[str, float] = {}  # when
        self._promises: deque[tuple[float, _Creditor, int]] = deque()  # when, and of how many blocks

    def follow(self, view: Mapping[str, pb.Instance]) -> None:
        """All that are there; what is known already costs a comparison, and changes nothing: what creditors
        were named for since their heartbeats still counts where the view holds etcd's copies of these."""
        known = self._known
        for name, instance in view.items():
            before = known.get(name)
            if before is not instance and before != instance:
                self._take(instance)
            else:
                known[name] = instance  # so that it is the same object the next time
        for name in known.keys() - view.keys():
            self._refused.pop(name, None)
            self._slow.pop(name, None)
            self._leave(known.pop(name))

    def heartbeat(self, instance: pb.Instance) -> None:
        """A heartbeat: what the creditor says now counts again."""
        self._refused.pop(instance.id, None)
        self._take(instance)

    def refused(self, name: str, now: float) -> None:
        self._refused[name] = now
        self._drop(name)

    def slow(self, name: str, now: float) -> None:
        """A debtor says so. It lends, and is asked when nobody else does."""
        self._slow[name] = now
        if name in self._known:
            self._take(self._known[name])

    def choose(self, request: pb.CandidatesRequest, now: float) -> list[pb.Instance]:
        """Up to three that hold the same model and can lend, the debtor's own host first, then the most
        lendable.

        Those that can lend all blocks asked for; where there is none, those that can lend any. Equals are
        shuffled. Instances that borrow themselves come when nobody else lends anything: what they have free
        is better used to bring their own blocks home, and a circle begins where a debtor lends. Those that
        are slow come last of all.
        """
        self._forgive(now)
        found: list[_Creditor] = []
        for rank in (_LENDS, _BORROWS, _SLOW):
            found = found or self._ranked(request, max(request.blocks, 1), rank)
            found = found or self._ranked(request, 1, rank)
        if found:
            # It is asked first, and others only if it refuses.
            blocks = min(request.blocks, found[0].instance.load.lendable_blocks)
            self._promises.append((now, found[0], blocks))
            self._promise(found[0], blocks)
        return [creditor.instance for creditor in found]

    def shortfall(self, model: bytes) -> str:
        """Why head groups of this model lend nothing; empty: none is to blame."""
        return self._groups.shortfall(model)

    def strangers(self, model: bytes) -> str:
        """What to say to a debtor where all attention pools hold another model; empty: they do not."""
        if not self._pools or model in self._pools.values():
            return ""
        names = ", ".join(sorted(self._pools)[:CANDIDATES_MAX])
        return f"attention pools hold another model, dtype or block size: start {names} with that of decode"

    def _ranked(self, request: pb.CandidatesRequest, blocks: int, rank: int) -> list[_Creditor]:
        found: list[_Creditor] = []
        near = self._of_host.get((request.model, rank, request.host), ())
        for name in _with(near, blocks):
            if name != request.debtor:
                found.append(self._creditors[name])
                if len(found) == CANDIDATES_MAX:
                    return found
        # Of the debtor's own host at most two and itself are passed over here.
        for name in _with(self._of_model.get((request.model, rank), ()), blocks):
            creditor = self._creditors[name]
            if name != request.debtor and creditor.instance.host != request.host:
                found.append(creditor)
                if len(found) == CANDIDATES_MAX:
                    break
        return found

    def _promise(self, creditor: _Creditor, blocks: int) -> None:
        self._remove(creditor)
        creditor.promised_blocks += blocks
        self._insert(creditor, creditor.left)

    def _take(self, instance: pb.Instance) -> None:
        known = self._known.get(instance.id)
        if known is not None and known.heads != instance.heads:
            self._leave(known)  # another life of it, set up otherwise
        self._known[instance.id] = instance
        if instance.service == "attention_pool":
            self._pools[instance.id] = instance.model.fingerprint
        if instance.HasField("heads"):
            self._groups.take(instance)
            self._regroup(instance.heads.group, heard=instance.id)
        else:
            self._offer(instance)

    def _leave(self, instance: pb.Instance) -> None:
        self._pools.pop(instance.id, None)
        if instance.HasField("heads"):
            self._groups.drop(instance)
            self._regroup(instance.heads.group, heard="")
        else:
            self._drop(instance.id)

    def _regroup(self, group: str, *, heard: str) -> None:
        """A part of it has changed: the one that was `heard`, or one has left. The group lends what the part
        with the fewest blocks does, and that part's word alone tells what became of promises."""
        offered = self._grouped.pop(group, None)
        former = self._drop(offered) if offered is not None else None
        whole = self._groups.lender(group)
        if whole is not None:
            self._grouped[group] = whole.id
            fewest = min(whole.members, key=lambda part: part.load.lendable_blocks)
            self._offer(whole, former if whole.id == offered and heard != fewest.id else None)

    def _offer(self, instance: pb.Instance, former: _Creditor | None = None) -> None:
        """`former`: what it was, where it is still named for that."""
        if instance.id in self._refused:
            return
        self._drop(instance.id)
        if can_lend(instance):
            borrows = any(instance.load.debts.values())
            rank = _SLOW if instance.id in self._slow else _BORROWS if borrows else _LENDS
            # The same object: promises that run out know it.
            creditor = former or _Creditor(instance, (0, 0.0, instance.id), rank)
            creditor.instance, creditor.rank = instance, rank
            self._creditors[instance.id] = creditor
            self._insert(creditor, creditor.left)

    def _drop(self, name: str) -> _Creditor | None:
        creditor = self._creditors.pop(name, None)
        if creditor is not None:
            self._remove(creditor)
        return creditor

    def _insert(self, creditor: _Creditor, blocks: int) -> None:
        creditor.entry = (-blocks, self._rng.random(), creditor.instance.id)
        group = creditor.instance.model.fingerprint, creditor.rank
        insort(self._of_model.setdefault(group, []), creditor.entry)
        insort(self._of_host.setdefault((*group, creditor.instance.host), []), creditor.entry)

    def _remove(self, creditor: _Creditor) -> None:
        group, host = (creditor.instance.model.fingerprint, creditor.rank), creditor.instance.host
        for entries in (self._of_model[group], self._of_host[(*group, host)]):
            del entries[bisect_left(entries, creditor.entry)]
        if not self._of_host[(*group, host)]:
            del self._of_host[(*group, host)]
        if not self._of_model[group]:
            del self._of_model[group]

    def _forgive(self, now: float) -> None:
        """What is older than a heartbeat counts no more, and who was slow long ago. Both are few; of
        promises, the oldest are first."""
        while self._promises and now - self._promises[0][0] >= REFUSAL_S:
            _, creditor, blocks = self._promises.popleft()
            if self._creditors.get(creditor.instance.id) is creditor:
                self._promise(creditor, -blocks)
        for name in [name for name, at in self._refused.items() if now - at >= REFUSAL_S]:
            del self._refused[name]
            if name in self._known:
                self._take(self._known[name])
        for name in [name for name, at in self._slow.items() if now - at >= SLOW_S]:
            del self._slow[name]
            if name in self._known:
                self._take(self._known[name])


def can_lend(instance: pb.Instance) -> bool:
    return instance.service in LENDERS and instance.load.ready and instance.load.lendable_blocks > 0


def _with(entries: Collection[_Entry] | Iterable[_Entry], blocks: int) -> Iterator[str]:
    for less, _, name in entries:
        if -less < blocks:
            return
        yield name
