"""A peer's bytes are hostile input: what it makes of good frames reaches no memory but what is meant for it,
and leaves nothing behind. The native path runs under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcommons.attention.native import build, library
from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2 as pb
from tests.contract.plan_cases import LAYERS, Peer, rig, row
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parents[1] / "native" / "fuzz_exchange.cpp"
SANITIZE = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BORDERS = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "probe.cpp").write_text("int main() { return 0; }")
    probe = run([compiler, *SANITIZE, str(folder / "probe.cpp"), "-o", str(folder / "probe")])
    if probe.returncode or run([str(folder / "probe")]).returncode:
        pytest.skip(f"{compiler} has no AddressSanitizer here: {probe.stderr.strip()[-200:]}")
    kernels = [variant for variant in build.variants(platform.machine()) if not variant.assembled]
    units = [(f"kernel-{one.name}", build.SOURCES / "kernel.cpp", one.flags) for one in kernels]
    known = [f"-DKVC_HAS_{one.name}" for one in kernels]
    units += [
        (name, build.SOURCES / f"{name}.cpp", known) for name in ("library", "creditor", "debtor", "team")
    ]
    units.append(("driver", DRIVER, []))
    for name, source, flags in units:
        made = run([compiler, *SANITIZE, *flags, "-c", str(source), "-o", str(folder / f"{name}.o")])
        assert not made.returncode, made.stderr
    objects = [str(folder / f"{name}.o") for name, _, _ in units]
    made = run([compiler, *SANITIZE, *objects, "-o", str(folder / "fuzz")])
    assert not made.returncode, made.stderr
    return folder / "fuzz"


def run(command: Sequence[str], timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(400)
def test_mutated_frames_on_the_native_path(fuzzer: Path, seed: int) -> None:
    done = run([str(fuzzer), str(seed), "4000"])
    assert not done.returncode, f"fuzz_exchange {seed} 4000:\n{done.stderr[-4000:]}"
    served, received = (int(word) for word in done.stdout.split() if word.isdigit())
    assert served > 500, "most frames are good enough to get somewhere"
    assert received > 500


@pytest.mark.skipif(library.chosen() is None, reason="there is no compiled kernel")
@pytest.mark.parametrize("seed", range(4))
def test_mutated_plans_and_layers(socket_folder: Path, seed: int) -> None:
    """A holder answers or hangs up, goes on answering others, and has no pin left."""
    chance = random.Random(seed)
    with rig(socket_folder, transport="unix") as made:
        refs = [made.lend(6) for _ in range(3)]
        rows = [row(ref, 4 + n, 5 + n) for n, ref in enumerate(refs)]
        bystander = made.peer()
        bystander.open(rows[:1])
        for _ in range(150):
            peer = made.peer()
            with contextlib.suppress(OSError, KVCommonsError, AssertionError):
                talk(chance, peer, rows)
            peer.socket.close()
            made.peers.remove(peer)
            bystander.ask(bystander.layer(0))
        assert (bystander.head.lost, bystander.lost()) == (0, {})
        bystander.socket.close()
        wait_until(lambda: made.server.connections == 0)
        assert made.pins() == 0


def talk(chance: random.Random, peer: Peer, rows: Sequence[object]) -> None:
    peer.socket.settimeout(0.05)
    peer.open(rows)  # type: ignore[arg-type]
    for step in range(4):
        kind = chance.randrange(4)
        if kind == 0:
            frame = peer.wrap(pb.DataRequest(deadline_ms=50, open_plan=hostile_plan(chance, rows)))
        elif kind == 1:
            change = pb.ChangePlan(
                plan=chance.choice((1, 2)),
                revision=chance.choice((1, 1, 2, 9)),
                step=chance.choice((step, *BORDERS)),
                removed=[chance.randrange(5) for _ in range(chance.randrange(3))],
            )
            for one in hostile_plan(chance, rows).rows:
                change.placed.add(index=chance.randrange(5), row=one)
            frame = peer.wrap(pb.DataRequest(deadline_ms=50, change_plan=change))
        else:
            frame = peer.layer(chance.randrange(LAYERS + 1), chance.choice((step, *BORDERS)), deadline_ms=50)
        peer.send(mutated(chance, frame) if chance.random() < 0.5 else frame)
        if kind > 1:
            peer.receive()


def hostile_plan(chance: random.Random, rows: Sequence[object]) -> pb.OpenPlan:
    plan = pb.OpenPlan(plan=chance.choice((1, 2, 0xFFFFFFFF)), step=chance.choice(BORDERS))
    for one in rows:
        message = one.message()  # type: ignore[attr-defined]
        if chance.random() < 0.5:
            field = chance.choice(("handle", "generation", "first_block", "queries", "position", "length"))
            setattr(message, field, chance.choice(BORDERS))
        plan.rows.append(message)
    return plan


def mutated(chance: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(len(changed), 80))
        how = chance.randrange(3)
        if how == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            changed[at : at + 4] = chance.choice(BORDERS).to_bytes(4, "little")
        else:
            del changed[at + 1 :]
    return bytes(changed)
