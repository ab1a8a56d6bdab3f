"""Logs: one JSON object a line, with the request and the session that it is about.

    log = logging.getLogger(__name__)
    with logs.bound(request_id="req-1", session_id="s"):
        log.info("turn committed", extra={"tokens": 17})

What is bound holds for the task (and the tasks it starts); the RPC layer carries it to the services that are
called. A new thread has nothing bound: bind again in it. Fields given in `extra` become fields of the line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from kvcommons.telemetry.floods import FloodFilter
from kvcommons.telemetry.trace import current_traceparent, trace_id

request_id: ContextVar[str] = ContextVar("kvcommons_request_id", default="")
session_id: ContextVar[str] = ContextVar("kvcommons_session_id", default="")

# What every LogRecord has; the rest came by `extra`.
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextlib.contextmanager
def bound(**ids: str) -> Iterator[None]:
    """Binds `request_id` and `session_id` (those given) around the body."""
    variables = {"request_id": request_id, "session_id": session_id}
    tokens = [(variables[name], variables[name].set(value)) for name, value in ids.items()]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            with contextlib.suppress(ValueError):  # an async generator closed in another context
                variable.reset(token)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._service = service
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in (
            ("request_id", request_id.get()),
            ("session_id", session_id.get()),
            ("trace_id", trace_id(current_traceparent())),
        ):
            if value:
                line[name] = value
        line.update((name, value) for name, value in vars(record).items() if name not in _RECORD_FIELDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _not_of_calls_that_ended(record: logging.LogRecord) -> bool:
    """Whether a record is to be logged. grpcio logs an error, and where it came from, for an answer that
    could not be sent since its caller was gone by then: anybody who hangs up would fill the log."""
    kind = record.exc_info[0] if record.name == "grpc._cython.cygrpc" and record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def configure(service: str, instance_id: str, *, level: str = "info", stream: TextIO | None = None) -> None:
    """All of this process's logs as JSON to `stream` (stderr), uncaught exceptions of threads included."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id))
    handler.addFilter(_not_of_calls_that_ended)
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Libraries speak up when something is wrong, not on each call.
    for library in ("aiohttp", "asyncio", "grpc", "aetcd", "opentelemetry", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    threading.excepthook = _log_thread_exception


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    logging.getLogger("kvcommons.thread").critical(
        "a thread died of an exception nobody expected",
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        extra={"dead_thread": args.thread.name if args.thread else ""},
    )
