"""The body of /v1/commons, as /openapi.json describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.router.api.schemas.answers import AnswerBody

_NO_ANSWER = "Null while the kvstore does not answer."


class CommonsInstance(AnswerBody):
    id: str
    service: str
    host: str
    model: str | None
    group: str | None = Field(description="Of a head group's part or a pipeline stage: whose.")
    ready: bool
    total_blocks: int
    free_blocks: int
    lendable_blocks: int
    running: int
    queued: int
    silent_s: float | None = Field(
        description="So old is what is said of its load: since its last heartbeat. null: not known."
    )
    answers: bool | None = Field(
        description="Of what lends: its memory and its loans are of this moment; false: as old as its last "
        "heartbeat. null: it lends nothing."
    )


class CommonsTiers(AnswerBody):
    kvstore: str
    dram_blocks: int | None = Field(description=_NO_ANSWER)
    dram_capacity_blocks: int | None
    disk_blocks: int | None
    disk_capacity_blocks: int | None
    pending_writes: int | None = Field(description="Blocks in DRAM that are not on disk yet.")
    sessions: int | None


class CommonsLoan(AnswerBody):
    creditor: str
    debtor: str
    blocks: int


class CommonsHolding(AnswerBody):
    instance: str
    blocks: int


class CommonsSequence(AnswerBody):
    name: str = Field(description="The request's number at this router, and the choice's in it.")
    phase: Literal["waiting", "computing", "generating", "resuming"]
    prompt_tokens: int
    tokens: int
    prefill: str | None
    decode: str | None
    holders: list[CommonsHolding] = Field(description="Where its KV lies; decode itself is the first.")
    resumptions: int


class CommonsLeg(AnswerBody):
    debtor: str
    creditor: str
    left_blocks: int
    settled_blocks: int


class CommonsSettlement(AnswerBody):
    id: str
    step: Literal["prepare", "freeze", "copy", "switch", "release", "end"]
    round: int
    legs: list[CommonsLeg] = Field(description="Of the circle, in order.")
    begun_s: float = Field(description="So many seconds ago.")
    ended_s: float | None = Field(description="So many seconds ago; null while it is under way.")


class CommonsQueue(AnswerBody):
    running: int
    waiting: int
    waiting_for_room: int = Field(description="Of the running choices: until decode has room for them.")
    documents: int


class CommonsClass(AnswerBody):
    name: str
    ttft_s: float | None = Field(description="The first token is promised after so long at most.")
    tbt_s: float | None = Field(description="Between two tokens.")
    met: int
    missed: int
    refused: int
    best_effort: int


class CommonsPicture(AnswerBody):
    object: Literal["commons"]
    taken_at: float = Field(description="Seconds since the epoch.")
    instances: list[CommonsInstance]
    tiers: list[CommonsTiers]
    loans: list[CommonsLoan]
    sequences: list[CommonsSequence] = Field(description="Under way at this router.")
    sequences_left_out: int
    settlements: list[CommonsSettlement] = Field(description="Under way, and those of the last minute.")
    queue: CommonsQueue
    classes: list[CommonsClass]
