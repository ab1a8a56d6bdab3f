"""A device that does everything as late as it may, and whose memory no host access reaches.

What a GPU would do by chance, it does always: an operation is only noted down, and done when somebody waits
for an event that was recorded behind it. Until then staged memory has nothing but noise in it, and uploads
take what is in host memory by then. Whatever reads or writes a tensor of its by another way than `upload` and
`download`, or mixes one with a tensor in host memory, raises HostAccess.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kvcommons.backend.interface import Backend, Device, DeviceEvent
from kvcommons.backend.torch_attention import TorchAttention
from kvcommons.backend.torch_operators import TorchOperators


class HostAccess(Exception):
    """A tensor of the device was touched from the host."""


class FarTensor(Tensor):
    """`shape_only` is a meta tensor by which shapes are found out at once; `content` is there once it was
    computed."""

    shape_only: Tensor
    stream: Stream
    content: Tensor

    # Operations come to `__torch_dispatch__` only.
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape_only: Tensor, stream: Stream) -> FarTensor:
        with torch.inference_mode(False):  # so that it serves in that mode and outside of it
            made: FarTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, shape_only.shape, strides=shape_only.stride(),
                storage_offset=shape_only.storage_offset(), dtype=shape_only.dtype, device="meta",
            )  # fmt: skip
        made.shape_only, made.stream = shape_only, stream
        return made

    def __repr__(self, **_: Any) -> str:
        return f"FarTensor({tuple(self.shape)}, {self.dtype})"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise HostAccess(f"{self!r} is not in host memory: download it")

    tolist = numpy = item = data_ptr = cpu = untyped_storage = _refuse
    __bool__ = __int__ = __float__ = __index__ = __array__ = __contains__ = _refuse

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        streams: list[Stream] = []
        own: dict[int, FarTensor] = {}

        def shape_of(value: Any) -> Any:
            if isinstance(value, FarTensor):
                streams.append(value.stream)
                own[id(value.shape_only)] = value
                return value.shape_only
            if isinstance(value, Tensor) and value.dim():
                raise HostAccess(f"{func} with a tensor in host memory of {tuple(value.shape)}")
            return value

        def far(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return own[id(value)] if id(value) in own else FarTensor(value, streams[0])

        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostAccess("a value on the device was asked for")
        kwargs = kwargs or {}
        with torch.inference_mode(False):
            shapes = func(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))
        if any(stream is not streams[0] for stream in streams):
            raise HostAccess(f"{func} with tensors of two devices")
        made = tree_map(far, shapes)
        streams[0].add(_operation(func, args, kwargs, made))
        return made


def _operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> Callable[[], None]:
    def content(value: Any) -> Any:
        return value.content if isinstance(value, FarTensor) else value

    def work() -> None:
        named = {name: "cpu" if name == "device" and value else value for name, value in kwargs.items()}
        computed = func(*tree_map(content, args), **tree_map(content, named))
        for one, tensor in zip(tree_leaves(made), tree_leaves(computed), strict=True):
            if isinstance(one, FarTensor):
                one.content = tensor

    return work


class Stream:
    """Work in the order in which it was given. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: list[Callable[[], None]] = []
        self.given = self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._pending.append(work)
            self.given += 1

    def run(self, until: int) -> None:
        """All that was given before it had been given `until` pieces of work."""
        with self._lock, torch.inference_mode():
            for work in self._pending[: until - self.done]:
                work()
            del self._pending[: max(until - self.done, 0)]
            self.done = max(self.done, until)


class _Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at = stream.given

    @property
    def done(self) -> bool:
        return self._stream.done >= self._at

    def wait(self) -> None:
        self._stream.run(self._at)


class AsynchronousDevice(Device):
    """Does what it is given when an event is waited for, in memory that the host does not reach."""

    host = False

    def __init__(self) -> None:
        self.stream = Stream()

    def upload(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FarTensor):
            raise HostAccess("it is on the device already")
        with torch.inference_mode(False):
            far = FarTensor(torch.empty_like(tensor, device="meta"), self.stream)

        def work() -> None:
            far.content = tensor.clone()

        self.stream.add(work)
        return far

    def download(self, tensor: Tensor) -> tuple[Tensor, DeviceEvent]:
        if not isinstance(tensor, FarTensor):
            raise HostAccess("it is in host memory already")
        staged = self.buffer(tensor.shape, tensor.dtype)

        def work() -> None:
            staged.copy_(tensor.content)

        self.stream.add(work)
        return staged, self.record()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        noise = torch.nan if dtype.is_floating_point else 1
        return torch.full(tuple(shape), noise, dtype=dtype)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.upload(torch.zeros(tuple(shape), dtype=dtype))

    def record(self) -> DeviceEvent:
        return _Event(self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousBackend(Backend):
    device: AsynchronousDevice


def asynchronous() -> AsynchronousBackend:
    device = AsynchronousDevice()
    return AsynchronousBackend(device=device, operators=TorchOperators(), attention=TorchAttention(device))
