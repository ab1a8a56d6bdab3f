"""What the router learns of where prefixes lie: from few questions, for many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import ledger_pb2
from services.router.admission.look_ahead import QueueLookAhead
from services.router.admission.queue import Prefix, QueuedRequest, RequestQueue
from services.router.admission.scheduling import ABSENT, DEVICE, DISK, DRAM, scheduling

STORE = ledger_pb2.Instance(id="kvstore", service="kvstore")
DEVICE_BLOCKS = 10


class Fleet:
    """Stands in for the fleet and the store behind it, to count the questions; the contract tests ask a real
    one."""

    def __init__(self, stored: Mapping[bytes, int]) -> None:
        self.asked = 0
        self._stored = stored

    def homed(self, key: bytes) -> Fleet:
        return self

    def store(self) -> ledger_pb2.Instance:
        return STORE

    def instances(self, service: str) -> list[ledger_pb2.Instance]:
        return [ledger_pb2.Instance(id=service, load=ledger_pb2.Load(total_blocks=DEVICE_BLOCKS))]

    def blocks(self, store: ledger_pb2.Instance) -> Fleet:
        return self

    async def Match(self, request: pb.MatchRequest, timeout: float) -> pb.MatchReply:
        self.asked += 1
        tiers: list[int] = []
        for block_id in request.block_ids:
            if block_id not in self._stored:
                break
            tiers.append(self._stored[block_id])
        return pb.MatchReply(tiers=tiers)  # type: ignore[arg-type]


def chained(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


def queue_of(fleet: Fleet) -> tuple[RequestQueue, QueueLookAhead]:
    queue = RequestQueue(max_running=1, max_waiting=100, policy=scheduling("fpf"))
    queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    anything: Any = fleet
    return queue, QueueLookAhead(
        queue, anything, router="r", requests_max=0, asks_distance=True, clock=lambda: 5.0
    )


def wait(queue: RequestQueue, look_ahead: QueueLookAhead, ids: Sequence[bytes]) -> QueuedRequest:
    request = queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    queue.set_prefix(request, Prefix(model=b"m", block_ids=ids))
    look_ahead.enqueued(request)
    return request


async def test_one_answer_serves_all_that_begin_alike() -> None:
    """Thirty requests with one prefix and a block of their own: nine of ten blocks are in DRAM."""
    fleet = Fleet(
        dict.fromkeys(chained("a" * 9), pb.TIER_DRAM) | dict.fromkeys(chained("b" * 9), pb.TIER_DISK)
    )
    queue, look_ahead = queue_of(fleet)
    alike = [wait(queue, look_ahead, chained("a" * 9 + chr(0x100 + n))) for n in range(30)]
    other = wait(queue, look_ahead, chained("b" * 9 + "x"))
    same = wait(queue, look_ahead, chained("b" * 9 + "x"))
    await look_ahead._refresh()
    assert fleet.asked == 2
    assert {request.distance for request in alike} == {(9 * DRAM + ABSENT) / 10}
    assert other.distance == same.distance == (9 * DISK + ABSENT) / 10
    late = wait(queue, look_ahead, chained("a" * 9 + "late"))
    assert late.distance == (9 * DRAM + 4 * ABSENT) / 13  # known before anybody asked
    asked = fleet.asked
    await look_ahead._refresh()
    assert fleet.asked == asked  # all of it is fresh


async def test_a_round_asks_of_as_many_prefixes_as_it_may() -> None:
    """Twenty prefixes, four requests each, with blocks of their own: asked of in three rounds."""
    prefixes = [chained(chr(0x100 + n) * 6) for n in range(20)]
    fleet = Fleet({block: pb.TIER_DISK for prefix in prefixes for block in prefix})
    queue, look_ahead = queue_of(fleet)
    requests = [
        wait(queue, look_ahead, [*prefix, *(f"{number}/{own}/{block}".encode() for block in range(own))])
        for number, prefix in enumerate(prefixes)
        for own in range(1, 5)
    ]
    for asked in (8, 16, 20, 20):
        await look_ahead._refresh()
        assert fleet.asked == asked
    assert all(request.distance < ABSENT for request in requests)


async def test_what_starts_comes_near_and_drives_others_away() -> None:
    fleet = Fleet(dict.fromkeys(chained("a" * 8), pb.TIER_DISK))
    queue, look_ahead = queue_of(fleet)
    first, second = (wait(queue, look_ahead, chained("a" * 8)) for _ in range(2))
    await look_ahead._refresh()
    assert second.distance == DISK
    look_ahead.started(first)
    assert (second.distance, second.on_device) == (DEVICE, 8)
    look_ahead.started(wait(queue, look_ahead, chained("c" * 6)))  # there is room for ten blocks
    assert (second.distance, second.on_device) == ((4 * DEVICE + 4 * DISK) / 8, 4)
