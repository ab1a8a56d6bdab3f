"""Attention offloading on simulated devices, with decode's schedulers, against the Lamina paper's figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.offload_figures import breakdown, overlap, paper_deployment, replicas, throughput
from benchmarks.offload_plan import Deployment
from benchmarks.offload_simulation import Batching, Load, OffloadSimulation, Outcome
from services.decode.staggering.pipelines import Fixed, Rotational


def quiet(_: str) -> None:
    pass


def run(
    deployment: Deployment, load: Load, batching: Batching = Batching.STAGGERED, seed: int = 1
) -> Outcome:
    return OffloadSimulation(deployment, load, batching, seed).run(6)


@pytest.mark.parametrize("name", ["llama-13b", "llama-33b"])
@pytest.mark.parametrize("scheme", [Fixed(1), Rotational(2), Fixed(3), Rotational(4)], ids=repr)
@pytest.mark.parametrize("context", [256, 2048])
def test_what_happens_is_what_the_formula_says(name: str, scheme: Fixed | Rotational, context: int) -> None:
    """The planner's closed form of a period, and events one after the other: devices that do not divide the
    batch, and queues between the stages of a message, are all that it leaves out."""
    deployment = replace(paper_deployment(name), scheme=scheme)
    batch = 60
    outcome = run(deployment, Load(sequences=batch * scheme.batches, context=context))
    expected = scheme.batches * batch / deployment.token_s(batch, context)
    assert outcome.tokens_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("scheme", [Fixed(1), Rotational(2), Fixed(2), Rotational(3)], ids=repr)
def test_a_slow_network_binds(scheme: Fixed | Rotational) -> None:
    """A twentieth of the paper's: connections are busy all the time. Contexts that move between replicas go
    the same way, which the formula does not count."""
    deployment = paper_deployment("llama-13b")
    deployment = replace(
        deployment, scheme=scheme, network_bytes_s=deployment.network_bytes_s / 20, round_trip_s=0.0
    )
    outcome = run(deployment, Load(sequences=60 * scheme.batches, context=64))
    expected = scheme.batches * 60 / deployment.token_s(60, 64)
    assert expected < scheme.batches * 60 / deployment.computing.linear_s(deployment.model, 60) / 1.5
    assert outcome.tokens_s == pytest.approx(expected, rel=0.05 if scheme.replicas == 1 else 0.3)


@pytest.mark.parametrize(
    ("name", "batches", "over", "per_cost"),
    [("llama-13b", (10.7, 11.4), (1.9, 7.3), (1.5, 4.9)), ("llama-33b", (29, 36), (3.1, 17), (2.4, 12.1))],
)
def test_throughput_against_the_same_devices_alone(
    name: str, batches: tuple[float, float], over: tuple[float, float], per_cost: tuple[float, float]
) -> None:
    """Figures 12 and 13. The paper: 10.7 to 64 times the batch, 1.75 to 20.5 times the throughput without
    pipelining, 1.48 to 12.1 times for the price, more with longer contexts; 1.13 to 1.63 times by
    pipelining."""
    report = throughput(paper_deployment(name), (128, 512, 4096), quiet)
    for column, (least, most) in (
        ("sequences over homogeneous", batches),
        ("throughput over homogeneous, one batch", over),
        ("throughput per cost over homogeneous", per_cost),
    ):
        found = [float(row[column]) for row in report.rows]
        assert least < min(found) <= max(found) < most, column
        assert column.startswith("sequences") or found == sorted(found), "longer contexts gain more"
    for row in report.rows:
        assert 1.08 < float(row["gain of pipelining, same sequences"]) < 1.63
        assert 1.13 < float(row["gain of pipelining, same batch"]) < 1.8
        assert float(row["chosen tokens/s"]) == pytest.approx(float(row["pipelined tokens/s"]), rel=0.02)


def test_pipelining_pays_for_large_batches_only_and_is_chosen_there() -> None:
    """Section 6.1: nearly twice the latency with few sequences; recommended from 128 on."""
    report = breakdown(paper_deployment("llama-13b"), (16, 64, 512), 256, quiet)
    pairs = [row for row in report.rows if "chosen" in row]
    assert [row["chosen"] for row in pairs] == ["one", "one", "two"]
    gains = [float(row["gain"]) for row in pairs]
    assert gains == sorted(gains)
    assert gains[0] < 0.65
    assert gains[-1] > 1.13
    for row in report.rows:
        parts = [float(row[f"{part} ms"]) for part in ("slices", "attention", "network", "waiting")]
        size = int(str(row["how"]).split(",")[0])
        assert sum(parts) == pytest.approx(1e3 * size / float(row["tokens/s"]), rel=0.02)


def test_messages_hide_behind_attention() -> None:
    """Figure 16: up to 62.2% of the network time, 16.2% of the latency; little with few sequences, whose
    messages are a round trip."""
    report = overlap(paper_deployment("llama-13b"), (16, 128, 512), 256, quiet)
    hidden = [float(row["hidden %"]) for row in report.rows]
    saved = [float(row["saved of the latency %"]) for row in report.rows]
    assert hidden == sorted(hidden)
    assert saved == sorted(saved)
    assert hidden[0] < 35
    assert 62 < hidden[-1] < 75
    assert saved[-1] == pytest.approx(16.2, abs=3)


def test_rotation_leaves_no_replica_idle() -> None:
    """Section 5.1.1, contexts moving between replicas: conflict- and bubble-free. Fixed batches leave
    bubbles (5.1.2)."""
    report = replicas(paper_deployment("llama-13b"), 64, 1024, (1, 2, 3, 4), quiet)
    for row in report.rows:
        assert float(row["rotational replicas busy %"]) > 99
        assert float(row["fixed replicas busy %"]) < 80
        assert float(row["rotational tokens/s"]) > 1.09 * float(row["fixed tokens/s"])


def test_contexts_that_come_home_pay_for_small_groups_only() -> None:
    """As decode has it: two hops a slice and six times the bytes of a ring, which the one batch more that
    there is hides behind the others' slices while there are few of them."""
    report = replicas(paper_deployment("llama-13b"), 64, 1024, (1, 2, 3, 4), quiet)
    gains = [float(row["home tokens/s"]) / float(row["fixed tokens/s"]) for row in report.rows]
    assert gains == sorted(gains, reverse=True)
    assert gains[1] > 1.09
    assert 0.99 < gains[2] < 1.04
    assert gains[3] < 1.0
    for row, gain in zip(report.rows, gains, strict=True):
        name = f"rotational, contexts come home, over fixed, {row['replicas']} replicas"
        assert report.ratios[name] == pytest.approx(gain)
    one = report.rows[0]  # whose contexts never leave
    assert one["home tokens/s"] == one["rotational tokens/s"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batches_stay_even_while_sequences_come_and_go(seed: int) -> None:
    """Continuous batching: contexts from a half to one and a half, every fifteenth sequence another after
    each iteration. Compared with sequences that are all alike and stay."""
    deployment = paper_deployment("llama-13b")
    alike = run(deployment, Load(sequences=128, context=1024))
    mixed = run(deployment, Load(sequences=128, context=1024, spread=0.5, answer_tokens=30), seed=seed)
    assert mixed.tokens_s > 0.95 * alike.tokens_s
    assert min(mixed.rows) >= 0.7 * 64
    assert max(mixed.rows) <= 1.3 * 64


def test_the_same_seed_gives_the_same_run() -> None:
    load = Load(sequences=40, context=512, spread=0.5, answer_tokens=10)
    first, second, other = (run(paper_deployment("llama-33b"), load, seed=seed) for seed in (4, 4, 5))
    assert first == second != other
