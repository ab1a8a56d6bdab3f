"""Every error that kvcommons raises on purpose, and how it crosses gRPC and HTTP.

    KVCommonsError
    ├── InvalidInput                 the caller's mistake; `param` names the field
    │   ├── ContextLengthExceeded
    │   ├── UnsupportedParameter     known to the API, not built (yet)
    │   └── MethodNotAllowed         of a path that has others
    ├── Unauthenticated
    ├── PermissionDenied
    ├── NotFound
    │   ├── ModelNotFound
    │   └── SessionNotFound
    ├── Conflict                     the state moved on under the caller
    │   ├── TurnInProgress
    │   ├── VersionConflict
    │   ├── AlreadyExists
    │   ├── IdempotencyInProgress    the request that a key stands for has not ended
    │   └── UnknownPlan              its creditor has the plan no more: open it again
    ├── TooLarge
    ├── Unprocessable
    │   └── IdempotencyKeyReused     a key that stood for another request
    ├── Overloaded                   a bounded queue or memory is full; retry later
    │   └── CapacityExhausted        no free blocks
    ├── QuotaExceeded                a tenant has used what it may
    ├── Unavailable                  a peer cannot be reached, or is not ready
    │   ├── Loading
    │   ├── StoreUnavailable
    │   └── UntrustedPeer            it cannot show that it is a service of this stack, or does not believe us
    ├── DeadlineExceeded
    ├── DataLoss                     bytes are there and wrong, or KV that should be there is gone
    │   └── StaleEpoch               a handle of a holder that has restarted, or of a lease that ran out
    └── Internal

One table (`_TABLE`) maps `code` to class, gRPC status, HTTP status and OpenAI's `type`. An error raised in
one service arrives in another as the same class: `to_detail` and `from_detail` carry it.
"""

from __future__ import annotations

from typing import ClassVar, Self, cast

import grpc

from kvcommons.pb import common_pb2 as pb

# Trailing metadata key under which an ErrorDetail travels.
METADATA_KEY = "kvcommons-error-bin"


class KVCommonsError(Exception):
    """Base of all. `message` is for people: it says what is wrong and what to do.

    `param` names the request field at fault; `retry_after_ms` is set where waiting helps.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def grpc_status(self) -> grpc.StatusCode:
        return _TABLE[self.code][1]

    @property
    def http_status(self) -> int:
        return _TABLE[self.code][2]

    @property
    def type(self) -> str:
        """OpenAI's `error.type`."""
        return _TABLE[self.code][3]

    def to_detail(self) -> pb.ErrorDetail:
        return pb.ErrorDetail(
            code=self.code, message=self.message, param=self.param or "", retry_after_ms=self.retry_after_ms
        )


class InvalidInput(KVCommonsError):
    code = "invalid_value"


class ContextLengthExceeded(InvalidInput):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, window: int, however: str, *, param: str) -> Self:
        """`window`: tokens. It begins as OpenAI's does: clients look for these words, and for the number."""
        return cls(f"This model's maximum context length is {window} tokens. However, {however}", param=param)


class UnsupportedParameter(InvalidInput):
    code = "unsupported_parameter"


class MethodNotAllowed(InvalidInput):
    code = "method_not_allowed"


class Unauthenticated(KVCommonsError):
    code = "invalid_api_key"


class PermissionDenied(KVCommonsError):
    code = "permission_denied"


class NotFound(KVCommonsError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class Conflict(KVCommonsError):
    code = "conflict"


class TurnInProgress(Conflict):
    code = "turn_in_progress"


class VersionConflict(Conflict):
    code = "version_conflict"


class AlreadyExists(Conflict):
    code = "already_exists"


class IdempotencyInProgress(Conflict):
    code = "idempotency_in_progress"


class UnknownPlan(Conflict):
    code = "unknown_plan"


class TooLarge(KVCommonsError):
    code = "request_too_large"


class Unprocessable(KVCommonsError):
    code = "unprocessable_entity"


class IdempotencyKeyReused(Unprocessable):
    code = "idempotency_key_reused"


class Overloaded(KVCommonsError):
    code = "overloaded"


class CapacityExhausted(Overloaded):
    code = "capacity_exhausted"


class QuotaExceeded(KVCommonsError):
    code = "quota_exceeded"


class Unavailable(KVCommonsError):
    code = "unavailable"


class Loading(Unavailable):
    code = "loading"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class UntrustedPeer(Unavailable):
    code = "untrusted_peer"


class DeadlineExceeded(KVCommonsError):
    code = "deadline_exceeded"


class DataLoss(KVCommonsError):
    code = "data_loss"


class StaleEpoch(DataLoss):
    code = "stale_epoch"


class Internal(KVCommonsError):
    code = "internal_error"


_S = grpc.StatusCode
_INVALID = "invalid_request_error"
_SERVER = "server_error"

# code: class, gRPC status, HTTP status, OpenAI's type
_TABLE: dict[str, tuple[type[KVCommonsError], grpc.StatusCode, int, str]] = {
    "invalid_value": (InvalidInput, _S.INVALID_ARGUMENT, 400, _INVALID),
    "context_length_exceeded": (ContextLengthExceeded, _S.INVALID_ARGUMENT, 400, _INVALID),
    "unsupported_parameter": (UnsupportedParameter, _S.UNIMPLEMENTED, 400, _INVALID),
    "method_not_allowed": (MethodNotAllowed, _S.UNIMPLEMENTED, 405, _INVALID),
    "invalid_api_key": (Unauthenticated, _S.UNAUTHENTICATED, 401, "authentication_error"),
    "permission_denied": (PermissionDenied, _S.PERMISSION_DENIED, 403, "permission_error"),
    "not_found": (NotFound, _S.NOT_FOUND, 404, _INVALID),
    "model_not_found": (ModelNotFound, _S.NOT_FOUND, 404, _INVALID),
    "session_not_found": (SessionNotFound, _S.NOT_FOUND, 404, _INVALID),
    "conflict": (Conflict, _S.ABORTED, 409, _INVALID),
    "turn_in_progress": (TurnInProgress, _S.ABORTED, 409, _INVALID),
    "version_conflict": (VersionConflict, _S.ABORTED, 409, _INVALID),
    "already_exists": (AlreadyExists, _S.ALREADY_EXISTS, 409, _INVALID),
    "idempotency_in_progress": (IdempotencyInProgress, _S.ABORTED, 409, _INVALID),
    "unknown_plan": (UnknownPlan, _S.ABORTED, 409, _INVALID),
    "request_too_large": (TooLarge, _S.INVALID_ARGUMENT, 413, _INVALID),
    "unprocessable_entity": (Unprocessable, _S.INVALID_ARGUMENT, 422, _INVALID),
    "idempotency_key_reused": (IdempotencyKeyReused, _S.INVALID_ARGUMENT, 422, _INVALID),
    "overloaded": (Overloaded, _S.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    "capacity_exhausted": (CapacityExhausted, _S.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    "quota_exceeded": (QuotaExceeded, _S.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    "unavailable": (Unavailable, _S.UNAVAILABLE, 503, _SERVER),
    "loading": (Loading, _S.UNAVAILABLE, 503, _SERVER),
    "store_unavailable": (StoreUnavailable, _S.UNAVAILABLE, 503, _SERVER),
    "untrusted_peer": (UntrustedPeer, _S.UNAUTHENTICATED, 503, _SERVER),
    "deadline_exceeded": (DeadlineExceeded, _S.DEADLINE_EXCEEDED, 503, _SERVER),
    "data_loss": (DataLoss, _S.DATA_LOSS, 500, _SERVER),
    "stale_epoch": (StaleEpoch, _S.DATA_LOSS, 500, _SERVER),
    "internal_error": (Internal, _S.INTERNAL, 500, _SERVER),
}

# For peers that fail without a detail (a dead process, a proxy): status to the class that callers can act on.
_BY_STATUS: dict[grpc.StatusCode, type[KVCommonsError]] = {
    _S.UNAVAILABLE: Unavailable,
    _S.DEADLINE_EXCEEDED: DeadlineExceeded,
    _S.CANCELLED: Unavailable,
    _S.RESOURCE_EXHAUSTED: Overloaded,
    _S.INVALID_ARGUMENT: InvalidInput,
    _S.NOT_FOUND: NotFound,
    _S.UNAUTHENTICATED: Unauthenticated,
    _S.PERMISSION_DENIED: PermissionDenied,
    _S.ABORTED: Conflict,
    _S.ALREADY_EXISTS: AlreadyExists,
    _S.DATA_LOSS: DataLoss,
    _S.UNIMPLEMENTED: UnsupportedParameter,
}


def from_detail(detail: pb.ErrorDetail) -> KVCommonsError:
    """The error that a peer raised; a code from a newer peer becomes Internal."""
    cls = _TABLE[detail.code][0] if detail.code in _TABLE else Internal
    return cls(detail.message, param=detail.param or None, retry_after_ms=detail.retry_after_ms)


def from_grpc(error: grpc.RpcError) -> KVCommonsError:
    """The error that a peer raised, or, where it could not raise one, the class its status stands for."""
    metadata = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in cast("tuple[tuple[str, str | bytes], ...]", metadata or ()):
        if key == METADATA_KEY and isinstance(value, bytes):
            return from_detail(pb.ErrorDetail.FromString(value))
    status = error.code() if hasattr(error, "code") else _S.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    return _BY_STATUS.get(status, Internal)(details or status.name)
