"""Trains the demo model on one thread: ``python -m demo.train --out DIR``.

Mixed training from the start does not learn to copy in any reasonable time. It starts with repeated random
blocks; the chats that follow, from short to long, teach what to copy. Every batch is drawn from the seed and
its step number, so a run that was stopped goes on from its checkpoint as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from demo.conversations import far_conversation, training_conversation
from demo.llama import Llama, LlamaShape, save_model
from demo.names import PLAIN_NAMES, NameMix
from demo.tokens import SPECIAL, ChatTokens, save_tokenizer, train_tokenizer

TOKENS_PER_STEP = 4096
WARM_UP = 50
# The user's words are not weighed at all: nothing is gained by guessing them.
ANSWER_WEIGHT, FACT_WEIGHT = 1.0, 2.0
# Among the chats every so many steps one of repeated random ids, or the skill of copying gets blurred.
COPY_EVERY = 6
SPECIAL_TOKENS = len(SPECIAL)

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Phase:
    """A stretch of training on sequences of one length. ``until`` ends it early, at that mean loss.

    ``hard`` and ``far`` (a share) say which conversations there are, ``names`` which names, ``name_weight``
    how much these weigh, ``untold`` how often something is asked for that was never told. Every
    ``copy_every`` steps comes a batch of repeated random ids, with an ``alphabet`` of only so many different
    ones per row if it is not 0.
    """

    name: str
    length: int
    steps: int
    rate: float
    last_rate: float
    until: float = 0.0
    hard: bool = False
    name_weight: float = FACT_WEIGHT
    far: float = 0.0
    names: NameMix = PLAIN_NAMES
    untold: float = 0.0
    copy_every: int = COPY_EVERY
    alphabet: int = 0


PHASES = (
    Phase("blocks", 128, 1500, 1e-3, 1e-3, until=0.15),
    Phase("chat-128", 128, 200, 1e-3, 1e-3),
    Phase("chat-256", 256, 400, 1e-3, 1e-3),
    Phase("chat-512", 512, 700, 1e-3, 1e-3),
    Phase("chat-1024", 1024, 1000, 1e-3, 1e-3),
    Phase("chat-2048", 2048, 1000, 1e-3, 1e-3, hard=True, far=0.2),
    # By now most of the loss is the choice among equally good phrases: the names get more weight. They are of
    # the kinds that are hard to copy, and where a token stands twice in a name one token of context is not
    # enough: random ids of which there are few teach that.
    Phase(
        "names-2048",
        2048,
        3600,
        1e-3,
        0.0,
        hard=True,
        name_weight=6.0,
        far=0.45,
        names=NameMix(0.15, 0.1),
        untold=0.05,
        alphabet=80,
    ),
)


@dataclass
class Progress:
    """Where a run is: phase and step within it, all steps, seconds of training, when each phase ended."""

    phase: int = 0
    step: int = 0
    total: int = 0
    seconds: float = 0.0
    ends: list[dict[str, float | str]] | None = None


def copy_batch(rng: Random, vocabulary: int, length: int, snippets: bool, alphabet: int = 0) -> Batch:
    """Random ids that repeat: ids, targets and weights, each [B, T].

    Either each row is one block, followed by itself; or it is a stream of short snippets, drawn again and
    again from a small pool, as names are in a chat. Only what can be known is weighed.
    """
    id_rows, weight_rows = [], []
    for index in range(TOKENS_PER_STEP // length):
        ids: list[int] = []
        weights: list[float] = []
        if alphabet:
            ids, weights = _ambiguous_row(rng, vocabulary, length, alphabet)
        elif snippets and index % 2 == 0:
            pool = [_random_ids(rng, vocabulary, rng.randint(3, 9)) for _ in range(max(4, length // 30))]
            seen: set[int] = set()
            while len(ids) <= length:
                pick = rng.randrange(len(pool))
                ids += pool[pick]
                weights += [0.0] + [float(pick in seen)] * (len(pool[pick]) - 1)
                seen.add(pick)
        else:
            half = length // 2
            block = _random_ids(rng, vocabulary, half)
            ids = block + block + block[:1]
            weights = [0.0] * (half + 1) + [1.0] * half
        id_rows.append(ids[: length + 1])
        weight_rows.append(weights[1 : length + 1])
    batch = torch.tensor(id_rows)
    return batch[:, :-1], batch[:, 1:], torch.tensor(weight_rows)


def _ambiguous_row(rng: Random, vocabulary: int, length: int, alphabet: int) -> tuple[list[int], list[float]]:
    """Snippets of few different ids, so that what follows depends on more than the id before; and weights.

    All end with the same id: where a snippet ends has to be copied too.
    """
    few = [*rng.sample(range(SPECIAL_TOKENS, vocabulary), rng.randint(12, alphabet))]
    pool = [
        [*rng.choices(few[1:], k=rng.randint(3, 10)), few[0]] for _ in range(rng.randint(4, length // 40))
    ]
    ids: list[int] = []
    weights: list[float] = []
    seen: set[int] = set()
    while len(ids) <= length:
        pick = rng.randrange(len(pool))
        ids += pool[pick]
        weights += [0.0, 0.0] + [float(pick in seen)] * (len(pool[pick]) - 2)
        seen.add(pick)
    return ids, weights


def _random_ids(rng: Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(SPECIAL_TOKENS, vocabulary) for _ in range(count)]


def chat_batch(rng: Random, tokens: ChatTokens, phase: Phase) -> Batch:
    """Conversations cut at the length of the phase: ids, targets and weights, each [B, T]."""
    length = phase.length
    id_rows, weight_rows = [], []
    for _ in range(TOKENS_PER_STEP // length):
        ids: list[int] = []
        weights: list[float] = []
        if phase.far and rng.random() < phase.far:
            messages = far_conversation(rng, tokens.count, length + 1, phase.names, phase.untold)
        else:
            messages = training_conversation(
                rng, tokens.count, length + 1, phase.hard, phase.names, phase.untold
            )
        for message in messages:
            header, content, newline = tokens.message(message)
            weight = FACT_WEIGHT if message.states else ANSWER_WEIGHT
            weight = weight if message.role == "assistant" else 0.0
            spread = [weight] * len(content)
            for fact in message.states:
                name = tokens.encode(f" {fact.value}")
                for at in range(len(content) - len(name) + 1):
                    if content[at : at + len(name)] == name:
                        spread[at : at + len(name)] = [phase.name_weight] * len(name)
            ids += [*header, *content, *newline]
            weights += [0.0] * len(header) + spread + [0.0] * len(newline)
        id_rows.append(ids[: length + 1])
        weight_rows.append(weights[1 : length + 1])
    batch = torch.tensor(id_rows)
    return batch[:, :-1], batch[:, 1:], torch.tensor(weight_rows)


def batch_loss(model: Llama, batch: Batch) -> Tensor:
    """The weighted mean loss over the targets that have a weight."""
    ids, targets, weights = batch
    counted = weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, _ = model(ids)
        logits = model.logits(hidden[counted])
    losses = functional.cross_entropy(logits.float(), targets[counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def rate_at(phase: Phase, step: int, total: int) -> float:
    """The learning rate: a short warm-up at the very start, then straight from ``rate`` to ``last_rate``."""
    rate = phase.rate + (phase.last_rate - phase.rate) * step / phase.steps
    return rate * min(1.0, (total + 1) / WARM_UP)


class Run:
    """One training run in a folder, from its checkpoint if there is one."""

    def __init__(self, out: Path, seed: int, shape: LlamaShape, phases: tuple[Phase, ...]) -> None:
        self.out, self.seed, self.phases = out, seed, phases
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "tokenizer.json").exists():
            save_tokenizer(train_tokenizer(shape.vocab_size, 3000, seed), out)
        self.tokens = ChatTokens(Tokenizer.from_file(str(out / "tokenizer.json")))
        torch.manual_seed(seed)
        self.model = Llama(shape)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, foreach=True
        )
        self.progress = Progress(ends=[])
        self.checkpoint = out / "checkpoint.pt"
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Writes the checkpoint, then the model folder; the checkpoint appears whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)
        save_model(
            self.model, self.out, bos=self.tokens.text_end, eos=self.tokens.end, pad=self.tokens.text_end
        )
        figures = {"seed": self.seed, "tokens_per_step": TOKENS_PER_STEP, **asdict(self.progress)}
        (self.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")

    def step(self, phase: Phase) -> float:
        """One optimizer step; gives the loss."""
        rng = Random(f"{self.seed} {self.progress.total}")
        only_blocks = phase.name == "blocks"
        if only_blocks or self.progress.step % phase.copy_every == 0:
            size = self.model.shape.vocab_size
            batch = copy_batch(rng, size, phase.length, not only_blocks, phase.alphabet)
        else:
            batch = chat_batch(rng, self.tokens, phase)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(phase, self.progress.step, self.progress.total)
        loss = batch_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def train_phase(self, phase: Phase) -> None:
        """Runs one phase to its end, from the step where the checkpoint left it."""
        progress, mean, copying, before = self.progress, 0.0, 0.0, time.monotonic()
        while progress.step < phase.steps:
            loss = self.step(phase)
            progress.step += 1
            progress.total += 1
            if phase.name == "blocks" or (progress.step - 1) % phase.copy_every:
                mean = loss if not mean else 0.95 * mean + 0.05 * loss
            else:
                copying = loss
            if progress.step % 50 == 0:
                now = time.monotonic()
                progress.seconds, before = progress.seconds + now - before, now
                print(
                    f"{phase.name} step {progress.step} loss {mean:.4f} copying {copying:.4f} "
                    f"{progress.seconds:.0f} s",
                    flush=True,
                )
            if progress.step % 200 == 0:
                self.save()
            if mean < phase.until and progress.step > 100:
                break
        progress.seconds += time.monotonic() - before
        ends = progress.ends if progress.ends is not None else []
        ends.append(
            {
                "name": phase.name,
                "steps": progress.step,
                "loss": round(mean, 4),
                "seconds": round(progress.seconds, 1),
            }
        )
        progress.ends, progress.phase, progress.step = ends, progress.phase + 1, 0
        self.save()

    def train(self) -> None:
        """Runs the phases that are left."""
        while self.progress.phase < len(self.phases):
            self.train_phase(self.phases[self.progress.phase])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, made if missing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Run(arguments.out, arguments.seed, LlamaShape(), PHASES).train()


if __name__ == "__main__":
    main()
