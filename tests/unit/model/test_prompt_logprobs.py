"""Logits of a prompt's rows, read slice by slice."""

from __future__ import annotations

import torch

from kvcommons.backend.choice import choose
from kvcommons.model.prompt_logprobs import POSITIONS_MAX, TOP_MAX, LogprobsOfChunk, WantedLogprobs

DEVICE = choose("cpu").device


def test_a_prompt_of_8k_with_the_most_alternatives_is_in_small_messages_and_small_slices() -> None:
    """As large a vocabulary as SmolLM2's: no slice of logits takes more than 16 MB, no message 256 KB."""
    vocab, tokens = 49_152, 8192
    draw = torch.Generator().manual_seed(1)
    following = torch.randint(vocab, (tokens - 1,), generator=draw).tolist()
    wanted = WantedLogprobs(first=1, tokens=following, top=TOP_MAX)
    collected = LogprobsOfChunk(wanted)
    slices = list(wanted.slices(vocab))
    assert [row for rows in slices for row in range(rows.start, rows.stop)] == list(range(tokens - 1))
    logits = torch.randn((slices[0].stop, vocab), generator=draw)
    assert logits.nbytes <= 16 << 20
    for rows in slices:
        collected.add(rows, logits[: rows.stop - rows.start], DEVICE)
    assert sum(len(message.logprobs) for message in collected.messages) == tokens - 1
    assert max(message.ByteSize() for message in collected.messages) <= 256 << 10
    assert max(len(message.logprobs) for message in collected.messages) <= POSITIONS_MAX


def test_numbers_are_those_of_log_softmax_and_alike_for_a_token_and_an_alternative() -> None:
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn((5, 11), generator=draw) * 9
    following = [int(logits[0].argmax()), 3, 10, 0, int(logits[4].argmin())]
    collected = LogprobsOfChunk(WantedLogprobs(first=7, tokens=following, top=20))
    collected.add(slice(0, 5), logits, DEVICE)
    (message,) = collected.messages
    assert (message.first, message.top) == (7, 11), "there are no more tokens than the vocabulary has"
    exact = logits.double().log_softmax(-1)
    for row, token in enumerate(following):
        order = exact[row].argsort(descending=True).tolist()
        own = message.logprobs[row]
        assert abs(own - float(exact[row, token])) < 1e-6
        assert message.ranks[row] == order.index(token) + 1
        assert list(message.top_tokens[row * 11 : (row + 1) * 11]) == order
        assert message.top_logprobs[row * 11 + order.index(token)] == own


def test_tokens_that_are_as_likely_have_one_rank() -> None:
    collected = LogprobsOfChunk(WantedLogprobs(first=1, tokens=[2], top=0))
    collected.add(slice(0, 1), torch.tensor([[1.0, 5.0, 1.0, 0.0]]), DEVICE)
    assert list(collected.messages[0].ranks) == [2]
    assert list(collected.messages[0].top_tokens) == []
