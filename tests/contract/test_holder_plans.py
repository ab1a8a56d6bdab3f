"""A plan's layers on the native path are what Python answers, bit for bit; what happens to its segments ends
no more of it than the rows concerned, and leaves no trace: no pin, no block, no thread.

Layers of a plan that belongs to a trace are answered by Python: such a one is what is compared with."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcommons.holder import plan_session
from kvcommons.holder.layer_head import LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.heads import HeadPart
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.frame import HEADER_BYTES
from tests.backends import COMPILED
from tests.contract.plan_cases import LAYERS, LAYOUT, SIZE, TRACE, Peer, Rig, rig, row
from tests.machine import scaled
from tests.system.collector import Collector
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not COMPILED, reason="there is no compiled kernel")

KINDS = {
    "float32": LAYOUT,
    "bfloat16": replace(LAYOUT, kv_dtype="bfloat16"),
    "half-the-heads": HeadPart(number=1, parts=2).layout(LAYOUT),
}


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize("kind", KINDS)
def test_iterations_are_what_python_answers(socket_folder: Path, transport: str, kind: str) -> None:
    """Across blocks' borders and growth, with segments that take tokens, that do not, and that have none; the
    layers' windows differ. A segment
    that grows needs no change."""
    layout = KINDS[kind]
    with rig(socket_folder, transport=transport, layout=layout) as made:
        memory = made.holder.memory
        growing, whole, empty, late = (made.lend(blocks) for blocks in (2, 3, 1, 4))
        rows = [
            row(growing, 5, 6),
            row(whole, 15, 12, append=False),
            row(empty, 3, 0, append=False),
            row(late, 9, 2, first_block=1),
        ]
        native, python = made.peer(), made.peer()
        native.open(rows)
        python.open(rows, trace=TRACE)
        for step in range(9):
            if 6 + step > 8:
                made.holder.grow(growing, -(-(6 + step) // SIZE), owner="debtor", lease_s=10)
            for layer in range(LAYERS):
                got = native.ask(native.layer(layer, step, seed=step))
                after = memory.layer(layer).clone()
                assert got == python.ask(python.layer(layer, step, seed=step))
                assert torch.equal(after, memory.layer(layer)), "appended to the same slots"
        for peer in (native, python):
            peer.socket.close()
        wait_until(lambda: made.server.connections == 0)
        layers = [one for one in made.observed if one.op == "attend_layer"]
        assert len(layers) == 2 * 9 * LAYERS
        wait_until(lambda: made.served >= 9 * LAYERS // 2)
        q_bytes = 4 * layout.query_heads * layout.head_dim * 4
        new_bytes = 2 * 2 * layout.kv_heads * layout.head_dim * (2 if kind == "bfloat16" else 4)
        assert {(one.received_bytes, one.sent_bytes, one.error) for one in layers} == {
            (q_bytes + new_bytes, q_bytes + 4 * layout.query_heads * 4, "")
        }


@pytest.mark.usefixtures("two_threads")
def test_a_long_sequence_on_two_threads_is_what_python_answers(socket_folder: Path) -> None:
    layout = replace(LAYOUT, block_tokens=256)
    with rig(socket_folder, layout=layout) as made:
        rows = [row(made.lend(20), n, n + 1) for n in (5000, 4999)] + [row(made.lend(2), 300, 301)]
        native, python = made.peer(), made.peer()
        native.open(rows)
        python.open(rows, trace=TRACE)
        for step in range(4):
            for layer in range(LAYERS):
                got = native.ask(native.layer(layer, step, seed=step))
                assert got == python.ask(python.layer(layer, step, seed=step))
        wait_until(lambda: made.served >= 2 * LAYERS)


def test_rows_come_and_go(socket_folder: Path) -> None:
    """A plan that is changed gives what a new one gives, whatever stands in between: no answer to a change is
    waited for."""
    with rig(socket_folder) as made:
        refs = [made.lend(4) for _ in range(6)]
        rows = [row(ref, 4 + n, 5 + n) for n, ref in enumerate(refs)]
        native = made.peer()
        native.open(rows[:3], step=7)
        present, step = rows[:3], 7
        for change in (
            lambda now: [*now[:1], *now[2:]],  # one ends
            lambda now: [rows[4], *now],  # one joins at the front
            lambda now: [*now, rows[5]],
            lambda now: [now[1], now[0], *now[2:]],  # in another order
            lambda now: [one._replace(append=False) for one in now],
            lambda now: now[-1:],
            lambda now: rows[:4],
        ):
            python = made.peer()
            python.open(present, step=step, trace=TRACE)
            for layer in range(LAYERS):
                assert native.ask(native.layer(layer, step)) == python.ask(python.layer(layer, step))
            step += 1
            present = change([one.moved(1) for one in present])
            native.change(present, step=step)
        wait_until(lambda: made.served >= 7 * LAYERS // 2)


@pytest.mark.parametrize("ask_s", [0.0, 2e-3])
def test_what_changes_a_segment_is_seen_by_the_next_layer(socket_folder: Path, ask_s: float) -> None:
    """And takes effect at once: nobody is in the middle of a layer."""
    with rig(socket_folder, ask_s=ask_s) as made:
        holder, peer = made.holder, made.peer()
        ref = made.lend(40)
        peer.open([row(ref, 16, 17)])
        step = made.follow(peer, 0)
        holder.freeze(ref, 1, 2, owner="debtor")
        frozen = replace(ref, generation=1)
        step = made.follow(peer, step)
        peer.open([row(frozen, 16, 17 - 2 * SIZE, first_block=2)], plan=2)
        step = made.follow(peer, step, plan=2)
        free = holder.allocator.free
        assert holder.trim(frozen, owner="debtor") == 2
        assert not holder.parting(frozen)
        assert holder.allocator.free == free + 2
        peer.ask(peer.layer(0, step))
        assert (peer.head.lost, peer.lost()) == (1, {0: "stale_epoch"})
        step = made.follow(peer, step, plan=2)
        holder.freeze(frozen, 2, 4, owner="debtor")
        holder.thaw(replace(frozen, generation=2), owner="debtor")
        step = made.follow(peer, step, plan=2)
        thawed = replace(frozen, generation=2)
        heir = holder.adopt(
            thawed, former_owner="debtor", owner="other", sequence="t", lease_s=10, shared_blocks=38
        )
        peer.ask(peer.layer(0, step, plan=2))
        assert peer.lost(2) == {0: "invalid_value"}, "shared blocks take no tokens"
        peer.change([row(frozen, 16, 17 - 2 * SIZE, first_block=2, append=False)], plan=2)
        step = made.follow(peer, step, plan=2)
        holder.release([heir, thawed])
        assert holder.allocator.in_use == 0
        peer.ask(peer.layer(1, step, plan=2))
        assert peer.lost(2) == {0: "stale_epoch"}


def test_blocks_that_are_frozen_while_the_debtor_is_silent_cost_no_row(socket_folder: Path) -> None:
    """The thread looks at its plans now and then. Where the last step wrote is sealed by now; the next one
    writes behind it."""
    with rig(socket_folder) as made:
        ref, peer = made.lend(10), made.peer()
        peer.open([row(ref, 0, 1)])
        step = made.follow(peer, 0)
        while step % SIZE:
            for layer in range(LAYERS):
                peer.ask(peer.layer(layer, step))
            step += 1
        made.holder.freeze(ref, 1, step // SIZE, owner="debtor")
        time.sleep(3 * plan_session._REPORT_S)
        for layer in range(LAYERS):
            peer.ask(peer.layer(layer, step))
        assert peer.lost() == {}


def test_each_layer_of_a_traced_plan_is_a_span(socket_folder: Path) -> None:
    with Collector() as collector:
        tracer = Tracer.otlp(collector.endpoint, service="attention_pool", instance_id="pool-0")
        with rig(socket_folder, tracer=tracer) as made:
            peer = made.peer()
            for number, trace in ((1, TRACE), (2, "")):
                peer.open([row(made.lend(8))], plan=number, trace=trace)
                for layer in range(LAYERS):
                    peer.ask(peer.layer(layer, plan=number))
        tracer.shutdown()
    assert [span.name for span in collector.spans] == ["holder.open_plan", *["holder.attend_layer"] * LAYERS]
    for span in collector.spans:
        assert (span.trace_id, span.parent_id, span.kind) == (TRACE[3:35], TRACE[36:52], "server")


def test_a_row_that_is_lost_ends_no_other(socket_folder: Path) -> None:
    """Its partial is empty from then on, on either path, until it is removed; the others do not notice."""
    with rig(socket_folder) as made:
        refs = [made.lend(4) for _ in range(3)]
        rows = [row(ref, 4 + n, 5 + n) for n, ref in enumerate(refs)]
        native, python = made.peer(), made.peer()
        native.open(rows)
        python.open(rows, trace=TRACE)
        for layer in range(LAYERS):
            assert native.ask(native.layer(layer)) == python.ask(python.layer(layer))
        made.holder.release([refs[1]])
        for step in (1, 2):
            for layer in range(LAYERS):
                got = native.ask(native.layer(layer, step))
                assert got == python.ask(python.layer(layer, step))
                lse = torch.frombuffer(bytearray(got), dtype=torch.float32)[-3 * LAYOUT.query_heads :]
                empty = torch.isneginf(lse.view(3, LAYOUT.query_heads)).all(1)
                assert empty.tolist() == [False, True, False]
                assert (native.head.lost, python.head.lost) == (1, 1)
        assert native.lost() == {1: "stale_epoch"}
        left = [one.moved(3) for one in (rows[0], rows[2])]
        native.change(left, step=3)
        python.open(left, step=3, trace=TRACE)
        assert native.ask(native.layer(0, 3)) == python.ask(python.layer(0, 3))
        assert (native.head.lost, native.lost()) == (0, {})
        wait_until(lambda: made.served >= LAYERS)


def test_rows_that_are_wrong_are_lost_alone(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        refs = [made.lend(2) for _ in range(5)]
        peer = made.peer()
        peer.open(
            [
                row(refs[0]),
                row(replace(refs[1], epoch=1)),
                row(refs[2], 8, 9),  # beyond its blocks
                row(refs[3], first_block=7),
                row(replace(refs[4], generation=3)),
            ]
        )
        peer.ask(peer.layer(0))
        assert peer.lost() == {1: "stale_epoch", 2: "invalid_value", 3: "invalid_value", 4: "stale_epoch"}
        for step in range(1, 4):
            peer.ask(peer.layer(0, step))
        assert 0 not in peer.lost()
        peer.ask(peer.layer(0, 4))
        assert 0 in peer.lost(), "it has outgrown its blocks"


@pytest.mark.parametrize("trace", ["", TRACE])
def test_a_layer_under_way_keeps_its_blocks(socket_folder: Path, trace: str) -> None:
    """It waits for its turn to compute when its segment is released: it is answered, and then the blocks come
    back."""
    with rig(socket_folder) as made:
        peer, ref = made.peer(), made.lend(30)
        peer.open([row(ref)], trace=trace)
        peer.ask(peer.layer(0))
        with made.computing():
            peer.send(peer.layer(0, 1))
            wait_until(lambda: made.data.attention.allowance.outstanding > 1)
            time.sleep(0.02)
            made.holder.release([ref])
            assert made.holder.allocator.in_use == 30
        reply, _ = peer.receive()
        assert isinstance(reply, LayerReply)
        assert (reply.queued_us > 10_000, reply.lost) == (True, 0)
        wait_until(lambda: made.holder.allocator.in_use == 0)
        peer.ask(peer.layer(1, 1))
        assert peer.lost() == {0: "stale_epoch"}


def test_a_layer_that_is_not_computed_in_time_is_refused(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        step = made.follow(peer, 0)
        with made.computing():
            assert peer.refused(peer.layer(0, step, deadline_ms=60)) == "deadline_exceeded"
        wait_until(lambda: made.observed[-1].error == "deadline_exceeded")
        last = made.observed[-1]
        assert (last.op, last.sent_bytes, last.seconds > 0.05) == ("attend_layer", 0, True)
        made.follow(peer, step)


def test_a_debtor_that_stops_in_the_middle_of_a_payload(socket_folder: Path) -> None:
    """Its own deadline ends the layer, and the connection with it."""
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        step = made.follow(peer, 0)
        peer.send(peer.layer(0, step, deadline_ms=100)[:-7])
        assert peer.closed()
        wait_until(lambda: made.pins() == 0)
        assert made.observed[-1].error == "deadline_exceeded"
        assert made.observed[-1].received_bytes == len(peer.payload(1, 0, 0)) - 7


@pytest.mark.parametrize("missing", [3, 200])
def test_a_debtor_that_dies_in_the_middle_of_a_frame(socket_folder: Path, missing: int) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        frame = peer.layer(0, made.follow(peer, 0))
        peer.send(frame[: len(frame) - missing])
        peer.socket.close()
        wait_until(lambda: made.server.connections == 0)
        assert made.pins() == 0


def test_a_debtor_that_does_not_read_holds_nothing_longer_than_its_deadline(socket_folder: Path) -> None:
    """Layers are sent one after the other until the answers that nobody reads fill the sockets."""
    layout = replace(LAYOUT, query_heads=64)
    with rig(socket_folder, transport="unix", layout=layout) as made:
        peer = made.peer()
        peer.open([row(made.lend(1), 2, 3, append=False) for _ in range(32)])
        frame = peer.layer(0, deadline_ms=scaled(1000))
        peer.ask(frame)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                peer.send(frame)
        wait_until(lambda: made.server.connections == 0)
        assert made.pins() == 0
        assert made.served > 1
        assert made.observed[-1].error == "deadline_exceeded"


def test_what_is_no_layer_of_a_plan_is_for_python(socket_folder: Path) -> None:
    """On the same connection, between two layers: other operations, other plans, and what is wrong."""
    with rig(socket_folder) as made:
        peer, ref, other = made.peer(), made.lend(30), made.lend(30)
        first, second = row(ref), row(other)
        object_bytes = bytes(range(256)) * (LAYOUT.object_bytes // 256)
        write = pb.WriteBlocks(handle=other.handle, epoch=other.epoch, layer=1, first_block=29, blocks=1)
        read = pb.ReadBlocks(handle=other.handle, epoch=other.epoch, layer=1, first_block=29, blocks=1)

        def moves_blocks() -> None:
            peer.send(peer.wrap(pb.DataRequest(deadline_ms=9999, write_blocks=write), object_bytes))
            reply, _ = peer.receive()
            assert isinstance(reply, pb.DataReply)
            assert reply.HasField("done")
            peer.send(peer.wrap(pb.DataRequest(deadline_ms=9999, read_blocks=read)))
            assert peer.receive()[1] == object_bytes

        def is_refused(frame: bytes, code: str = "invalid_value") -> Callable[[], None]:
            def ask() -> None:
                assert peer.refused(frame) == code

            return ask

        def is_answered(rows: Sequence[PlanRow], trace: str = "") -> Callable[[], None]:
            return lambda: check_equal(made, peer, rows, trace)

        peer.open([first])
        one = peer.layer(0)
        for between in (
            moves_blocks,
            is_answered([first, second]),
            is_answered([second]),
            is_answered([first], TRACE),
            is_answered([row(ref, 1 << 40)]),
            is_answered([row(ref, append=False)]),
            is_answered([row(ref, length=3, first_block=1)]),
            is_answered([row(ref, queries=3), second]),
            is_refused(peer.layer(LAYERS)),
            is_refused(peer.layer(0, deadline_ms=0)),
            is_refused(peer.cut(one, 4)),
            is_refused(peer.layer(0, plan=9), "unknown_plan"),
            is_refused(with_field(one, 8, 1), "unknown_plan"),  # another revision
            is_refused(with_field(one, 20, 2)),  # queries
            is_refused(with_field(one, 24, 7)),  # with K and V
            is_refused(with_field(one, 28, 1), "data_loss"),
            is_refused(one[:HEADER_BYTES] + b"\x09" + one[HEADER_BYTES + 1 :], "unsupported_parameter"),
        ):
            made.follow(peer, 0)
            between()
        made.follow(peer, 0)


def with_field(frame: bytes, offset: int, value: int) -> bytes:
    """A layer's frame with another field in its head."""
    changed = bytearray(frame)
    struct.pack_into("<I", changed, HEADER_BYTES + offset, value)
    return bytes(changed)


def check_equal(made: Rig, peer: Peer, rows: Sequence[PlanRow], trace: str) -> None:
    """Of a plan of its own."""
    python = made.peer()
    peer.open(rows, plan=5, trace=trace)
    python.open(rows, plan=5, trace=TRACE)
    got = peer.ask(peer.layer(0, plan=5, seed=3))
    assert got == python.ask(python.layer(0, plan=5, seed=3))
    python.socket.close()


@pytest.mark.parametrize(
    "message",
    [
        pb.OpenPlan(plan=1),
        pb.OpenPlan(plan=1, rows=[pb.PlanRow(handle=1, queries=0)]),
        pb.OpenPlan(plan=1, rows=[pb.PlanRow(handle=1, queries=2, length=1, append=True)]),
        pb.OpenPlan(plan=1, rows=[pb.PlanRow(handle=1, queries=1, position=1 << 63)]),
        pb.OpenPlan(plan=1, rows=[pb.PlanRow(handle=1, queries=1 << 30)]),
        pb.OpenPlan(plan=1, rows=[pb.PlanRow(handle=1, queries=1)] * 5000),
        pb.ChangePlan(plan=1, revision=1, removed=[0]),
        pb.ChangePlan(plan=1, revision=1, removed=[1]),
        pb.ChangePlan(plan=1, revision=2),
        pb.ChangePlan(plan=1, revision=1, placed=[pb.PlacedRow(index=3, row=pb.PlanRow(queries=1))]),
        pb.ChangePlan(plan=1, revision=1, removed=[0, 0]),
    ],
)
def test_a_plan_that_cannot_be_is_the_answer_to_its_layers(
    socket_folder: Path, message: pb.OpenPlan | pb.ChangePlan
) -> None:
    """It is not answered itself, and can be opened anew."""
    with rig(socket_folder) as made:
        peer, rows = made.peer(), [row(made.lend(4))]
        peer.open(rows)
        frame = peer.layer(0)
        peer.ask(frame)
        request = pb.DataRequest(deadline_ms=9999)
        request.MergeFrom(
            pb.DataRequest(open_plan=message)
            if isinstance(message, pb.OpenPlan)
            else pb.DataRequest(change_plan=message)
        )
        peer.send(peer.wrap(request))
        assert peer.refused(frame) == "invalid_value"
        peer.open(rows)
        peer.ask(frame)
        assert made.pins() == 1


@pytest.mark.parametrize("change", [False, True])
def test_rows_are_counted_before_anything_is_made_of_them(socket_folder: Path, change: bool) -> None:
    """A message of 4 MB has a million of them, and whatever they say, reading each holds up all others."""
    bad = pb.PlanRow(handle=1)  # without queries: what the answer would be, if the first one were read
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(4))])
        frame = peer.layer(0)
        request = pb.DataRequest(deadline_ms=9999)
        if change:
            placed = [pb.PlacedRow(index=at, row=bad) for at in range(5000)]
            request.change_plan.CopyFrom(pb.ChangePlan(plan=1, revision=1, placed=placed))
        else:
            request.open_plan.CopyFrom(pb.OpenPlan(plan=1, rows=[bad] * 300_000))
        peer.send(peer.wrap(request))
        peer.send(frame)
        reply, _ = peer.receive()
        assert isinstance(reply, pb.DataReply)
        assert f"{5000 if change else 300_000} rows" in reply.error.message


def test_a_peer_has_so_many_plans(socket_folder: Path) -> None:
    """Those that were used last; a debtor opens the others again."""
    with rig(socket_folder) as made:
        peer, ref = made.peer(), made.lend(4)
        for plan in range(1, plan_session.PLANS_MAX + 1):
            peer.open([row(ref)], plan=plan)
        peer.ask(peer.layer(0, plan=1))
        time.sleep(0.15)  # the connection's thread serves on the native path for so long
        peer.ask(peer.layer(0, plan=1))
        peer.open([row(ref)], plan=99)
        assert peer.ask(peer.layer(0, plan=99))
        assert made.pins() == plan_session.PLANS_MAX
        assert peer.refused(peer.layer(0, plan=2)) == "unknown_plan"
        peer.ask(peer.layer(0, plan=3))
        assert made.pins() == plan_session.PLANS_MAX
        peer.socket.close()
        wait_until(lambda: made.pins() == 0)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"KVCF\x02" + bytes(15)])
def test_garbage_is_refused_as_ever(socket_folder: Path, garbage: bytes) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        made.follow(peer, 0)
        assert peer.refused(garbage) == "data_loss"
        assert peer.closed()


def test_a_head_that_comes_in_pieces(socket_folder: Path) -> None:
    with rig(socket_folder) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        step = made.follow(peer, 0)
        frame = peer.layer(0, step)
        expected = peer.ask(frame)
        for cut in (1, 19, 21, 40, 52, len(frame) - 1):
            made.follow(peer, step)
            peer.send(frame[:cut])
            time.sleep(0.02)
            peer.send(frame[cut:])
            assert peer.receive()[1] == expected


def test_several_debtors_at_once(socket_folder: Path) -> None:
    """Each gets its own answers, on the cores one after the other."""
    with rig(socket_folder) as made:
        refs = [made.lend(8) for _ in range(3)]
        answers: dict[int, list[bytes]] = {}

        def debtor(number: int) -> None:
            peer = made.peer()
            peer.open([row(refs[number], 6 + number, 7 + number)])
            answers[number] = [
                peer.ask(peer.layer(layer, step, seed=number))
                for step in range(15)
                for layer in range(LAYERS)
            ]

        threads = [threading.Thread(target=debtor, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        wait_until(lambda: made.served >= 15 * LAYERS)
        python = made.peer()
        for number, ref in enumerate(refs):
            python.open([row(ref, 6 + number, 7 + number)], trace=TRACE)
            again = [
                python.ask(python.layer(layer, step, seed=number))
                for step in range(15)
                for layer in range(LAYERS)
            ]
            assert again == answers[number]


def test_a_server_stops_while_a_thread_waits(socket_folder: Path) -> None:
    with rig(socket_folder, ask_s=2e-3) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        made.follow(peer, 0)
        assert made.server.stop(scaled(5))
        assert made.pins() == 0
        assert peer.closed()


def test_plans_that_take_turns_on_a_connection(socket_folder: Path) -> None:
    """Mini-batches, and pipelined batches."""
    with rig(socket_folder) as made:
        refs = [made.lend(10) for _ in range(3)]
        plans = {
            number: [row(ref, 9, 11 - number), row(refs[2], 9, 3, append=False)]
            for number, ref in enumerate(refs[:2], 1)
        }
        peers, python = [made.peer(), made.peer()], made.peer()
        for number, rows in plans.items():
            for peer in (*peers, python):
                peer.open(rows, plan=number, trace=TRACE if peer is python else "")
        for step in range(12):
            for layer in range(LAYERS):
                for number in plans:
                    peer = peers[(step * layer + number) % 2]
                    got = peer.ask(peer.layer(layer, step, plan=number, seed=step))
                    assert got == python.ask(python.layer(layer, step, plan=number, seed=step))
        wait_until(lambda: made.served >= 12 * LAYERS)


def test_a_segment_that_changes_as_it_is_pinned_is_looked_up_again(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(socket_folder) as made:
        peer, ref = made.peer(), made.lend(2)
        pin_each = made.holder.pin_each

        def changed(*wanted: object) -> object:
            found = pin_each(*wanted)  # type: ignore[arg-type]
            monkeypatch.undo()
            made.holder.freeze(ref, 1, 1, owner="debtor")
            return found

        monkeypatch.setattr(made.holder, "pin_each", changed)
        peer.open([row(ref)])
        for layer in range(LAYERS):
            peer.ask(peer.layer(layer))
        wait_until(lambda: made.served >= 1)
        assert (made.pins(), peer.head.lost) == (1, 0)
        peer.socket.close()
        wait_until(lambda: made.pins() == 0)
