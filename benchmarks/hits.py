"""Is a hit ever slower than the better of loading and computing? Turns after histories of many lengths, from
the store's DRAM and from its disk, each taken three times: as the system decides, computed whole, and with
all of the stored history loaded.

The third is taken by a second stack beside the first, which has the same sessions and always loads. Both
compute half of the turns that are computed, so that neither rests more than the other. One turn is taken
after the other, and which of the three goes first rotates. The first session of each round warms both up and
is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Report, Row, p50
from benchmarks.session_stack import StackSetting
from benchmarks.sessions import Workload, Writer
from devstack.rest import RestClient, Turn
from kvcommons.errors import Internal

Progress = Callable[[str], None]
DEVICE_SHARE_MAX = 0.1  # of the history: what is left there of a session when the others had their turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One turn taken three times."""

    source: str  # "dram" or "disk": where the stored history lies
    hit: Turn
    computed: Turn
    loaded: Turn


def take_trials(setting: StackSetting, workload: Workload, progress: Progress) -> list[Trial]:
    """Two stacks' life: histories, turns from DRAM, and one round from disk after a restart."""
    benchmark = _Benchmark(workload, setting.writer(), progress)
    progress("starting two stacks")
    folder = setting.folder.with_name(f"{setting.folder.name}-always")
    always = replace(setting, folder=folder, loads="always")
    with setting.stack(workload) as chosen, always.stack(workload) as forced:
        for client in (chosen.client, forced.client):
            benchmark.begin(client)
        trials = benchmark.round(chosen.client, forced.client, 0, "dram")
        progress("restarting the stacks")
        for stack in (chosen, forced):
            stack.kill_all()
            stack.start()
        return trials + benchmark.round(chosen.client, forced.client, 1, "disk")


class _Benchmark:
    def __init__(self, workload: Workload, write: Writer, progress: Progress) -> None:
        self._load = workload
        self._write = write
        self._progress = progress

    def begin(self, client: RestClient) -> None:
        """Gives every session its history, and one to the session that warms up."""
        load = self._load
        for number in range(load.sessions + 1):
            self._progress(f"history of session {number} of {load.sessions}")
            self._turn(client, _name(number), number, load.history_tokens - load.answer_tokens)

    def round(self, chosen: RestClient, forced: RestClient, turn: int, source: str) -> list[Trial]:
        load = self._load
        trials = []
        for number in range(load.sessions + 1):
            self._progress(f"from {source}: turn {turn + 1} of session {number} of {load.sessions}")
            name, serial = _name(number), (turn + 1) * (load.sessions + 1) + number
            computing = (chosen, forced)[number % 2]
            fork = str(computing.post(f"/v1/sessions/{name}/fork", {})["id"])
            ways = {"hit": (chosen, name), "computed": (computing, fork), "loaded": (forced, name)}
            order = list(ways)
            order = order[number % 3 :] + order[: number % 3]
            turns = {
                how: self._turn(*ways[how], serial, load.new_tokens, reuse=how != "computed") for how in order
            }
            computing.delete_session(fork)
            if number:
                trials.append(Trial(source=source, **turns))
        check(trials)
        return trials

    def _turn(
        self, client: RestClient, session: str, serial: int, tokens: int, *, reuse: bool = True
    ) -> Turn:
        answer = self._load.answer_tokens
        return client.say(
            self._write(serial, tokens),
            session,
            max_tokens=answer,
            ignore_eos=True,
            temperature=0.0,
            reuse=reuse,
        )


def _name(number: int) -> str:
    return f"hit-{number}"


def check(trials: Sequence[Trial]) -> None:
    """A benchmark that did not do what its rows say is an error, not a figure."""
    for trial in trials:
        if trial.computed.cached_tokens:
            raise Internal(f"a turn without reuse reports {trial.computed.cached_tokens} cached tokens")
        if not trial.loaded.cached_tokens:
            raise Internal("a turn that loads all reports no cached token: is the kvstore large enough?")
        for turn in (trial.hit, trial.loaded):
            if turn.timings["device_tokens"] > DEVICE_SHARE_MAX * trial.loaded.cached_tokens:
                raise Internal("history was still on the device: raise the number of sessions")


def summarise(title: str, by_history: Mapping[int, Sequence[Trial]]) -> Report:
    """Ratios are medians over trials: TTFT of the hit over that of the better one of computing and loading,
    which is the one with the shorter median."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for history, trials in by_history.items():
        for source in dict.fromkeys(trial.source for trial in trials):
            group = [trial for trial in trials if trial.source == source]
            ways = {
                "computed": [trial.computed.ttft_s for trial in group],
                "loaded": [trial.loaded.ttft_s for trial in group],
            }
            hits = [trial.hit.ttft_s for trial in group]
            better = min(ways, key=lambda way: p50(ways[way]))
            over = {way: p50([hit / s for hit, s in zip(hits, ways[way], strict=True)]) for way in ways}
            ratios[f"ttft_{source}_{history}"] = over[better]
            rows.append(
                {
                    "history": f"{history} from {source}",
                    "trials": len(group),
                    "hit TTFT ms": p50(hits) * 1000,
                    "computed TTFT ms": p50(ways["computed"]) * 1000,
                    "loaded TTFT ms": p50(ways["loaded"]) * 1000,
                    "hit prefill ms": p50([trial.hit.timings["prefill_ms"] for trial in group]),
                    "and waiting ms": p50([trial.hit.timings["load_wait_ms"] for trial in group]),
                    "computed prefill ms": p50([trial.computed.timings["prefill_ms"] for trial in group]),
                    "hit / computed": over["computed"],
                    "hit / loaded": over["loaded"],
                    "cached tokens": round(p50([trial.hit.cached_tokens for trial in group])),
                }
            )
    ratios["ttft_worst"] = max(ratios.values())
    return Report(title=title, ratios=ratios, rows=rows)
