from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.load_or_compute import AlwaysLoad, Duration, LoadOrCompute
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.scheduler import Scheduler
from kvcommons.telemetry.trace import Tracer
from tests.unit.engine.test_prompt import make
from tests.unit.engine.tiny import tiny_core


def each(token_s: float) -> Callable[[range], float]:
    """Each token takes as long to compute; 0: that is not known."""
    return lambda positions: token_s * len(positions)


def cost(*, load_s: float, compute_s: float, retry_every: int = 8) -> LoadOrCompute:
    """A block (1,000 bytes, 10 tokens) takes so long to load and to compute."""
    made = LoadOrCompute(each(compute_s / 10), retry_every=retry_every)
    made.loaded(1000, load_s)
    made.loaded(1000, load_s)
    return made


def to_load(made: LoadOrCompute, blocks: int, new_tokens: int = 0) -> int:
    positions = range(blocks * 10 + new_tokens)
    return made.blocks_to_load(blocks, block_bytes=1000, block_tokens=10, positions=positions)


def test_a_line_tells_the_fixed_part_from_the_rest() -> None:
    line = Duration(0.3)
    assert line.seconds(5) == 0
    line.add(100, 1.0)
    assert line.seconds(50) == pytest.approx(0.5)
    for amount in (10, 100, 40):
        line.add(amount, 0.5 + 0.01 * amount)
    for _ in range(20):
        line.add(10, 0.6)
        line.add(100, 1.5)
    assert line.seconds(50) == pytest.approx(1.0, rel=0.01)
    assert line.seconds(0) == 0


def test_a_line_never_says_that_more_takes_less() -> None:
    line = Duration(0.3)
    for amount, seconds in ((10, 1.0), (100, 0.5), (10, 1.2), (100, 0.4)):
        line.add(amount, seconds)
    assert 0 <= line.seconds(1) <= line.seconds(10) <= line.seconds(1000)


def test_loads_all_until_both_are_known() -> None:
    made = LoadOrCompute(each(0.0))
    assert to_load(made, 7) == 7
    made.loaded(1000, 10.0)
    assert to_load(made, 7) == 7


def test_the_first_load_is_no_reason_to_compute() -> None:
    made = LoadOrCompute(each(0.01))
    made.loaded(1000, 10.0)
    assert to_load(made, 50) == 50
    made.loaded(1000, 0.01)
    assert to_load(made, 50) == 50
    assert made.load_bytes_per_s == pytest.approx(1e5)


def test_the_faster_one_wins_and_a_short_load_is_always_made() -> None:
    assert to_load(cost(load_s=0.01, compute_s=1.0), 50) == 50
    assert to_load(cost(load_s=100.0, compute_s=0.1), 50) == 0
    assert to_load(cost(load_s=0.001, compute_s=0.0001), 20) == 20
    assert to_load(cost(load_s=0.001, compute_s=0.0001), 40) < 40


def test_a_run_is_divided_where_both_together_are_fastest() -> None:
    """Loading and computing at the same pace: half of the blocks each."""
    assert to_load(cost(load_s=0.1, compute_s=0.1), 50) == 25
    # New tokens have to be computed anyway: as long as that takes, loading is free.
    assert to_load(cost(load_s=0.1, compute_s=0.1), 50, new_tokens=500) == 50
    assert to_load(cost(load_s=0.1, compute_s=0.1), 50, new_tokens=100) == 30


def test_a_verdict_against_loading_is_tested_again() -> None:
    made = cost(load_s=10.0, compute_s=0.01, retry_every=3)
    assert [to_load(made, 50) for _ in range(6)] == [0, 0, 50, 0, 0, 50]


def test_of_a_long_context_more_is_loaded() -> None:
    """Its blocks take longer to compute than those of a short one, and no longer to load."""
    made = LoadOrCompute(lambda positions: 1e-4 * len(positions) * (positions.start + positions.stop) / 2)
    for _ in range(2):
        made.loaded(1000, 0.5)

    def loads(positions: range) -> int:
        return made.blocks_to_load(50, block_bytes=1000, block_tokens=10, positions=positions)

    assert loads(range(500)) == 21
    assert loads(range(10_000, 10_500)) == 50


def test_the_load_rate_follows_what_is_measured() -> None:
    made = LoadOrCompute(each(0.0))
    assert made.load_bytes_per_s == 0
    for _ in range(30):
        made.loaded(100, 1.0)
    for _ in range(30):
        made.loaded(300, 1.0)
        made.loaded(0, 1.0)
        made.loaded(100, 0.0)
    assert made.load_bytes_per_s == pytest.approx(300, rel=0.01)


def patience(
    made: LoadOrCompute, *, waited_s: float = 0.0, pace_s: float = 0.0, layers_left: int = 16
) -> float:
    return made.patience_s(positions=range(1000), waited_s=waited_s, pace_s=pace_s, layers_left=layers_left)


def test_a_load_is_waited_for_as_long_as_computing_takes() -> None:
    made = cost(load_s=0.1, compute_s=0.02)  # 2 s for 1,000 tokens
    assert patience(made) == pytest.approx(2.0)
    assert patience(made, waited_s=1.5) == pytest.approx(0.5)
    assert patience(made, waited_s=2.5) == 0
    assert patience(LoadOrCompute(each(0.0)), waited_s=0.4) == pytest.approx(0.6)


def test_a_hopeless_load_is_given_up_at_once() -> None:
    made = cost(load_s=0.1, compute_s=0.02)
    assert patience(made, pace_s=0.2, layers_left=16) > 0
    assert patience(made, pace_s=0.3, layers_left=16) == 0
    assert patience(made, pace_s=0.3, layers_left=8) > 0


def test_of_a_load_that_is_given_up_the_share_is_kept_that_comes_in_time() -> None:
    made = cost(load_s=0.1, compute_s=0.1)

    def keep(pace_s: float, layers_left: int = 10) -> int:
        return made.blocks_to_keep(
            50, block_tokens=10, positions=range(500), pace_s=pace_s, layers_left=layers_left
        )

    assert keep(0.5) == 25  # 5 s for all that is left, as computing takes for all
    assert keep(5.0) == 0
    assert keep(0.0) == 0
    assert 0 < keep(0.9) < 25
    assert keep(0.5, layers_left=2) == 25  # half of them at most


def test_one_pause_changes_little_and_a_trend_is_followed() -> None:
    line = Duration(0.3)
    for _ in range(10):
        line.add(100, 1.0)
    line.add(100, 1000.0)
    assert line.seconds(100) < 2.5
    for _ in range(20):
        line.add(100, 1000.0)
    assert line.seconds(100) > 900


def test_what_always_loads_waits_for_it() -> None:
    made = AlwaysLoad(each(0.01))
    made.loaded(1000, 100.0)
    assert to_load(made, 50) == 50
    assert patience(made, waited_s=1e4, pace_s=1e3) > 0


CHUNK, STORED = 48, 60  # tokens, and blocks of 16


def chunks_take(predictor: Predictor, seconds: float) -> None:
    for _ in range(50):
        predictor.learn(IterationWork.of_chunk(range(CHUNK)), seconds)


def loading(predictor: Predictor, *, chunk_tokens: int = CHUNK, stages: int = 1) -> Callable[[], int]:
    """How many blocks the prompts of an engine with this predictor load, of those that are stored. To load
    one takes 10 ms."""
    core, nobody = tiny_core(layers=2), cast(Any, "never called here")
    prompts = Prompts(
        core, Scheduler(), chunk_tokens=chunk_tokens, keeper=nobody, histories=nobody,
        read_buffer=ReadBuffer(layers=2, bytes_max=0), predictor=predictor, stages=stages,
        tracer=Tracer.off(),
    )  # fmt: skip
    for _ in range(2):
        loaded = make(STORED * 16, matched=10)
        loaded.reuse(loaded=10)
        loaded.load = cast(Any, SimpleNamespace(bytes=10 * core.block_bytes, seconds=0.1))
        prompts.preloading.ended(loaded)

    def decide() -> int:
        prompt = make(STORED * 16 + 1, matched=STORED)
        prompts.preloading.decide(prompt)
        return prompt.loaded_blocks

    return decide


def test_prompts_are_loaded_or_computed_by_what_their_engine_has_learnt() -> None:
    """Of one predictor: whatever it learns, the next prompt goes by."""
    predictor = Predictor()
    decide = loading(predictor)
    assert decide() == STORED, "it knows no chunk yet"
    chunks_take(predictor, 1.0)
    assert decide() == STORED
    chunks_take(predictor, 0.001)
    assert decide() <= 3


def test_what_is_loaded_depends_on_chunks_and_stages() -> None:
    """Chunks of three blocks that take as long as three blocks' load: half of them each. Several stages
    compute faster, and smaller chunks more slowly."""
    predictor = Predictor()
    chunks_take(predictor, 0.03)
    assert loading(predictor)() == pytest.approx(STORED / 2, abs=3)
    assert loading(predictor, stages=4)() < STORED / 3
    assert loading(predictor, chunk_tokens=CHUNK // 2)() > 0.6 * STORED
