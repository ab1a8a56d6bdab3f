"""What a router knows of instances' free blocks between two heartbeats."""

from __future__ import annotations

import pytest

from kvcommons.errors import Overloaded
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import HeadPart, Instance, Load
from kvcommons.rpc.channel import open_channel
from services.router.capacity.occupancy import Occupancy, Reservation
from services.router.fleet.fleet import Fleet

MODEL = ModelInfo(fingerprint=b"m" * 32, name="m", block_tokens=64)


def decode(instance_id: str = "d", *, free: int = 100, changes: int = 0, **load: int | bool) -> Instance:
    known = {"total_blocks": 128, "only_here": True, "ready": True, **load}
    return Instance(
        id=instance_id, service="decode", model=MODEL, load=Load(free_blocks=free, changes=changes, **known)
    )


def observed(*instances: Instance) -> Occupancy:
    occupancy = Occupancy()
    occupancy.update(instances)
    return occupancy


def running(occupancy: Occupancy, change: int, blocks: int, remote: int = 0) -> Reservation:
    reservation = occupancy.reserve("d", blocks + remote)
    occupancy.confirm(reservation, change=change, local=blocks, remote=remote)
    return reservation


def free(occupancy: Occupancy, instance: Instance) -> int:
    return occupancy.projected(instance).load.free_blocks


def test_what_was_dispatched_is_taken_until_a_heartbeat_counts_it() -> None:
    before = decode(free=100, changes=4)
    occupancy = observed(before)
    first, second = occupancy.reserve("d", 30), occupancy.reserve("d", 20)
    assert (free(occupancy, before), occupancy.projected(before).load.running) == (50, 2)
    occupancy.confirm(first, change=5, local=25, remote=5)
    occupancy.confirm(second, change=6, local=20, remote=0)
    assert free(occupancy, before) == 55
    between = decode(free=75, changes=5, running=1)
    occupancy.update([between])
    assert (free(occupancy, between), occupancy.projected(between).load.running) == (55, 2)
    after = decode(free=55, changes=6, running=2)
    occupancy.update([after])
    assert (free(occupancy, after), occupancy.projected(after).load.running) == (55, 2)


def test_what_prompts_that_have_begun_still_want_is_nobody_elses_to_borrow() -> None:
    """Here is what others may have: it was never promised."""
    grows = decode("d", free=10, lendable_blocks=5, only_here=False, promised_blocks=12)
    other = decode("e", free=20, lendable_blocks=15, only_here=False)
    pool = Instance(id="p", load=Load(lendable_blocks=30))
    occupancy = Occupancy()
    occupancy.update([grows, other], [pool])
    assert occupancy.free_blocks([grows, other], [pool]) == {"d": 10 + 15 + 30 - 12, "e": 20 + 5 + 30 - 12}
    grows.load.promised_blocks = 100
    occupancy.update([grows, other], [pool])
    assert occupancy.free_blocks([grows, other], [pool]) == {"d": 10, "e": 20}


def test_a_heartbeat_that_is_quicker_than_the_reservation_is_not_counted_twice() -> None:
    occupancy = observed(decode(free=100, changes=4))
    reservation = occupancy.reserve("d", 30)
    after = decode(free=70, changes=5)
    occupancy.update([after])
    occupancy.confirm(reservation, change=5, local=30, remote=0)
    assert free(occupancy, after) == 70


def test_what_has_ended_is_given_back_until_a_heartbeat_counts_it() -> None:
    occupancy = observed(decode(free=100, changes=4))
    reservation = running(occupancy, 5, 30)
    late = decode(free=70, changes=5, running=1)
    occupancy.update([late])
    occupancy.grow(reservation, 33)
    assert free(occupancy, late) == 67
    reservation.reported_end = 6
    occupancy.end(reservation)
    assert (free(occupancy, late), occupancy.projected(late).load.running) == (100, 0)
    again = decode(free=68, changes=5, running=1)  # seconds old: from before the end, and after a block more
    occupancy.update([again])
    assert 100 <= free(occupancy, again) <= 101
    at_last = decode(free=100, changes=6)
    occupancy.update([at_last])
    assert occupancy.projected(at_last) is at_last


def test_a_ledger_that_lags_behind_is_not_heard() -> None:
    occupancy = observed(decode(free=100, changes=4))
    reservation = running(occupancy, 5, 30)
    reservation.reported_end = 6
    occupancy.end(reservation)
    occupancy.update([decode(free=100, changes=6)])
    old = decode(free=70, changes=5, running=1)
    occupancy.update([old])
    assert (free(occupancy, old), occupancy.projected(old).load.running) == (100, 0)


def test_a_sequence_between_two_heartbeats_leaves_no_trace() -> None:
    before = decode(free=100, changes=4)
    occupancy = observed(before)
    reservation = running(occupancy, 5, 30)
    reservation.reported_end = 6
    occupancy.end(reservation)
    assert free(occupancy, before) == 100
    meanwhile = decode(free=70, changes=5)
    occupancy.update([meanwhile])
    assert free(occupancy, meanwhile) == 100


def test_a_call_that_was_cancelled_is_given_back_once() -> None:
    occupancy = observed(decode(free=100, changes=4))
    reservation = running(occupancy, 5, 30)
    occupancy.update([decode(free=70, changes=5)])
    occupancy.end(reservation)
    assert free(occupancy, decode(free=70, changes=5)) == 100
    after = decode(free=100, changes=6)
    occupancy.update([after])
    assert free(occupancy, after) == 100


def test_an_instance_that_numbers_nothing_is_believed() -> None:
    instance = decode(free=100)
    occupancy = observed(instance)
    reservation = occupancy.reserve("d", 30)
    assert free(occupancy, instance) == 70
    occupancy.confirm(reservation, change=0, local=30, remote=0)
    assert free(occupancy, instance) == 100
    occupancy.end(reservation)
    assert occupancy.projected(instance) is instance


def test_a_refusal_holds_until_room_comes_or_a_heartbeat() -> None:
    instance = decode(free=100, changes=4)
    occupancy = observed(instance)
    old = running(occupancy, 5, 10)
    assert occupancy.largest_free([instance], []) == 89, (
        "90 are free, of which the sequence may want one more"
    )
    occupancy.refuse(occupancy.reserve("d", 50), 50)
    assert (occupancy.largest_free([instance], []), free(occupancy, instance)) == (48, 49)
    occupancy.end(old)
    assert occupancy.largest_free([instance], []) == 59
    later = decode(free=80, changes=6)
    occupancy.update([later])
    assert occupancy.largest_free([later], []) == 80


def test_room_that_comes_while_decode_is_being_asked_is_not_lost() -> None:
    instance = decode(free=20, changes=4)
    occupancy = observed(instance)
    old = running(occupancy, 5, 10)
    asks = occupancy.reserve("d", 12)
    occupancy.end(old)
    occupancy.refuse(asks, 12)  # it said so before
    assert occupancy.largest_free([instance], []) == 20


def test_the_largest_sequence_where_memory_is_shared() -> None:
    one = decode("d", free=10, lendable_blocks=10, only_here=False, running=3)
    other = decode("e", free=20, lendable_blocks=15, only_here=False)
    parts = [Instance(id=f"h{number}", load=Load(lendable_blocks=7)) for number in range(2)]
    for number, part in enumerate(parts):
        part.heads.CopyFrom(HeadPart(group="g", number=number, parts=2))
    occupancy = observed(one, other)
    # Each that runs is left a block to grow: 7 and 15 + 7, or 20 and 7 + 7.
    assert occupancy.largest_free([one, other], parts) == 34
    reservation = occupancy.reserve("e", 25)
    occupancy.confirm(reservation, change=1, local=19, remote=6)
    assert occupancy.largest_free([one, other], parts) == max(7 + 0 + 7 - 6, 0 + 7 + 7 - 6)
    occupancy.end(reservation)
    assert occupancy.largest_free([one, other], parts) == 34
    assert occupancy.largest_free([], parts) is None


class View:
    records = ""

    def __init__(self, *decodes: Instance) -> None:
        self.decodes = list(decodes)

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        prefill = Instance(id="p", model=MODEL, load=Load(ready=True))
        return {"decode": self.decodes, "prefill": [prefill]}.get(service, [])

    def silent_s(self, instance_id: str) -> float | None:
        return None

    def suspect(self, instance_id: str) -> None: ...


def test_two_long_sequences_go_to_two_idle_instances_though_heartbeats_are_old() -> None:
    """Both have had one before, and have not said yet that it has ended."""
    view = View(decode("d", free=128), decode("e", free=128))
    fleet, tokens = Fleet(view, open_channel), 7168
    for turn in range(3):
        entered = []
        for _ in range(2):
            pair = fleet.place(MODEL, affinity="", tokens=tokens, failed=())
            assert pair is not None
            entered.append(fleet.reserve(pair, 113))
            reservation = entered[-1].__enter__()
            fleet.occupancy.confirm(reservation, change=2 * turn + 1, local=113, remote=0)
        assert fleet.largest_free(MODEL) == 14
        old = {"running": 1, "free": 15, "changes": 2 * turn + 1}
        view.decodes = [decode("d", **old), decode("e", **old)]
        fleet.update()
        for one in entered:
            one.__exit__(None, None, None)
        assert fleet.largest_free(MODEL) == 128


def test_a_refusal_is_heard_where_the_call_ends() -> None:
    view = View(decode("d", free=128))
    fleet = Fleet(view, open_channel)
    pair = fleet.place(MODEL, affinity="", tokens=63, failed=())
    assert pair is not None
    with pytest.raises(Overloaded), fleet.reserve(pair, 40):
        raise Overloaded("full")
    assert fleet.largest_free(MODEL) == 39


def ids(*names: str) -> list[bytes]:
    """Identities of blocks: each depends on those before it."""
    return ["/".join(names[: at + 1]).encode() for at in range(len(names))]


def test_an_instance_that_restarts_under_its_id_is_heard_at_once() -> None:
    occupancy = observed(decode(free=100, changes=0, epoch=1))
    old = [occupancy.reserve("d", 20) for _ in range(3)]
    for change, reservation in enumerate(old, 1):
        occupancy.confirm(reservation, change=change, local=20, remote=0, epoch=1)
    late = decode(free=40, changes=3, running=3, epoch=1)
    occupancy.update([late])
    fresh = decode(free=128, changes=0, epoch=2)
    occupancy.update([fresh])
    assert (free(occupancy, fresh), occupancy.projected(fresh).load.running) == (128, 0)
    occupancy.update([late])  # of a ledger that lags behind
    assert free(occupancy, fresh) == 128
    for reservation in old:  # their streams break
        occupancy.end(reservation)
    reservation = occupancy.reserve("d", 30)
    occupancy.confirm(reservation, change=1, local=30, remote=0, epoch=2)
    assert (free(occupancy, fresh), occupancy.projected(fresh).load.running) == (98, 1)
    counted = decode(free=98, changes=1, running=1, epoch=2)
    occupancy.update([counted])
    assert (free(occupancy, counted), occupancy.projected(counted).load.running) == (98, 1)
    occupancy.update([decode(free=128, changes=0, epoch=2)])  # older than that
    assert free(occupancy, counted) == 98


def test_what_the_restarted_one_takes_before_its_first_heartbeat_stays() -> None:
    occupancy = observed(decode(free=10, changes=40, epoch=1))
    asks, stays, ends = (occupancy.reserve("d", 30) for _ in range(3))
    occupancy.confirm(stays, change=1, local=30, remote=0, epoch=2)
    occupancy.confirm(ends, change=2, local=30, remote=0, epoch=2)
    occupancy.end(ends)
    fresh = decode(free=98, changes=1, running=1, epoch=2)
    occupancy.update([fresh])
    assert free(occupancy, fresh) == 68, "one asks, one is counted, one has ended without ever being counted"
    occupancy.end(asks)
    assert free(occupancy, fresh) == 98


def test_a_shared_prefix_counts_once() -> None:
    before = decode(free=100, changes=0)
    occupancy = observed(before)
    prefix = ids(*"abcdefgh")
    first = occupancy.reserve("d", 10, prefix)
    occupancy.confirm(first, change=1, local=10, remote=0)
    assert occupancy.shared_blocks("d", prefix) == 0, "it is not computed yet: who comes now computes it, too"
    occupancy.grow(first, 10)
    assert occupancy.shared_blocks("d", ids(*"abcxyz")) == 3
    second = occupancy.reserve("d", 12, ids(*"abcdefxyz"))
    third = occupancy.reserve("d", 9, prefix)
    assert free(occupancy, before) == 100 - 10 - (12 - 6) - (9 - 8)
    occupancy.confirm(second, change=2, local=12, remote=0)
    occupancy.confirm(third, change=3, local=9, remote=0)
    occupancy.grow(second, 13)
    assert free(occupancy, before) == 100 - 10 - (13 - 6) - (9 - 8)
    counted = decode(free=82, changes=3, running=3)
    occupancy.update([counted])
    assert free(occupancy, counted) == 82
    # The third one has all of the first one's prefix: only what is not of it comes free.
    first.reported_end = 4
    occupancy.end(first)
    assert free(occupancy, counted) == 82 + 2
    third.reported_end = 5
    occupancy.end(third)
    assert free(occupancy, counted) == 82 + 2 + 1 + 2, "the second one has six of the eight"
    second.reported_end = 6
    occupancy.end(second)
    assert free(occupancy, counted) == 100


def test_a_refusal_of_one_that_shares_is_of_what_it_lacks() -> None:
    occupancy = observed(decode("d", free=100), decode("e", free=100))
    prefix = ids(*"abcdefgh")
    there = occupancy.reserve("d", 95, prefix)
    occupancy.confirm(there, change=1, local=95, remote=0)
    occupancy.grow(there, 95)
    assert occupancy.shared_blocks("d", prefix) == 8
    assert occupancy.shared_blocks("e", prefix) == 0
    asks = occupancy.reserve("d", 12, prefix)
    assert (asks.local, asks.shared_blocks) == (4, 8)
    occupancy.refuse(asks, asks.local)
    assert occupancy.largest_free([decode("d", free=100)], []) == 2, "3, less one that the other may grow by"
