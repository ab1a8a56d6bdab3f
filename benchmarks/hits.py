"""Is a hit ever slower than computing? Turns after histories of many lengths, from the store's DRAM and from
its disk, each beside the same turn computed whole.

What the system chooses for a hit (to load, to compute, or some of each) is compared with computing: the
better of the two is computing, or what was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report import Report, Row, p50
from benchmarks.sessions import Pair


def summarise(title: str, by_history: Mapping[int, Sequence[Pair]]) -> Report:
    """Ratios are medians over pairs: TTFT of the hit over TTFT of computing."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for history, pairs in by_history.items():
        for source in dict.fromkeys(pair.source for pair in pairs):
            group = [pair for pair in pairs if pair.source == source]
            ratio = p50([pair.reuse.ttft_s / pair.compute.ttft_s for pair in group])
            ratios[f"ttft_{source}_{history}"] = ratio
            rows.append(
                {
                    "history": f"{history} from {source}",
                    "pairs": len(group),
                    "hit TTFT ms": p50([pair.reuse.ttft_s * 1000 for pair in group]),
                    "computed TTFT ms": p50([pair.compute.ttft_s * 1000 for pair in group]),
                    "hit / computed": ratio,
                    "cached tokens": round(p50([pair.reuse.cached_tokens for pair in group])),
                }
            )
    ratios["ttft_worst"] = max(ratios.values())
    return Report(title=title, ratios=ratios, rows=rows)
