"""Turns driven as a router drives them, and what transformers says of them."""

from __future__ import annotations

import asyncio
import random
import subprocess
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2, decode_pb2, prefill_pb2
from kvcommons.token_ids import packed, unpacked
from tests.exactness import assert_greedy, evident, logits_of
from tests.machine import scaled

SALT = bytes(range(32))
CALL_S = scaled(30.0)
START_S = scaled(20.0)  # that decode waits for a prompt
END_S = 0.75 * START_S  # to find out that a process is gone


def prompt(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 199) for _ in range(length)]


class Reference:
    """What transformers says in float32, greedy, for prompts all of whose steps are evident."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._prompts: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}  # those of a file's tests

    @property
    def layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    def prompt(self, length: int, new: int = 1, first_seed: int = 1) -> tuple[list[int], list[int]]:
        """A prompt and the `new` tokens that follow it."""
        key = length, new, first_seed
        if key not in self._prompts:
            self._prompts[key] = self._prompt(*key)
        tokens, following = self._prompts[key]
        return list(tokens), list(following)

    def _prompt(self, length: int, new: int, first_seed: int) -> tuple[list[int], list[int]]:
        for seed in range(first_seed, first_seed + 200):
            tokens = prompt(length, seed)
            following = self.follow(tokens, new)
            if following is not None:
                return tokens, following
        raise AssertionError("no prompt of 200 is evidence")

    def follow(
        self,
        tokens: Sequence[int],
        new: int,
        process: Callable[[Tensor, Tensor], Tensor] = lambda _, logits: logits,
    ) -> list[int] | None:
        """The `new` tokens after these; None where one is no evidence. `process`: from all tokens [1, T] and
        logits [1, V] to logits, as transformers' processors are called."""
        made: list[int] = []
        past, step = None, list(tokens)
        with torch.inference_mode():
            while len(made) < new:
                out = self._model(torch.tensor([step]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                logits = process(torch.tensor([[*tokens, *made]]), out.logits[:, -1])
                if not evident(logits):
                    return None
                step = [int(logits[0].argmax())]
                made += step
        return made

    def assert_greedy(self, tokens: Sequence[int], made: Sequence[int]) -> None:
        """That `made` follows these tokens, however far it came."""
        assert made
        assert_greedy(made, logits_of(self._model, tokens, made))

    def prompt_logprobs(self, tokens: Sequence[int]) -> Tensor:
        """What follows each of these but the last: [len(tokens) - 1, vocabulary]."""
        return logits_of(self._model, tokens[:1], tokens[1:]).log_softmax(-1)

    def logprobs(self, tokens: Sequence[int], made: Sequence[int]) -> list[float]:
        """Of each token of `made`, which follow these."""
        logits = logits_of(self._model, tokens, made)
        of_made = logits.log_softmax(-1).gather(1, torch.tensor(made).unsqueeze(1))
        return [float(one) for one in of_made[:, 0]]


def assert_exact(reference: Reference, one: Turn, tokens: Sequence[int], expected: Sequence[int]) -> None:
    """Its tokens are those that follow; logits are compared as logarithms of probabilities."""
    assert one.tokens == expected
    logprobs = reference.logprobs(tokens, expected)
    assert [token.logprob for token in one.sampled] == pytest.approx(logprobs, abs=1e-4)


def prefill_request(model: bytes, tokens: Sequence[int], **changes: Any) -> prefill_pb2.PrefillRequest:
    known: dict[str, Any] = {
        "request_id": "r", "tenant": "t", "salt": SALT, "model": model, "tokens": packed(tokens),
        "prompt_tokens": len(tokens), "sampling": common_pb2.Sampling(temperature=0.0, top_p=1.0),
    }  # fmt: skip
    of_request = {name: changes.pop(name) for name in ("targets", "push_from_block") if name in changes}
    return prefill_pb2.PrefillRequest(job=common_pb2.Job(**(known | changes)), **of_request)


async def compute(
    stub: Any, request: prefill_pb2.PrefillRequest, call_s: float = CALL_S
) -> prefill_pb2.PrefillFirst:
    """The result of a job; checks that it is told as the contract says."""
    events = [event async for event in stub.Compute(request, timeout=call_s)]
    assert [event.WhichOneof("event") for event in events] == ["started", "first"]
    return events[1].first


@dataclass(slots=True)
class Turn:
    """One attempt at a generation, driven as a router drives it: what was heard from both sides."""

    prefill: Any
    decode: Any
    request: decode_pb2.GenerateRequest
    prefill_history: common_pb2.History | None = None  # where prefill finds another one than decode
    call_s: float = CALL_S
    tokens: list[int] = field(default_factory=list)
    sampled: list[common_pb2.SampledToken] = field(default_factory=list)
    first: prefill_pb2.PrefillFirst | None = None
    reserved: decode_pb2.Reserved | None = None
    missing: list[int] = field(default_factory=list)
    borrowed: list[dict[str, int]] = field(default_factory=list)  # as it was told, one after another
    finished: decode_pb2.Finished | None = None

    @property
    def prompt(self) -> array[int]:
        """The request's tokens."""
        return unpacked(self.request.job.tokens)

    async def run(self) -> Turn:
        computing: asyncio.Task[None] | None = None
        call = self.decode.Generate(self.request, timeout=self.call_s)

        def has_ended(prefill: asyncio.Task[None]) -> None:
            """Decode would wait for a prompt that does not come, and not know why."""
            if _failed(prefill):
                asyncio.get_running_loop().call_later(scaled(5), call.cancel)

        try:
            async for event in call:
                kind = event.WhichOneof("event")
                if kind in ("reserved", "missing"):
                    if kind == "reserved":
                        self.reserved = event.reserved
                        if event.reserved.computes:
                            continue
                    else:
                        self.missing.append(event.missing.push_from_block)
                    if computing is not None:
                        computing.cancel()
                    computing = asyncio.create_task(self._compute(getattr(event, kind).push_from_block))
                    computing.add_done_callback(has_ended)
                elif kind == "prefilled":
                    self.first = event.prefilled
                    self._take([self.first.token])
                elif kind == "tokens":
                    self._take(event.tokens.tokens)
                elif kind == "borrowed":
                    holders = event.borrowed.holders
                    self.borrowed.append({one.data_address: one.blocks for one in holders})
                else:
                    self.finished = event.finished
            if computing is not None:
                await computing
        except (asyncio.CancelledError, KVCommonsError):
            if computing is not None and _failed(computing):
                await computing  # decode's call ended because of it
            raise
        finally:
            if computing is not None:
                computing.cancel()
        return self

    async def _compute(self, push_from_block: int) -> None:
        assert self.reserved is not None
        job = common_pb2.Job()
        job.CopyFrom(self.request.job)
        if self.prefill_history is not None:
            job.history.CopyFrom(self.prefill_history)
        request = prefill_pb2.PrefillRequest(
            job=job, targets=self.reserved.placements, push_from_block=push_from_block
        )
        self.first = await compute(self.prefill, request, self.call_s)
        self._take([self.first.token])

    def _take(self, tokens: Sequence[common_pb2.SampledToken]) -> None:
        """Tokens are told by their position: one heard twice has to be the same."""
        for token in tokens:
            index = token.position - len(self.prompt)
            if index < len(self.tokens):
                assert self.tokens[index] == token.token
            else:
                assert index == len(self.tokens), "a token is missing"
                self.tokens.append(token.token)
                self.sampled.append(token)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def turn(prefill: Any, decode: Any, model: bytes, tokens: Sequence[int], new: int, **changes: Any) -> Turn:
    """A greedy turn that ends with `length` after `new` tokens, unless `changes` say otherwise."""
    known: dict[str, Any] = {
        "request_id": "r", "tenant": "t", "salt": SALT, "model": model, "tokens": packed(tokens),
        "prompt_tokens": len(tokens), "max_position": len(tokens) + new,
        "sampling": common_pb2.Sampling(temperature=0.0, top_p=1.0),
    }  # fmt: skip
    start_wait_ms = changes.pop("start_wait_ms", int(START_S * 1000))
    job = common_pb2.Job(**(known | changes))
    return Turn(prefill, decode, decode_pb2.GenerateRequest(job=job, start_wait_ms=start_wait_ms))


async def started_in_order(turns: Sequence[Turn]) -> list[asyncio.Task[Turn]]:
    """Each has its place before the next one asks for its own."""
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        while one.reserved is None:
            await asyncio.sleep(0.005)
    return tasks


async def whole_beside_a_kill(
    turns: Sequence[Turn],
    expected: Sequence[Sequence[int]],
    child: subprocess.Popen[bytes],
    draw: random.Random,
    calm_s: float,
) -> int:
    """How many of them have all of their tokens, where this process is killed at some moment: of the time
    that they took undisturbed, or when all have ended. Each other one has the leading ones, up to a clear
    error, and none waits for its deadline."""
    running = [asyncio.create_task(one.run()) for one in turns]
    moment = 1.2 * draw.random()
    await asyncio.wait(running, timeout=moment * calm_s if moment < 1 else CALL_S)
    child.kill()
    child.wait()
    _, hanging = await asyncio.wait(running, timeout=END_S)
    assert not hanging, f"{len(hanging)} wait for what does not come"
    results = await asyncio.gather(*running, return_exceptions=True)
    whole = 0
    for one, result, tokens in zip(turns, results, expected, strict=True):
        assert one.tokens == tokens[: len(one.tokens)]
        if isinstance(result, BaseException):
            assert isinstance(result, KVCommonsError), result
        else:
            assert one.tokens == tokens
            whole += 1
    return whole
