"""What verifying drafts brings, and what it costs where nothing repeats: answers with it and without it.

Two stacks run and differ in their drafts alone; only one is asked at a time, the same prompts, and
which goes first changes from round to round. Each round is another tenant's, so that no answer is drafted
from the same one before. An answer's time is that from its first token to its last one:
prompts are computed alike. Tokens are compared, too; in bfloat16 a step whose two best logits are as good as
equal may go either way.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent_sessions import agent_session
from benchmarks.deepened_model import write_deepened_model
from benchmarks.plot import panels
from benchmarks.prompts import PromptWriter
from benchmarks.random_model import chosen_model
from benchmarks.report import Report, Row, geometric, p50
from benchmarks.scraping import metric
from devstack.rest import RestClient
from devstack.running import RunningStack
from kvcommons.errors import InvalidInput
from kvcommons.model.chat import ChatTemplate
from kvcommons.model.tokenizer import Tokenizer

Progress = Callable[[str], None]
WAYS = ("without", "with")
DRAFT_TOKENS = 16  # of a sequence in an iteration
CASES = 5
WARM_UP = 1  # rounds that count for nothing
PROMPT_TOKENS_MAX = 2048
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
_QUESTIONS = (
    "Why is the sky blue?", "How does a refrigerator work?", "Tell me a story about a lighthouse keeper.",
    "What should I pack for a week in the mountains?", "Explain what a database index is.",
    "Write a letter to a friend who has moved away.", "How do bees make honey?",
    "What are the causes of inflation?", "Describe a market in the morning.", "How do vaccines work?",
    "Give me a plan to learn to swim.", "What makes bread rise?", "Who was Ada Lovelace?",
    "Describe how rivers shape valleys.", "What is the point of version control?", "Tell me about the moon.",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Questions of one kind, as token ids, and how they are answered."""

    name: str
    prompts: Sequence[Sequence[int]]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[str, ...]
    seconds: float  # from its first token to its last one


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "speculation",
        help="answers with drafts verified and without, of agent sessions and of plain questions",
    )
    parser.add_argument("--model", metavar="DIR", help="default: smollm2, fetched once")
    parser.add_argument("--random-model", metavar="SIZE", help="random weights instead")
    parser.add_argument("--draft-model", metavar="DIR", help="drafts are of this one, too")
    parser.add_argument(
        "--deepen",
        type=int,
        metavar="N",
        help="the model drafts for itself with N times its layers, which add little: a stand-in",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        choices=range(1, CASES + 1),
        default=range(1, CASES + 1),
        metavar="N",
        help="agent sessions, the same sampled, questions, the same sampled, noise",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="N", help="answers at once")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="of each kind")
    parser.add_argument("--answer", type=int, default=192, metavar="N", help="tokens, at most")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    if options.prompts < (most := max(options.batches)):
        raise InvalidInput(
            f"--prompts {options.prompts} are fewer than are asked at once: name {most} or more",
            param="prompts",
        )
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name, ExitStack() as running:
        folder = Path(name)
        model, what = chosen_model(options, folder, progress)
        draft_model = options.draft_model or ""
        if draft_model and options.deepen:
            raise InvalidInput("--deepen names a draft model itself: leave out one of both", param="deepen")
        if draft_model:
            what = f"{what}, by drafts of {Path(draft_model).name}"
        if options.deepen:
            progress(f"writing {what} with {options.deepen} times its layers")
            draft_model, model = str(model), write_deepened_model(folder, model, options.deepen)
            what = f"{what} with {options.deepen} times its layers, by drafts of {what}"
        cases = [
            case for number, case in enumerate(_cases(model, options.prompts), 1) if number in options.cases
        ]
        rounds = len(cases) * len(options.batches) * (WARM_UP + options.rounds)
        keys = Keys(folder / "keys", rounds)
        with_drafts: dict[str, Any] = {"max_draft_tokens": DRAFT_TOKENS, "draft_model": draft_model}
        progress("starting two stacks")
        stacks = {
            way: running.enter_context(_stack(folder / way, model, options, keys, drafts))
            for way, drafts in zip(WAYS, ({"max_draft_tokens": 0}, with_drafts), strict=True)
        }
        rows: list[Row] = []
        for batch in options.batches:
            for case in cases:
                rows.append(_compare(stacks, case, batch, keys, options, progress))
    ratios = {f"{row['prompts']}, {row['at once']} at once": float(row["ratio"]) for row in rows}
    return Report(
        title=f"{what}, {options.dtype}: tokens a second with drafts over without", ratios=ratios, rows=rows
    )


class Keys:
    """A tenant for each round, who was answered nothing yet: otherwise drafts would be what the same prompt
    was answered a round before."""

    def __init__(self, file: Path, count: int) -> None:
        self.file = file
        self._keys = [secrets.token_hex(16) for _ in range(count)]
        file.write_text("".join(f"tenant-{number} {key}\n" for number, key in enumerate(self._keys)))
        file.chmod(0o600)
        self._left = iter(self._keys)

    def next(self) -> str:
        return next(self._left)


def _cases(model: Path, count: int) -> list[Case]:
    tokenizer = Tokenizer.read(model)
    template = ChatTemplate.read(model, tokenizer)
    questions = [
        template.prompt([{"role": "user", "content": _QUESTIONS[at % len(_QUESTIONS)]}])
        for at in range(count)
    ]
    sessions = [template.prompt(agent_session(seed)) for seed in range(count)]
    write = PromptWriter(tokenizer, 0)
    noise = [tokenizer.encode_text(write(serial, 256)) for serial in range(count)]
    greedy: dict[str, Any] = {"temperature": 0.0}
    return [
        Case(name="agent sessions", prompts=sessions, sampling=greedy),
        Case(name="agent sessions, sampled", prompts=sessions, sampling=SAMPLED),
        Case(name="questions", prompts=questions, sampling=greedy),
        Case(name="questions, sampled", prompts=questions, sampling=SAMPLED),
        Case(name="noise", prompts=noise, sampling={"temperature": 2.0, "ignore_eos": True}),
    ]


def _stack(
    folder: Path, model: Path, options: argparse.Namespace, keys: Keys, drafts: dict[str, Any]
) -> RunningStack:
    engine = {
        "dtype": options.dtype,
        "capacity_tokens": (max(options.batches) + 1) * (PROMPT_TOKENS_MAX + options.answer + 64),
    }
    tables = {"prefill": engine, "decode": {**engine, **drafts}}
    return RunningStack(
        folder, tables=tables, model=str(model), attention_pool=0, api_key_file=str(keys.file)
    )


def _compare(
    stacks: dict[str, RunningStack],
    case: Case,
    batch: int,
    keys: Keys,
    options: argparse.Namespace,
    progress: Progress,
) -> Row:
    """All of a case's prompts in each round, so many at once."""
    ratios, speeds, same, answers = [], {way: list[float]() for way in WAYS}, 0, 0
    counts = [0.0, 0.0, 0.0]
    for number in range(WARM_UP + options.rounds):
        progress(f"{case.name}, {batch} at once, round {number + 1} of {WARM_UP + options.rounds}")
        key = keys.next()
        for first in range(0, len(case.prompts) if number >= WARM_UP else batch, batch):
            prompts = case.prompts[first : first + batch]
            order = WAYS if (number + first // batch) % 2 else WAYS[::-1]
            before = _counts(stacks["with"])
            made = {way: _ask(stacks[way].url, key, case, prompts, options.answer) for way in order}
            if number < WARM_UP:
                continue
            counts = [sum(some) for some in zip(counts, _counts(stacks["with"]), strict=True)]
            counts = [now - then for now, then in zip(counts, before, strict=True)]
            speed = {way: sum(len(one.tokens) for one in some) / _seconds(some) for way, some in made.items()}
            ratios.append(speed["with"] / speed["without"])
            for way in WAYS:
                speeds[way].append(speed[way])
            pairs = list(zip(made["with"], made["without"], strict=True))
            same, answers = (
                same + sum(one.tokens == other.tokens for one, other in pairs),
                answers + len(pairs),
            )
    tokens, iterations, drafts = counts
    mean, error = geometric(ratios)
    return {
        "prompts": case.name,
        "at once": batch,
        "tokens/s without": p50(speeds["without"]),
        "tokens/s with": p50(speeds["with"]),
        "ratio": mean,
        "low": mean / error,
        "high": mean * error,
        "tokens an iteration": tokens / max(iterations, 1.0),
        "drafts a token": drafts / max(tokens, 1.0),
        "same answers": same / answers,
    }


def _ask(url: str, key: str, case: Case, prompts: Sequence[Sequence[int]], answer: int) -> list[Answer]:
    client = RestClient(url, api_key=key)

    def one(at: int) -> Answer:
        tokens: list[str] = []
        times_s: list[float] = []
        for event in client.tokens(prompts[at], max_tokens=answer, logprobs=0, seed=at, **case.sampling):
            now_s = time.monotonic()
            for choice in event.get("choices", []):
                came = (choice.get("logprobs") or {}).get("tokens") or []
                tokens += came
                times_s += [now_s] * len(came)
        return Answer(tokens=tuple(tokens), seconds=times_s[-1] - times_s[0] if times_s else 0.0)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def _seconds(answers: Sequence[Answer]) -> float:
    """Of answers that were made at once: those of the longest one."""
    return max(1e-3, *(one.seconds for one in answers))


def _counts(stack: RunningStack) -> list[float]:
    """Tokens that decode has sampled, sequences in its iterations, and drafts that it has verified."""
    path = stack.runtime / "decode.m"
    names = ("decode_tokens_total", "iteration_batch_size_sum", "draft_tokens_total")
    return [metric(path, f"kvcommons_{name}") for name in names]


def _draw(path: Path, report: Report) -> None:
    bars = [(f"{row['prompts']}, {row['at once']}", float(row["ratio"])) for row in report.rows]
    panels(path, report.title, [("ratio", bars)], "tokens a second, with over without")
