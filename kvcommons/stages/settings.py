"""The shape of an instance of several processes: prefill's and decode's settings have these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """All processes of an instance have the same, but for `stage` and `rank`."""

    stages: Annotated[int, Ge(1)] = 1  # processes that are one instance, each with a range of the layers
    stage: Annotated[int, Ge(0)] = 0  # which of them this one is; the first, 0, takes requests
    stage_group: str = "stages"  # of an instance's stages, by which they find each other
    stage_layers: tuple[int, ...] = ()  # of each stage; default: by what each layer takes, measured
    stage_deadline_s: Annotated[float, Gt(0)] = 120.0  # of an iteration, through all; then one is lost
    tensor: Annotated[int, Ge(1)] = 1  # processes of each stage, each with a share of heads and MLP columns
    rank: Annotated[int, Ge(0)] = 0  # which of its stage's this one is

    def __post_init__(self) -> None:
        if self.stage >= self.stages:
            raise ValueError(f"stage = {self.stage} of stages = {self.stages}: stages count from 0")
        if self.stage_layers and len(self.stage_layers) != self.stages:
            raise ValueError(
                f"stage_layers = {list(self.stage_layers)} names {len(self.stage_layers)} stages, and stages "
                f"= {self.stages}"
            )
        if self.rank >= self.tensor:
            raise ValueError(f"rank = {self.rank} of tensor = {self.tensor}: ranks count from 0")

    @property
    def members(self) -> int:
        """Processes of the instance."""
        return self.stages * self.tensor

    @property
    def follows(self) -> bool:
        """Whether another process of the instance takes the requests."""
        return self.stage + self.rank > 0

    @property
    def said_layers(self) -> tuple[int, ...] | None:
        """Of each stage, as far as the settings say it; () where there is one. None: the first stage says
        it."""
        return self.stage_layers or (() if self.stages == 1 else None)
