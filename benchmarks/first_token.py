"""What does a first token cost besides the model? A short prompt, again and again, on an idle stack."""

from __future__ import annotations

from benchmarks.report import Report, Row, p50, p99
from devstack.rest import RestClient, Turn

WARM_UP = 5


def measure(client: RestClient, *, requests: int, sessions: bool) -> list[Turn]:
    """One after the other; each prompt is a few words that no earlier one began with."""
    turns = []
    for number in range(WARM_UP + requests):
        session = f"first-token-{number}" if sessions else None
        turns.append(client.say(f"{number}, hello!", session, max_tokens=4, temperature=0.0))
    return turns[WARM_UP:]


def summarise(title: str, runs: dict[str, list[Turn]]) -> Report:
    """Besides the model: the client's time to the first token less the time that prefill computed."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for name, turns in runs.items():
        besides_ms = [turn.ttft_s * 1000 - turn.timings["prefill_ms"] for turn in turns]
        ratios[f"besides_model_share_{name.replace(' ', '_')}"] = p50(
            [ms / (turn.ttft_s * 1000) for ms, turn in zip(besides_ms, turns, strict=True)]
        )
        rows.append(
            {
                "how": name,
                "requests": len(turns),
                "prompt tokens": round(p50([turn.prompt_tokens for turn in turns])),
                "TTFT p50 ms": p50([turn.ttft_s * 1000 for turn in turns]),
                "TTFT p99 ms": p99([turn.ttft_s * 1000 for turn in turns]),
                "model p50 ms": p50([turn.timings["prefill_ms"] for turn in turns]),
                "besides the model p50 ms": p50(besides_ms),
                "besides the model p99 ms": p99(besides_ms),
            }
        )
    return Report(title=title, ratios=ratios, rows=rows)
