"""The commons as whole stacks show them: what one instance lends another, and a circle of debts that is
settled while answers go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fault.commons_chaos import PROMPTS, TABLES, Chaos, Load, Prompt, answers
from tests.machine import scaled
from tests.system.stack import Stack

SEED = 20261125
SETTLED_S_MAX = 120.0


@pytest.mark.slow
@pytest.mark.timeout(int(scaled(300)))
def test_a_settlement_is_seen_as_it_happens(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    prompts = [Prompt.drawn(dice, number) for number in range(PROMPTS)]
    chaos = Chaos(answers(tmp_path / "calm", prompts))
    steps: set[str] = set()
    loans: set[tuple[str, str]] = set()

    def settled() -> list[dict[str, Any]]:
        """Of the settlements that have ended those that brought blocks home."""
        seen = stack.client.get("/v1/commons")
        loans.update((one["creditor"], one["debtor"]) for one in seen["loans"])
        steps.update(one["step"] for one in seen["settlements"] if one["ended_s"] is None)
        return [
            one
            for one in seen["settlements"]
            if one["ended_s"] is not None and all(leg["settled_blocks"] for leg in one["legs"])
        ]

    with Stack(tmp_path / "stack", tables=TABLES, decode=3, attention_pool=0) as stack:
        with Load(stack.url, prompts, SEED, chaos):
            stack.until(
                lambda: bool(settled() and steps), SETTLED_S_MAX, "no settlement was seen under way and ended"
            )
            found = settled()[0]
        known = {one["id"] for one in stack.client.get("/v1/commons")["instances"]}
        stack.assert_no_block_is_held(SETTLED_S_MAX)
        stack.until(
            lambda: not stack.client.get("/v1/commons")["loans"],
            SETTLED_S_MAX,
            "loans are shown that are none",
        )
    debtors = [leg["debtor"] for leg in found["legs"]]
    assert sorted(debtors) == sorted(leg["creditor"] for leg in found["legs"]), "it is a circle"
    assert len(debtors) >= 2
    assert found["begun_s"] > found["ended_s"], "so many seconds ago, both"
    assert set(debtors) <= known
    assert loans, "what was borrowed was shown"
    assert steps <= {"prepare", "freeze", "copy", "switch", "release", "end"}
    assert chaos.wrong() == []
