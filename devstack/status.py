"""`kvcommons status`: services, sessions, tiers and debts, as tables."""

from __future__ import annotations

import sys
import time
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from devstack.rest import RestClient
from kvcommons.errors import KVCommonsError

REFRESH_S = 1.0
# Heartbeats come every half second, and a ledger tells of them within two more.
STALE_S = 4.0
SESSIONS_SHOWN = 10
ID_COLUMNS_MAX = 48  # of a session's id in one line
SESSIONS_ASKED = 100  # what a page holds at most
Json = dict[str, Any]


def status(client: RestClient, *, watch: bool) -> int:
    """Prints the tables once, or until Ctrl-C; the exit status."""
    console = Console()
    try:
        if not watch:
            console.print(_tables(*_ask(client)))
            return 0
        if console.is_terminal:
            _redraw(client, console)
        while True:
            _print(_answer(client), console)
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0
    except KVCommonsError as error:
        print(f"kvcommons status: {error.message}", file=sys.stderr)
        return 1


def _redraw(client: RestClient, console: Console) -> NoReturn:
    """In place, on a terminal."""
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_answer(client), refresh=True)
            time.sleep(REFRESH_S)


def _print(shown: RenderableType, console: Console) -> None:
    """One after another, each with its time: what no terminal shows is read later, or by a program."""
    console.print(time.strftime("%Y-%m-%dT%H:%M:%S%z"), highlight=False)
    console.print(shown)
    console.print()
    console.file.flush()


def _answer(client: RestClient) -> RenderableType:
    """A stack that is away for a moment is part of what one watches."""
    try:
        return _tables(*_ask(client))
    except KVCommonsError as error:
        return error.message


def _ask(client: RestClient) -> tuple[Json, Json]:
    """What the router tells of the stack, and a page of sessions; `total`: of all, where that is known."""
    found: Json = client.get("/v1/status")
    try:
        sessions: Json = client.get(f"/v1/sessions?limit={SESSIONS_ASKED}")
    except KVCommonsError:  # the session store is away: the services can still be shown
        sessions = {"data": [], "has_more": False}
    store = found.get("store")
    # The store counts all tenants' sessions. Where no key is needed there is one tenant.
    total = len(sessions["data"]) if not sessions["has_more"] else None
    if total is None and store is not None and not client.keyed:
        total = store["sessions"]
    return found, sessions | {"total": total}


def _tables(found: Json, sessions: Json) -> Group:
    parts: list[RenderableType] = [_services(found["instances"], found.get("records"))]
    debts = [
        (instance["id"], creditor, blocks)
        for instance in found["instances"]
        for creditor, blocks in instance["debts"].items()
    ]
    if debts:
        parts += ["", _debts(debts)]
    parts += ["", _store(found.get("store"), found.get("records"))]
    if sessions["data"]:
        parts += ["", _sessions(sessions["data"], sessions["total"])]
    queue = found["queue"]
    models = ", ".join(map(escape, found["models"])) or "none ready"
    parts += ["", f"models: {models}; requests: {queue['running']} running, {queue['waiting']} waiting"]
    return Group(*parts)


def _table(title: str, *names: str) -> Table:
    """Columns with what people type (the names) are never cut: what does not fit goes on in the next line."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _figures(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _services(instances: list[Json], records: str | None) -> Group:
    """Ids begin with the name of their service, unless a setting says otherwise."""
    table = _table("services", "instance")
    table.add_column("state", no_wrap=True)
    _figures(table, "blocks", "running", "queued", "up")
    reasons = []
    for item in instances:
        name = item["id"]
        named = name if name.startswith(item["service"]) else f"{item['service']} {name}"
        state, reason = _state(item, records)
        if reason:
            reasons.append(escape(f"{name}: {reason}"))
        if (silent_s := item.get("silent_s")) is not None and silent_s > STALE_S:
            reasons.append(escape(f"{name}: silent, these are its figures of {silent_s:.0f} s ago"))
        if item["heads"] is not None:
            reasons.append(escape(f"{name}: {_part(item['heads'])}"))
        if item.get("products"):
            reasons.append(escape(f"{name}: products by {item['products']}"))
        total = item["total_blocks"]
        table.add_row(
            escape(named),
            state,
            f"{total - item['free_blocks']}/{total}" if total else "",
            str(item["running"]),
            str(item["queued"]),
            _span(item["started_at"]),
        )
    return Group(table, *reasons)


def _state(item: Json, records: str | None) -> tuple[str, str]:
    """In a word, and why where it needs a sentence."""
    if item["unfit"] is not None:
        return "[red]unfit[/]", f"lends nothing: {item['unfit']}"
    if item["records"] is not None and item["records"] != records:
        return "[red]unfit[/]", f"serves nothing: has session records of its own, in the {item['records']}"
    return ("[green]ready[/]" if item["ready"] else "[yellow]not ready[/]"), ""


def _part(heads: Json) -> str:
    return f"heads {heads['number']}/{heads['parts']} of {heads['group']}"


def _debts(debts: list[tuple[str, str, int]]) -> Table:
    table = _table("debts", "debtor", "creditor")
    _figures(table, "blocks")
    for debtor, creditor, blocks in debts:
        table.add_row(escape(debtor), escape(creditor), str(blocks))
    return table


def _store(store: Json | None, records: str | None) -> RenderableType:
    if store is None:
        return "[yellow]the session store is away[/]"
    table = _table("session store", "tier")
    _figures(table, "blocks", "capacity", "used")
    for tier in ("dram", "disk"):
        blocks, capacity = store[f"{tier}_blocks"], store[f"{tier}_capacity_blocks"]
        table.add_row(tier, str(blocks), str(capacity), f"{blocks / capacity:.0%}" if capacity else "")
    looked_up = store["block_hits"] + store["block_misses"]
    facts = (
        f"{store['sessions']} sessions, {store['pending_writes']} blocks on their way to disk, "
        f"{store['block_hits']} of {looked_up} blocks looked up were there, {store['corrupt_blocks']} corrupt"
    )
    return Group(table, escape(facts if records is None else f"{facts}; records in the {records}"))


def _sessions(sessions: list[Json], total: int | None) -> Group:
    """Of a page, which has the first ones by their ids, those that were used last. `total`: of all sessions;
    None where only the server could count them."""
    table = _table("sessions", "session", "model")
    # The model gives way first: an id in one piece is what people copy.
    table.columns[0].min_width = min(ID_COLUMNS_MAX, max(len(session["id"]) for session in sessions))
    _figures(table, "turns", "last used")
    shown = sorted(sessions, key=lambda session: session["last_used_at"], reverse=True)[:SESSIONS_SHOWN]
    for session in shown:
        turns, used = str(session["version"]), _span(session["last_used_at"])
        table.add_row(escape(session["id"]), escape(session["model"] or ""), turns, f"{used} ago")
    if total is None:
        left_out = f"more than {len(sessions) - len(shown)}"
    elif total > len(shown):
        left_out = str(total - len(shown))
    else:
        return Group(table)
    return Group(table, f"not shown: {left_out} (GET /v1/sessions lists all)")


def _span(since: int) -> str:
    """Time since a Unix time, in its two largest units."""
    seconds = max(0, int(time.time() - since))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // part}{smaller}"
    return f"{seconds}s"
