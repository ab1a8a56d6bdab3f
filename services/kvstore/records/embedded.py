"""Records in this kvstore's own RocksDB."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from services.kvstore.records.interface import RecordsObserver
from services.kvstore.sessions import Sessions

P = ParamSpec("P")
T = TypeVar("T")


def _on_executor(
    call: Callable[Concatenate[Sessions, P], T],
) -> Callable[Concatenate[EmbeddedRecords, P], Coroutine[Any, Any, T]]:
    """The method of `EmbeddedRecords` that is this one of `Sessions`."""

    async def called(self: EmbeddedRecords, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work = partial(copy_context().run, call, self._sessions, *args, **kwargs)  # for the ids in log lines
        began_s = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._observer.called(call.__name__, time.monotonic() - began_s)

    return called


class EmbeddedRecords:
    """`Records` over `Sessions`, whose calls block and therefore run on the executor.

    A caller that is cancelled leaves its call to go on to its end.
    """

    def __init__(
        self, sessions: Sessions, executor: Executor, observer: RecordsObserver | None = None
    ) -> None:
        self._sessions = sessions
        self._executor = executor
        self._observer = observer or RecordsObserver()

    create = _on_executor(Sessions.create)
    get = _on_executor(Sessions.get)
    page = _on_executor(Sessions.page)
    delete = _on_executor(Sessions.delete)
    fork = _on_executor(Sessions.fork)
    begin = _on_executor(Sessions.begin)
    renew = _on_executor(Sessions.renew)
    commit = _on_executor(Sessions.commit)
    abandon = _on_executor(Sessions.abandon)
    documents = _on_executor(Sessions.documents)
    sweep = _on_executor(Sessions.sweep)
    close = _on_executor(Sessions.close)

    async def count(self) -> int:
        return self._sessions.count
