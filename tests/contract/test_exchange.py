"""A layer's exchanges on the native path give what they give in Python, bit for bit, whatever lies where and
whatever fails in between."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.engine.batch import Batch, Queries
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.remote.plans import NewRows
from kvcommons.errors import KVCommonsError
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.head_group import Creditor
from kvcommons.rblock.heads import divided
from kvcommons.transport.base import Observation
from tests.contract.exchange_cases import (
    BATCHES,
    HERE,
    ITERATIONS,
    LOCAL_BLOCKS,
    Debtor,
    assert_the_same,
    both,
    in_python,
    rows_of,
    run,
    two_holders,
)
from tests.contract.holder_cases import (
    BLOCK_TOKENS,
    LAYOUT,
    Served,
    embedded,
    group_of,
    pools,
)
from tests.machine import scaled


@pytest.fixture(params=["tcp", "unix"])
async def served(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[list[Served]]:
    """Two holders."""
    async with two_holders(socket_folder, request.param, LAYOUT) as made:
        yield made


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
@pytest.mark.parametrize("name", BATCHES)
async def test_the_same_bits(served: list[Served], name: str, mini_batches: int) -> None:
    """And what is told of it: to observers of the data plane, and of how long holders let wait."""
    seen: tuple[list[Observation], list[Observation]] = [], []
    natively, python = await both(
        served,
        BATCHES[name],
        lambda holders: Debtor(holders, LAYOUT, mini_batches),
        [some.append for some in seen],
    )
    assert (natively.native_layers, python.native_layers) == (ITERATIONS * LAYOUT.layers, 0)
    assert len(natively.attention) == ITERATIONS * LAYOUT.layers
    assert_the_same(natively, python)
    assert not natively.lost
    reported = [Counter(replace(one, seconds=0.0) for one in some) for some in seen]
    assert reported[0] == reported[1] != Counter()
    assert all(0 < one.seconds < 5 for one in seen[0])
    assert [key for key, _ in natively.waited] == [key for key, _ in python.waited]


@pytest.mark.parametrize("name", BATCHES)
async def test_the_same_bits_in_bfloat16(socket_folder: Path, name: str) -> None:
    layout = replace(LAYOUT, kv_dtype="bfloat16")
    async with two_holders(socket_folder, "unix", layout) as served:
        natively, python = await both(served, BATCHES[name], lambda holders: Debtor(holders, layout))
    assert natively.native_layers == ITERATIONS * LAYOUT.layers
    assert_the_same(natively, python)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("fails", [False, True])
async def test_the_same_bits_of_head_groups(socket_folder: Path, name: str, fails: bool) -> None:
    """Each of the two creditors is one. Where the first segment `fails`, one part has lost it."""
    made = []
    for way in (nullcontext, in_python):
        async with AsyncExitStack() as stack:
            stack.enter_context(way())
            parts: list[list[Served]] = []
            for _ in range(2):
                folder = Path(tempfile.mkdtemp(prefix="g", dir=socket_folder))
                some = [embedded(folder, part=part, blocks=LOCAL_BLOCKS) for part in divided(2)]
                parts.append([await stack.enter_async_context(one) for one in some])
            debtor = Debtor([await stack.enter_async_context(group_of(some)) for some in parts], LAYOUT)

            def lose(
                iteration: int, layer: int, debtor: Debtor = debtor, parts: list[list[Served]] = parts
            ) -> None:
                if fails and (iteration, layer) == (1, 0):
                    ref = next(refs[0] for refs in debtor.refs if refs)
                    for some in parts:
                        with suppress(KVCommonsError):
                            some[0].holder.release([ref])

            debtor.between = lose
            made.append(await run(debtor, BATCHES[name]))
    assert bool(made[0].lost) == fails
    assert made[0].native_layers == (2 if fails else ITERATIONS) * LAYOUT.layers
    assert_the_same(*made)


@pytest.mark.parametrize("mini_batches", [1, 2])
async def test_a_segment_that_is_gone_loses_its_own_row_only(served: list[Served], mini_batches: int) -> None:
    """Its holder has others of the batch."""

    def make(holders: list[Creditor]) -> Debtor:
        debtor = Debtor(holders, LAYOUT, mini_batches)

        def release(iteration: int, layer: int) -> None:
            if (iteration, layer) == (1, 1):
                served[0].holder.release([debtor.refs[2][0]])

        debtor.between = release
        return debtor

    rows = rows_of((0, 2), count=4) + rows_of((0, 1), (HERE, 1), (1, 1), count=2)
    natively, python = await both(served, rows, make)
    assert list(natively.lost) == [2]
    assert natively.native_layers == 2 * LAYOUT.layers
    assert_the_same(natively, python)


@pytest.mark.parametrize(("fault", "layer"), [("killed", 0), ("paused", 1)])
async def test_a_holder_that_fails_loses_its_own_rows_only(fault: str, layer: int) -> None:
    """Between two layers, or two iterations. It is another process."""
    made = []
    for way in (nullcontext, in_python):
        async with AsyncExitStack() as stack:
            stack.enter_context(way())
            (pool,) = stack.enter_context(pools(None))
            other = await pool.ready()
            well = await stack.enter_async_context(embedded(pool.folder, blocks=LOCAL_BLOCKS))
            holders = [await stack.enter_async_context(one.debtor()) for one in (well, other)]
            debtor = Debtor(holders, LAYOUT, deadline_s=scaled(2.0))
            fail = pool.kill if fault == "killed" else pool.pause
            debtor.between = lambda iteration, one, fail=fail: (
                fail() if (iteration, one) == (1, layer) else None
            )
            rows = rows_of((0, 2), count=3) + rows_of((0, 1), (1, 2), count=2) + rows_of((HERE, 2))
            made.append(await run(debtor, rows))
    assert sorted(made[0].lost) == [3, 4]
    assert_the_same(*made)
    waits = [[(answered, seconds > scaled(1.5)) for _, (seconds, answered) in one.waited] for one in made]
    assert ((False, True) in waits[0]) == ((False, True) in waits[1]) == (fault == "paused")


async def test_a_connection_that_went_stale_is_replaced(socket_folder: Path) -> None:
    """Its peer has seen nothing of the request: the holder's data plane has started anew in between, and
    nobody looked at the connection."""
    async with two_holders(socket_folder, "unix", LAYOUT) as served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvcommons.holder.plan_connection.fresh", lambda connection, last_used_s: True)

            def make(holders: list[Creditor]) -> Debtor:
                debtor = Debtor(holders, LAYOUT)
                debtor.between = lambda iteration, layer: served[0].again() if iteration == 1 else None
                return debtor

            natively, python = await both(served, rows_of((0, 2), (1, 1), count=3), make)
    assert natively.native_layers == ITERATIONS * LAYOUT.layers
    assert not natively.lost
    assert_the_same(natively, python)


async def test_what_was_asked_for_is_not_kept_where_the_iteration_fails(served: list[Served]) -> None:
    """A connection on which an answer comes that nobody waits for is closed."""
    async with served[0].debtor() as holder:
        debtor = Debtor([holder], LAYOUT)
        sequences = await debtor.sequences(rows_of((0, 2), count=2))
        batch = Batch(sequences, BLOCK_TOKENS, choose())
        remote = RemoteAttention(LAYOUT, choose(), AttentionBudget(1.0))
        q = debtor.random(2, LAYOUT.query_heads, LAYOUT.head_dim)
        k = debtor.random(2, LAYOUT.kv_heads, LAYOUT.head_dim)
        answers = []
        for fails in (False, True, False):
            step = remote.begin(batch, 5.0, IterationTiming())
            new = NewRows(0, Queries(plain=q), k, k)
            remote.ask(step, new)
            if not fails:
                answers.append(remote.collect(step, new).out.clone())
            remote.end(step)
            (plan,) = holder._plans._idle
            assert (plan.bare is not None) != fails
    assert torch.equal(*answers)
