"""An NVIDIA GPU: it computes on one stream, and copies to and from pinned memory on two others meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcommons.backend.interface import DeviceEvent
from kvcommons.backend.torch_device import TorchDevice


class CudaDevice(TorchDevice):
    """What is loaded is there for all that the device is given after it, and what is saved is as it was after
    all that it had been given before; neither holds up what is computed. What is saved must not be written to
    until its event has completed."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self._loads = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._saves = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]

    def upload(self, tensor: Tensor) -> Tensor:
        if not tensor.is_pinned():
            # It is read when this returns. Else torch would wait for all that the device was given before.
            return tensor.to(self.place, non_blocking=True)
        computing = torch.cuda.current_stream(self.place)
        with torch.cuda.stream(self._loads):
            loaded = tensor.to(self.place, non_blocking=True)
            computing.wait_event(_recorded(self._loads))
        loaded.record_stream(computing)
        return loaded

    def download(self, tensor: Tensor) -> tuple[Tensor, DeviceEvent]:
        staged = self.buffer(tensor.shape, tensor.dtype)
        self._saves.wait_event(_recorded(torch.cuda.current_stream(self.place)))
        with torch.cuda.stream(self._saves):
            staged.copy_(tensor, non_blocking=True)
            event = _recorded(self._saves)
        tensor.record_stream(self._saves)
        return staged, _CudaEvent(event)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def captured(self, work: Callable[[], object]) -> Callable[[], None]:
        """All that `work` gives the device, as one graph: for benchmarks of what takes less time than its
        launches. What is compiled or made lazily has been before."""
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def record(self) -> DeviceEvent:
        return _CudaEvent(_recorded(torch.cuda.current_stream(self.place)))


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = stream.record_event()
    return event


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()
