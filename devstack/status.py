"""`kvcommons status`: services, sessions, tiers and debts, as tables."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from devstack.rest import RestClient
from kvcommons.errors import KVCommonsError

REFRESH_S = 1.0
SESSIONS_SHOWN = 10
Json = dict[str, Any]


def status(client: RestClient, *, watch: bool) -> int:
    """Prints the tables once, or until Ctrl-C; the exit status."""
    console = Console()
    try:
        if not watch:
            console.print(_tables(*_ask(client)))
            return 0
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(_answer(client), refresh=True)
                time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0
    except KVCommonsError as error:
        print(f"kvcommons status: {error.message}", file=sys.stderr)
        return 1


def _answer(client: RestClient) -> RenderableType:
    """A stack that is away for a moment is part of what one watches."""
    try:
        return _tables(*_ask(client))
    except KVCommonsError as error:
        return error.message


def _ask(client: RestClient) -> tuple[Json, list[Json]]:
    found: Json = client.get("/v1/status")
    try:
        sessions: list[Json] = client.get(f"/v1/sessions?limit={SESSIONS_SHOWN}")["data"]
    except KVCommonsError:  # the session store is away: the services can still be shown
        sessions = []
    return found, sessions


def _tables(found: Json, sessions: list[Json]) -> Group:
    parts: list[RenderableType] = [_services(found["instances"], found.get("records"))]
    debts = [
        (instance["id"], creditor, blocks)
        for instance in found["instances"]
        for creditor, blocks in instance["debts"].items()
    ]
    if debts:
        parts.append(_debts(debts))
    parts.append(_store(found.get("store"), found.get("records")))
    if sessions:
        parts.append(_sessions(sessions))
    queue = found["queue"]
    models = ", ".join(found["models"]) or "none ready"
    parts.append(f"models: {models}; requests: {queue['running']} running, {queue['waiting']} waiting")
    return Group(*parts)


def _services(instances: list[Json], records: str | None) -> Table:
    table = Table("service", "instance", "state", title="services", title_justify="left")
    for column in ("blocks used", "blocks", "running", "queued", "up"):
        table.add_column(column, justify="right")
    for item in instances:
        total = item["total_blocks"]
        table.add_row(
            item["service"],
            item["id"] if item["heads"] is None else f"{item['id']} ({_part(item['heads'])})",
            _state(item, records),
            str(total - item["free_blocks"]) if total else "",
            str(total) if total else "",
            str(item["running"]),
            str(item["queued"]),
            _span(item["started_at"]),
        )
    return table


def _state(item: Json, records: str | None) -> str:
    if item["unfit"] is not None:
        return f"[red]lends nothing: {escape(item['unfit'])}[/]"
    if item["records"] is not None and item["records"] != records:
        return f"[red]serves nothing: has session records of its own, in the {escape(item['records'])}[/]"
    return "[green]ready[/]" if item["ready"] else "[yellow]not ready[/]"


def _part(heads: Json) -> str:
    return f"heads {heads['number']}/{heads['parts']} of {heads['group']}"


def _debts(debts: list[tuple[str, str, int]]) -> Table:
    table = Table("debtor", "creditor", title="debts", title_justify="left")
    table.add_column("blocks", justify="right")
    for debtor, creditor, blocks in debts:
        table.add_row(debtor, creditor, str(blocks))
    return table


def _store(store: Json | None, records: str | None) -> RenderableType:
    if store is None:
        return "[yellow]the session store is away[/]"
    table = Table("tier", title="session store", title_justify="left")
    for column in ("blocks", "capacity", "used"):
        table.add_column(column, justify="right")
    for tier in ("dram", "disk"):
        blocks, capacity = store[f"{tier}_blocks"], store[f"{tier}_capacity_blocks"]
        table.add_row(tier, str(blocks), str(capacity), f"{blocks / capacity:.0%}" if capacity else "")
    looked_up = store["block_hits"] + store["block_misses"]
    table.caption = (
        f"{store['sessions']} sessions, {store['pending_writes']} blocks on their way to disk, "
        f"{store['block_hits']} of {looked_up} blocks looked up were there, {store['corrupt_blocks']} corrupt"
    )
    if records is not None:
        table.caption += f"; records in the {escape(records)}"
    table.caption_justify = "left"
    return table


def _sessions(sessions: list[Json]) -> Table:
    table = Table("session", "model", title="sessions", title_justify="left")
    for column in ("turns", "last used"):
        table.add_column(column, justify="right")
    for session in sessions:
        turns, used = str(session["version"]), _span(session["last_used_at"])
        table.add_row(session["id"], session["model"] or "", turns, f"{used} ago")
    return table


def _span(since: int) -> str:
    """Time since a Unix time, in its two largest units."""
    seconds = max(0, int(time.time() - since))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller}"
    return f"{seconds} s"
