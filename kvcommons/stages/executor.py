"""The first stage's iterations: as soon as a chunk has left it, it computes the next one."""

from __future__ import annotations

from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer, Inline, Work
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.stages.group import StageGroup
from kvcommons.stages.iteration import StageIteration


class Pipelined(Inline):
    """Prompts only: no sequence generates in stages yet."""

    def __init__(self, core: Core, composer: Composer, group: StageGroup) -> None:
        super().__init__(composer)
        self._core = core
        self._group = group

    def advance(self, work: Work) -> bool:
        spans = work.spans(beside=IterationWork()) if self._group.takes_more() else ()
        if not spans:
            work.idle()
            return False
        iteration = StageIteration(self._core, spans)
        tokens = self.run(work, iteration)
        self._group.pass_on(iteration)
        work.take_results(iteration, tokens)
        return True
