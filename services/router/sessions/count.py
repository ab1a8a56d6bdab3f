"""How many sessions a tenant may have, where the quotas say so."""

from __future__ import annotations

from kvcommons.errors import QuotaExceeded
from kvcommons.pb import kvstore_pb2 as pb
from services.router.http.tenants import Tenant
from services.router.serving import Serving

_PAGE = 1000  # the most that a kvstore lists at once
_PATIENCE_S = 5.0


async def check_room(serving: Serving, tenant: Tenant) -> None:
    """Before a session is made, a branch or a fork too. They are counted where they lie, so that all routers
    and restarts see the same; requests that come at once may each find the last place free. Raises
    QuotaExceeded, StoreUnavailable."""
    limit = serving.quotas.of(tenant.name).sessions
    if limit is None:
        return
    found, after = 0, ""
    while found < limit:
        wanted = pb.ListSessionsRequest(tenant=tenant.name, after=after, limit=min(_PAGE, limit - found))
        reply = await serving.store.list(wanted, patience_s=_PATIENCE_S)
        found += len(reply.sessions)
        if not reply.more:
            break
        after = reply.sessions[-1].session_id
    if found >= limit:
        raise QuotaExceeded(
            f"the tenant {tenant.name!r} has {limit} sessions, and may have no more here: delete some, give "
            "them a ttl_s, or ask the operator for more (quotas)"
        )
