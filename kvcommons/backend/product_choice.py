"""Who multiplies with a model's matrices on the CPU: measured once for a machine, a model's shape and a
number of threads, and kept beside the compiled kernel."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcommons.attention.native import build, library
from kvcommons.backend.choice import kernels_version, processor
from kvcommons.backend.native_operators import NativeOperators
from kvcommons.backend.products import Products
from kvcommons.files import write_whole

log = logging.getLogger(__name__)

_VERSION = 1  # of the file
ROWS = (1, 8, 256)  # a sequence that generates, a batch of them, a prompt's chunk
_MANY_ROWS = 64  # and more take as long for a matrix in a cache as for one in memory
_MEMORY_BYTES = 96 << 20  # of matrices that few rows go through: more than the caches, or the whole model
_OUT_MAX = 2048  # outputs of a matrix that are measured
_S_MAX = 0.1  # for one number of rows, after the first times
_TIMES_MIN, _TIMES_MAX = 2, 30
# What else decides how fast a product is, and may be set from one start to the next.
_VARIABLES = (library.VARIABLE, "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

# Seconds by who multiplies, for each of ROWS.
Timings = Mapping[Products, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductWork:
    """A model's products: a layer's matrices [out, in], of so many layers, on so many threads."""

    matrices: tuple[tuple[int, int], ...]
    layers: int
    dtype: torch.dtype
    threads: int

    @property
    def copies(self) -> int:
        """Of the layer's matrices that few rows go through, as they would through the model's."""
        layer_bytes = sum(rows * size for rows, size in self.measured) * self.dtype.itemsize
        return max(min(self.layers, math.ceil(_MEMORY_BYTES / layer_bytes)), 1)

    @property
    def measured(self) -> tuple[tuple[int, int], ...]:
        return tuple((min(rows, _OUT_MAX), size) for rows, size in self.matrices)

    @property
    def identity(self) -> str:
        """Of what the timings depend on, in letters that a file name may have."""
        facts = (
            str(self), processor(), kernels_version(), torch.__version__,
            *(os.environ.get(name, "") for name in _VARIABLES),
        )  # fmt: skip
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def quickest(timings: Timings) -> Products:
    """Of two, who takes less for the numbers of rows together, each weighed alike: a matrix has one form, and
    so one of them multiplies whatever comes."""
    return min(timings, key=lambda who: math.prod(timings[who]))


def measure(work: ProductWork, clock: Callable[[], float] = time.perf_counter) -> Timings:
    """For about a second. The least of several times counts: others may use the cores meanwhile."""
    timings: dict[Products, list[float]] = {}
    kernel = library.chosen()
    for who in Products:
        operators = NativeOperators(kernel, who)
        weights = [torch.ones(shape, dtype=work.dtype) for shape in work.measured]
        layers = [[operators.pack(weight.clone()) for weight in weights] for _ in range(work.copies)]
        timings[who] = []
        for rows in ROWS:
            inputs = [torch.ones((rows, size), dtype=work.dtype) for _, size in work.matrices]
            some = layers if rows < _MANY_ROWS else layers[:1]
            began_s, least_s = clock(), math.inf
            for number in range(_TIMES_MAX):
                started_s = clock()
                for layer in some:
                    for matrix, x in zip(layer, inputs, strict=True):
                        matrix(x)
                least_s = min(least_s, clock() - started_s)
                if number + 1 >= _TIMES_MIN and clock() - began_s > _S_MAX:
                    break
            timings[who].append(least_s / len(some))
    return timings


def kept_products(
    work: ProductWork, folders: Sequence[Path], measured: Callable[[ProductWork], Timings] = measure
) -> Products:
    """As it was kept in the first of the folders that has it or can be written to, or else as it is measured:
    by one process of the machine, while others wait."""
    if library.chosen() is None:
        return Products.ONEDNN
    name = f"_products-{work.identity}.json"
    for folder in folders:
        if (found := _read(folder / name)) is not None:
            return found
    with build.locked(folders, ".products.lock") as writable:
        if writable is None:
            log.warning("who multiplies with weights is measured at each start: it can be kept in no folder")
            return _measured(work, measured)
        found = _read(writable / name)
        if found is None:
            found = _measured(work, measured)
            _write(writable / name, found)
        return found


def _measured(work: ProductWork, measured: Callable[[ProductWork], Timings]) -> Products:
    with torch.inference_mode():
        timings = measured(work)
    found = quickest(timings)
    log.info(
        "products measured",
        extra={"products": found.value, "rows": list(ROWS)}
        | {f"{who.value}_ms": [round(s * 1e3, 3) for s in seconds] for who, seconds in timings.items()},
    )
    return found


def _read(path: Path) -> Products | None:
    """None where there is none that this version can read."""
    try:
        kept = json.loads(path.read_bytes())
        return Products(kept["products"]) if kept["version"] == _VERSION else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("who multiplies with weights is measured anew, for %s: %s", path, error)
        return None


def _write(path: Path, found: Products) -> None:
    try:
        write_whole(path, json.dumps({"version": _VERSION, "products": found.value}).encode())
    except OSError as error:
        log.warning("who multiplies with weights is not kept in %s: %s", path, error)


def chosen_products(wanted: str, work: ProductWork) -> Products:
    """`wanted` as the setting `products` has it: "auto", or one of Products."""
    if wanted != "auto":
        return Products(wanted)
    return kept_products(work, build.folders(os.environ))
