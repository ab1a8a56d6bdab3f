"""Who of the kvstores serves: the next view, decided from the last one and from who is there. Pure.

A view is only ever left for one whose shards have every committed turn (docs/shards.md has the argument):

- A shard that is gone is dropped only while every other one is there and the view is settled, so that the
  other copy of whatever it had is in the next view.
- One that comes joins first, serves nothing, and is let in once every serving shard has said, of that very
  epoch, that it has got all it needs.
- The last shard is never dropped: nobody else has what it has. An operator may say that its disk is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from kvcommons.pb import ledger_pb2, shards_pb2
from kvcommons.shards import ShardView, decode_view, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a shard says of itself. `view`: the newest that it knows."""

    folder: str
    name: str
    view: ShardView | None
    synced_epoch: int
    has_sessions: bool


def reports(instances: Collection[ledger_pb2.Instance]) -> dict[str, Report]:
    """Of the kvstores that are there, by the shard's name."""
    found: dict[str, ledger_pb2.Instance] = {}
    for one in instances:
        if one.service != "kvstore" or not one.shard.name:
            continue
        # Of a folder's processes the last one has it; dead ones stay until their leases run out.
        other = found.get(one.shard.folder)
        if other is None or other.started_ms < one.started_ms:
            found[one.shard.folder] = one
    return {one.shard.name: report_of(one.shard) for one in found.values()}


def known_view(stored: ShardView | None, present: Mapping[str, Report]) -> ShardView | None:
    """The newest view that is known of: etcd may be away, or may have lost what it had."""
    views = [report.view for report in present.values() if report.view is not None]
    return newest([stored, *(view for view in views if stored is None or view.stack == stored.stack)])


class ShardViews:
    """Keeps in mind since when which shard has been away."""

    def __init__(
        self,
        *,
        grace_s: float,
        lost: Collection[str] = (),
        draw: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        """`lost`: shards whose disks are gone for good, as the operator says; `draw` names a new stack."""
        self._draw = draw
        self._grace_s = grace_s
        self._lost = frozenset(lost)
        self._away_since: dict[str, float] = {}

    def pause(self) -> None:
        """Who is there is not known for now, so nobody has been away for long."""
        self._away_since.clear()

    def next(self, stored: ShardView | None, present: Mapping[str, Report], now: float) -> ShardView | None:
        """The view that is to follow; None: the stored one stays. `now` in seconds, monotonic."""
        last = known_view(stored, present)
        if last is None:
            return _first(present, self._draw())
        if stored is None or stored.epoch < last.epoch:
            return self._restored(last, present)
        members = (*last.serving, *last.joining)
        self._away_since = {name: self._away_since.get(name, now) for name in members if name not in present}
        return self._without_lost(last, present) or self._step(last, present, now)

    def _step(self, last: ShardView, present: Mapping[str, Report], now: float) -> ShardView | None:
        joining = tuple(name for name in last.joining if not self._gone(name, now))
        if joining != last.joining:
            return _after(last, joining=joining)
        if any(name not in present for name in last.serving):
            return self._without_one(last, present, now)
        if (last.joining or not last.settled) and all(
            present[name].synced_epoch == last.epoch for name in last.serving
        ):
            return _after(last, serving=(*last.serving, *last.joining), joining=(), settled=True)
        fresh = tuple(
            name
            for name, report in sorted(present.items())
            if name not in last.members and _may_join(report, last)
        )
        return _after(last, joining=(*last.joining, *fresh)) if fresh else None

    def _without_one(self, last: ShardView, present: Mapping[str, Report], now: float) -> ShardView | None:
        """Without the one serving shard that is away, if the others have all that it had."""
        away = [name for name in last.serving if name not in present]
        if len(away) != 1 or len(last.serving) == 1 or not last.settled or not self._gone(away[0], now):
            return None
        left = tuple(name for name in last.serving if name != away[0])
        return _after(last, serving=left, settled=len(left) == 1)

    def _without_lost(self, last: ShardView, present: Mapping[str, Report]) -> ShardView | None:
        """A shard is lost where its folder has other sessions now, or where the operator says so."""
        folders = {report.folder for report in present.values()}
        lost = [
            name
            for name in (*last.serving, *last.joining)
            if name not in present and (name in self._lost or folder_of(name) in folders)
        ]
        if not lost:
            return None
        serving = tuple(name for name in last.serving if name not in lost)
        joining = tuple(name for name in last.joining if name not in lost)
        if not serving:
            # All that had been committed is gone, as the operator knows who began the folder anew, or put
            # another one in its place.
            serving = tuple(sorted(name for name in present if _may_begin(present[name], lost)))[:1]
            joining = ()
        if not serving:
            return None
        seen = max((report.view.epoch for report in present.values() if report.view is not None), default=0)
        view = _after(last, serving=serving, joining=joining, settled=len(serving) == 1)
        return replace(view, epoch=max(view.epoch, seen + 1))

    def _restored(self, last: ShardView, present: Mapping[str, Report]) -> ShardView | None:
        """etcd has lost the newest view. It goes on where the shards were, once all that served are there: a
        later one that none of the present knows can only have dropped one of them while another was in it.
        """
        if any(name not in present and name not in self._lost for name in last.serving):
            return None
        return _after(last, settled=last.settled)

    def _gone(self, name: str, now: float) -> bool:
        since = self._away_since.get(name)
        return since is not None and now - since >= self._grace_s


def folder_of(shard: str) -> str:
    """A shard's name begins with that of its folder."""
    return shard.rpartition(".")[0]


def _may_begin(report: Report, lost: Collection[str]) -> bool:
    """Whether all may be left to a shard: it is in the place of one that is lost, or it is an empty one."""
    return report.folder in {folder_of(one) for one in lost} or not report.has_sessions


def _first(present: Mapping[str, Report], stack: str) -> ShardView | None:
    """One serves, the one that has sessions if there is one; the others join it."""
    if not present:
        return None
    best = min(present.values(), key=lambda report: (not report.has_sessions, report.name))
    return ShardView(epoch=1, serving=(best.name,), stack=stack)


def _may_join(report: Report, last: ShardView) -> bool:
    """Sessions of another stack, or of none, would be dropped: they are not in this one."""
    return not report.has_sessions if report.view is None else report.view.stack == last.stack


def _after(
    last: ShardView,
    *,
    serving: tuple[str, ...] | None = None,
    joining: tuple[str, ...] | None = None,
    settled: bool | None = None,
) -> ShardView:
    return ShardView(
        epoch=last.epoch + 1,
        serving=tuple(sorted(serving if serving is not None else last.serving)),
        joining=tuple(sorted(joining if joining is not None else last.joining)),
        settled=last.settled if settled is None else settled,
        stack=last.stack,
    )


def report_of(shard: shards_pb2.Shard) -> Report:
    return Report(
        folder=shard.folder,
        name=shard.name,
        view=decode_view(shard.view),
        synced_epoch=shard.synced_epoch,
        has_sessions=shard.has_sessions,
    )
