"""The planner of attention offloading, against what the Lamina paper says of the same devices and models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.offload_plan import (
    Deployment,
    Homogeneous,
    attention_devices,
    compare,
    minimum_bandwidth,
    model_of,
    plan_of,
)
from benchmarks.rooflines import (
    A100_40G,
    A100_80G,
    ARC_A770,
    H100,
    IDEAL,
    MODELS,
    RTX_3090,
    RX_7900_XTX,
    Device,
    Group,
    Model,
)
from benchmarks.slice_schedule import attend_s_wanted
from demo import MODEL_DIR
from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec
from services.decode.staggering.pipelines import Fixed, Rotational

BATCHES = (128, 256, 512, 1024)


def model(name: str) -> Model:
    return next(one for one in MODELS if one.name == name)


@pytest.mark.parametrize(
    ("device", "of_memory", "of_reading"),
    [
        (A100_80G, 219, 9.04),
        (H100, 456, 10.90),
        (RTX_3090, 67, 1.71),
        (RX_7900_XTX, 42, 1.04),
        (ARC_A770, 22, 0.63),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_what_memory_costs(device: Device, of_memory: float, of_reading: float) -> None:
    """Table 1: dollars for a GB, and for a GB/s. Printed digits, so half a unit of the last one."""
    assert device.price / device.memory_bytes * 1e9 == pytest.approx(of_memory, abs=0.5)
    assert device.price / device.read_bytes_s * 1e9 == pytest.approx(of_reading, abs=0.006)


def test_how_much_cheaper_the_memory_of_cheap_devices_is() -> None:
    """Section 4.1: 3.27 to 17.3 times."""
    cheap, dear = (RTX_3090, RX_7900_XTX, ARC_A770), (A100_80G, H100)
    by_memory = [b.price / b.memory_bytes / (a.price / a.memory_bytes) for a in cheap for b in dear]
    by_reading = [b.price / b.read_bytes_s / (a.price / a.read_bytes_s) for a in cheap for b in dear]
    assert min(by_memory + by_reading) == pytest.approx(3.27, rel=0.01)
    assert max(by_reading) == pytest.approx(17.3, rel=0.02)


@pytest.mark.parametrize(
    ("name", "devices", "table"),
    [
        ("llama-13b", 1, (4.90, 8.12, 9.08, 10.06)),
        ("llama-33b", 2, (5.94, 9.31, 11.56, 12.53)),
        ("llama-65b", 4, (7.55, 11.78, 13.92, 15.90)),
    ],
)
def test_the_bandwidth_that_communication_needs(name: str, devices: int, table: tuple[float, ...]) -> None:
    """Table 3. The paper has it from MFUs that it measured, this from a roofline with three constants for all
    twelve figures: 15%. At a batch of 128 on several devices kernels and sums are far from their rates, which
    a roofline does not know: it asks for up to 40% more than was needed."""
    computing = Group(device=A100_40G, count=devices)
    found = [minimum_bandwidth(model(name), computing, batch) / 1e9 for batch in BATCHES]
    assert found[1:] == pytest.approx(table[1:], rel=0.15)
    assert 1 <= found[0] / table[0] <= 1.4
    assert found == sorted(found)
    assert max(found) < 20, "one 200 Gbit/s connection is enough"


@pytest.mark.parametrize("batch", BATCHES)
def test_the_formula_of_the_paper_is_the_one_computed(batch: int) -> None:
    """Section 4.2 in its second form: 2edL * MFU(B) * peak / N."""
    llama, computing = model("llama-13b"), Group(device=A100_40G, count=1)
    peak = A100_40G.flops * computing.mfu(llama, batch)
    wanted = 2 * llama.element_bytes * llama.hidden * llama.layers * peak / llama.parameters
    assert minimum_bandwidth(llama, computing, batch) == pytest.approx(wanted)


def test_shared_heads_move_less() -> None:
    """Grouped-query attention: K and V are an eighth as wide, queries and answers as wide as ever."""
    grouped = model("llama3-70b")
    assert grouped.moved_bytes == (2 + 2 / 8) * grouped.element_bytes * grouped.hidden * grouped.layers


def test_the_share_of_attention() -> None:
    """Figure 4: more than 80% of the time beyond a context of 1500, batches of 128 and 512. As a mean of the
    two here; the smaller batch gets there at 1,900."""
    llama, a100 = model("llama-13b"), Group(device=A100_40G, count=1)

    def share(batch: int, context: int) -> float:
        attention_s = a100.attention_s(llama, batch * context)
        return attention_s / (attention_s + a100.linear_s(llama, batch))

    assert share(512, 1500) > 0.8
    assert (share(512, 1500) + share(128, 1500)) / 2 == pytest.approx(0.8, abs=0.01)
    assert share(128, 1900) > 0.8 > share(128, 1000)


def test_utilisation_grows_with_the_batch_and_not_with_attention() -> None:
    """Section 3.1: MFU grows up to a batch of 2048 (figure 3), that of attention stays under 5%."""
    llama, a100 = model("llama-13b"), Group(device=A100_40G, count=1)
    found = [a100.mfu(llama, 2**power) for power in range(12)]
    assert found == sorted(found)
    assert found[0] < 0.01
    assert found[11] > 0.5
    products = 4 * llama.hidden * llama.layers  # of a query with a token's K, and of its weight with V
    assert products / a100.attention_s(llama, 1) / A100_40G.flops < 0.05


@pytest.mark.parametrize(
    ("name", "devices", "batch", "ratio"), [("llama-13b", 1, 3, 10.7), ("llama-33b", 2, 1, 64.0)]
)
def test_how_much_larger_batches_are(name: str, devices: int, batch: int, ratio: float) -> None:
    """Section 6.1: 10.7 to 64 times. With three memory devices to each computing one and batches of powers of
    two, 10.7 is 32 over 3 at a context of 4096. The 64 needs more than these devices hold, by half: the paper
    lets KV exceed the memory (section 5.4), or had more devices."""
    computing = Group(device=A100_40G, count=devices)
    alone = Homogeneous(model=model(name), computing=computing, context=4096)
    pool = Group(device=A100_40G, count=3 * devices)
    offloaded = Deployment(model=model(name), computing=computing, pool=pool, scheme=Rotational(2))
    assert alone.batch == batch
    found = 2 ** (offloaded.sequences(4096).bit_length() - 1) / alone.batch
    assert found == pytest.approx(ratio if batch == 3 else ratio / 2, rel=0.01)


@pytest.mark.parametrize("name", ["llama-7b", "llama-13b", "llama-33b", "llama-65b"])
def test_the_advantage_of_cheap_memory(name: str) -> None:
    """Section 4.1 and figure 1: 2.1 to 2.8 times the throughput for the price at a context of 512, more at
    longer ones, with devices at their data sheets' rates and memory at 1 / 3.27 of the price. Here 1.7 to 2.2
    and 2.9 to 3.0, for the homogeneous side may have as many devices as are best for it; the text does not
    say how many the paper gave it. 3.27 is the bound."""
    llama = model(name)
    cheap = replace(A100_80G, name="cheap", price=A100_80G.price / 3.27)
    a100 = replace(A100_80G, link_bytes_s=float("inf"))

    def best(context: int) -> float:
        groups = [Group(device=a100, count=count, efficiency=IDEAL) for count in range(1, 17)]
        alone = max(
            Homogeneous(model=llama, computing=group, context=context).tokens_s_per_dollar for group in groups
        )
        one = Group(device=cheap, count=1, efficiency=IDEAL)
        offloaded = []
        for computing in groups[int(llama.weight_bytes // a100.usable_bytes) :]:
            for batch in range(16, 2000, 16):
                period_s = 2 * computing.linear_s(llama, batch)
                # Of both batches, in parts of a device.
                for_time = 2 * one.attention_s(llama, batch * context)
                for_memory = 2 * batch * context * llama.kv_token_bytes / cheap.usable_bytes
                price = computing.price + max(for_time / period_s, for_memory) * cheap.price
                offloaded.append(2 * batch / period_s / price)
        return max(offloaded) / alone

    assert 1.7 < best(512) < 2.2
    assert 2.8 < best(4096) < 3.27


def test_the_pool_has_the_size_that_pipelining_wants() -> None:
    llama, computing, batch, context = model("llama-13b"), Group(device=A100_40G, count=1), 64, 512
    slice_s = computing.linear_s(llama, batch)
    for batches in (2, 3, 5, 9):
        scheme = Rotational(batches)
        count = attention_devices(llama, scheme, slice_s, batch * context, RTX_3090)
        pool = Group(device=RTX_3090, count=count)
        assert pool.attention_s(llama, batch * context) <= attend_s_wanted(scheme, slice_s)
        assert pool.kv_tokens(llama, weights=False) >= batches * batch * context
        fewer = Group(device=RTX_3090, count=count - 1)
        assert (
            fewer.attention_s(llama, batch * context) > attend_s_wanted(scheme, slice_s)
            or fewer.kv_tokens(llama, weights=False) < batches * batch * context
        )


def test_a_plan_says_what_binds() -> None:
    """Batches that the pool of the right size hides: slices bind. Then as many tokens as the model makes."""
    llama, computing = model("llama-13b"), Group(device=A100_80G, count=1)
    plan = plan_of(llama, computing, RTX_3090, Rotational(2), batch=128, context=512)
    assert plan.tokens_s == pytest.approx(128 / computing.linear_s(llama, 128))
    alone = plan_of(llama, computing, RTX_3090, Fixed(1), batch=256, context=512)
    timing = alone.deployment.timing(256, 512)
    assert alone.token_s == pytest.approx(llama.layers * timing.alone_s)
    assert plan.tokens_s > alone.tokens_s
    report = compare(llama, computing, RTX_3090, Rotational(2), sizes=BATCHES, context=4096)
    assert [row["sequences"] for row in report.rows] == list(BATCHES)
    assert report.ratios["throughput per cost over homogeneous, best"] > 2


def test_a_folder_of_a_model_is_one_too() -> None:
    """The demo model's weights, stored in float32: all but norms, and the embedding that is also the head."""
    demo = model_of(str(MODEL_DIR))
    spec = ModelSpec.read(MODEL_DIR)
    stored = sum(path.stat().st_size for path in MODEL_DIR.glob("*.safetensors"))
    assert demo.kv_token_bytes == 2 * 2 * spec.kv_heads * spec.head_dim * spec.layers
    assert demo.weight_bytes == pytest.approx(stored / 2, rel=0.02)
    with pytest.raises(InvalidInput, match="neither a folder"):
        model_of("llama-14b")


def test_what_has_no_room_is_refused() -> None:
    one = Group(device=A100_40G, count=1)
    with pytest.raises(InvalidInput, match="--devices"):
        compare(model("llama-33b"), one, RTX_3090, Rotational(2), sizes=[8], context=512)
    with pytest.raises(InvalidInput, match="fits no host"):
        Homogeneous.best(model("llama-65b"), A100_40G, 100_000_000)
