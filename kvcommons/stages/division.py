"""Which layers each stage has: the first stage decides, by what each layer takes on its machine, and the
others have what it says of itself in the registry (Mnemosyne, section 4.3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcommons.engine.calibration import machine_facts
from kvcommons.engine.kept import Kept
from kvcommons.engine.settings import EngineSettings
from kvcommons.model.layer_ranges import UNEVEN, LayerTimes, ranges_of
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rpc.directory import Directory
from kvcommons.stages.layer_timing import StageWork, measured_times
from kvcommons.stages.settings import StageSettings

log = logging.getLogger(__name__)

LEDGER_S = 2.0  # what the first stage waits for a ledger to say which stages are loaded already
LOOK_S = 1.0  # between looks where the registry does not change


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDivision:
    """The layers of each stage, and what each layer takes, in any one unit."""

    ranges: tuple[range, ...]
    times: LayerTimes
    kept: Kept | None = None  # where the times are; None: they were not asked for

    @classmethod
    def said(cls, counts: Sequence[int], layers: int) -> LayerDivision:
        """By a setting, or by the first stage; each layer takes the same, as far as is known. Raises
        InvalidInput for what is no division of all layers."""
        return cls(ranges=ranges_of(counts, layers), times=LayerTimes(layers=(1.0,) * layers))

    @classmethod
    def of(
        cls,
        engine: EngineSettings,
        shape: StageSettings,
        spec: ModelSpec,
        work: StageWork,
        standing: Sequence[int],
    ) -> LayerDivision:
        """What the first stage decides. `standing`: layers of each stage, as others of the group have them;
        it stays where no other division is much better. Takes some seconds where it measures. Raises
        InvalidInput for more stages than layers, and for a setting that does not divide all of them."""
        if shape.stages == 1 or shape.stage_layers:
            return cls.said(shape.stage_layers or (spec.layers,), spec.layers)
        estimate = work.estimate(spec)
        estimate.divide(shape.stages)  # what cannot be divided is not measured
        file = f"{engine.predictor_file}.layers" if engine.predictor_file else ""
        facts = (
            *machine_facts(engine),
            spec.config,
            engine.dtype,
            engine.products,
            str(shape.tensor),
            str(work),
        )
        kept = Kept.of(file, *facts)
        times = kept.read(_parsed)
        if times is None and engine.calibrate_s:
            times = measured_times(engine, spec, TensorRank(ranks=shape.tensor), work)
            kept.write(asdict(times))
        times = times or estimate
        return cls(ranges=times.division(shape.stages, standing), times=times, kept=kept)

    def measured(self, seconds: Sequence[float]) -> None:
        """What each stage took of many iterations: says so where another division would be better. Where no
        setting divides, the next start has it."""
        times = self.times.corrected(self.ranges, seconds)
        better = times.divide(len(self.ranges))
        gain = times.gain(self.ranges, better)
        if gain > UNEVEN:
            log.info(
                "the stages are uneven: %s %s would let the slowest take %.0f%% less",
                "stage_layers =" if self.kept is None else "the next start divides the layers anew,",
                [len(layers) for layers in better],
                100 * gain,
                extra={"busy_s": [round(took, 3) for took in seconds]},
            )
        if self.kept is not None:
            self.kept.write(asdict(times))


def _parsed(learnt: Any) -> LayerTimes:
    return LayerTimes(
        layers=tuple(map(float, learnt["layers"])),
        embedding=float(learnt["embedding"]),
        head=float(learnt["head"]),
    )


def said_by(instances: Iterable[pb.Instance], group: str) -> tuple[int, ...]:
    """Layers of each stage of a group, as the newest of these instances that knows says; empty where none
    does."""
    known = [one for one in instances if one.stage.group == group and one.stage.division]
    return tuple(max(known, key=lambda one: one.started_ms).stage.division) if known else ()


async def standing_division(directory: Directory, service: str, shape: StageSettings) -> tuple[int, ...]:
    """What the stages beside the first one have loaded already; empty where none has, no ledger says so in
    time, or the settings say it."""
    if shape.said_layers is not None:
        return ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEDGER_S):
            while not directory.connected:
                await asyncio.sleep(LEDGER_S / 40)
    return said_by(directory.instances(f"{service}_stage", ready=False), shape.stage_group)


async def first_stages_division(
    directory: Directory, service: str, shape: StageSettings, *, but: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns once the first stage has said how the layers are divided, and otherwise than `but`."""
    mismatch: tuple[int, ...] = ()
    while True:
        said = said_by(directory.instances(service, ready=False), shape.stage_group)
        if said and len(said) != shape.stages and said != mismatch:
            mismatch = said
            log.warning(
                "stages = %d here, and the first stage of group %r has %d: start all with the same stages",
                shape.stages,
                shape.stage_group,
                len(said),
            )
        elif len(said) == shape.stages and said != tuple(but):
            return said
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await directory.changed()
