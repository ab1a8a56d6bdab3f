"""A second, smaller model whose tokens are drafts: an option, for text that repeats nothing.

It samples as the first one does, with the sequence's parameters and the seed of each position. One number
decides both tokens, so they are the same wherever the distributions agree, and not in greedy answers alone.

What it computes of a sequence lies in blocks of its own, and is no state: elsewhere it is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvcommons.engine.batch import Batch
from kvcommons.engine.calibration import calibrated
from kvcommons.engine.chunk_budget import ChunkBudget
from kvcommons.engine.chunk_rows import InnerChunk
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.drafts.acceptance import FADES, Agreement
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.sequence import LocalRun
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.engine.settings import EngineSettings
from kvcommons.engine.truncated import WHOLE
from kvcommons.errors import CapacityExhausted, InvalidInput, ModelNotFound
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.spec import ModelSpec, resolve_folder
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb

# Tokens behind the last one that it has computed, and still it drafts at once: more are a chunk.
_ROWS_BEHIND = 17
_TEMPERATURE_MAX = 2.0  # above, all are alike
_KEPT_OF_ALL, _KEPT_OF_ONE = 0.995, 0.97  # of what a draft has shown, by the next one


@dataclass(slots=True)
class _Followed:
    """`copy` is the sequence, as far as it was taken in. The KV of its first `computed` tokens is there;
    behind drafts also that of its last one, and of all drafts but the last."""

    copy: Generating
    agreement: Agreement
    knows: Callable[[int], bool]  # whether the draft model has such a token
    drafts: list[int] = field(default_factory=list)

    @property
    def caught_up(self) -> bool:
        return self.copy.computed == len(self.copy.tokens) - 1

    def take_in(self, tokens: Sequence[int]) -> list[int]:
        """The sequence has these tokens by now. Those that came behind the last drafts, if any did."""
        drafts, self.drafts = self.drafts, []
        came = list(tokens[len(self.copy.tokens) :]) if drafts else []
        if came:
            right = 0
            while right < min(len(drafts) - 1, len(came)) and drafts[right] == came[right]:
                right += 1
            for token in takewhile(self.knows, came[: right + 1]):
                self.copy.append(token)
            self.agreement.learn(drafts, came)
        return came


def load_draft_model(
    settings: EngineSettings,
    core: Core,
    model: str,
    *,
    max_draft_tokens: int,
    chunk_tokens: int,
    core_lock: str = "",
) -> DraftModel:
    """Of a folder or hub id. `settings` and `core` are those of the model that it drafts for; its own are the
    same in all else. Takes seconds, in which its iterations are measured, too: never on an event loop. Raises
    ModelNotFound, and InvalidInput for a model that cannot be served or has other tokens."""
    try:
        folders = [resolve_folder(settings.model), resolve_folder(model)]
    except ModelNotFound as error:
        raise ModelNotFound(f"draft_model: {error.message}", param="draft_model") from error
    named = all((folder / "tokenizer.json").is_file() for folder in folders)
    if named:
        tokenizers = [Tokenizer.read(folder) for folder in folders]
        same = tokenizers[0].has_tokens_of(tokenizers[1])
    else:
        same = ModelSpec.read(folders[1]).vocab_size == core.info.vocab_size
    if not same:
        raise InvalidInput(
            f"draft_model = {model!r} has other tokens than {settings.model!r}: name a smaller model with "
            "the same tokenizer, or leave it out",
            param="draft_model",
        )
    own_settings = replace(settings, model=str(folders[1]), model_name=None, predictor_file="")
    own = load_core(own_settings)
    predictor, _ = calibrated(
        own, own_settings, chunk_tokens=chunk_tokens, generates=True, core_lock=core_lock
    )
    return DraftModel(own, predictor, core.info.vocab_size, max_draft_tokens, chunk_tokens)


class DraftModel:
    """Belongs to the engine's thread. For sequences for which it has no room there are no drafts."""

    def __init__(
        self,
        core: Core,
        predictor: Predictor,
        vocab_size: int,
        max_draft_tokens: int,
        chunk_tokens: int,
    ) -> None:
        """`core` and `predictor` are its own; `vocab_size` is that of the model that it drafts for. A chunk
        has at most `chunk_tokens`."""
        self._core = core
        self._predictor = predictor
        self._vocab_size = vocab_size
        self._most = max_draft_tokens
        self._chunk_tokens = chunk_tokens
        remote = RemoteAttention(core.layout, core.backend, AttentionBudget(1.0))  # there is nobody
        self._composer = Composer(core, remote, attend_deadline_s=1.0)
        self._rested = 1.0  # of what it takes, what is believed: less, the longer it was not asked
        self._agreements: dict[float, Agreement] = {}  # of all sequences, by temperature
        self._followed: dict[int, _Followed] = {}
        self._given_up: set[int] = set()
        self._token_bytes = core.layout.block_bytes // core.block_tokens

    def chance(self, sequence: Generating) -> float:
        """That its next draft of the sequence is right; takes in what has come of the last ones. 0 where it
        has no drafts for it."""
        if sequence.key in self._given_up:
            return 0.0
        known, of_all = self._followed.get(sequence.key), self._agreement(sequence)
        if known is None:
            return of_all.share
        drafts = known.drafts
        of_all.learn(drafts, known.take_in(sequence.tokens))
        return known.agreement.share

    def rest(self, sequences: Sequence[Generating]) -> None:
        """It is not worth asking for drafts of these: what is known of them fades, and of what a draft takes,
        so that it is asked again."""
        self._rested *= FADES
        for one in sequences:
            self._agreement(one).fade()
            if (known := self._followed.get(one.key)) is not None:
                known.agreement.fade()

    def step_seconds(self, sequences: Sequence[Generating]) -> float:
        """For a draft of each of these; 0 until that was measured."""
        tokens = sum(len(one.tokens) for one in sequences)
        work = IterationWork(rows=len(sequences), read_bytes=tokens * self._token_bytes)
        return self._predictor.seconds(work) * self._rested

    def follow(self, sequence: Generating) -> bool:
        """Whether it can have the sequence: all of its tokens are of its vocabulary, and within its
        window. Not once it was given up."""
        if sequence.key in self._given_up:
            return False
        known = self._followed.get(sequence.key)
        if known is None:
            request = replace(
                sequence.request,
                tokens=sequence.tokens[:],
                truncated=WHOLE,  # to it what is left is a text of its own
                sampling=replace(sequence.request.sampling, logprobs=False),
                stop_token_ids=frozenset(filter(self._knows, sequence.request.stop_token_ids)),
            )
            size, share = self._core.block_tokens, self._agreement(sequence).share
            copy = Generating(key=sequence.key, request=request, block_tokens=size, chain=sequence.chain)
            agreement = Agreement(expected=share, kept=_KEPT_OF_ONE)
            known = _Followed(copy, agreement, self._knows)
            self._followed[sequence.key] = known
            news: Sequence[int] = sequence.tokens
        else:
            news = sequence.tokens[len(known.copy.tokens) :]
        window = self._core.info.context_window
        if len(sequence.tokens) + self._most > window or not self._knows(max(news, default=0)):
            self.give_up(sequence.key)
            return False
        return True

    def ready(self, sequence: Generating) -> bool:
        """Whether drafts are quick behind what it has computed of a sequence that it follows, and have
        room."""
        if self.lags(sequence):
            return False
        if self.has_room(sequence):
            return True
        self.give_up(sequence.key)  # what it has is of no use, and others have room then
        return False

    def lags(self, sequence: Generating) -> bool:
        """Whether it has to catch up with a sequence that it follows before it is ready."""
        known = self._followed.get(sequence.key)
        return known is not None and not (
            known.caught_up and len(sequence.tokens) - len(known.copy.tokens) < _ROWS_BEHIND
        )

    def has_room(self, sequence: Generating) -> bool:
        """Whether it has blocks for a sequence that it follows, and for drafts behind it, or has them now."""
        core, copy = self._core, self._followed[sequence.key].copy
        lacking = -(-(len(sequence.tokens) + self._most) // core.block_tokens) - copy.blocks
        if lacking > 0:
            try:
                blocks = core.allocator.allocate(lacking)
            except CapacityExhausted:
                return False
            copy.append_run(LocalRun(first_block=copy.blocks, blocks=blocks))
        return True

    def catch_up_seconds(self, sequence: Generating) -> float:
        """Until it is ready; 0 where that is not known."""
        return self._predictor.seconds(IterationWork.of_chunk(self._missing(sequence)))

    def catch_up(self, sequence: Generating, most_s: float) -> None:
        """Computes the next chunk of a sequence that it follows, and has room for: as long a one as takes
        `most_s`, and not less than chunks of prompts have."""
        positions, copy = self._missing(sequence), self._followed[sequence.key].copy
        chunk = ChunkBudget(
            self._predictor, IterationWork(), objective_s=most_s, chunk_tokens=self._chunk_tokens
        )
        positions = positions[: chunk.fit(positions.start, len(positions))]
        rows = InnerChunk(self._core, positions, copy.local_blocks(), sequence.tokens)
        self._carry_out(Iteration(self._core, [rows]))
        for token in sequence.tokens[len(copy.tokens) : positions.stop + 1]:
            copy.append(token)
        copy.computed = positions.stop

    def draft(self, sequences: Sequence[Generating], depth: int) -> dict[int, list[int]]:
        """So many tokens of each sequence, by key; all are ready. Raises what computing them raised."""
        known = [self._followed[one.key] for one in sequences]
        ahead = [
            list(one.tokens[len(each.copy.tokens) :]) for one, each in zip(sequences, known, strict=True)
        ]
        rows = [
            (each.copy, some[:count])
            for each, some in zip(known, ahead, strict=True)
            for count in range(len(some) + 1)
        ]
        for _ in range(depth):
            drawn = self._sampled(rows)
            for each, some in zip(known, ahead, strict=True):
                token = drawn[each.copy.key]
                each.drafts.append(token)
                some.append(token)
            rows = [(each.copy, some) for each, some in zip(known, ahead, strict=True)]
        for one, each in zip(sequences, known, strict=True):
            for token in one.tokens[len(each.copy.tokens) :]:
                each.copy.append(token)
        return {
            one.key: list(takewhile(lambda token: token < self._vocab_size, each.drafts))
            for one, each in zip(sequences, known, strict=True)
        }

    def leave(self, key: int) -> None:
        """The sequence has ended."""
        self._given_up.discard(key)
        known = self._followed.pop(key, None)
        if known is not None:
            self._core.allocator.release(known.copy.local_blocks())

    def give_up(self, key: int) -> None:
        """There are no drafts for it any more."""
        self.leave(key)
        self._given_up.add(key)

    def _sampled(self, rows: Sequence[tuple[Generating, Sequence[int]]]) -> dict[int, int]:
        """What follows the last of each sequence's rows, by key."""
        core = self._core
        batch = Batch([one for one, _ in rows], core.block_tokens, core.backend, [some for _, some in rows])
        (drawn,) = self._carry_out(self._composer.iteration(batch))
        return {one.key: token.token for (one, _), token in zip(rows, drawn, strict=True)}

    def _carry_out(self, iteration: Iteration) -> list[list[pb.SampledToken]]:
        tokens = iteration.run()
        for failure in iteration.failures.values():
            raise failure
        self._predictor.learn(iteration.work, iteration.timing.own_s)
        self._rested = 1.0
        return tokens

    def _agreement(self, sequence: Generating) -> Agreement:
        """Of sequences that are sampled as freely: the more so, the less often both models draw the same."""
        temperature = min(round(sequence.request.sampling.temperature, 1), _TEMPERATURE_MAX)
        return self._agreements.setdefault(temperature, Agreement(kept=_KEPT_OF_ALL))

    def _missing(self, sequence: Generating) -> range:
        """Tokens before its last one that are not computed."""
        return range(self._followed[sequence.key].copy.computed, len(sequence.tokens) - 1)

    def _knows(self, token: int) -> bool:
        return token < self._core.info.vocab_size
