"""An asyncio event loop in simulated time, for the classes that serve: one for each simulated process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from kvcommons.errors import KVCommonsError

Event = Callable[[], None]
Asked = tuple[Any, ...]  # arguments of Proc.call


class _Blocked(BaseException):
    """A thread waits for the answer to a call."""

    def __init__(self, asked: Asked, timeout_s: float) -> None:
        self.asked = asked
        self.timeout_s = timeout_s


class Due(Protocol):
    """An event that is to happen."""

    cancelled: bool


class Timer(asyncio.TimerHandle):
    __slots__ = ("event",)

    event: Due

    def happen(self) -> None:
        if not self.cancelled():  # while its process was paused
            self._run()


class Thread:
    """What runs beside the event loop (asyncio.to_thread). Where it waits for an answer it is left, and when
    that has come it begins anew with all that it was answered: nothing in it may matter twice."""

    def __init__(self) -> None:
        self.writes: list[int] = []  # physical blocks that it writes to
        self.answers: list[Any] = []
        self._given = 0

    def ask(self, *asked: Any, timeout_s: float) -> Any:
        """Returns what the call returned, or raises what it raised. Called in the thread."""
        if self._given == len(self.answers):
            raise _Blocked(asked, timeout_s)
        answer = self.answers[self._given]
        self._given += 1
        if isinstance(answer, KVCommonsError):
            raise answer
        return answer

    async def run(self, work: Callable[[], Any], call: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        while True:
            self._given = 0
            try:
                return work()
            except _Blocked as blocked:
                asked, timeout_s = blocked.asked, blocked.timeout_s
            try:
                self.answers.append(await call(*asked, timeout_s=timeout_s))
            except KVCommonsError as error:
                self.answers.append(error)


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs what is ready when an event of its process happens (`run`), and never otherwise."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        after: Callable[[float, Event], Due],
        call: Callable[..., Coroutine[Any, Any, Any]],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`after` has an event happen in so many seconds, `call` asks other processes, for threads, and
        `failed` is told of what must not come out of a task or a callback."""
        self.time = clock  # type: ignore[method-assign]
        self.threads: list[Thread] = []  # under way
        self.thread: Thread | None = None  # that runs
        self._after = after
        self._call = call
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def run(self, event: Event) -> None:
        """An event of the process, and all that follows at once."""
        asyncio._set_running_loop(self)
        try:
            event()
            ready = self._ready
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """Ends all tasks, so that nothing is left to the garbage collector, which would run their ends at any
        time."""
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            self.run(lambda: None)

    # ---- what asyncio asks of a loop

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = Timer(self.time() + delay, callback, args, self, context)
        timer.event = self._after(max(0.0, delay), timer.happen)
        return timer

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Cancelling what is returned does not end the thread."""
        outcome = self.create_future()

        def ended(task: asyncio.Task[Any]) -> None:
            self.threads.remove(thread)
            if not outcome.done() and not task.cancelled():
                error = task.exception()
                if error is None:
                    outcome.set_result(task.result())
                else:
                    outcome.set_exception(error)

        def work() -> Any:
            self.thread = thread
            try:
                return func(*args)
            finally:
                self.thread = None

        thread = Thread()
        self.threads.append(thread)
        self.create_task(thread.run(work, self._call)).add_done_callback(ended)
        return outcome

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raises is told; that nobody asked for the outcome of a future is not."""
        if "handle" in context and "exception" in context:
            self._failed(context["exception"])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        assert isinstance(handle, Timer)
        handle.event.cancelled = True

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, KVCommonsError):
                self._failed(error)
