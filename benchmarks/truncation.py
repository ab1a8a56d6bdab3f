"""What does a conversation lose when its context window overflows, by what is done about it?

AttentionStore, tables 1 and 2: AS goes on with the KV that is left, met with a shifted query; TT computes the
tokens that are left anew (token truncation); NKVT goes on with the KV that is left as if nothing had moved
(naive KV cache truncation). All three see the same tokens. Perplexity is that of the tokens after an
overflow, until the window is full again, and after a second one; recall is of names never seen in training
that were told in what is left. The engine's own chunks compute all of it, in float32.

The other figure is the time to the first token of the turn that overflows, on a real stack: the session's
turn against the same tokens computed whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.prompts import PromptWriter
from benchmarks.report import Report, Row, p50
from devstack.rest import RestClient, Turn
from kvcommons.errors import Internal

if TYPE_CHECKING:
    from torch import Tensor

    from demo.conversations import Message
    from demo.tokens import ChatTokens
    from kvcommons.engine.core import Core

Figures = dict[str, float]  # by scheme
Progress = Callable[[str], None]

SCHEMES = ("AS", "TT", "NKVT")
RATIO = 0.5  # of the window, as the paper has it
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
ANSWER_TOKENS = 48
SYSTEM = "You are a friendly assistant."


@dataclass(slots=True)
class Context:
    """What one scheme sees: tokens, the blocks of their KV, and how much has gone after the head."""

    scheme: str
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    dropped_tokens: int = 0
    done_tokens: int = 0  # with KV


class Runner:
    """Contexts over one core. `head_tokens` are kept in front."""

    def __init__(self, core: Core, head_tokens: int) -> None:
        self._core = core
        self._head = head_tokens

    def feed(self, context: Context, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab] after appending them; of those that had no KV before as well."""
        import torch

        from kvcommons.engine.chunk_rows import ChunkRows, logits
        from kvcommons.engine.truncated import Truncated

        core = self._core
        context.tokens += tokens
        missing = -(-len(context.tokens) // core.block_tokens) - len(context.blocks)
        context.blocks += core.allocator.allocate(missing) if missing > 0 else []
        shifted = context.scheme == "AS" and context.dropped_tokens > 0
        truncated = Truncated(
            head_tokens=self._head if shifted else 0,
            dropped_tokens=context.dropped_tokens if shifted else 0,
        )
        found = []
        with torch.inference_mode():
            while context.done_tokens < len(context.tokens):
                end = min(context.done_tokens + CHUNK_TOKENS, len(context.tokens))
                rows = range(context.done_tokens, end)
                chunk = ChunkRows(core, context.tokens, rows, torch.tensor(context.blocks), truncated)
                found.append(logits(core, chunk, range(len(rows))))
                context.done_tokens = end
            return torch.cat(found)[-len(tokens) :]

    def truncated(self, context: Context, scheme: str, dropped_tokens: int) -> Context:
        """`context` after an overflow, as a scheme has it. Blocks that are used on are shared."""
        size, head = self._core.block_tokens, self._head
        complete = (len(context.tokens) - 1) // size * size
        rest = head + dropped_tokens
        after = Context(
            scheme=scheme,
            tokens=[*context.tokens[:head], *context.tokens[rest:]],
            dropped_tokens=context.dropped_tokens + dropped_tokens,
        )
        if scheme != "TT":
            after.done_tokens = complete - dropped_tokens
            after.blocks = [*context.blocks[: head // size], *context.blocks[rest // size : complete // size]]
            self._core.allocator.retain(after.blocks)
        return after

    def release(self, context: Context) -> None:
        self._core.allocator.release(context.blocks)
        context.blocks = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A conversation; `answers` says which tokens are the assistant's."""

    tokens: list[int]
    answers: list[bool]


@dataclass(slots=True)
class Loss:
    """Of the answers' tokens: what users write a chat model was not trained to predict."""

    nats: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)  # whether the token had the best logit

    def add(self, logits: Tensor, wanted: Sequence[int], counts: Sequence[bool]) -> None:
        import torch

        rows = torch.tensor(counts)
        target = torch.tensor(list(wanted))[rows]
        loss = torch.nn.functional.cross_entropy(logits.double()[rows], target, reduction="none")
        self.nats += loss.tolist()
        self.right += (logits[rows].argmax(-1) == target).tolist()

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nats) / len(self.nats))


def perplexity(
    core: Core, documents: Sequence[Document], head: int, window: int, progress: Progress
) -> Figures:
    """By scheme."""
    found = losses(core, documents, head, window, progress)
    return {scheme: loss.perplexity for scheme, loss in found.items()}


def losses(
    core: Core, documents: Sequence[Document], head: int, window: int, progress: Progress
) -> dict[str, Loss]:
    """By scheme, of the same tokens. Each document overflows twice: it has tokens for two and a half
    windows."""
    runner = Runner(core, head)
    dropped = dropped_by(window)
    found = {scheme: Loss() for scheme in SCHEMES}
    for number, document in enumerate(documents):
        progress(f"text {number + 1} of {len(documents)}")
        whole = Context(scheme="AS")
        runner.feed(whole, document.tokens[:window])
        for scheme in SCHEMES:
            context, at = whole, window
            for _ in range(2):
                after = runner.truncated(context, scheme, dropped)
                if context is not whole:
                    runner.release(context)
                context = after
                end = at + window - len(context.tokens)
                logits = runner.feed(context, document.tokens[at:end])
                # The first of them was predicted before the overflow.
                found[scheme].add(logits[:-1], document.tokens[at + 1 : end], document.answers[at + 1 : end])
                at = end
            runner.release(context)
        runner.release(whole)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation that fills the window, a question about what is left of it, and the name to be said."""

    history: list[int]
    asked: list[int]
    value: str
    end: int


def recall(
    core: Core, questions: Sequence[Question], decode: Callable[[list[int]], str], head: int, window: int,
    progress: Progress,
) -> Figures:  # fmt: skip
    """Share of greedy answers that have the name, by scheme."""
    runner = Runner(core, head)
    right = dict.fromkeys(SCHEMES, 0)
    for number, question in enumerate(questions):
        progress(f"recall: question {number + 1} of {len(questions)}")
        whole = Context(scheme="AS")
        runner.feed(whole, question.history)
        for scheme in SCHEMES:
            context = runner.truncated(whole, scheme, dropped_by(window))
            said: list[int] = []
            step = question.asked
            while len(said) < ANSWER_TOKENS:
                step = [int(runner.feed(context, step)[-1].argmax())]
                if step[0] == question.end:
                    break
                said += step
            runner.release(context)
            found = re.search(rf"(?<!\w){re.escape(question.value)}(?!\w)", decode(said))
            right[scheme] += found is not None
        runner.release(whole)
    return {scheme: count / len(questions) for scheme, count in right.items()}


def dropped_by(window: int) -> int:
    return math.ceil(RATIO * window / BLOCK_TOKENS) * BLOCK_TOKENS


def quality(model: Path, texts: int, questions: int, seed: int, progress: Progress) -> Report:
    """A column for each figure, in the form of the paper's tables 1 and 2 turned over."""
    from demo.tokens import ChatTokens
    from kvcommons.engine.core import make_core
    from kvcommons.model.slices import Model
    from kvcommons.model.spec import ModelSpec, fingerprint, model_info

    spec = ModelSpec.read(model)
    identity = fingerprint(model, spec, "float32", BLOCK_TOKENS)
    info = model_info(model.name, spec, identity, "float32", BLOCK_TOKENS)
    window = info.context_window
    core = make_core(Model.load(model, dtype="float32"), info, capacity_tokens=8 * window)
    tokens = ChatTokens.load(model)
    from demo.conversations import Message

    opening = tokens.prompt([Message("system", SYSTEM)])[: -len(tokens.header("assistant"))]
    head = -(-len(opening) // BLOCK_TOKENS) * BLOCK_TOKENS
    rows: list[dict[str, str | float]] = []
    figures: dict[str, float] = {}
    kinds = {"conversations": _conversation, "long texts": _long_texts}
    for kind, write in kinds.items():
        documents = [
            _written(tokens, write, Random(f"{kind} {seed} {number}"), 2 * window + window // 2)
            for number in range(texts)
        ]
        found = perplexity(core, documents, head, window, progress)
        rows.append({"what": f"perplexity, {kind}", **found})
        name = kind.replace(" ", "_")
        figures[f"perplexity_{name}"] = found["AS"] / found["TT"]
        figures[f"perplexity_{name}_nkvt"] = found["NKVT"] / found["TT"]
    asked = [_question(tokens, Random(f"recall {seed} {number}"), window) for number in range(questions)]
    shares = recall(core, asked, tokens.decode, head, window, progress)
    rows.append({"what": "recall, %", **{scheme: 100 * share for scheme, share in shares.items()}})
    figures["recall_points"] = 100 * (shares["AS"] - shares["TT"])
    figures["recall_points_nkvt"] = 100 * (shares["NKVT"] - shares["TT"])
    title = f"{model.name}: after overflows of a window of {window} tokens, {RATIO:.0%} dropped"
    return Report(title=title, rows=_by_scheme(rows), ratios=figures)


def _by_scheme(figures: Sequence[Mapping[str, str | float]]) -> list[Row]:
    """A row a scheme: reports print a column a row."""
    return [
        {"how": scheme, **{str(one["what"]): one[scheme] for one in figures if scheme in one}}
        for scheme in SCHEMES
        if any(scheme in one for one in figures)
    ]


def _written(
    tokens: ChatTokens, write: Callable[[ChatTokens, Random, int], list[Message]], rng: Random, count: int
) -> Document:
    """So many tokens of a conversation."""
    from demo.conversations import Message

    ids: list[int] = []
    answers: list[bool] = []
    messages = [Message("system", SYSTEM)]
    while len(ids) < count:
        for message in messages:
            header, content, after = tokens.message(message)
            ids += [*header, *content, *after]
            answers += [False] * len(header) + [message.role == "assistant"] * len(content)
            answers += [False] * len(after)
        messages = write(tokens, rng, count)
    return Document(tokens=ids[:count], answers=answers[:count])


def _conversation(tokens: ChatTokens, rng: Random, count: int) -> list[Message]:
    """Facts with held-out names told and asked for, mostly over distances that lie within what is left."""
    from demo.conversations import Writer
    from demo.facts import FactMaker
    from demo.names import held_out_name

    written = Writer(rng, tokens.count, count // 6, FactMaker(held_out_name)).write()
    return [message for message in written if message.role != "system"]


def _long_texts(tokens: ChatTokens, rng: Random, count: int) -> list[Message]:
    """Facts with held-out names, and long texts between them and the questions."""
    from demo.conversations import Message, long_text
    from demo.facts import FactMaker
    from demo.names import held_out_name

    maker = FactMaker(held_out_name)
    facts = {fact.key: fact for fact in (maker.fact(rng) for _ in range(3))}
    reported, asked = list[Message](), list[Message]()
    for fact in facts.values():
        reported += [Message("user", fact.tell(rng)), Message("assistant", fact.acknowledge(rng, [fact]))]
        question, answer = fact.ask(rng)
        asked += [Message("user", question), Message("assistant", answer)]
    return [*reported, *long_text(rng, tokens.count, rng.randint(100, 400)), *asked]


def _question(tokens: ChatTokens, rng: Random, window: int) -> Question:
    """The fact was told last some way back in what is left after the overflow."""
    from demo.conversations import Message, small_talk
    from demo.recall import make_case

    case = make_case(rng, tokens, rng.randint(64, int((1 - RATIO) * window * 0.8)))
    reported = [message for message in case.messages if message.role != "system"]
    system, filler = Message("system", SYSTEM), list[Message]()
    header = len(tokens.header("assistant"))
    while len(tokens.prompt([system, *filler, *reported[:-1]])) - header < window - 40:
        filler += small_talk(rng)
    history = tokens.prompt([system, *filler, *reported[:-1]])[:-header]
    whole = tokens.prompt([system, *filler, *reported])
    return Question(history=history, asked=whole[len(history) :], value=case.fact.value, end=tokens.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """Sessions that fill a window of `window_tokens`, and a turn of `new_tokens` that does not fit any
    more."""

    window_tokens: int
    new_tokens: int
    sessions: int
    answer_tokens: int = 8

    def tables(self, dtype: str) -> dict[str, dict[str, Any]]:
        """Prefill has room for one context and a little more: what is kept comes from the kvstore."""
        capacity = self.window_tokens + 4 * self.new_tokens + 128
        return {
            "prefill": {"dtype": dtype, "capacity_tokens": capacity},
            "decode": {"dtype": dtype, "capacity_tokens": 2 * capacity},
            "attention_pool": {"dtype": dtype, "capacity_tokens": capacity},
            "kvstore": {"dram_bytes": 2 << 30, "disk_bytes": 8 << 30},
        }


def first_tokens(
    client: RestClient, load: Overflow, write: PromptWriter, label: str, progress: Progress
) -> Report:
    """The session's turn that overflows, then the tokens that it saw as a plain prompt without reuse (TT),
    for each session. Between its two turns other sessions take theirs, so that what is kept comes from the
    kvstore."""
    common: dict[str, Any] = {"max_tokens": load.answer_tokens, "temperature": 0.0, "ignore_eos": True}
    for number in range(load.sessions):
        progress(f"filling the window of session {number + 1} of {load.sessions}")
        length = load.window_tokens - load.new_tokens // 2 - load.answer_tokens
        client.say(write(2 * number + 1, length), f"truncation-{number}", **common)
    kept: list[Turn] = []
    computed: list[float] = []
    for number in range(load.sessions):
        progress(f"overflow of session {number + 1} of {load.sessions}")
        session = f"truncation-{number}"
        turn = client.say(write(2 * number + 2, load.new_tokens), session, truncation="auto", **common)
        tokens = client.session(session)["token_ids"][: -turn.completion_tokens]
        if turn.prompt_tokens >= len(tokens) or turn.cached_tokens < turn.prompt_tokens // 2:
            raise Internal(f"nothing was dropped, or what is left was not kept: {turn}")
        _, timings = client.complete(tokens[-turn.prompt_tokens :], reuse=False, **common)
        kept.append(turn)
        computed.append(timings["ttft_ms"])
    ratio = p50([turn.timings["ttft_ms"] / other for turn, other in zip(kept, computed, strict=True)])
    facts = {"turns": load.sessions, "prompt tokens": round(p50([turn.prompt_tokens for turn in kept]))}
    parts = {name: p50([turn.timings[name] for turn in kept]) for name in ("load_wait_ms", "prefill_ms")}
    return Report(
        title=f"{label}: first turn after a window of {load.window_tokens} tokens overflowed",
        rows=[
            {
                "how": "AS", **facts, "cached tokens": round(p50([turn.cached_tokens for turn in kept])),
                "TTFT p50 ms": p50([turn.timings["ttft_ms"] for turn in kept]),
                "load wait ms": parts["load_wait_ms"], "prefill ms": parts["prefill_ms"],
            },
            {"how": "TT", **facts, "cached tokens": 0, "TTFT p50 ms": p50(computed)},
        ],
        ratios={"ttft": ratio},
    )  # fmt: skip
