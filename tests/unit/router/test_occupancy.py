"""What a router knows of instances' room between two heartbeats."""

from __future__ import annotations

import grpc.aio
import pytest

from kvcommons.errors import Overloaded
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import HeadPart, Instance, Load
from services.router.capacity.occupancy import Rooms, Taken
from services.router.fleet.fleet import Fleet

MODEL = ModelInfo(fingerprint=b"m" * 32, name="m", block_tokens=64)


def decode(instance_id: str = "d", *, free: int = 100, changes: int = 0, **load: int | bool) -> Instance:
    known = {"total_blocks": 128, "only_here": True, "ready": True, **load}
    return Instance(
        id=instance_id, service="decode", model=MODEL, load=Load(free_blocks=free, changes=changes, **known)
    )


def heard(*instances: Instance) -> Rooms:
    rooms = Rooms()
    rooms.hear(instances)
    return rooms


def running(rooms: Rooms, change: int, blocks: int, away: int = 0) -> Taken:
    taken = rooms.take("d", blocks + away)
    rooms.reserved(taken, change=change, here=blocks, away=away)
    return taken


def free(rooms: Rooms, instance: Instance) -> int:
    return rooms.now(instance).load.free_blocks


def test_what_was_dispatched_is_taken_until_a_heartbeat_counts_it() -> None:
    before = decode(free=100, changes=4)
    rooms = heard(before)
    first, second = rooms.take("d", 30), rooms.take("d", 20)
    assert (free(rooms, before), rooms.now(before).load.running) == (50, 2)
    rooms.reserved(first, change=5, here=25, away=5)
    rooms.reserved(second, change=6, here=20, away=0)
    assert free(rooms, before) == 55
    between = decode(free=75, changes=5, running=1)
    rooms.hear([between])
    assert (free(rooms, between), rooms.now(between).load.running) == (55, 2)
    after = decode(free=55, changes=6, running=2)
    rooms.hear([after])
    assert (free(rooms, after), rooms.now(after).load.running) == (55, 2)


def test_a_heartbeat_that_is_quicker_than_the_reservation_is_not_counted_twice() -> None:
    rooms = heard(decode(free=100, changes=4))
    taken = rooms.take("d", 30)
    after = decode(free=70, changes=5)
    rooms.hear([after])
    rooms.reserved(taken, change=5, here=30, away=0)
    assert free(rooms, after) == 70


def test_what_has_ended_is_given_back_until_a_heartbeat_counts_it() -> None:
    rooms = heard(decode(free=100, changes=4))
    taken = running(rooms, 5, 30)
    late = decode(free=70, changes=5, running=1)
    rooms.hear([late])
    rooms.grown(taken, 33)
    assert free(rooms, late) == 67
    taken.finished = 6
    rooms.ended(taken)
    assert (free(rooms, late), rooms.now(late).load.running) == (100, 0)
    again = decode(free=68, changes=5, running=1)  # seconds old: from before the end, and after a block more
    rooms.hear([again])
    assert 100 <= free(rooms, again) <= 101
    at_last = decode(free=100, changes=6)
    rooms.hear([at_last])
    assert rooms.now(at_last) is at_last


def test_a_ledger_that_lags_behind_is_not_heard() -> None:
    rooms = heard(decode(free=100, changes=4))
    taken = running(rooms, 5, 30)
    taken.finished = 6
    rooms.ended(taken)
    rooms.hear([decode(free=100, changes=6)])
    old = decode(free=70, changes=5, running=1)
    rooms.hear([old])
    assert (free(rooms, old), rooms.now(old).load.running) == (100, 0)


def test_a_sequence_between_two_heartbeats_leaves_no_trace() -> None:
    before = decode(free=100, changes=4)
    rooms = heard(before)
    taken = running(rooms, 5, 30)
    taken.finished = 6
    rooms.ended(taken)
    assert free(rooms, before) == 100
    meanwhile = decode(free=70, changes=5)
    rooms.hear([meanwhile])
    assert free(rooms, meanwhile) == 100


def test_a_call_that_was_cancelled_is_given_back_once() -> None:
    rooms = heard(decode(free=100, changes=4))
    taken = running(rooms, 5, 30)
    rooms.hear([decode(free=70, changes=5)])
    rooms.ended(taken)
    assert free(rooms, decode(free=70, changes=5)) == 100
    after = decode(free=100, changes=6)
    rooms.hear([after])
    assert free(rooms, after) == 100


def test_an_instance_that_numbers_nothing_is_believed() -> None:
    instance = decode(free=100)
    rooms = heard(instance)
    taken = rooms.take("d", 30)
    assert free(rooms, instance) == 70
    rooms.reserved(taken, change=0, here=30, away=0)
    assert free(rooms, instance) == 100
    rooms.ended(taken)
    assert rooms.now(instance) is instance


def test_a_refusal_holds_until_room_comes_or_a_heartbeat() -> None:
    instance = decode(free=100, changes=4)
    rooms = heard(instance)
    old = running(rooms, 5, 10)
    assert rooms.largest([instance], []) == 89, "90 are free, of which the sequence may want one more"
    rooms.refused(rooms.take("d", 50), 50)
    assert (rooms.largest([instance], []), free(rooms, instance)) == (48, 49)
    rooms.ended(old)
    assert rooms.largest([instance], []) == 59
    later = decode(free=80, changes=6)
    rooms.hear([later])
    assert rooms.largest([later], []) == 80


def test_room_that_comes_while_decode_is_being_asked_is_not_lost() -> None:
    instance = decode(free=20, changes=4)
    rooms = heard(instance)
    old = running(rooms, 5, 10)
    asks = rooms.take("d", 12)
    rooms.ended(old)
    rooms.refused(asks, 12)  # it said so before
    assert rooms.largest([instance], []) == 20


def test_the_largest_sequence_where_memory_is_shared() -> None:
    one = decode("d", free=10, lendable_blocks=10, only_here=False, running=3)
    other = decode("e", free=20, lendable_blocks=15, only_here=False)
    parts = [Instance(id=f"h{number}", load=Load(lendable_blocks=7)) for number in range(2)]
    for number, part in enumerate(parts):
        part.heads.CopyFrom(HeadPart(group="g", number=number, parts=2))
    rooms = heard(one, other)
    # Each that runs is left a block to grow: 7 and 15 + 7, or 20 and 7 + 7.
    assert rooms.largest([one, other], parts) == 34
    taken = rooms.take("e", 25)
    rooms.reserved(taken, change=1, here=19, away=6)
    assert rooms.largest([one, other], parts) == max(7 + 0 + 7 - 6, 0 + 7 + 7 - 6)
    rooms.ended(taken)
    assert rooms.largest([one, other], parts) == 34
    assert rooms.largest([], parts) is None


class View:
    shards = None

    def __init__(self, *decodes: Instance) -> None:
        self.decodes = list(decodes)

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        prefill = Instance(id="p", model=MODEL, load=Load(ready=True))
        return {"decode": self.decodes, "prefill": [prefill]}.get(service, [])

    def suspect(self, instance_id: str) -> None: ...


def test_two_long_sequences_go_to_two_idle_instances_though_heartbeats_are_old() -> None:
    """Both have had one before, and have not said yet that it has ended."""
    view = View(decode("d", free=128), decode("e", free=128))
    fleet, tokens = Fleet(view, grpc.aio.insecure_channel), 7168
    for turn in range(3):
        engaged = []
        for _ in range(2):
            pair = fleet.place(MODEL, affinity="", tokens=tokens, failed=())
            assert pair is not None
            engaged.append(fleet.engaged(pair, 113))
            taken = engaged[-1].__enter__()
            fleet.rooms.reserved(taken, change=2 * turn + 1, here=113, away=0)
        assert fleet.room_now(MODEL) == 14
        old = {"running": 1, "free": 15, "changes": 2 * turn + 1}
        view.decodes = [decode("d", **old), decode("e", **old)]
        fleet.look()
        for one in engaged:
            one.__exit__(None, None, None)
        assert fleet.room_now(MODEL) == 128


def test_a_refusal_is_heard_where_the_call_ends() -> None:
    view = View(decode("d", free=128))
    fleet = Fleet(view, grpc.aio.insecure_channel)
    pair = fleet.place(MODEL, affinity="", tokens=63, failed=())
    assert pair is not None
    with pytest.raises(Overloaded), fleet.engaged(pair, 40):
        raise Overloaded("full")
    assert fleet.room_now(MODEL) == 39


def ids(*names: str) -> list[bytes]:
    """Identities of blocks: each depends on those before it."""
    return ["/".join(names[: at + 1]).encode() for at in range(len(names))]


def test_an_instance_that_restarts_under_its_id_is_heard_at_once() -> None:
    rooms = heard(decode(free=100, changes=0, epoch=1))
    old = [rooms.take("d", 20) for _ in range(3)]
    for change, taken in enumerate(old, 1):
        rooms.reserved(taken, change=change, here=20, away=0, epoch=1)
    late = decode(free=40, changes=3, running=3, epoch=1)
    rooms.hear([late])
    fresh = decode(free=128, changes=0, epoch=2)
    rooms.hear([fresh])
    assert (free(rooms, fresh), rooms.now(fresh).load.running) == (128, 0)
    rooms.hear([late])  # of a ledger that lags behind
    assert free(rooms, fresh) == 128
    for taken in old:  # their streams break
        rooms.ended(taken)
    taken = rooms.take("d", 30)
    rooms.reserved(taken, change=1, here=30, away=0, epoch=2)
    assert (free(rooms, fresh), rooms.now(fresh).load.running) == (98, 1)
    told = decode(free=98, changes=1, running=1, epoch=2)
    rooms.hear([told])
    assert (free(rooms, told), rooms.now(told).load.running) == (98, 1)
    rooms.hear([decode(free=128, changes=0, epoch=2)])  # older than that
    assert free(rooms, told) == 98


def test_what_the_restarted_one_takes_before_its_first_heartbeat_stays() -> None:
    rooms = heard(decode(free=10, changes=40, epoch=1))
    asks, stays, ends = (rooms.take("d", 30) for _ in range(3))
    rooms.reserved(stays, change=1, here=30, away=0, epoch=2)
    rooms.reserved(ends, change=2, here=30, away=0, epoch=2)
    rooms.ended(ends)
    fresh = decode(free=98, changes=1, running=1, epoch=2)
    rooms.hear([fresh])
    assert free(rooms, fresh) == 68, "one asks, one is counted, one has ended without ever being counted"
    rooms.ended(asks)
    assert free(rooms, fresh) == 98


def test_a_shared_prefix_counts_once() -> None:
    before = decode(free=100, changes=0)
    rooms = heard(before)
    prefix = ids(*"abcdefgh")
    first = rooms.take("d", 10, prefix)
    rooms.reserved(first, change=1, here=10, away=0)
    assert rooms.shared("d", prefix) == 0, "it is not computed yet: who comes now computes it, too"
    rooms.grown(first, 10)
    assert rooms.shared("d", ids(*"abcxyz")) == 3
    second = rooms.take("d", 12, ids(*"abcdefxyz"))
    third = rooms.take("d", 9, prefix)
    assert free(rooms, before) == 100 - 10 - (12 - 6) - (9 - 8)
    rooms.reserved(second, change=2, here=12, away=0)
    rooms.reserved(third, change=3, here=9, away=0)
    rooms.grown(second, 13)
    assert free(rooms, before) == 100 - 10 - (13 - 6) - (9 - 8)
    told = decode(free=82, changes=3, running=3)
    rooms.hear([told])
    assert free(rooms, told) == 82
    # The third one has all of the first one's prefix: only what is not of it comes free.
    first.finished = 4
    rooms.ended(first)
    assert free(rooms, told) == 82 + 2
    third.finished = 5
    rooms.ended(third)
    assert free(rooms, told) == 82 + 2 + 1 + 2, "the second one has six of the eight"
    second.finished = 6
    rooms.ended(second)
    assert free(rooms, told) == 100


def test_a_refusal_of_one_that_shares_is_of_what_it_lacks() -> None:
    rooms = heard(decode("d", free=100), decode("e", free=100))
    prefix = ids(*"abcdefgh")
    there = rooms.take("d", 95, prefix)
    rooms.reserved(there, change=1, here=95, away=0)
    rooms.grown(there, 95)
    assert rooms.shared("d", prefix) == 8
    assert rooms.shared("e", prefix) == 0
    asks = rooms.take("d", 12, prefix)
    assert (asks.here, asks.shared) == (4, 8)
    rooms.refused(asks, asks.here)
    assert rooms.largest([decode("d", free=100)], []) == 2, "3, less one that the other may grow by"
