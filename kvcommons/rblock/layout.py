"""The bytes of one object: K and V of one layer of one block.

`[2, kv_heads, block_tokens, head_dim]`, row-major.

Heads lie outside tokens, the order in which the attention kernels read fastest. Holder memory, the wire, the
kvstore's DRAM and its slab files all have objects in this one form.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2 as pb

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shape of a model's KV. Raises InvalidInput where a size is zero or the dtype unknown."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    kv_dtype: str
    query_heads: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "query_heads"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} of a KV layout must be at least 1", param=name)
        if self.kv_dtype not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise InvalidInput(f"KV dtype {self.kv_dtype!r} is not one of {known}", param="kv_dtype")
        if self.query_heads % self.kv_heads:
            raise InvalidInput(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly",
                param="query_heads",
            )

    @classmethod
    def of(cls, info: pb.ModelInfo) -> Layout:
        """The layout that a model announces."""
        return cls(
            layers=info.layers,
            kv_heads=info.kv_heads,
            block_tokens=info.block_tokens,
            head_dim=info.head_dim,
            kv_dtype=info.kv_dtype,
            query_heads=info.query_heads,
        )

    @property
    def object_shape(self) -> tuple[int, int, int, int]:
        """`[2, kv_heads, block_tokens, head_dim]`."""
        return (2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def object_bytes(self) -> int:
        """Of one layer of one block."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.layers * self.object_bytes

    def blocks_of(self, tokens: int) -> int:
        """Blocks that `tokens` touch, the last one maybe partly filled."""
        return -(-tokens // self.block_tokens)
