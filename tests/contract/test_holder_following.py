"""What a holder serves layer after layer without the interpreter is what it answers with it, bit for bit; and
whatever comes between leaves no trace: no pin, no block, no thread.

Requests that belong to a trace are answered by Python: such a one is what is compared with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcommons.attention.native import library
from kvcommons.holder.segment import Stay
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.heads import HeadPart
from tests.contract.following_cases import LAYERS, LAYOUT, SIZE, TRACE, Peer, Rig, Row, eventually, rig
from tests.machine import scaled

pytestmark = pytest.mark.skipif(library.chosen() is None, reason="there is no compiled kernel")

KINDS = {
    "float32": LAYOUT,
    "bfloat16": replace(LAYOUT, kv_dtype="bfloat16"),
    "half-the-heads": HeadPart(number=1, parts=2).layout(LAYOUT),
}


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize("kind", KINDS)
def test_iterations_are_what_python_answers(socket_folder: Path, transport: str, kind: str) -> None:
    """Across blocks' borders and growth, with segments that take tokens, that do not, and that have none; the
    layers' windows differ."""
    layout = KINDS[kind]
    with rig(socket_folder, transport=transport, layout=layout) as made:
        memory = made.holder.memory
        growing, whole, empty, late = (made.lend(blocks) for blocks in (2, 3, 1, 4))
        rows = [
            Row(ref=growing, position=5, length=6),
            Row(ref=whole, position=15, length=12, append=False),
            Row(ref=empty, position=3, length=0, append=False),
            Row(ref=late, position=9, length=2, first_block=1),
        ]
        native, python = made.peer(), made.peer()
        for iteration in range(9):
            if rows[0].length > 8:
                made.holder.grow(growing, -(-rows[0].length // SIZE), owner="debtor", lease_s=10)
            for layer in range(LAYERS):
                got = native.ask(native.frame(layer, rows, iteration))
                after = memory.layer(layer).clone()
                assert got == python.ask(python.frame(layer, rows, iteration, trace=TRACE))
                assert torch.equal(after, memory.layer(layer)), "appended to the same slots"
            rows = [row.next() for row in rows]
        for peer in (native, python):
            peer.socket.close()
        eventually(lambda: made.server.connections == 0)
        assert len(made.observed) == 2 * 9 * LAYERS
        # One request is answered by Python at first, and one whenever the first segment had grown.
        assert made.served >= 9 * LAYERS // 2
        q_bytes = 4 * layout.query_heads * layout.head_dim * 4
        new_bytes = 2 * 2 * layout.kv_heads * layout.head_dim * (2 if kind == "bfloat16" else 4)
        assert {(one.op, one.received_bytes, one.sent_bytes, one.error) for one in made.observed} == {
            ("attend_layer", q_bytes + new_bytes, q_bytes + 4 * layout.query_heads * 4, "")
        }


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_long_sequence_on_two_threads_is_what_python_answers(socket_folder: Path) -> None:
    layout = replace(LAYOUT, block_tokens=256)
    with rig(socket_folder, layout=layout) as made:
        rows = [Row(ref=made.lend(20), position=n, length=n + 1) for n in (5000, 4999)]
        rows.append(Row(ref=made.lend(2), position=300, length=301))
        native, python = made.peer(), made.peer()
        for iteration in range(4):
            for layer in range(LAYERS):
                got = native.ask(native.frame(layer, rows, iteration))
                assert got == python.ask(python.frame(layer, rows, iteration, trace=TRACE))
            rows = [row.next() for row in rows]
        eventually(lambda: made.served >= 2 * LAYERS)


@pytest.mark.parametrize("ask_s", [0.0, 2e-3])
def test_what_changes_a_segment_is_seen_by_the_next_layer(socket_folder: Path, ask_s: float) -> None:
    """And takes effect at once: nobody is in the middle of a request."""
    with rig(socket_folder, ask_s=ask_s) as made:
        holder, peer = made.holder, made.peer()
        ref = made.lend(40)
        row = made.follow(peer, Row(ref=ref, position=16, length=17))
        holder.freeze(ref, 1, 2, owner="debtor")
        frozen = replace(ref, generation=1)
        row = made.follow(peer, row)
        row = made.follow(peer, replace(row, ref=frozen, first_block=2, length=row.length - 2 * SIZE))
        free = holder.allocator.free
        assert holder.trim(frozen, owner="debtor") == 2
        assert not holder.parting(frozen)
        assert holder.allocator.free == free + 2
        assert peer.refused(peer.frame(0, [replace(row, ref=ref)])) == "stale_epoch"
        row = made.follow(peer, row)
        holder.freeze(frozen, 2, 4, owner="debtor")
        holder.thaw(replace(frozen, generation=2), owner="debtor")
        row = made.follow(peer, row)
        thawed = replace(frozen, generation=2)
        heir = holder.adopt(
            thawed, former_owner="debtor", owner="other", sequence="t", lease_s=10, shared_blocks=38
        )
        assert peer.refused(peer.frame(0, [row])) == "invalid_value", "shared blocks take no tokens"
        row = made.follow(peer, replace(row, append=False))
        holder.release([heir, thawed])
        assert holder.allocator.in_use == 0
        assert peer.refused(peer.frame(1, [row])) == "stale_epoch"


def test_a_lease_that_runs_out_ends_it(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        made.clock_s = 5
        assert made.holder.renew("debtor", [row.ref], lease_s=20) == []
        made.clock_s = 15
        assert made.holder.expire() == 0
        row = made.follow(peer, row)
        made.clock_s = 26
        assert made.holder.expire() == 1
        assert made.holder.allocator.in_use == 0
        assert peer.refused(peer.frame(2, [row])) == "stale_epoch"


def test_a_request_under_way_keeps_its_blocks(socket_folder: Path) -> None:
    """It waits for its turn to compute when its segment is released: it is answered, and then the blocks come
    back."""
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        served = made.served
        with made.computing():
            peer.send(peer.frame(0, [row]))
            eventually(lambda: peer.unread() == 0)
            time.sleep(0.02)
            made.holder.release([row.ref])
            assert made.holder.allocator.in_use == 30
        reply, _ = peer.receive()
        assert reply.attend_layer.queued_us > 10_000
        eventually(lambda: made.holder.allocator.in_use == 0)
        eventually(lambda: made.served > served)
        assert peer.refused(peer.frame(1, [row])) == "stale_epoch"


def test_a_request_that_is_not_computed_in_time_is_refused(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        with made.computing():
            assert peer.refused(peer.frame(0, [row], deadline_ms=60)) == "deadline_exceeded"
        eventually(lambda: made.observed[-1].error == "deadline_exceeded")
        last = made.observed[-1]
        assert (last.op, last.sent_bytes, last.seconds > 0.05) == ("attend_layer", 0, True)
        made.follow(peer, row)


def test_a_debtor_that_stops_in_the_middle_of_a_payload(socket_folder: Path) -> None:
    """Its own deadline ends the request, and the connection with it."""
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        peer.send(peer.frame(0, [row], deadline_ms=100)[:-7])
        assert peer.closed()
        assert made.pins() == 0
        assert made.observed[-1].error == "deadline_exceeded"
        assert made.observed[-1].received_bytes == len(peer.payload([row], 0, 0)) - 7


@pytest.mark.parametrize("missing", [3, 200])
def test_a_debtor_that_dies_in_the_middle_of_a_frame(socket_folder: Path, missing: int) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        frame = peer.frame(0, [row])
        peer.send(frame[: len(frame) - missing])
        peer.socket.close()
        eventually(lambda: made.server.connections == 0)
        assert made.pins() == 0


def test_a_debtor_that_does_not_read_holds_nothing_longer_than_its_deadline(socket_folder: Path) -> None:
    """Requests are sent one after the other until the answers that nobody reads fill the sockets."""
    layout = replace(LAYOUT, query_heads=64)
    with rig(socket_folder, transport="unix", layout=layout) as made:
        peer = made.peer()
        refs = [made.lend(1) for _ in range(32)]
        rows = [Row(ref=ref, position=2, length=3, append=False) for ref in refs]
        frame = peer.frame(0, rows, deadline_ms=300)
        peer.ask(frame)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                peer.send(frame)
        eventually(lambda: made.server.connections == 0)
        assert made.pins() == 0
        assert made.served > 1
        assert made.observed[-1].error == "deadline_exceeded"


def test_what_does_not_follow_is_for_python(socket_folder: Path) -> None:
    """On the same connection, between two layers: other operations, other segments, and what is wrong."""
    with rig(socket_folder) as made:
        peer, ref, other = made.peer(), made.lend(30), made.lend(30)
        row, second = Row(ref=ref, position=4, length=5), Row(ref=other, position=4, length=5)
        object_bytes = bytes(range(256)) * (LAYOUT.object_bytes // 256)
        write = pb.WriteBlocks(handle=other.handle, epoch=other.epoch, layer=1, first_block=29, blocks=1)
        read = pb.ReadBlocks(handle=other.handle, epoch=other.epoch, layer=1, first_block=29, blocks=1)

        def moves_blocks() -> None:
            peer.send(peer.wrap(pb.DataRequest(deadline_ms=9999, write_blocks=write), object_bytes))
            assert peer.receive()[0].HasField("done")
            peer.send(peer.wrap(pb.DataRequest(deadline_ms=9999, read_blocks=read)))
            assert peer.receive()[1] == object_bytes

        def is_refused(frame: bytes, code: str = "invalid_value") -> Callable[[], None]:
            def ask() -> None:
                assert peer.refused(frame) == code

            return ask

        def is_answered(rows: Sequence[Row], trace: str = "") -> Callable[[], None]:
            return lambda: check_equal(made, peer, rows, trace)

        attend = pb.AttendLayer(layer=0)
        for between in (
            moves_blocks,
            is_answered([row, second]),
            is_answered([second]),
            is_answered([row], TRACE),
            is_answered([replace(row, position=9, length=10)]),
            is_answered([replace(row, position=2, length=3)]),
            is_answered([replace(row, position=1 << 40)]),
            is_answered([replace(row, append=False)]),
            is_answered([replace(row, length=3, first_block=1)]),
            is_refused(peer.frame(LAYERS, [row])),
            is_refused(peer.frame(0, [row], deadline_ms=0)),
            is_refused(peer.frame(0, [replace(row, length=121, position=121)])),
            is_refused(peer.wrap(pb.DataRequest(deadline_ms=9999, attend_layer=attend))),
            is_refused(peer.frame(0, [replace(row, ref=replace(ref, epoch=1))]), "stale_epoch"),
            is_refused(peer.cut(peer.frame(0, [row]), 4)),
        ):
            row = made.follow(peer, replace(row, position=4, length=5))
            between()
        made.follow(peer, row)


def check_equal(made: Rig, peer: Peer, rows: Sequence[Row], trace: str) -> None:
    python = made.peer()
    got = peer.ask(peer.frame(0, rows, 3, trace=trace))
    assert got == python.ask(python.frame(0, rows, 3, trace=TRACE))
    python.socket.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"KVCF\x02" + bytes(15)])
def test_garbage_is_refused_as_ever(socket_folder: Path, garbage: bytes) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        assert peer.refused(garbage) == "data_loss"
        assert peer.closed()


def test_a_head_that_comes_in_pieces(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        expected = peer.ask(peer.frame(0, [row]))
        frame = peer.frame(0, [row])
        for cut in (1, 19, 21, 40, len(frame) - 1):
            row = made.follow(peer, row)
            peer.send(frame[:cut])
            time.sleep(0.02)
            peer.send(frame[cut:])
            assert len(peer.receive()[1]) == len(expected)


def test_several_debtors_at_once(socket_folder: Path) -> None:
    """Each gets its own answers, on the cores one after the other."""
    with rig(socket_folder) as made:
        refs = [made.lend(8) for _ in range(3)]
        answers: dict[int, list[bytes]] = {}

        def debtor(number: int) -> None:
            peer, row = made.peer(), Row(ref=refs[number], position=6 + number, length=7 + number)
            answers[number] = []
            for _ in range(15):
                for layer in range(LAYERS):
                    answers[number].append(peer.ask(peer.frame(layer, [row], number)))
                row = row.next()

        threads = [threading.Thread(target=debtor, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        eventually(lambda: made.served > 15 * LAYERS)
        python = made.peer()
        for number, ref in enumerate(refs):
            row = Row(ref=ref, position=6 + number, length=7 + number)
            again = []
            for _ in range(15):
                for layer in range(LAYERS):
                    again.append(python.ask(python.frame(layer, [row], number, trace=TRACE)))
                row = row.next()
            assert again == answers[number]


def test_a_server_stops_while_a_thread_waits(socket_folder: Path) -> None:
    with rig(socket_folder, ask_s=2e-3) as made:
        peer = made.peer()
        ref = made.lend(30)
        made.follow(peer, Row(ref=ref, position=4, length=5))
        began_s = time.monotonic()
        assert made.server.stop(5)
        assert time.monotonic() - began_s < scaled(2)
        assert made.pins() == 0
        assert peer.closed()


def test_batches_that_take_turns_on_a_connection(socket_folder: Path) -> None:
    """Mini-batches, and pipelined batches: their messages go over whichever connection is free, so that one
    sees some layers of an iteration, or none."""
    with rig(socket_folder) as made:
        refs = [made.lend(10) for _ in range(3)]
        batches = [
            [
                Row(ref=ref, position=9, length=10 - number),
                Row(ref=refs[2], position=9, length=3, append=False),
            ]
            for number, ref in enumerate(refs[:2])
        ]
        peers, python = [made.peer(), made.peer()], made.peer()
        for iteration in range(12):
            for layer in range(LAYERS):
                for number, rows in enumerate(batches):
                    peer = peers[(iteration * layer + number) % 2 if iteration % 4 else number]
                    got = peer.ask(peer.frame(layer, rows, iteration))
                    assert got == python.ask(python.frame(layer, rows, iteration, trace=TRACE))
            batches = [[row.next() for row in rows] for rows in batches]
        eventually(lambda: made.served >= 12 * LAYERS)


def test_a_debtor_that_pauses_holds_no_pins(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        eventually(lambda: made.pins() == 0)
        made.follow(peer, row)


def test_a_segment_that_changes_as_it_is_pinned_is_for_python(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(socket_folder) as made:
        peer, ref = made.peer(), made.lend(2)
        stay = made.holder.stay

        def changed(refs: Sequence[SegmentRef], end: Callable[[], bool]) -> Stay:
            found = stay(refs, end)
            made.holder.freeze(ref, 1, 1, owner="debtor")
            monkeypatch.undo()
            return found

        monkeypatch.setattr(made.holder, "stay", changed)
        row = Row(ref=ref, position=4, length=5)
        for layer in range(LAYERS):
            peer.ask(peer.frame(layer, [row]))
        assert made.pins() in (0, 1)  # the last request is still followed
        made.follow(peer, row.next())
        peer.socket.close()
        eventually(lambda: made.pins() == 0)
