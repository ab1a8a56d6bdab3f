"""Where `auto` places sequences, by costs that are given and by costs that it measures; the tokens are those
of transformers wherever they lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcommons.config import DataPlane
from kvcommons.engine.calibration import KeptPredictor
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.engine.kept import Kept
from kvcommons.engine.predictor import Predictor
from services.attention_pool.config import AttentionPoolConfig
from services.attention_pool.service import serve as serve_pool
from services.decode import service as decode_service
from services.decode.arrival.growth import GrowingPrompt, Growth
from tests.contract.engine_stack import BLOCK, Stack, settings
from tests.contract.engine_turns import Turn, turn
from tests.contract.rest_stack import free_port

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

PROMPT, ANSWER = 260, 30
BLOCKS = -(-(PROMPT + 1) // BLOCK)
POOLS = ("pool-0", "pool-1", "pool-2")
THIRDS = [(True, 6), (False, 6), (False, BLOCKS - 12)]
SLOW_BYTE_S, FAST_BYTE_S = 1e-6, 1e-12


def believe(monkeypatch: pytest.MonkeyPatch, **known: float) -> None:
    """Of the next decode: what one of these amounts takes, in seconds, until it has measured it."""

    def calibrated(*args: Any, **options: Any) -> tuple[Predictor, KeptPredictor]:
        predictor = Predictor()
        predictor.costs = IterationCosts.of(known)
        predictor.most = IterationWork(**dict.fromkeys(known, 1))
        return predictor, KeptPredictor(kept=Kept(path=Path(), fingerprint=""), model={})

    monkeypatch.setattr(decode_service, "calibrated", calibrated)


def placed_by(of: Turn, engines: Stack, growing: Sequence[GrowingPrompt] = ()) -> list[tuple[bool, int]]:
    """Whether each piece was placed at decode itself, and its blocks, in the sequence's order: those that
    were reserved when it came, and those that joined."""
    assert of.reserved is not None
    here = engines.data("decode")
    places = [*of.reserved.placements, *(place for prompt in growing for place in prompt.places)]
    return [(place.data_address == here, place.blocks) for place in places if place.blocks]


def record_growing(monkeypatch: pytest.MonkeyPatch) -> list[GrowingPrompt]:
    """Of decodes in this process: those whose holders join later."""
    begin, begun = Growth.begin, []

    def recorded(growth: Growth, prompt: GrowingPrompt) -> None:
        begun.append(prompt)
        begin(growth, prompt)

    monkeypatch.setattr(Growth, "begin", recorded)
    return begun


@pytest.mark.parametrize(
    ("capacity", "known", "placed"),
    [
        (64, {"away_bytes": SLOW_BYTE_S}, [(True, BLOCKS)]),
        (64, {"exchanges": 1.0}, [(True, BLOCKS)]),
        (64, {"read_bytes": SLOW_BYTE_S, "away_bytes": FAST_BYTE_S, "exchanges": 0.0}, [(False, BLOCKS)]),
        # It does not fit: three memories are read at once, each a third.
        (8, {"away_bytes": SLOW_BYTE_S}, THIRDS),
        (64, {"read_bytes": SLOW_BYTE_S, "away_bytes": SLOW_BYTE_S, "exchanges": 0.0}, THIRDS),
    ],
    ids=["slow holders", "slow network", "slow memory", "little memory", "all alike"],
)
async def test_a_sequence_goes_where_a_token_takes_least(
    engines: Stack,
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    known: dict[str, float],
    placed: list[tuple[bool, int]],
) -> None:
    believe(monkeypatch, **known)
    growing = record_growing(monkeypatch)
    await engines.lenders(24, 24, 24)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="auto", holder_tokens=6 * BLOCK, engine={"capacity_tokens": capacity * BLOCK}
    )
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    one = turn(prefill, decode, engines.model, tokens, ANSWER)
    assert (await one.run()).tokens == expected
    assert placed_by(one, engines, growing) == placed
    await engines.idle("decode", *POOLS)


@contextmanager
def slow_link(port: int) -> Iterator[int]:
    """The port of a relay to this one that lets 20 kB a second through: a layer's query and answer take
    some ten milliseconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.limited_link", f"127.0.0.1:{port}", "20000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        with child.stdout:
            yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


async def test_a_network_that_turns_out_slow_is_not_gone_over_again(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence goes to a pool that is taken for quick. What its tokens take is measured, and the
    next one stays."""
    believe(monkeypatch, read_bytes=1 / 3e7, exchanges=0.0)
    await engines.lenders()
    port = free_port()
    with slow_link(port) as seen_port:
        pool = AttentionPoolConfig(
            node=engines.node("pool-0"),
            data_plane=DataPlane(
                data_listen=f"tcp:127.0.0.1:{port}", advertise_data=f"tcp:127.0.0.1:{seen_port}"
            ),
            engine=settings(engines.folder, capacity_tokens=40 * BLOCK),
            ledger=engines.ledger,
        )
        engines.launch("pool-0", "attention_pool", serve_pool, pool)
        await engines.lending("pool-0")
        prefill = await engines.prefill()
        decode = await engines.decode(placement="auto", holder_tokens=40 * BLOCK)
        tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
        for placed in ([(False, BLOCKS)], [(True, BLOCKS)]):
            one = turn(prefill, decode, engines.model, tokens, ANSWER)
            assert (await one.run()).tokens == expected
            assert placed_by(one, engines) == placed
        await engines.idle("decode", "pool-0")
        await engines.stop("decode")
        await engines.stop("prefill")
