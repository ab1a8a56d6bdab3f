"""Any device that torch knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.backend.interface import Device, DeviceEvent


class TorchDevice(Device):
    """Tensors of torch's on one device, in the order of its current stream. What comes back does so by way of
    pinned memory, where the device has any."""

    host = False

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._pins = place.type == "cuda"

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.place)

    def download(self, tensor: Tensor) -> tuple[Tensor, DeviceEvent]:
        staged = self.buffer(tensor.shape, tensor.dtype)
        staged.copy_(tensor, non_blocking=self._pins)
        return staged, self.record()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pins)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.place)

    def record(self) -> DeviceEvent:
        return _CudaEvent() if self._pins else HAPPENED


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class _Happened:
    """Of a device that has done what it was given when the call returns."""

    done = True

    def wait(self) -> None:
        """There is nothing to wait for."""


HAPPENED: DeviceEvent = _Happened()
