"""How likely a prompt's own tokens are: the logits of its rows are read, and never leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.backend.interface import Device
from kvcommons.pb import common_pb2 as pb

# Of each position. What it bounds is what a message of them has.
TOP_MAX = 20
# Of one message: 150 KB where each position has the most alternatives.
POSITIONS_MAX = 1024
# Of the logits that are there at once; what is reckoned from them takes three times as much.
_LOGITS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLogprobs:
    """Of `tokens`, which follow the leading rows of a chunk and lie at positions from `first` on, with `top`
    alternatives each."""

    first: int
    tokens: Sequence[int]
    top: int

    def slices(self, vocab: int) -> Iterator[slice]:
        """Rows whose logits are made at once."""
        rows = min(max(1, _LOGITS_BYTES // (4 * vocab)), POSITIONS_MAX)
        return (slice(at, min(at + rows, len(self.tokens))) for at in range(0, len(self.tokens), rows))


class LogprobsOfChunk:
    """Collects them slice by slice; `messages` are of bounded size."""

    def __init__(self, wanted: WantedLogprobs) -> None:
        self._wanted = wanted
        self.messages: list[pb.PromptLogprobs] = []

    def add(self, rows: slice, logits: Tensor, device: Device) -> None:
        """The next `rows`, of which these are the logits [rows, vocab], float32 on the device.

        A token's number is the same one among the alternatives: both are read from the same logits, and the
        sum over all tokens is in float64."""
        wanted = self._wanted
        tokens = wanted.tokens[rows]
        own = logits.gather(1, device.longs(list(tokens)).unsqueeze(1))
        whole = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        best = logits.topk(min(wanted.top, logits.shape[1]), dim=-1)
        logprobs = torch.cat((own, best.values), dim=1).double() - whole
        found = (device.download(tensor) for tensor in (logprobs, (logits > own).sum(-1) + 1, best.indices))
        (values, _), (ranks, _), (indices, event) = found
        event.wait()
        message = self._message(wanted.first + rows.start, len(tokens), indices.shape[1])
        message.logprobs.extend(values[:, 0].tolist())
        message.ranks.extend(ranks.tolist())
        message.top_tokens.extend(indices.flatten().tolist())
        message.top_logprobs.extend(values[:, 1:].flatten().tolist())

    def _message(self, first: int, positions: int, top: int) -> pb.PromptLogprobs:
        """That these positions go to."""
        if not self.messages or len(self.messages[-1].logprobs) + positions > POSITIONS_MAX:
            self.messages.append(pb.PromptLogprobs(first=first, top=top))
        return self.messages[-1]
