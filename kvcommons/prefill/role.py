"""What an engine needs beside itself to compute prompts for decode instances."""

from __future__ import annotations

from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Condemner
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompts import Prompts
from kvcommons.prefill.intake import Intake, PromptStages
from kvcommons.prefill.push import Pusher
from kvcommons.prefill.spread import Holders
from kvcommons.rpc.dialer import UNSECURED, Dialer


class PrefillRole:
    """Connections to where KV goes, and what makes prompts of requests. Made on the event loop."""

    def __init__(
        self,
        core: Core,
        engine: Engine,
        prompts: Prompts,
        *,
        keeper: BlockKeeper,
        condemner: Condemner,
        chunk_tokens: int,
        push_deadline_s: float,
        dialer: Dialer = UNSECURED,
        stages: PromptStages | None = None,
    ) -> None:
        """`stages`: as the intake has them. `push_deadline_s`: of one write, and of a layer's
        attention at holders of a spread prompt."""
        self._pusher = Pusher(
            core.memory,
            core.allocator,
            call_deadline_s=push_deadline_s,
            dialer=dialer,
            heads=core.heads,
        )
        self._holders = Holders(
            core.layout,
            core.backend,
            attend_deadline_s=push_deadline_s,
            heads=core.heads,
            dialer=dialer,
        )
        self.intake = Intake(
            core,
            engine,
            prompts,
            keeper=keeper,
            pusher=self._pusher,
            holders=self._holders,
            condemner=condemner,
            chunk_tokens=chunk_tokens,
            stages=stages,
        )

    def close(self) -> None:
        """After the engine has stopped."""
        self._pusher.stop()
        self._holders.close()
