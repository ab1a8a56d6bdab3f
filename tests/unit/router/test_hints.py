"""What a store hears of the queue: each request's blocks once, then its number and its start."""

from __future__ import annotations

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.expected import ExpectedUse
from services.kvstore.hinted import HintedJobs
from services.kvstore.hints import BLOCKS_MAX, Hints
from services.router.admission.hints import NEW_BLOCKS_MAX, StoreHints, WaitingRequest
from services.router.admission.queue import Prefix

BLOCKS = 192  # of a prompt of 12,000 tokens


def waiting(*numbers: int, blocks: int = BLOCKS) -> list[WaitingRequest]:
    return [
        WaitingRequest(number, Prefix(model=b"m", block_ids=ids(number, blocks)), float(place))
        for place, number in enumerate(numbers)
    ]


def ids(number: int, blocks: int = BLOCKS) -> list[bytes]:
    return [f"{number:>16}/{block:>15}".encode() for block in range(blocks)]


class Store:
    """The store's side, as its server puts it together."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.hinted = HintedJobs()
        self.hints = Hints(lambda model: 1, dram_bytes=1 << 40, disk_bytes=0, blocks_max=blocks_max)
        self.now_s = 0.0

    def hear(self, hint: pb.HintRequest) -> pb.HintReply:
        hint = pb.HintRequest.FromString(hint.SerializeToString())
        uses, unknown = self.hinted.complete(hint, self.now_s)
        expected = [ExpectedUse(model=m, block_ids=b, at_s=self.now_s + s) for m, b, s, _ in uses]
        accepted = self.hints.put(hint.router, expected, now_s=self.now_s, ttl_s=5.0)
        self.hinted.keep(hint, uses[:accepted], self.now_s)
        rest = [use.job for use in uses[accepted:]]
        return pb.HintReply(accepted_uses=accepted, unknown_jobs=[*unknown, *rest])

    @property
    def known(self) -> list[list[bytes]]:
        return [list(use.block_ids) for use in self.hints.upcoming()]


def tell(
    hints: StoreHints, store: Store, requests: list[WaitingRequest], router: str = "r"
) -> pb.HintRequest:
    hint = hints.next(router, requests, 5.0)
    hints.answered(hint, store.hear(hint))
    return hint


def test_hundreds_of_long_prompts_are_known_and_each_is_sent_once() -> None:
    hints, store = StoreHints(), Store()
    numbers = list(range(1, 601))
    requests = waiting(*numbers)
    rounds = 0
    while len(store.known) < len(requests):
        hint = tell(hints, store, requests)
        assert sum(len(use.block_ids) for use in hint.uses) <= NEW_BLOCKS_MAX
        assert hint.ByteSize() < 1 << 20
        rounds += 1
        assert rounds < 20
    assert store.known == [ids(number) for number in numbers]
    again = tell(hints, store, requests)
    assert again.ByteSize() < 20 * len(requests)
    assert len(store.known) == len(requests)


def test_the_order_changes_without_a_block_being_sent_again() -> None:
    hints, store = StoreHints(), Store()
    tell(hints, store, waiting(1, 2, 3))
    hint = tell(hints, store, waiting(4, 3, 1))
    assert [bool(use.block_ids) for use in hint.uses] == [True, False, False]
    assert store.known == [ids(4), ids(3), ids(1)]


def test_a_store_that_forgot_is_sent_all_again() -> None:
    hints, store = StoreHints(), Store()
    tell(hints, store, waiting(1, 2))
    tell(hints, Store(), waiting(1, 2))  # it restarted
    store = Store()
    tell(hints, store, waiting(1, 2))
    assert store.known == [ids(1), ids(2)]
    store.now_s = 60.0
    tell(hints, store, waiting(1, 2))
    tell(hints, store, waiting(1, 2))
    assert store.known == [ids(1), ids(2)]
    hints.failed()
    assert all(use.block_ids for use in hints.next("r", waiting(1, 2), 5.0).uses)


def test_a_store_that_takes_no_more_is_not_sent_all_again_and_again() -> None:
    hints, store = StoreHints(), Store(blocks_max=10 * BLOCKS)
    requests = waiting(*range(1, 61))
    tell(hints, store, requests)
    assert len(store.known) == 10
    hint = tell(hints, store, requests)
    assert sum(bool(use.block_ids) for use in hint.uses) <= 16
    assert len(store.known) == 10
    soonest = tell(hints, store, waiting(*range(11, 61)))
    assert len(soonest.uses) <= 26
    assert store.known == [ids(number) for number in range(11, 21)]


def test_routers_share_what_a_store_remembers() -> None:
    store = Store(blocks_max=8 * BLOCKS)
    first, second = StoreHints(), StoreHints()
    tell(first, store, waiting(*range(1, 11)), "one")
    tell(second, store, waiting(*range(21, 31)), "two")
    tell(first, store, waiting(*range(1, 11)), "one")
    assert len(store.known) == 8
    assert {one[0] for one in store.known} == {ids(number)[0] for number in (1, 2, 3, 4, 21, 22, 23, 24)}


def test_a_hint_without_numbers_is_whole() -> None:
    store = Store()
    use = pb.ExpectedUse(model=b"m", block_ids=ids(1), starts_in_ms=5)
    assert store.hear(pb.HintRequest(router="r", uses=[use], ttl_ms=5000)).accepted_uses == 1
    assert store.known == [ids(1)]
