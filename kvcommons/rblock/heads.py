"""KV divided by heads (Lamina, section 5.2): each of several holders has all tokens of a sequence, and an
equal, consecutive share of its KV heads with the query heads that read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

PARTS_MAX = 1024  # no model has as many KV heads; others' messages say it before any model is known
_WRITTEN = re.compile(r"(\d{1,4})/(\d{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPart:
    """Part `number` (0 is the first) of `parts`. Raises InvalidInput for one that is not there."""

    number: int
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise InvalidInput(
                f"heads = {str(self)!r} divides nothing: a head group has two parts or more; leave heads out "
                "where a pool has all of them",
                param="heads",
            )
        if self.parts > PARTS_MAX:
            raise InvalidInput(
                f"heads = {str(self)!r}: {PARTS_MAX} parts are the most, for no model has more KV heads",
                param="heads",
            )
        if not 0 <= self.number < self.parts:
            raise InvalidInput(
                f"heads = {str(self)!r}: parts are counted from 0, so that the last one is "
                f"{self.parts - 1}/{self.parts}",
                param="heads",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    @classmethod
    def parse(cls, text: str) -> HeadPart:
        """Of "0/2". Raises InvalidInput."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise InvalidInput(
                f'heads = {text!r} is no part of a whole: the first of two parts is written "0/2"',
                param="heads",
            )
        return cls(number=int(match[1]), parts=int(match[2]))

    @classmethod
    def of(cls, message: pb.Heads) -> HeadPart:
        """What a message names. Raises InvalidInput."""
        return cls(number=message.number, parts=message.parts)

    def message(self) -> pb.Heads:
        return pb.Heads(number=self.number, parts=self.parts)

    def layout(self, whole: Layout) -> Layout:
        """Of this part. Raises InvalidInput where the heads cannot be divided so."""
        if whole.kv_heads % self.parts:
            able = [str(parts) for parts in range(2, whole.kv_heads + 1) if not whole.kv_heads % parts]
            raise InvalidInput(
                f"heads = {str(self)!r}: {whole.kv_heads} KV heads cannot be divided into {self.parts} equal "
                f"parts; this model's can into {', '.join(able) or 'none'}",
                param="heads",
            )
        return replace(
            whole,
            kv_heads=whole.kv_heads // self.parts,
            query_heads=whole.query_heads // self.parts,
        )

    def model(self, fingerprint: bytes) -> bytes:
        """What a holder of this part calls its model (32 bytes): whoever takes it for one of the whole model,
        or of another part, is refused."""
        digest = blake2b(digest_size=32, person=b"kvc-head-part")
        digest.update(fingerprint)
        digest.update(str(self).encode())
        return digest.digest()

    def kv_heads(self, whole: Layout) -> slice:
        """This part's among all."""
        count = whole.kv_heads // self.parts
        return slice(self.number * count, (self.number + 1) * count)

    def query_heads(self, whole: Layout) -> slice:
        count = whole.query_heads // self.parts
        return slice(self.number * count, (self.number + 1) * count)

    def pieces(self, objects: Sequence[Buffer]) -> list[memoryview]:
        """Of each object of the whole model, in place: this part's K, then its V. One after another they are
        the part's objects."""
        return [piece for one in objects for piece in self.pieces_of(memoryview(one).cast("B"))]

    def pieces_of(self, whole: memoryview) -> tuple[memoryview, memoryview]:
        """Of one object of all heads, by its bytes: this part's K and V, in place. Raises InvalidInput where
        it cannot be divided so."""
        half, rest = divmod(len(whole), 2)
        size, uneven = divmod(half, self.parts)
        if rest or uneven or not size:
            raise InvalidInput(
                f"an object of {len(whole)} bytes has no {self.parts} equal parts", param="heads"
            )
        begin = self.number * size
        return whole[begin : begin + size], whole[half + begin : half + begin + size]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransfer:
    """Heads that go from one holder's objects to another's."""

    place: int  # of the receivers' parts
    sent: HeadPart | None  # part of what the sender has; None: all of it
    received: HeadPart | None  # part of what the receiver has; None: all of it


def transfers(sender: HeadPart | None, receivers: int) -> list[HeadTransfer]:
    """What the sender of a part (None: of all heads) sends to holders that divide all heads equally. Raises
    InvalidInput where shares of the one begin within those of the other."""
    senders = 1 if sender is None else sender.parts
    own = 0 if sender is None else sender.number
    if receivers >= senders and not receivers % senders:
        times = receivers // senders
        return [
            HeadTransfer(place=own * times + number, sent=_part(number, times), received=None)
            for number in range(times)
        ]
    if not senders % receivers:
        times = senders // receivers
        return [HeadTransfer(place=own // times, sent=None, received=_part(own % times, times))]
    raise InvalidInput(
        f"KV heads divided over {senders} ranks cannot be sent to a head group, or ranks, of {receivers}: "
        "take a tensor that divides these, or is divided by them",
        param="tensor",
    )


def _part(number: int, parts: int) -> HeadPart | None:
    return HeadPart(number=number, parts=parts) if parts > 1 else None


def divided(parts: int) -> list[HeadPart]:
    """All parts, in order."""
    return [HeadPart(number=number, parts=parts) for number in range(parts)]
