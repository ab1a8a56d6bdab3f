"""`kvcommons bench records`: what turns cost whose session records are in a database, beside records in the
kvstore's own folder.

Three real kvstores: one with its folder, two on the database that `--records` names. Turns are taken at the
folder and at the database in turn, at the two kvstores of the database one after the other, over the calls
that a router makes which has taken the turns before, too: it knows the session, and names the blocks that
are new. KV itself is left out.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from statistics import median

import grpc

from benchmarks.kvstore_child import KvstoreChild
from benchmarks.plot import panels
from benchmarks.report import Report, Row, p50
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import kvstore_pb2_grpc as rpc

Progress = Callable[[str], None]
Kvstores = Sequence[rpc.SessionsStub]

CALL_S = 30.0
LEASE_MS = 60_000
MODEL = b"records".ljust(32, b".")
BLOCK_TOKENS = 16
NEW_TOKENS = 100  # of a turn, question and answer
PAGE = 100
WARM_UP = 5


class Session:
    """A conversation that takes its turns at several kvstores, one after the other."""

    def __init__(self, kvstores: Kvstores, name: str) -> None:
        self._kvstores = itertools.cycle(kvstores)
        self.name = name
        self._last_turn_id = ""
        self._tokens = 0

    def turn(self, new_tokens: int) -> tuple[float, float]:
        """Seconds of its begin and of its commit."""
        kept = self._tokens // BLOCK_TOKENS
        self._tokens += new_tokens
        new_ids = [
            blake2b(f"{self.name} {number}".encode(), digest_size=32).digest()
            for number in range(kept, self._tokens // BLOCK_TOKENS)
        ]
        kvstore, turn_id = next(self._kvstores), f"{self.name} {self._tokens}"
        began_s = time.monotonic()
        begun = kvstore.BeginTurn(
            pb.BeginTurnRequest(
                tenant="bench",
                session_id=self.name,
                turn_id=turn_id,
                owner="bench",
                lease_ms=LEASE_MS,
                known_turn_id=self._last_turn_id,
            ),
            timeout=CALL_S,
        )
        assert begun.after_known == bool(self._last_turn_id)
        commit = pb.CommitTurnRequest(
            tenant="bench",
            session_id=self.name,
            turn_id=turn_id,
            fencing=begun.fencing,
            expected_version=begun.record.version,
            model=MODEL,
            model_name="bench",
            new_tokens=range(new_tokens),
            new_messages=[pb.Message(role="user", content="x" * 4 * new_tokens)],
            kept_blocks=kept,
            block_ids=new_ids,
        )
        begun_s = time.monotonic()
        kvstore.CommitTurn(commit, timeout=CALL_S)
        self._last_turn_id = turn_id
        return begun_s - began_s, time.monotonic() - begun_s

    def delete(self) -> None:
        wanted = pb.DeleteSessionRequest(tenant="bench", session_id=self.name)
        next(self._kvstores).Delete(wanted, timeout=CALL_S)


def one_after_another(
    folder: Kvstores, database: Kvstores, *, pairs: int, history: int, run: str
) -> dict[str, list[tuple[float, float]]]:
    """Begins and commits of turns on a session of so many tokens at each, taken in turn."""
    sessions = {
        name: Session(kvstores, f"{run} {history} {name}")
        for name, kvstores in (("folder", folder), ("database", database))
    }
    for session in sessions.values():
        session.turn(history)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    for pair in range(WARM_UP + pairs):
        for name in sorted(sessions, reverse=bool(pair % 2)):
            seconds = sessions[name].turn(NEW_TOKENS)
            if pair >= WARM_UP:
                taken[name].append(seconds)
    for session in sessions.values():
        session.delete()
    return taken


def at_once(kvstores: Kvstores, *, sessions: int, turns: int, run: str) -> float:
    """Turns a second of so many sessions at the same time."""
    made = [Session(kvstores[number % 2 :] or kvstores, f"{run} {number}") for number in range(sessions)]

    def talk(session: Session) -> None:
        for _ in range(turns):
            session.turn(NEW_TOKENS)

    with ThreadPoolExecutor(sessions) as threads:
        began_s = time.monotonic()
        list(threads.map(talk, made))
        seconds = time.monotonic() - began_s
        list(threads.map(Session.delete, made))
    return sessions * turns / seconds


def listed(kvstores: Kvstores, *, sessions: int, run: str) -> list[float]:
    """Seconds of each page of all sessions of a tenant."""
    tenant = f"bench {run}"
    with ThreadPoolExecutor(16) as threads:
        list(
            threads.map(
                lambda number: kvstores[0].Create(
                    pb.CreateSessionRequest(tenant=tenant, session_id=f"s{number}"), timeout=CALL_S
                ),
                range(sessions),
            )
        )
        pages_s, seen, after, more = list[float](), list[str](), "", True
        while more:
            began_s = time.monotonic()
            page = kvstores[0].List(
                pb.ListSessionsRequest(tenant=tenant, after=after, limit=PAGE), timeout=CALL_S
            )
            pages_s.append(time.monotonic() - began_s)
            seen += [record.session_id for record in page.sessions]
            after, more = seen[-1], page.more
        assert len(set(seen)) == sessions, f"{len(set(seen))} of {sessions} sessions were listed"
        list(
            threads.map(
                lambda name: kvstores[0].Delete(
                    pb.DeleteSessionRequest(tenant=tenant, session_id=name), timeout=CALL_S
                ),
                seen,
            )
        )
    return pages_s


def measure(
    folder: Kvstores,
    database: Kvstores,
    *,
    pairs: int,
    histories: Sequence[int],
    sessions: int,
    turns: int,
    listing: int,
    progress: Progress,
) -> Report:
    run = f"{time.time_ns():x}"
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    whole_s: dict[tuple[str, int], float] = {}
    for history in histories:
        progress(f"turns on {history} tokens")
        taken = one_after_another(folder, database, pairs=pairs, history=history, run=run)
        commits = {name: [commit_s for _, commit_s in turns_s] for name, turns_s in taken.items()}
        ratios[f"commit on {history} tokens, database over folder"] = median(
            one / other for one, other in zip(commits["database"], commits["folder"], strict=True)
        )
        for name, turns_s in taken.items():
            whole_s[name, history] = p50([sum(turn_s) for turn_s in turns_s])
            rows.append(_row(f"begin, {history} tokens", name, [begin_s for begin_s, _ in turns_s]))
            rows.append(_row(f"commit, {history} tokens", name, commits[name]))
    for name in ("folder", "database"):
        ratios[f"turn on {histories[-1]} tokens over {histories[0]}, {name}"] = (
            whole_s[name, histories[-1]] / whole_s[name, histories[0]]
        )
    for name, kvstores in (("folder", folder), ("database", database)):
        progress(f"turns at once, {name}")
        rates = {
            number: at_once(kvstores, sessions=number, turns=turns, run=f"{run} {number} {name}")
            for number in (1, sessions)
        }
        rows += [
            {"what": f"turns, {n} at once", "records": name, "a second": rate} for n, rate in rates.items()
        ]
        ratios[f"{sessions} turns at once over one, {name}"] = rates[sessions] / rates[1]
    for name, kvstores in (("folder", folder), ("database", database)):
        progress(f"pages of {listing} sessions, {name}")
        pages_s = listed(kvstores, sessions=listing, run=f"{run} {name}")
        rows.append(_row(f"page of {PAGE}, {listing} sessions", name, pages_s))
    return Report(title="Session records in the kvstore's folder and in a database", ratios=ratios, rows=rows)


def _row(what: str, name: str, seconds: Sequence[float]) -> Row:
    return {
        "what": what,
        "records": name,
        "p50 ms": p50([one_s * 1e3 for one_s in seconds]),
        "slowest ms": max(seconds) * 1e3,
        "a second": 1 / p50(seconds),
    }


@contextmanager
def serving(records: str) -> Iterator[tuple[Kvstores, Kvstores]]:
    """Stubs of a kvstore with its folder, and of two on the database."""
    with ExitStack() as stack:
        stubs: list[rpc.SessionsStub] = []
        for place in ("", records, records):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-")))
            child = KvstoreChild(folder, dram_bytes=16 << 20, disk_bytes=64 << 20, records=place)
            stack.enter_context(child)
            stubs.append(rpc.SessionsStub(stack.enter_context(grpc.insecure_channel(child.control_address))))
        yield stubs[:1], stubs[1:]


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "records", help="turns whose records are in a database, beside the kvstore's own folder"
    )
    parser.add_argument("--records", required=True, metavar="URL", help="as in [kvstore]: postgresql://…")
    parser.add_argument("--pairs", type=int, default=100, metavar="N")
    parser.add_argument("--histories", default="1000,100000", metavar="N,N", help="tokens of the sessions")
    parser.add_argument("--sessions", type=int, default=16, metavar="N", help="at once")
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="of each of these")
    parser.add_argument("--listing", type=int, default=10_000, metavar="N", help="sessions to be listed")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    with serving(options.records) as (folder, database):
        return measure(
            folder,
            database,
            pairs=options.pairs,
            histories=[int(number) for number in options.histories.split(",")],
            sessions=options.sessions,
            turns=options.turns,
            listing=options.listing,
            progress=progress,
        )


def _draw(path: Path, report: Report) -> None:
    groups = [
        (what, [(str(row["records"]), float(row["p50 ms"])) for row in report.rows if row["what"] == what])
        for what in dict.fromkeys(str(row["what"]) for row in report.rows if "p50 ms" in row)
    ]
    panels(path, report.title, groups, "ms")
