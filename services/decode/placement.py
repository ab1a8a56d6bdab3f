"""Where a sequence's blocks go when it arrives: a pure decision.

`local`: all here, or not at all. `overflow` (Infinite-LLM, section 4.4): what does not fit here is borrowed.
Older blocks are the ones that go elsewhere: the newest stay, so that tokens are appended here for as long as
there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.errors import CapacityExhausted, UnsupportedParameter

POLICIES = ("local", "overflow", "offload", "grow", "auto")
_BUILT = ("local", "overflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """After the blocks that are here already: `remote_blocks` on other holders, then `local_blocks` here."""

    remote_blocks: int
    local_blocks: int


def check_policy(name: str) -> None:
    """Raises UnsupportedParameter for a policy that is not built."""
    if name not in _BUILT:
        raise UnsupportedParameter(
            f"placement {name!r} is not built yet: use one of {', '.join(_BUILT)}", param="placement"
        )


def place(*, policy: str, blocks: int, free_blocks: int, sequences: int) -> Layout:
    """Where `blocks` more blocks of a new sequence go.

    `free_blocks` can be allocated here; `sequences` are held here already, each of which will want a block
    more: what overflows leaves them one each, so that a long prompt does not push them out. Raises
    CapacityExhausted.
    """
    if blocks <= free_blocks:
        return Layout(remote_blocks=0, local_blocks=blocks)
    if policy == "local":
        raise CapacityExhausted(
            f"the sequence needs {blocks} blocks and this decode instance has {free_blocks} free: try "
            "another, retry later, raise capacity_tokens, or set placement to overflow",
            retry_after_ms=500,
        )
    local = max(free_blocks - sequences - 1, 0)
    return Layout(remote_blocks=blocks - local, local_blocks=local)
