"""What all requests share, put together once; handlers get it from the application."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvcommons.grammar.grammars import Grammars
from kvcommons.rpc.directory import Directory
from kvcommons.telemetry.trace import Tracer
from services.router.admission.admission import Admission
from services.router.admission.backlog import PromptBacklog
from services.router.admission.classes import ServiceClasses
from services.router.admission.look_ahead import QueueLookAhead
from services.router.admission.quotas import Quotas
from services.router.commons.watch import CommonsWatch
from services.router.config import RouterConfig
from services.router.documents.documents import Documents
from services.router.fleet.fleet import Fleet
from services.router.http.certificate import Certificate
from services.router.http.connections import ConnectionTable
from services.router.http.origins import Origins
from services.router.http.tenants import Tenants
from services.router.metrics import RouterMetrics
from services.router.sessions.copies import RecordCopies
from services.router.sessions.store import SessionStore
from services.router.turn.dispatch import Dispatch
from services.router.turn.idempotency import KeptAnswers
from services.router.turn.rendering import Text
from services.router.turn.sampling import SEED_BITS


def draw_seed() -> int:
    return secrets.randbits(SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    config: RouterConfig
    instance_id: str
    tenants: Tenants
    origins: Origins
    text: Text
    grammars: Grammars
    directory: Directory
    fleet: Fleet
    store: SessionStore
    admission: Admission
    classes: ServiceClasses
    quotas: Quotas
    look_ahead: QueueLookAhead
    dispatch: Dispatch
    answers: KeptAnswers
    documents: Documents
    commons: CommonsWatch
    connections: ConnectionTable[Any]  # of the HTTP server's protocols
    certificate: Certificate | None  # None: HTTP without TLS
    metrics: RouterMetrics
    tracer: Tracer
    started_s: int  # since the epoch
    clock: Callable[[], float] = time.monotonic
    seed: Callable[[], int] = draw_seed
    copies: RecordCopies = field(default_factory=RecordCopies)
    backlog: PromptBacklog = field(default_factory=PromptBacklog)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that outlives its request, and ends before the router does. It is bounded by itself."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self, grace_s: float) -> None:
        """Leaves documents, waits for background work, for `grace_s` each at most, and closes what requests
        used."""
        await asyncio.wait((asyncio.create_task(self.documents.close()),), timeout=grace_s)
        if self._background:
            await asyncio.wait(set(self._background), timeout=grace_s)
        for task in set(self._background):
            task.cancel()
        await self.dispatch.close()
        await self.fleet.close()
        await asyncio.to_thread(self.grammars.close)
