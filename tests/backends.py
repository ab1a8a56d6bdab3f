"""What tests compute attention with, and on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.native import library
from kvcommons.backend.choice import choose
from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import Backend, Partial
from kvcommons.backend.native_attention import NativeAttention
from kvcommons.backend.native_operators import NativeOperators
from kvcommons.backend.torch_attention import TorchAttention
from kvcommons.backend.torch_operators import TorchOperators

# Whether there is a compiled kernel here.
COMPILED = library.chosen() is not None


def without_kernel() -> Backend:
    """The CPU's where nothing is compiled, or KVCOMMONS_KERNEL is torch."""
    return Backend(device=HostDevice(), operators=NativeOperators(None), attention=NativeAttention(None))


def reference() -> Backend:
    """Torch's plain operators, in host memory."""
    device = HostDevice()
    return Backend(device=device, operators=TorchOperators(), attention=TorchAttention(device))


def merge(partials: Sequence[Partial]) -> Partial:
    return choose().attention.merge(partials)


def attend_chunk(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: int,
    *,
    first_key_position: int,
    query_positions: Tensor,
    scale: float,
    window: int | None = None,
    backend: Backend | None = None,
) -> Partial:
    """By a plan of its own; `query_positions` are consecutive."""
    first = int(query_positions[0])
    assert query_positions.tolist() == list(range(first, first + len(q)))
    plan = (backend or choose()).attention.plan_chunk(
        kv, q.shape[1], table, length,
        first_key_position=first_key_position, query_positions=range(first, first + len(q)), window=window,
    )  # fmt: skip
    return plan.attend(q, kv, scale)


def attend_batch(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    first_key_positions: Tensor,
    query_positions: Tensor,
    scale: float,
    window: int | None = None,
    backend: Backend | None = None,
) -> Partial:
    """By a plan of its own."""
    plan = (backend or choose()).attention.plan_batch(
        kv, tables, lengths,
        first_key_positions=first_key_positions, query_positions=query_positions, window=window,
    )  # fmt: skip
    return plan.attend(q, kv, scale)


def on_device(backend: Backend, tensor: Tensor) -> Tensor:
    """As `upload`, of content that nobody changes any more."""
    return backend.device.upload(tensor.clone())


def fetched(backend: Backend, partial: Partial) -> Partial:
    return Partial(out=backend.device.fetch(partial.out), lse=backend.device.fetch(partial.lse))


class _AskingInPython(NativeAttention):
    native_exchange = None


def asking_in_python() -> Backend:
    """As `choose`, but for the native path of the attention exchange."""
    backend = choose()
    return Backend(
        device=backend.device, operators=backend.operators, attention=_AskingInPython(library.chosen())
    )
