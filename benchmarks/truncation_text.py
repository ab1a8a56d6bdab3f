"""What a real model loses in overflows of its window while it reads a real text.

The text follows a system prompt, which stays, as the words of one long answer. Each of its tokens is
predicted from those before it (teacher forcing) by the KV that is left (AS), by the same tokens computed anew
(TT), and by KV that is used as if nothing had moved (NKVT): the schemes are compared token by token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.report import Report, Row
from benchmarks.truncation import (
    BLOCK_TOKENS,
    RATIO,
    SCHEMES,
    SYSTEM,
    Document,
    Loss,
    Progress,
    dropped_by,
    losses,
)
from kvcommons.errors import InvalidInput

QUESTION = "What do you know?"


def quality_of_text(model: Path, text: Path, tokens: int, window: int, progress: Progress) -> Report:
    """Over at least `tokens` tokens of `text` that come after an overflow of `window` tokens.

    Raises InvalidInput for a text that is too short, and for a window that the model does not have.
    """
    from kvcommons.engine.core import make_core
    from kvcommons.model.slices import Model
    from kvcommons.model.spec import ModelSpec, fingerprint, model_info

    spec = ModelSpec.read(model)
    if window > spec.context_window:
        raise InvalidInput(f"{model.name} has a window of {spec.context_window} tokens, not of {window}")
    content = text.read_bytes()
    opening, documents = documents_of(model, content.decode(), tokens, window)
    info = model_info(
        model.name, spec, fingerprint(model, spec, "float32", BLOCK_TOKENS), "float32", BLOCK_TOKENS
    )
    core = make_core(Model.load(model, dtype="float32"), info, capacity_tokens=4 * window)
    head = -(-len(opening) // BLOCK_TOKENS) * BLOCK_TOKENS
    pieces = []
    for number, document in enumerate(documents):
        progress(f"piece {number + 1} of {len(documents)}")
        pieces.append(losses(core, [document], head, window, lambda _: None))
    return _report(
        pieces, f"{model.name} reads {text.name} (SHA-256 {hashlib.sha256(content).hexdigest()})", window
    )


def documents_of(model: Path, text: str, tokens: int, window: int) -> tuple[list[int], list[Document]]:
    """What precedes the text, and pieces of it that overflow twice, spread evenly over all of it."""
    from kvcommons.model.chat import ChatTemplate
    from kvcommons.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.read(model)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    opening = ChatTemplate.read(model, tokenizer).prompt(messages)
    # Lines that were wrapped and indented for a page are paragraphs again.
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    words = tokenizer.encode_text("\n".join(one for one in paragraphs if one))
    length = 2 * window + window // 2 - len(opening)
    # The first token after an overflow was predicted before it.
    count = math.ceil(tokens / (2 * (dropped_by(window) - 1)))
    if count * length > len(words):
        raise InvalidInput(
            f"the text has {len(words)} tokens; {tokens} after overflows take {count * length}"
        )
    step = (len(words) - length) // max(count - 1, 1)
    return opening, [
        Document(
            tokens=[*opening, *words[start : start + length]],
            answers=[False] * len(opening) + [True] * length,
        )
        for start in range(0, step * (count - 1) + 1, step)
    ]


def _report(pieces: Sequence[Mapping[str, Loss]], what: str, window: int) -> Report:
    """Of the losses of equally long pieces, by scheme."""
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for scheme in SCHEMES:
        losses_of = [piece[scheme] for piece in pieces]
        row: dict[str, str | float] = {
            "how": scheme, "tokens": sum(len(loss.right) for loss in losses_of),
            "perplexity": math.exp(mean(mean(loss.nats) for loss in losses_of)),
            "right, %": 100 * mean(mean(loss.right) for loss in losses_of),
        }  # fmt: skip
        # The logarithm of a ratio of perplexities is the mean of the differences.
        percent, percent_error = _paired(
            [mean(piece[scheme].nats) - mean(piece["TT"].nats) for piece in pieces]
        )
        points, points_error = _paired(
            [mean(piece[scheme].right) - mean(piece["TT"].right) for piece in pieces]
        )
        row |= {
            "perplexity to TT, %": f"{percent:+.3f} ± {percent_error:.3f}",
            "right to TT, points": f"{points:+.3f} ± {points_error:.3f}",
        }
        rows.append(row)
        if scheme != "TT":
            figures |= {f"perplexity_percent_{scheme.lower()}": percent, f"points_{scheme.lower()}": points}
    title = f"{what}, after overflows of a window of {window} tokens, {RATIO:.0%} dropped"
    return Report(title=title, rows=rows, ratios=figures)


def _paired(differences: Sequence[float]) -> tuple[float, float]:
    """Hundred times the mean difference of a piece, and half its 95% interval. Tokens of one piece are not
    independent of each other: an interval from tokens would be half as wide."""
    error = 1.96 * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return 100 * mean(differences), 100 * error
