"""Rotational staggered pipelining over decode instances (Lamina, section 5.1.1): n batches over n - 1
replicas of the model.

Each instance is a replica and owns a batch, the group's first one owns two. A batch's slices go from replica
to replica, its activations with them; its sequences, their KV's addresses and their sampling stay with the
owner, which asks the pool. Where a replica does not answer its owner computes the slice: exact, and later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from kvcommons.backend.interface import PagedRows
from kvcommons.engine.core import Core
from kvcommons.engine.fair_lock import FairLock
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.slices import Slices
from kvcommons.errors import InvalidInput
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.sampling import SamplingRow
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import data_pb2
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.server import Exchange, Handler
from services.decode.staggering.lanes import LANES, BatchLane, Mode, Pipelining, timing_of
from services.decode.staggering.peers import MEET_EVERY_S, MEET_S, Peer
from services.decode.staggering.pipelines import Rotational, Staggering
from services.decode.staggering.slice_exchange import SliceMetrics, SliceServer, check_model

# What the first has said holds for so long: it may be gone.
_ANNOUNCEMENT_TTL_S = 2 * (MEET_EVERY_S + MEET_S)


class Rotated:
    """The slices of one iteration: the first and the last here, those between them on the replica whose turn
    it is."""

    def __init__(
        self,
        here: Slices,
        whose: Callable[[int], Peer | None],
        budget: AttentionBudget,
        *,
        unrotated: bool,
    ) -> None:
        """`whose`: by the slice's number, None for this instance. `unrotated`: the batch shifts queries."""
        self._here = here
        self._whose = whose
        self._budget = budget
        self._unrotated = unrotated
        self._positions: list[int] = []

    def begin(self, timing: IterationTiming, tokens: Tensor, positions: Tensor) -> State:
        self._positions = positions.tolist()
        return self._here.begin(timing, tokens, positions)

    def advance(self, timing: IterationTiming, layer: int, state: State, attention: Tensor) -> State:
        peer = self._whose(layer + 1)
        if peer is None:
            return self._here.advance(timing, layer, state, attention)
        if peer.well:
            asked_s = time.monotonic()
            with self._budget.waiting():
                answer = peer.advance(
                    layer, state, attention, positions=self._positions, unrotated=self._unrotated
                )
            blocked_s = time.monotonic() - asked_s
            if answer is not None:
                residual, reply = answer
                timing.slice_away(
                    blocked_s, computed_s=reply.computed_us / 1e6, queued_s=reply.queued_us / 1e6
                )
                return residual
            timing.waiting_s += blocked_s
        timing.stood_in += 1
        return self._here.advance(timing, layer, state, attention)

    def forward(self, timing: IterationTiming, layers: range, state: State, rows: PagedRows) -> None:
        """Each layer may be another instance's."""

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        return self._here.end(timing, state, attention, rows)

    def close(self, timing: IterationTiming, state: State, attention: Tensor) -> Tensor:
        return self._here.close(timing, state, attention)

    def head(self, timing: IterationTiming, closed: Tensor) -> Tensor:
        return self._here.head(timing, closed)


class Rotation:
    """One instance's part in its group. What the engine calls belongs to its thread: `batches`, `slices`,
    `ended`, `took_staggered`. The rest is thread-safe."""

    def __init__(
        self,
        mode: Mode,
        replicas: Sequence[str],
        core: Core,
        budget: AttentionBudget,
        metrics: SliceMetrics,
        *,
        deadline_s: float,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`replicas`: data addresses of the whole group, the same list in each of it. `deadline_s`: for a
        slice elsewhere."""
        self.model_lock = FairLock()
        self._slices = SliceServer(core, self.model_lock, metrics)
        self._mode = mode
        self._replicas = tuple(replicas)
        self._core = core
        self._layers = core.layout.layers
        self._budget = budget
        self._scheme = Rotational(len(self._replicas) + 1)
        self._staggering = Staggering(self._scheme)
        self._alone = Pipelining(mode, self._layers)  # while it does not rotate
        self._peers = {
            number: Peer(address, core, deadline_s=deadline_s, dialer=dialer)
            for number, address in enumerate(self._replicas)
        }
        self._number = -1
        self._load = data_pb2.MetReplica()
        self._announced = False
        self._announced_s = 0.0
        self._lock = threading.Lock()  # guards what the group's first instance announced

    def join(self, own_address: str) -> None:
        """Finds this instance in the group. Raises InvalidInput where it is not there, or alone. Call it
        first."""
        if own_address not in self._replicas or len(set(self._replicas)) != len(self._replicas):
            raise InvalidInput(
                f"replicas = {', '.join(self._replicas)} has to name each instance of the group once, this "
                f"one at {own_address} among them (see advertise_data)",
                param="replicas",
            )
        if len(self._replicas) == 1:
            raise InvalidInput(
                f"replicas = {own_address} is this instance alone, which has no slices to exchange with "
                "anybody: name the group's other instances too, or leave replicas out",
                param="replicas",
            )
        self._number = self._replicas.index(own_address)
        del self._peers[self._number]

    def start(self) -> None:
        for peer in self._peers.values():
            peer.start(self._replicas[self._number], rotate=self._first and self._mode == "on")

    def close(self, timeout_s: float) -> None:
        for peer in self._peers.values():
            peer.close(timeout_s)

    def peers_well(self) -> int:
        """Of the others, how many this one's slices may go to."""
        return sum(peer.well for peer in self._peers.values())

    @property
    def rotating(self) -> bool:
        """Whether slices of this instance's batches go to its peers."""
        if self._mode != "auto":
            return self._mode == "on"
        if self._first:
            return self._staggering.on
        with self._lock:
            return self._announced and time.monotonic() - self._announced_s < _ANNOUNCEMENT_TTL_S

    @property
    def shares(self) -> int:
        """Of the group's sequences, beside one of each other instance: as many as it owns batches."""
        return LANES if self._first and self.rotating else 1

    def handler(self, others: Handler) -> Handler:
        """Answers what peers ask; `others` answers the rest of the data plane."""

        def handle(request: data_pb2.DataRequest, exchange: Exchange) -> None:
            op = request.WhichOneof("op")
            if op == "compute_slice":
                self._slices.answer(request.compute_slice, exchange)
            elif op == "meet_replica":
                exchange.reply(data_pb2.DataReply(met_replica=self._met(request.meet_replica)))
            else:
                others(request, exchange)

        return handle

    def batches(self, sequences: int, tokens: int) -> int:
        """Into how many batches the sequences of this instance are divided, which run and whose KV is of so
        many tokens."""
        self._load = data_pb2.MetReplica(sequences=sequences, tokens=tokens)
        alone = self._alone.batches(sequences, tokens)
        if self._first and self._mode == "auto":
            self._decide(self._alone.gain(sequences, tokens))
        if not self.rotating:
            return alone
        return LANES if self._first and sequences >= LANES else 1

    def slices(self, lane: int, here: Slices, *, unrotated: bool) -> Slices:
        """For the next iteration of one of this instance's batches."""
        if not self.rotating:
            return here
        batch = self._number if lane == 0 else self._scheme.replicas

        def whose(slice_index: int) -> Peer | None:
            return self._peers.get(self._scheme.replica_of(batch, slice_index))

        return Rotated(here, whose, self._budget, unrotated=unrotated)

    def ended(self, sequences: int, tokens: int, timing: IterationTiming, *, batch: int, alone: bool) -> None:
        """One of this instance's iterations, of `batch` sequences. `sequences` and `tokens` are of all its
        batches."""
        if timing.away:
            self._staggering.moved(batch, timing.moved_s / self._layers)
        elif alone and not timing.stood_in:
            self._staggering.took_alone(sequences, tokens, timing_of(timing, self._layers))
            self._alone.ended(sequences, tokens, timing, batch=batch, alone=True)

    def took_staggered(self, sequences: int, tokens: int, lane: BatchLane) -> None:
        """A lane's next iteration begins. `sequences` and `tokens` are of both lanes."""
        if not self.rotating:
            self._alone.took_staggered(sequences, tokens, lane)
            return
        group = self._group_load()
        began_s, lane.began_s = lane.began_s, time.monotonic()
        if began_s is not None:
            layer_s = (lane.began_s - began_s) / self._layers
            self._staggering.took_staggered(group.sequences, group.tokens, layer_s)

    @property
    def _first(self) -> bool:
        return self._number == 0

    def _decide(self, alone: float) -> None:
        """For the group: whether n batches bring more than what each replica has without, one or two of its
        own, which gain so much over one. All have to be there, and this one needs sequences for both of its
        batches: without them the group has a batch for each replica, which it has without rotating, and
        nothing is measured that could end a trial."""
        before, group = self._staggering.on, self._group_load()
        if self._load.sequences >= LANES and self.peers_well() == len(self._peers):
            self._staggering.decide(group.sequences, group.tokens, alone)
        else:
            self._staggering.give_up()
        if self._staggering.on != before:
            for peer in self._peers.values():
                peer.announce(self._staggering.on)

    def _group_load(self) -> data_pb2.MetReplica:
        loads = [self._load, *(peer.load for peer in self._peers.values() if peer.well)]
        return data_pb2.MetReplica(
            sequences=sum(load.sequences for load in loads), tokens=sum(load.tokens for load in loads)
        )

    def _met(self, asked: data_pb2.MeetReplica) -> data_pb2.MetReplica:
        check_model(asked.model, self._core.info.fingerprint)
        if asked.address == self._replicas[0]:
            with self._lock:
                self._announced, self._announced_s = asked.rotate, time.monotonic()
        return self._load
