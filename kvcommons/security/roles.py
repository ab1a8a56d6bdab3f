"""What services answer as. A certificate names its service's roles as DNS names, `decode.kvcommons`; whoever
dials a service holds it to the role that it needs there. Addresses are in no certificate: instances register
them when they start, wherever that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

Role: TypeAlias = Literal[
    "router",
    "ledger",
    "kvstore",
    "prefill",
    "decode",
    "attention-pool",
    "holder",
    "stage",
    "etcd",
    "etcd-client",
]

_SUFFIX = ".kvcommons"
# The files of the router's key that signs tenants, and who has the one that verifies.
TENANTS_KEY, TENANTS_PUBLIC = "tenants.key", "tenants.pub"
VERIFYING = ("kvstore", "prefill", "decode")
# By service. A decode instance may compute prompts, too, and it is a holder as an attention pool is.
ROLES: Mapping[str, tuple[Role, ...]] = {
    "router": ("router",),
    "ledger": ("ledger", "etcd-client"),
    "kvstore": ("kvstore",),
    "prefill": ("prefill", "stage"),
    "decode": ("decode", "prefill", "holder", "stage"),
    "attention_pool": ("attention-pool", "holder"),
    "etcd": ("etcd", "etcd-client"),
}


def name_of(role: Role) -> str:
    """As a certificate has it."""
    return role + _SUFFIX


def own_name(service: str) -> str:
    """The role that no other service has, as its certificate names it."""
    return name_of(ROLES[service][0])


def names_a_service(names: Iterable[str]) -> bool:
    """Whether a certificate with these DNS names is a service's: an authority may have signed others, too."""
    return any(name.endswith(_SUFFIX) for name in names)
