"""Which backend a process computes with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from kvcommons.attention.native import build, library
from kvcommons.backend.cuda_device import CudaDevice
from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import Backend
from kvcommons.backend.native_attention import NativeAttention
from kvcommons.backend.native_operators import NativeOperators
from kvcommons.backend.products import Products
from kvcommons.backend.slice_graphs import cuda_capture
from kvcommons.backend.torch_attention import TorchAttention
from kvcommons.backend.torch_device import TorchDevice
from kvcommons.backend.torch_operators import TorchOperators
from kvcommons.errors import InvalidInput


def choose(device: str = "cpu", products: Products = Products.NATIVE) -> Backend:
    """For a device as torch names it ("cpu", "cuda", "cuda:1"). On the CPU the kernel is compiled, if it has
    to be, before anybody waits for it; KVCOMMONS_KERNEL says which of its variants is taken, if any. On an
    NVIDIA GPU kernels are compiled by Triton as they are needed, unless KVCOMMONS_KERNEL is torch.
    `products`: who multiplies with weights there; without the kernel it is oneDNN. Raises InvalidInput for a
    device that cannot be used."""
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidInput(f"device {device!r} cannot be used: {reason}", param="device") from error
    if place.type == "cpu":
        kernel = library.chosen()
        operators = NativeOperators(kernel, products)
        # With products of oneDNN threads of OpenMP's need the cores, too.
        own = kernel if products is Products.NATIVE else None
        return Backend(device=HostDevice(own), operators=operators, attention=NativeAttention(kernel))
    if place.type == "cuda":
        return _cuda(place)
    far = TorchDevice(place)
    return Backend(device=far, operators=TorchOperators(), attention=TorchAttention(far))


def _cuda(place: torch.device) -> Backend:
    device = CudaDevice(place)
    if os.environ.get(library.VARIABLE) == "torch":
        return Backend(device=device, operators=TorchOperators(), attention=TorchAttention(device))
    try:
        # Their compiler comes with torch's builds for CUDA, and with no other.
        from kvcommons.backend.cuda_attention import CudaAttention
        from kvcommons.backend.cuda_operators import CudaOperators
    except ImportError as error:
        raise InvalidInput(
            f"device {str(place)!r} needs Triton: install it, or set {library.VARIABLE}=torch ({error})",
            param="device",
        ) from error
    operators = CudaOperators(cuda_capture(place))
    return Backend(device=device, operators=operators, attention=CudaAttention(device))


def kernels_version() -> str:
    """Of the compiled kernels: others take other times."""
    return build.file_name()


def device_name(device: str) -> str:
    """Of an accelerator, as its maker calls it; else as torch names it."""
    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else device


def device_bytes(device: str) -> int:
    """An NVIDIA GPU's memory in all, whoever has it."""
    return torch.cuda.mem_get_info(device)[1]


def processor() -> str:
    """Its name, as far as the operating system tells, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else name}, {len(os.sched_getaffinity(0))} cores"
