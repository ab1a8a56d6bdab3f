from __future__ import annotations

import pytest

from kvcommons.errors import CapacityExhausted, UnsupportedParameter
from services.decode.placement import Layout, check_policy, place


@pytest.mark.parametrize("policy", ["local", "overflow"])
def test_what_fits_stays_here(policy: str) -> None:
    assert place(policy=policy, blocks=8, free_blocks=8, sequences=3) == Layout(
        remote_blocks=0, local_blocks=8
    )


def test_local_refuses_what_does_not_fit() -> None:
    with pytest.raises(CapacityExhausted, match="needs 9 blocks and this decode instance has 8 free"):
        place(policy="local", blocks=9, free_blocks=8, sequences=0)


def test_overflow_keeps_the_newest_blocks_and_leaves_the_others_a_block_each() -> None:
    assert place(policy="overflow", blocks=20, free_blocks=8, sequences=3) == Layout(
        remote_blocks=16, local_blocks=4
    )
    assert place(policy="overflow", blocks=20, free_blocks=2, sequences=5) == Layout(
        remote_blocks=20, local_blocks=0
    )


@pytest.mark.parametrize("policy", ["offload", "grow", "auto"])
def test_policies_that_are_not_built_are_refused(policy: str) -> None:
    with pytest.raises(UnsupportedParameter, match=policy):
        check_policy(policy)
