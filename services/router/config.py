"""The router's settings: table `[router]` of kvcommons.toml."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from kvcommons.config import Addresses, Node
from kvcommons.errors import InvalidInput
from services.router.admission.classes import ClassObjectives, ServiceClasses
from services.router.admission.quotas import Quota
from services.router.admission.scheduling import OVERTAKES_MAX, scheduling
from services.router.answer.formats import check_tool_format
from services.router.turn.volatile import check_mode

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Each field with its reason; defaults suit one machine."""

    node: Node  # `listen` serves gRPC health
    ledger: Addresses  # of its replicas
    model: str  # folder or hub id: the router reads tokenizer and chat template from it, never weights
    bind: str = "127.0.0.1"  # anything but loopback needs api_keys
    port: int = 8000  # 0: any free one
    # File: a line per key, "tenant key [operator]"; none: one tenant, loopback only.
    api_keys: str | None = None
    secret_file: str | None = None  # root of the tenants' salts; needed with api_keys
    # PEM: a private key of Ed25519, by which calls say for which tenant they are made. None: unsigned.
    tenant_key: str | None = None
    tls_cert: str | None = None  # a PEM file: HTTPS instead of HTTP; read again when it changes
    tls_key: str | None = None  # the certificate's key, likewise; one is nothing without the other
    # Web pages that may call from a browser: "https://chat.example.org", or "*" for all; none by default.
    cors_origins: tuple[str, ...] = ()
    page: bool = True  # the web page at /; it needs no key, and asks for one; false: 404
    # Names besides those of loopback under which it is called without api_keys, as by a proxy of this
    # machine; "*" for all.
    allowed_hosts: tuple[str, ...] = ()
    policy: str = "slack"  # of the request queue; or fcfs, fpf, relaxed_fpf, bounded_fpf
    overtakes_max: int = OVERTAKES_MAX  # with bounded_fpf: how many later requests may start before one
    # By name; see docs/service-classes.md. {"priority": {"ttft_s": 1.0, "tbt_s": 0.1, "unmet": "refuse"}}
    service_classes: dict[str, ClassObjectives] = field(default_factory=dict)
    # By tenant ("*": those that are not named): the classes that it may ask for, first the one it has if it
    # does not ask; none: each may ask for all.
    entitlements: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # How the model writes calls of tools: found from its chat template, or hermes, llama3, mistral,
    # mistral_named, generic (docs/tools.md).
    tool_format: str = "auto"
    # Of a request's body, of which nobody knows: "refuse" with 400; or "ignore", and name them in the header
    # X-Ignored-Fields.
    unknown_fields: str = "refuse"
    # Of a system prompt, lines that clients write anew for each request (billing, the time to the second):
    # "keep" them where they are, "move" them behind all that is cached, or "drop" them. The answer's header
    # X-Volatile-Lines says what was done (docs/apis.md).
    volatile_lines: str = "keep"
    # By tenant ("*": each of those that are not named): {"alice": {"requests_per_minute": 60}}; see
    # docs/security.md.
    quotas: dict[str, Quota] = field(default_factory=dict)
    look_ahead_jobs: int = 1024  # of those that wait, so many next ones are hinted to the kvstore; 0: none
    max_running: int = 64  # choices under way at once; more wait in the queue
    max_queue: int = 1024  # choices that wait; more are answered 429
    max_choices: int = 16  # n times prompts of one request
    max_documents: int = 4  # computed at once for POST /v1/sessions/{id}/prefill; more are answered 429
    document_part_s: float = 5.0  # so long a part of a document computes; chat gets its memory in between
    document_patience_s: float = 3600.0  # how long a document may get no further before it is given up
    # Reading a body holds up every stream, by up to 10 ms a megabyte; this is a million tokens of text.
    max_body_bytes: int = 4 * 1024 * 1024
    truncation_ratio: float = 0.5  # of the context window, that goes when a session with "auto" does not fit
    replay_max: float = 4.0  # of prompts: at most so much is computed to make KV again behind truncations
    max_connections: int = 4096  # of clients; fewer where the process may not open so many files
    # Of one address (IPv6: one /64 network). Behind a proxy all clients are one: set it to max_connections
    # there.
    max_connections_per_address: int = 1024
    head_s: float = 10.0  # from the beginning of a connection or request until its headers are there
    body_s: float = 60.0  # from the headers until the body is there
    request_deadline_s: float = 600.0  # a request in all, its queueing included
    resume_deadline_s: float = 60.0  # how long a turn may go without a new token while its instances fail
    client_stall_s: float = 60.0  # a client that reads nothing of its answer for so long loses its turn
    stall_s: float = 20.0  # a decode stream that is silent for so long is taken for dead
    commit_deadline_s: float = 30.0  # how long a commit is tried again while the kvstore is away
    durable_wait_ms: int = 2000  # how long a commit waits for the turn's KV to be on disk
    # In memory, of answers to requests with an Idempotency-Key that are in no session.
    idempotency_bytes: int = 64 << 20
    idempotency_s: float = 3600.0  # how long such an answer is kept
    # Of a turn; renewed each third of it. The kvstore grants none that is longer than this bound.
    lease_ms: Annotated[int, Ge(1), Le(600_000)] = 15_000

    def __post_init__(self) -> None:
        """Raises InvalidInput for settings that cannot be served."""
        scheduling(self.policy)  # raises for an unknown one
        ServiceClasses(self.service_classes, self.entitlements)  # raises for what is not there
        check_tool_format(self.tool_format)
        if self.unknown_fields not in ("refuse", "ignore"):
            raise InvalidInput(
                f"router unknown_fields is refuse or ignore, not {self.unknown_fields!r}",
                param="unknown_fields",
            )
        check_mode(self.volatile_lines)
        if self.api_keys is None and not is_loopback(self.bind):
            raise InvalidInput(
                f"without api_keys the router serves anyone who can reach it, so it binds to loopback only, "
                f"not to {self.bind!r}: set api_keys (KVCOMMONS_ROUTER__API_KEYS=FILE), or bind to 127.0.0.1",
                param="bind",
            )
        if self.api_keys is not None and self.secret_file is None:
            raise InvalidInput(
                "api_keys without secret_file: tenants' block identities are keyed by a secret; write some "
                "random bytes to a file and set secret_file (KVCOMMONS_ROUTER__SECRET_FILE=FILE)",
                param="secret_file",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise InvalidInput(
                f"{given} without {missing}: HTTPS needs a certificate and its key, two PEM files",
                param=missing,
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidInput(
                    f"router cors_origins: {origin!r} is no origin: write scheme, host and port as a browser "
                    'does, "https://chat.example.org" without a path, or "*" for all',
                    param="cors_origins",
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise InvalidInput(
                    f"router allowed_hosts: {host!r} is no host's name: write it without scheme and port, "
                    '"kv.example.org", or "*" for all',
                    param="allowed_hosts",
                )
        sizes = (
            "max_running",
            "max_queue",
            "max_choices",
            "max_documents",
            "max_body_bytes",
            "idempotency_bytes",
        )
        for name in (*sizes, "max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"router {name} must be at least 1", param=name)
        for name in ("overtakes_max", "look_ahead_jobs"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"router {name} must be at least 0", param=name)
        if not 0 < self.truncation_ratio <= 1:
            raise InvalidInput("router truncation_ratio lies between 0 and 1", param="truncation_ratio")
        if not self.replay_max >= 0:
            raise InvalidInput("router replay_max must be at least 0", param="replay_max")
        deadlines = (
            "request_deadline_s",
            "resume_deadline_s",
            "stall_s",
            "client_stall_s",
            "head_s",
            "body_s",
            "document_part_s",
            "document_patience_s",
            "idempotency_s",
        )
        for name in (*deadlines, "commit_deadline_s"):
            if not getattr(self, name) > 0:  # nor nan, which TOML can write
                raise InvalidInput(f"router {name} must be more than 0", param=name)


def is_loopback(bind: str) -> bool:
    """Whether only processes of this machine can reach `bind`."""
    if bind == "localhost":
        return True
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return False
