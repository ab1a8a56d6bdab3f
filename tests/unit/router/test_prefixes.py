"""How far a prompt's KV lies, from what the store says and what was started last; and how many waiting
prompts share a prefix, counted by identity, as a radix tree would say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcommons.pb.kvstore_pb2 import TIER_DISK, TIER_DRAM
from services.router.admission.prefixes import DeviceBlocks, PrefixSharers, common, distance_of
from services.router.admission.scheduling import ABSENT, DEVICE, DISK, DRAM


@pytest.mark.parametrize(
    ("blocks", "on_device", "tiers", "distance"),
    [
        (4, 4, [], DEVICE),
        (4, 0, [TIER_DRAM] * 4, DRAM),
        (4, 0, [TIER_DISK] * 4, DISK),
        (4, 0, [], ABSENT),
        (4, 2, [TIER_DISK] * 3, (0 + 0 + 2 + 3) / 4),
        (4, 0, [TIER_DRAM, TIER_DISK], (1 + 2 + 3 + 3) / 4),
        (2, 0, [TIER_DRAM] * 5, DRAM),
        (0, 0, [], ABSENT),
    ],
)
def test_the_distance_is_the_mean_over_the_blocks(
    blocks: int, on_device: int, tiers: list[int], distance: float
) -> None:
    assert distance_of(blocks, on_device, tiers) == distance


def test_the_device_has_what_was_used_last_as_far_as_it_fits() -> None:
    a, b = [bytes([n]) for n in range(3)], [bytes([n]) for n in range(10, 12)]
    device = DeviceBlocks()
    assert device.used(a, 4) == {a[0]}
    assert device.leading([*a, b"?"]) == 3
    assert device.used(b, 4) == {a[0], b[0]}  # whose distance changed: the new one's, and whoever's went
    assert (device.leading(a), device.leading(b)) == (2, 2)  # the deepest of the older ones went
    device.used(a[:1], 3)
    assert (device.leading(a), device.leading(b)) == (1, 2)
    device.used(b, 0)
    assert device.leading(b) == 0


@pytest.mark.parametrize(
    ("first", "second"), [("", "abc"), ("abc", "abd"), ("abc", "abcde"), ("x", "y"), ("ab", "ab")]
)
def test_chained_prompts_part_once(first: str, second: str) -> None:
    ids = [[text[: end + 1].encode() for end in range(len(text))] for text in (first, second)]
    alike = sum(a == b for a, b in zip(*ids, strict=False))
    assert common(*ids) == common(*reversed(ids)) == alike


PROMPTS = st.lists(st.text("ab", max_size=5), max_size=12)


def ids_of(prompt: str) -> list[bytes]:
    """Chained, as identities are: each says all that comes before it."""
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


@settings(max_examples=200, deadline=None)
@given(
    prompts=PROMPTS, gone=st.lists(st.integers(0, 11), max_size=6, unique=True), own=st.text("ab", max_size=5)
)
def test_it_counts_those_that_begin_alike(prompts: list[str], gone: list[int], own: str) -> None:
    sharers = PrefixSharers()
    for prompt in prompts:
        sharers.join(ids_of(prompt))
    for number in gone:
        if number < len(prompts):
            sharers.leave(ids_of(prompts[number]))
    left = [prompt for number, prompt in enumerate(prompts) if number not in gone] + [own]
    sharers.join(ids_of(own))
    for on_device in range(len(own)):
        wanted = own[: on_device + 1]
        assert sharers.of(ids_of(own), on_device) == sum(prompt.startswith(wanted) for prompt in left)
    assert sharers.of(ids_of(own), len(own)) == 1
    for prompt in left:
        sharers.leave(ids_of(prompt))
    assert len(sharers) == 0
