"""What each of the ranks has that compute a model's layers together (tensor parallelism): query heads, the
KV heads that these read, and columns of the MLP. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRank:
    """Rank `number` (0 is the first) of `ranks`. Where there are fewer KV heads than ranks, as many
    consecutive ranks have the same one; the first of these is the one that saves and sends it."""

    number: int = 0
    ranks: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Raises InvalidInput where the model cannot be divided so."""
        able = [str(ranks) for ranks in range(1, spec.query_heads + 1) if _divides(ranks, spec)]
        if not _divides(self.ranks, spec):
            raise InvalidInput(
                f"tensor = {self.ranks} does not divide {spec.query_heads} query heads, {spec.kv_heads} KV "
                f"heads (of which several ranks may have the same) and {spec.mlp} columns of the MLP: this "
                f"model's can be divided over {', '.join(able)}",
                param="tensor",
            )

    def query_heads(self, count: int) -> range:
        """Of so many in the model."""
        return self._share(count)

    def kv_heads(self, count: int) -> range:
        """Of so many in the model."""
        if count >= self.ranks:
            return self._share(count)
        own = self.number * count // self.ranks
        return range(own, own + 1)

    def mlp(self, columns: int) -> range:
        """Of so many in the model."""
        return self._share(columns)

    def layout(self, whole: Layout) -> Layout:
        """Of this rank's KV."""
        return replace(
            whole,
            kv_heads=len(self.kv_heads(whole.kv_heads)),
            query_heads=len(self.query_heads(whole.query_heads)),
        )

    def kv_part(self, kv_heads: int) -> HeadPart | None:
        """Which part of the model's KV its own is; None: all of it."""
        parts = min(self.ranks, kv_heads)
        return HeadPart(number=self.number * parts // self.ranks, parts=parts) if parts > 1 else None

    def keeps(self, kv_heads: int) -> bool:
        """Whether its KV is its own to save and to send, rather than the same of a rank before it."""
        return kv_heads >= self.ranks or self.number % (self.ranks // kv_heads) == 0

    def _share(self, count: int) -> range:
        each = count // self.ranks
        return range(self.number * each, (self.number + 1) * each)


def _divides(ranks: int, spec: ModelSpec) -> bool:
    divisible = not spec.query_heads % ranks and not spec.mlp % ranks
    return divisible and (not spec.kv_heads % ranks or not ranks % spec.kv_heads)


ALONE = TensorRank()
