"""From logits to tokens.

A token is drawn by inverting the cumulative distribution, in order of token ids and in float64, at one
uniform number that is a hash of (seed, choice, position). So it does not depend on the device, on what
else is in the batch, or on which process draws it: a resumed turn goes on as the undisturbed one would have.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcommons.backend.interface import Device
from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.model.prompt_logprobs import TOP_MAX
from kvcommons.pb import common_pb2 as pb

# By a mask's byte, what bounds the logits of its eight tokens: nothing, or minus infinity.
_BOUNDS = (
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
    )
    .astype(np.float32)
    .view("V32")[:, 0]
)
# What a row may be sampled with at most: more than the APIs let through.
_BETWEEN = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -math.inf, math.inf),
    ("presence_penalty", -math.inf, math.inf),
    ("repetition_penalty", 0.0, math.inf),
    ("top_logprobs", 0, TOP_MAX),
)
# top_p is looked for among this many most probable tokens first; few distributions need a full sort.
_LIKELY_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A sequence's sampling parameters: `SamplingParams.of(proto)` once, used for each of its tokens."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 keeps all
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is none
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    @classmethod
    def of(cls, sampling: pb.Sampling) -> SamplingParams:
        """Raises InvalidInput for numbers that no logits can be changed by: a row of them would cost those
        beside it their iteration, too."""
        for name, least, most in _BETWEEN:
            value = getattr(sampling, name)
            if not (least <= value <= most and math.isfinite(value)):
                raise InvalidInput(f"sampling.{name} is {value}", param=f"sampling.{name}")
        if any(map(math.isnan, sampling.logit_bias.values())):
            raise InvalidInput(
                "sampling.logit_bias has a value that is no number", param="sampling.logit_bias"
            )
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p or 1.0,  # an unset one keeps all
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice=sampling.choice,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,  # an unset one is none
            min_tokens=sampling.min_tokens,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            logprobs=sampling.logprobs,
            top_logprobs=sampling.top_logprobs,
        )

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def penalises_repetition(self) -> bool:
        return self.repetition_penalty != 1.0


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for each token, in a third of the time
class SamplingRow:
    """`position`: index in the sequence of the token to sample; `generated`: how often each token after the
    prompt boundary came (only read where a penalty is set); `seen`: each token of the sequence once (only
    read with a repetition penalty); `withheld`: tokens that may not come yet; `mask`: of the tokens that a
    grammar allows here, a bit each, the lowest of a byte first; an error that it raises is that row's
    alone."""

    params: SamplingParams
    position: int
    generated: Mapping[int, int]
    seen: Collection[int] = ()
    withheld: Collection[int] = ()
    mask: Callable[[], bytes] | None = None


def sample(logits: Tensor, rows: Sequence[SamplingRow], device: Device) -> list[pb.SampledToken]:
    """logits [B, vocab] float32 on the device (left unchanged), a row each -> SampledToken with position,
    logprob and top set; or with its error, where what a row may have cannot be said.

    logprob and top are of the distribution that a mask leaves, unmodified else, and set only where `logprobs`
    asks for them."""
    logits, errors = _masked(logits, rows, device)
    adjusted = _adjusted(logits, rows, device)
    best = adjusted.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        index = device.longs(drawn)
        best[index] = _draw(adjusted[index], [rows[i] for i in drawn], device)
    tokens = device.fetch(best).tolist()
    sampled = [
        pb.SampledToken(token=token, position=row.position) for token, row in zip(tokens, rows, strict=True)
    ]
    _add_logprobs(sampled, logits, rows, device)
    for i, error in errors.items():
        sampled[i].error.CopyFrom(error.to_detail())
    return sampled


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that decides a token: the first 53 bits of BLAKE2b over (u64, u32, u64), LE."""
    data = struct.pack("<QIQ", seed & 0xFFFFFFFFFFFFFFFF, choice & 0xFFFFFFFF, position)
    digest = hashlib.blake2b(data, digest_size=8, person=b"kvcommons-noise").digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _masked(
    logits: Tensor, rows: Sequence[SamplingRow], device: Device
) -> tuple[Tensor, dict[int, KVCommonsError]]:
    """Without the tokens that masks do not allow, and the rows that have none; `logits` itself where no row
    has a mask."""
    masks: dict[int, bytes] = {}
    errors: dict[int, KVCommonsError] = {}
    for i, row in enumerate(rows):
        if row.mask is not None:
            try:
                masks[i] = row.mask()
            except KVCommonsError as error:
                errors[i] = error
    if not masks:
        return logits, errors
    vocab = logits.shape[1]
    width = -(-vocab // 8)
    all_bits, none = b"\xff" * width, b"\0" * width
    joined = b"".join((masks[i] + none)[:width] if i in masks else all_bits for i in range(len(rows)))
    # Numbers from a table, and the lesser of two: a fifth of the time of a choice by each bit.
    bounds = np.take(_BOUNDS, np.frombuffer(joined, dtype=np.uint8)).view(np.float32)
    bound = device.upload(torch.from_numpy(bounds.reshape(len(rows), 8 * width)[:, :vocab]))
    return torch.minimum(bound, logits), errors


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow], device: Device) -> Tensor:
    """With a repetition penalty on what the model said, then logit_bias and the other penalties; `logits`
    itself where no row has any."""
    adjusted = logits
    for i, row in enumerate(rows):
        if row.params.penalises_repetition and row.seen:
            if adjusted is logits:
                adjusted = logits.clone()
            penalty, seen = row.params.repetition_penalty, device.longs(list(row.seen))
            values = adjusted[i, seen]
            adjusted[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
        changes: dict[int, float] = {}
        for token, bias in row.params.logit_bias:
            if token < logits.shape[1]:
                changes[token] = bias
        if row.params.penalised:
            for token, count in row.generated.items():
                less = row.params.frequency_penalty * count + row.params.presence_penalty
                changes[token] = changes.get(token, 0.0) - less
        for token in row.withheld:
            changes[token] = -math.inf
        if changes:
            if adjusted is logits:
                adjusted = logits.clone()
            adjusted[i, device.longs(list(changes))] += device.upload(torch.tensor(list(changes.values())))
    return adjusted


def _draw(logits: Tensor, rows: Sequence[SamplingRow], device: Device) -> Tensor:
    """LongTensor [R]: a token for each row of logits [R, vocab], all with a temperature above 0."""

    def column(values: Sequence[float]) -> Tensor:
        return device.upload(torch.tensor(values, dtype=torch.float64)).unsqueeze(1)

    params = [row.params for row in rows]
    wide = logits.double()
    # In units of the most probable token's probability.
    shares = torch.exp((wide - wide.amax(-1, keepdim=True)) / column([p.temperature for p in params]))
    threshold = column([p.min_p for p in params])
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        threshold = torch.maximum(threshold, _top_threshold(shares, params, device))
    cumulative = torch.cumsum(shares.masked_fill_(shares < threshold, 0.0), dim=-1)
    total = cumulative[:, -1:].contiguous()
    point = column([uniform(row.params.seed, row.params.choice, row.position) for row in rows]) * total
    token = torch.searchsorted(cumulative, point, right=True)
    # Rounding can bring the point to the total: the last token that is kept is meant then.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(token, last).squeeze(1)


def _top_threshold(shares: Tensor, params: Sequence[SamplingParams], device: Device) -> Tensor:
    """[R, 1]: the share of the least probable token that top_k, then top_p (of what top_k kept), keep."""
    vocab = shares.shape[1]
    most = device.longs([min(p.top_k or vocab, vocab) for p in params]).unsqueeze(1)
    top_p = device.upload(torch.tensor([p.top_p for p in params], dtype=torch.float64)).unsqueeze(1)
    looked_at = min(max([_LIKELY_TOKENS, *(p.top_k for p in params)]), vocab)
    while True:
        best = shares.topk(looked_at, dim=-1).values
        within = device.upload(torch.arange(looked_at)) < most
        reached = torch.cumsum(best * within, dim=-1)
        kept = torch.where(most < vocab, reached[:, -1:], shares.sum(-1, keepdim=True))
        target = top_p * kept
        if looked_at == vocab or device.fetch(((reached[:, -1:] >= target) | (top_p >= 1)).all()):
            break
        looked_at = vocab
    count = torch.minimum((reached < target).sum(-1, keepdim=True) + 1, most)
    threshold = best.gather(1, (count - 1).clamp_max(looked_at - 1))
    return threshold.masked_fill((top_p >= 1) & (most >= vocab), 0.0)


def _add_logprobs(
    sampled: Sequence[pb.SampledToken], logits: Tensor, rows: Sequence[SamplingRow], device: Device
) -> None:
    asked = [i for i, row in enumerate(rows) if row.params.logprobs]
    if not asked:
        return
    logprobs = torch.log_softmax(logits[device.longs(asked)].double(), dim=-1)
    most = min(max(rows[i].params.top_logprobs for i in asked), logits.shape[1])
    top = logprobs.topk(most, dim=-1)
    own = logprobs.gather(1, device.longs([sampled[i].token for i in asked]).unsqueeze(1))
    found = (device.download(tensor) for tensor in (own, top.values, top.indices))
    (own, _), (best, _), (index, event) = found
    event.wait()
    values, tokens = best.tolist(), index.tolist()
    for at, i in enumerate(asked):
        sampled[i].logprob = float(own[at])
        for token, value in zip(tokens[at], values[at], strict=True):
            if len(sampled[i].top) < rows[i].params.top_logprobs and value > -math.inf:
                sampled[i].top.add(token=token, logprob=value)
