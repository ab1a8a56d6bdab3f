"""What an engine is asked to compute: one prompt, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field

import numpy as np

from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.errors import ContextLengthExceeded, InvalidInput, ModelNotFound
from kvcommons.model.prompt_logprobs import TOP_MAX
from kvcommons.model.sampling import SamplingParams
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.identity import SALT_BYTES, IdentityChain, reusable_blocks
from kvcommons.token_ids import unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A `Job` that was checked."""

    request_id: str
    session_id: str
    tenant: str
    salt: bytes
    tokens: Sequence[int]  # prompt, and what was generated before a resumption
    prompt_tokens: int
    max_position: int = 0  # 0: the sequence is handed over with its first token
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    grammar: str = ""  # that the answer keeps to; empty: none
    store_control: str  # the kvstore's addresses; empty: no store
    store_data: str
    matched_blocks: int  # leading blocks that the store said it has
    no_reuse: bool
    prompt_logprobs: int | None = None  # of its own tokens, with so many alternatives; None: not wanted
    tbt_objective_s: float = 0.0  # between its tokens; 0: as this instance's settings have it
    background: bool = False  # other prompts come first
    prediction: tuple[int, ...] = ()  # what the answer may be, from its first token on; empty: nobody said
    truncated: Truncated = WHOLE
    origin: Context = field(default_factory=copy_context, repr=False)  # of the call: its trace and ids

    @classmethod
    def of(cls, job: pb.Job, model: pb.ModelInfo) -> Request:
        """Of the call under way. Raises InvalidInput, ContextLengthExceeded or ModelNotFound for what an
        instance of this model cannot compute."""
        if job.model != model.fingerprint:
            raise ModelNotFound("this instance serves another model than the one asked for", param="model")
        if len(job.salt) != SALT_BYTES:
            raise InvalidInput(f"salt must have {SALT_BYTES} bytes, not {len(job.salt)}", param="salt")
        try:
            tokens = unpacked(job.tokens)
        except ValueError as error:
            raise InvalidInput(f"tokens: {error}", param="tokens") from error
        if not tokens:
            raise InvalidInput("a prompt needs at least one token", param="tokens")
        if len(tokens) > model.context_window:
            raise ContextLengthExceeded(
                f"{len(tokens)} tokens are more than the context window of {model.context_window}: "
                "shorten the prompt",
                param="tokens",
            )
        largest = int(np.frombuffer(tokens, dtype=np.uint32).max())
        if largest >= model.vocab_size:
            raise InvalidInput(
                f"token {largest} is not in the vocabulary of {model.vocab_size}", param="tokens"
            )
        if len(job.prediction) > model.context_window:
            raise InvalidInput(
                f"a prediction of {len(job.prediction)} tokens is longer than the context window of "
                f"{model.context_window}: shorten it, or leave it out",
                param="prediction",
            )
        if max(job.prediction, default=0) >= model.vocab_size:
            raise InvalidInput(
                f"a predicted token is not in the vocabulary of {model.vocab_size}", param="prediction"
            )
        if any(token >= model.vocab_size for token in job.sampling.stop_token_ids):
            raise InvalidInput(
                f"a token that ends the answer is not in the vocabulary of {model.vocab_size}",
                param="sampling.stop_token_ids",
            )
        if job.prompt_tokens > len(tokens):
            raise InvalidInput("prompt_tokens is larger than the number of tokens", param="prompt_tokens")
        truncated = WHOLE
        if job.HasField("truncated"):
            truncated = Truncated.of(job.truncated, len(tokens), model.block_tokens)
        logprobs = job.prompt_logprobs if job.HasField("prompt_logprobs") else None
        if logprobs is not None and (logprobs > TOP_MAX or truncated is not WHOLE):
            raise InvalidInput(
                f"logprobs of a prompt have at most {TOP_MAX} alternatives each, and a prompt from which "
                "something was truncated has none",
                param="prompt_logprobs",
            )
        return cls(
            request_id=job.request_id,
            session_id=job.session_id,
            tenant=job.tenant,
            salt=job.salt,
            tokens=tokens,
            prompt_tokens=job.prompt_tokens,
            max_position=job.max_position,
            sampling=SamplingParams.of(job.sampling),
            stop_token_ids=frozenset(job.sampling.stop_token_ids),
            grammar=job.sampling.grammar,
            store_control=job.history.control_address,
            store_data=job.history.data_address,
            matched_blocks=job.history.matched_blocks,
            no_reuse=job.no_reuse,
            prompt_logprobs=logprobs,
            tbt_objective_s=job.tbt_objective_ms / 1000,
            background=job.background,
            prediction=tuple(job.prediction),
            truncated=truncated,
        )

    def chain(self, model: pb.ModelInfo) -> IdentityChain:
        """Identities of all full blocks of `tokens`."""
        return self.truncated.chain(self.salt, model.fingerprint, model.block_tokens, self.tokens)

    def reusable(self, block_tokens: int) -> int:
        """Leading blocks that may be found instead of computed: the last token is always computed, and so is
        each one that says how likely the next one is."""
        computes = self.no_reuse or self.prompt_logprobs is not None
        return 0 if computes else reusable_blocks(len(self.tokens), block_tokens)
