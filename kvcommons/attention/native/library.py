"""The compiled kernel: one row a sequence over paged KV, and merges of partials, on the CPU."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcommons.attention.native import build, structures
from kvcommons.attention.native.structures import STRUCTURES
from kvcommons.backend.interface import Partial
from kvcommons.errors import InvalidInput

log = logging.getLogger(__name__)

# The environment's say in what computes: "torch", or the widest instruction set that may be taken
# ("portable", "avx2", "avx512", "avx512bf16"). For tests and comparisons.
VARIABLE = "KVCOMMONS_KERNEL"
_DIM_STEP, _DIM_MAX = 8, 256
_DTYPES = (torch.bfloat16, torch.float32)


class Kernel:
    """The library, with instruction sets up to `variant`. Thread-safe."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """Raises OSError for a file that is no such library, InvalidInput for a variant that is not there."""
        self._library = ctypes.CDLL(str(path))
        structures.check(self._library)
        self._library.kvc_variant_name.restype = c_char_p
        self._library.kvc_scratch_bytes.restype = c_int64
        self._library.kvc_chunk_scratch_bytes.restype = c_int64
        self._library.kvc_packed_bytes.restype = c_int64
        self._library.kvc_packed_bytes.argtypes = (c_int64, c_int64, c_int32, c_int32)
        self._library.kvc_advance_bytes.restype = c_int64
        self._library.kvc_panel.restype = c_int64
        self._library.kvc_arranged_bytes.restype = c_int64
        self._library.kvc_arranged_bytes.argtypes = (c_int64, c_int64)
        self._library.kvc_keep_awake.restype = None
        self._library.kvc_keep_awake.argtypes = (c_int64,)
        self._library.kvc_read.restype = c_float
        self._library.kvc_read.argtypes = (c_void_p, c_int64, c_int64, c_int32)
        names = self.variants()
        if variant is not None and variant not in names:
            raise InvalidInput(
                f"{VARIABLE} = {variant!r}: take torch, or of this processor's {', '.join(names)}"
            )
        self.variant = variant or names[-1]
        self._index = list(self._all_variants()).index(self.variant)

    def variants(self) -> list[str]:
        """Of those compiled, what this processor has, from the plainest to the widest."""
        return [name for name in self._all_variants() if name]

    def _all_variants(self) -> list[str]:
        names: list[str] = []
        while (name := self._library.kvc_variant_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def merge(self, partials: Sequence[Partial]) -> Partial:
        """To one: exact online softmax; -inf where all are."""
        outs = [part.out.contiguous() for part in partials]
        lses = [part.lse.contiguous() for part in partials]
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        count = len(outs)
        out_pointers = (c_void_p * count)(*[part.data_ptr() for part in outs])
        lse_pointers = (c_void_p * count)(*[part.data_ptr() for part in lses])
        call = STRUCTURES["kvc_merge"](
            outs=ctypes.addressof(out_pointers), lses=ctypes.addressof(lse_pointers), out=out.data_ptr(),
            lse=lse.data_ptr(), parts=count, rows=lse.numel(), dim=out.shape[-1],
            threads=torch.get_num_threads(), variant=self._index,
        )  # fmt: skip
        self._library.kvc_merge_partials(byref(call))
        return Partial(out=out, lse=lse)

    def keep_awake(self, seconds: float) -> None:
        """So long the threads that compute with the calling one wait awake for its next operation."""
        self._library.kvc_keep_awake(round(seconds * 1e9))

    def read(self, memory: Tensor) -> None:
        """Reads all of a contiguous CPU tensor, on as many threads as torch has: for benchmarks."""
        size = memory.numel() * memory.element_size()
        self._library.kvc_read(memory.data_ptr(), size, torch.get_num_threads(), self._index)


class _PagedPlan:
    """Queries over KV that the kernel `serves`; not for two threads at once."""

    def __init__(self, kernel: Kernel, call: Any, attend: Any, scratch_bytes: Any) -> None:
        """`call` is the structure that both functions of the library take; what it points to stays."""
        self._call = call
        self._attend, self._scratch_bytes = attend, scratch_bytes
        self._scratch: Tensor | None = None
        call.variant = kernel._index

    def attend(self, q: Tensor, kv: Tensor, scale: float, into: Partial | None = None) -> Partial:
        rows, heads, dim = q.shape
        if q.stride(2) != 1:
            q = q.contiguous()
        if into is None:
            into = Partial(out=torch.empty((rows, heads, dim)), lse=torch.empty((rows, heads)))
        call = self.prepare(scale, into)
        call.q, call.kv = q.data_ptr(), kv.data_ptr()
        call.q_row, call.q_head = q.stride(0), q.stride(1)
        call.q_is_bf16, call.kv_is_bf16 = q.dtype == torch.bfloat16, kv.dtype == torch.bfloat16
        self._attend(byref(call))
        return into

    def prepare(self, scale: float, into: Partial) -> Any:
        """The structure, but for its queries and KV, and what these are like; it is worth something as long
        as this plan and `into` are there."""
        call, heads = self._call, into.out.shape[1]
        call.out, call.lse, call.scale = into.out.data_ptr(), into.lse.data_ptr(), scale
        threads = torch.get_num_threads()
        if self._scratch is None or call.heads != heads or call.threads != threads:
            call.heads, call.threads = heads, threads
            self._scratch = torch.empty(self._scratch_bytes(byref(call)) + 64, dtype=torch.uint8)
            call.scratch = (self._scratch.data_ptr() + 63) // 64 * 64
        return call


class PagedBatch(_PagedPlan):
    """A BatchPlan (kvcommons.backend.interface)."""

    def __init__(
        self,
        kernel: Kernel,
        kv_shape: Sequence[int],
        tables: Tensor,
        lengths: Tensor,
        first_key_positions: Tensor,
        query_positions: Tensor,
        window: int | None,
    ) -> None:
        # Copied: a batch moves its lengths on in place.
        columns = torch.stack((lengths, first_key_positions, query_positions))
        tables = tables.contiguous()
        self._kept = tables, columns
        first, row = columns.data_ptr(), columns.stride(0) * columns.element_size()
        _, _, kv_heads, block_tokens, dim = kv_shape
        call = STRUCTURES["kvc_batch"](
            tables=tables.data_ptr(), lengths=first, first_positions=first + row,
            query_positions=first + 2 * row, batch=tables.shape[0], kv_heads=kv_heads, dim=dim,
            block_tokens=block_tokens, table_width=tables.shape[1], window=window or 0,
        )  # fmt: skip
        super().__init__(kernel, call, kernel._library.kvc_attend, kernel._library.kvc_scratch_bytes)


class PagedChunk(_PagedPlan):
    """A ChunkPlan (kvcommons.backend.interface)."""

    def __init__(
        self,
        kernel: Kernel,
        kv_shape: Sequence[int],
        query_heads: int,
        table: Tensor,
        length: int,
        first_query: int,
        rows: int,
        window: int | None,
    ) -> None:
        """`first_query`: which key row 0 is the query of, by index."""
        self._table = table.contiguous()
        _, _, kv_heads, block_tokens, dim = kv_shape
        length = min(length, len(table) * block_tokens)
        call = STRUCTURES["kvc_chunk"](
            table=self._table.data_ptr(), rows=rows, heads=query_heads, kv_heads=kv_heads, dim=dim,
            block_tokens=block_tokens, length=length, first_query=first_query, window=window or 0,
        )  # fmt: skip
        library = kernel._library
        super().__init__(kernel, call, library.kvc_attend_chunk, library.kvc_chunk_scratch_bytes)


def serves(kv: Tensor) -> bool:
    """Whether a batch over such KV, in host memory, can be the kernel's. Queries are bfloat16 or float32."""
    dim = kv.shape[-1]
    return kv.dtype in _DTYPES and dim % _DIM_STEP == 0 and dim <= _DIM_MAX and kv.is_contiguous()


def chosen() -> Kernel | None:
    """What the environment asks for, the widest by default; None: torch's operators."""
    return _load(os.environ.get(VARIABLE) or None)


@functools.cache
def _load(variant: str | None) -> Kernel | None:
    if variant == "torch":
        return None
    try:
        return Kernel(build.find_or_build(os.environ), variant)
    except (build.Unbuilt, OSError) as error:
        log.warning(
            "attention on the CPU is computed by torch, several times slower: the kernel is not compiled",
            extra={"reason": str(error)},
        )
        return None
