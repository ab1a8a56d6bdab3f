"""A slice of the model that another decode instance of the same model computes: both ends.

Slices are pure functions of activations: whoever has the weights can compute any of them, and who asked can
compute it itself where no answer comes. Rows' sequences, their KV and their sampling stay with their owner.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvcommons.backend.memory import byte_view
from kvcommons.engine.core import Core
from kvcommons.engine.fair_lock import FairLock
from kvcommons.errors import InvalidInput
from kvcommons.model.slices import Model, RotaryAngles, State
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.client import DataClient, PendingCall
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

_ROTATIONS_KEPT = 16  # of batches: all slices of an iteration are at the same positions


def check_model(theirs: bytes, mine: bytes) -> None:
    """Raises InvalidInput unless both are the same."""
    if theirs != mine:
        raise InvalidInput(
            f"replicas of one model only share slices: this one's is {mine.hex()[:16]}, asked for was "
            f"{theirs.hex()[:16]}; start all of `replicas` with the same weights, dtype and block_tokens",
            param="model",
        )


class SliceMetrics(Protocol):
    def for_peer(self) -> None:
        """A slice was computed for another instance."""


class SliceServer:
    """Computes slices for others, between this instance's own. Thread-safe."""

    def __init__(self, core: Core, model_lock: FairLock, metrics: SliceMetrics) -> None:
        self._model, self._identity = core.model, core.info.fingerprint
        self._model_lock = model_lock
        self._metrics = metrics
        self._rotations: OrderedDict[tuple[int, ...], tuple[Tensor, RotaryAngles]] = OrderedDict()
        self._lock = threading.Lock()  # of `_rotations`

    def answer(self, asked: pb.ComputeSlice, exchange: Exchange) -> None:
        """Raises InvalidInput for another model or what is no slice of this one, DeadlineExceeded where its
        turn did not come."""
        model, rows, spec = self._model, len(asked.positions), self._model.spec
        check_model(asked.model, self._identity)
        if asked.layer >= spec.layers - 1 or not rows:
            raise InvalidInput(f"layer {asked.layer} of {spec.layers}, {rows} rows: this is no slice")
        hidden = torch.empty((rows, spec.hidden), dtype=model.dtype)
        attention = torch.empty((rows, spec.query_heads, spec.head_dim), dtype=model.dtype)
        due = hidden.nbytes + attention.nbytes
        if exchange.payload_bytes != due:
            raise InvalidInput(f"ComputeSlice came with {exchange.payload_bytes} bytes where {due} belong")
        exchange.receive_payload([byte_view(hidden), byte_view(attention)])
        asked_s = time.monotonic()
        with self._model_lock.within(exchange.deadline), torch.inference_mode():
            began_s = time.monotonic()
            positions, rotation = self._rotation(tuple(asked.positions))
            device = model.backend.device
            state = model.resume(
                asked.layer, device.upload(hidden), device.upload(attention), positions, rotation
            )
            tensors = [state.hidden, torch.cat((state.q, state.k, state.v), dim=1)]
            if asked.unrotated:
                tensors.append(state.unrotated_q.contiguous())
            payload = [byte_view(device.fetch(tensor)) for tensor in tensors]
        reply = pb.ComputedSlice(
            queued_us=int((began_s - asked_s) * 1e6), computed_us=int((time.monotonic() - began_s) * 1e6)
        )
        self._metrics.for_peer()
        exchange.reply(pb.DataReply(computed_slice=reply), payload)

    def _rotation(self, positions: tuple[int, ...]) -> tuple[Tensor, RotaryAngles]:
        with self._lock:
            if positions in self._rotations:
                self._rotations.move_to_end(positions)
                return self._rotations[positions]
        longs = self._model.backend.device.longs(positions)
        made = longs, self._model.rotation(longs)
        with self._lock:
            self._rotations[positions] = made
            if len(self._rotations) > _ROTATIONS_KEPT:
                self._rotations.popitem(last=False)
        return made


class PendingSlice:
    """Another replica computes; `finish` it."""

    def __init__(self, call: PendingCall, model: Model, state: State, unrotated: bool) -> None:
        self._call = call
        self._model = model
        self._state = state
        self._unrotated = unrotated

    def finish(self) -> tuple[State, pb.ComputedSlice]:
        """The next state, and what the replica says that it took. Raises what the replica raised,
        Unavailable, DeadlineExceeded."""
        spec, state, upload = self._model.spec, self._state, self._model.backend.device.upload
        dtype, rows = self._model.dtype, len(state.hidden)
        hidden = torch.empty((rows, spec.hidden), dtype=dtype)
        qkv = torch.empty((rows, spec.query_heads + 2 * spec.kv_heads, spec.head_dim), dtype=dtype)
        into = [hidden, qkv]
        if self._unrotated:
            into.append(torch.empty((rows, spec.query_heads, spec.head_dim), dtype=dtype))
        reply = self._call.finish([byte_view(tensor) for tensor in into])
        q, k, v = torch.split(upload(qkv), [spec.query_heads, spec.kv_heads, spec.kv_heads], dim=1)
        unrotated = upload(into[2]) if self._unrotated else state.unrotated_q
        advanced = replace(state, hidden=upload(hidden), q=q, k=k, v=v, unrotated_q=unrotated)
        return advanced, reply.computed_slice


def begin_slice(
    client: DataClient,
    model: Model,
    identity: bytes,
    layer: int,
    state: State,
    attention: Tensor,
    *,
    positions: list[int],
    unrotated: bool,
    deadline: Deadline,
) -> PendingSlice:
    """Asks another replica for `model.advance(layer, state, attention)`. `positions` are the state's; without
    `unrotated` the next state's `unrotated_q` is of no use."""
    request = pb.DataRequest(
        compute_slice=pb.ComputeSlice(model=identity, layer=layer, positions=positions, unrotated=unrotated)
    )
    moved = (state.hidden, attention.to(model.dtype))
    payload = [byte_view(model.backend.device.fetch(tensor).contiguous()) for tensor in moved]
    return PendingSlice(client.begin(request, payload, deadline=deadline), model, state, unrotated)
