"""What a prompt is expected to take, by what instances say of themselves and by what is under way."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import Instance, Load
from services.router.admission.backlog import PromptBacklog
from services.router.fleet.fleet import Fleet

MODEL = ModelInfo(name="demo", fingerprint=b"f" * 32, block_tokens=16)


class View:
    records = ""

    def __init__(self, *instances: Instance) -> None:
        self._instances = instances

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        return [one for one in self._instances if one.service == service]

    def silent_s(self, instance_id: str) -> float | None:
        return None

    def suspect(self, instance_id: str) -> None:
        """None is."""


def fleet(*instances: Instance) -> Fleet:
    return Fleet(View(*instances), cast(Any, None))


def instance(service: str, costs: dict[str, float], model: ModelInfo = MODEL) -> Instance:
    return Instance(service=service, model=model, load=Load(costs=costs, chunk_tokens=100))


def test_a_prompt_costs_what_it_takes_where_it_is_quickest() -> None:
    slow = {"iterations": 0.1, "few_rows": 0.01, "more_rows": 0.01, "pairs": 1e-6}
    fast = {name: cost / 2 for name, cost in slow.items()}
    of_slow = fleet(instance("prefill", slow)).prompt_seconds(MODEL, range(250))
    assert of_slow == pytest.approx(3 * 0.1 + 250 * 0.01 + 250 * 251 / 2 * 1e-6), "three chunks"
    both = fleet(instance("prefill", slow), instance("prefill", fast), instance("prefill", {}))
    assert both.prompt_seconds(MODEL, range(250)) == pytest.approx(of_slow / 2)
    late, early = (both.prompt_seconds(MODEL, positions) for positions in (range(200, 250), range(50)))
    assert late == pytest.approx(early + 50 * 200 * 5e-7), "each of its tokens attends to those before"
    assert both.prefills(MODEL) == 3


def test_stages_compute_several_chunks_of_a_prompt_at_a_time() -> None:
    """A chunk takes what all of them do; one chunk alone gains nothing (Mnemosyne, equation 8)."""
    one = instance("prefill", {"iterations": 0.1, "more_rows": 0.01, "pairs": 1e-9})
    four = Instance()
    four.CopyFrom(one)
    four.stage.stages = 4
    for chunks, share in ((1, 1.0), (4, 7 / 16), (40, 43 / 160)):
        positions = range(100 * chunks)
        whole_s, staged_s = (fleet(some).prompt_seconds(MODEL, positions) for some in (one, four))
        assert staged_s == pytest.approx(share * whole_s)


def test_nothing_is_said_where_nobody_has_measured() -> None:
    other = ModelInfo(name="other", fingerprint=b"o" * 32)
    nobody = fleet(instance("prefill", {}), instance("prefill", {"iterations": 1.0, "pairs": 1.0}, other))
    assert nobody.prompt_seconds(MODEL, range(250)) == 0.0
    assert nobody.token_seconds(MODEL) == 0.0
    tokens_only = fleet(instance("prefill", {"iterations": 1.0}))
    assert tokens_only.prompt_seconds(MODEL, range(250)) == 0.0


def test_a_token_takes_an_iteration_at_least() -> None:
    costs = {"iterations": 0.03, "few_rows": 0.001, "read_bytes": 1e-9}
    assert fleet(instance("decode", costs)).token_seconds(MODEL) == pytest.approx(0.031)


def test_a_prompt_waits_for_shorter_ones_and_for_as_much_of_longer_ones_as_it_takes() -> None:
    backlog = PromptBacklog()
    assert backlog.ahead_s(2.0, instances=1) == 0.0
    numbers = [backlog.begin(seconds) for seconds in (0.5, 60.0)]
    assert backlog.ahead_s(2.0, instances=1) == 2.5
    assert backlog.ahead_s(2.0, instances=2) == 1.25
    assert backlog.ahead_s(0.1, instances=1) == pytest.approx(0.2)
    for number in (*numbers, numbers[0]):
        backlog.end(number)
    assert backlog.ahead_s(2.0, instances=1) == 0.0
