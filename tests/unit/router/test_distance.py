"""How far a prompt's KV lies, from what the store says and what was started last."""

from __future__ import annotations

import pytest

from kvcommons.pb.kvstore_pb2 import TIER_DISK, TIER_DRAM
from services.router.admission.distance import DeviceBlocks, common, distance_of
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
