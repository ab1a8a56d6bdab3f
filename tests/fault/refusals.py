"""How many streams a client may be refused while parts of the stack die, and for which reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcommons.errors import KVCommonsError

# By the errors' codes. Whatever else a client hears is a fault.
REASONS = {
    "unavailable": "the router died under the stream, or its instances did not come back in time",
    "loading": "the instances that came back were not ready in time",
    "store_unavailable": "the session store did not come back in time",
    "turn_in_progress": "the turn that broke holds its session until its lease is over",
    "capacity_exhausted": "who would have lent memory was dead or paused until the request's deadline",
}


def wrong_with(refused: Sequence[KVCommonsError], struck: Sequence[str], streams_at_once: int) -> list[str]:
    """What is wrong with the refusals, each the first one of a stream. `struck`: who was killed or paused.

    The death of the router may end all streams that are under way: its clients' connections go with it. Of
    whoever else is struck the streams go on elsewhere, or when it is back; one may find no room.
    """
    found = [
        f"refused for {error!r}, which is no reason"
        for error in refused
        if error.code not in REASONS or not error.message
    ]
    most = sum(streams_at_once if name == "router" else 1 for name in struck)
    if len(refused) > most:
        counted = Counter(error.code for error in refused)
        found.append(f"{len(refused)} streams were refused, at most {most} may be: {dict(counted)}")
    return found
