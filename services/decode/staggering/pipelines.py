"""Staggered pipelining (Lamina, section 5.1): several batches alternate, so that model replicas compute
slices of some while the attention pool computes attention of others. Decisions only, without I/O or a clock.

A batch alternates: a slice of the model on a replica, then that layer's attention in the pool. Slice
`slice_index` of a batch stands before its attention number `slice_index`; where an iteration ends, the end of
the last layer, sampling and the beginning of the next iteration are one slice. Sequences join and leave a
batch there only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvcommons.engine.regression import Regression


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one layer of one batch. `network_s` is what of both ways is not hidden behind attention."""

    slice_s: float
    attend_s: float
    network_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """With nothing else under way."""
        return self.slice_s + self.attend_s + self.network_s


class Scheme(Protocol):
    """Which replica computes which slice. Batches and replicas are numbered from 0."""

    @property
    def name(self) -> str: ...

    @property
    def batches(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    def replica_of(self, batch: int, slice_index: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Each replica has a batch of its own, and waits while the pool computes attention (section 5.1.2). With
    one batch there is no pipelining."""

    batches: int
    name = "fixed"

    @property
    def replicas(self) -> int:
        return self.batches

    def replica_of(self, batch: int, slice_index: int) -> int:
        return batch


@dataclass(frozen=True, slots=True)
class Rotational:
    """n batches over n - 1 replicas: after each attention a batch goes to the next replica, and its context
    with it (section 5.1.1). With n = 2 both stay where they are."""

    batches: int
    name = "rotational"

    def __post_init__(self) -> None:
        assert self.batches > 1

    @property
    def replicas(self) -> int:
        return self.batches - 1

    def replica_of(self, batch: int, slice_index: int) -> int:
        return (batch + slice_index) % self.replicas


def period_s(scheme: Scheme, timing: Timing) -> float:
    """Seconds in which every batch gets one layer further, in the steady state: bound by a batch that waits
    for nobody, by the replicas or by the pool."""
    n = scheme.batches
    return max(timing.alone_s, n * timing.slice_s / scheme.replicas, n * timing.attend_s)


class Division:
    """Which sequences are in which batch: continuous batching in each. Batches should take equally long, so
    each has an equal share of the sequences (slices) and of the KV on every holder (attention)."""

    _UNEVEN = 0.25  # of an even share: a batch that changes is composed anew, which takes time too

    def __init__(self) -> None:
        self._batches = 1
        self._members: dict[int, int] = {}  # sequence -> batch

    @property
    def batches(self) -> int:
        return self._batches

    def spread(self, batches: int) -> None:
        """Over so many from now on; sequences go over as their batches are composed."""
        assert batches > 0
        self._batches = batches

    def leave(self, sequence: int) -> None:
        self._members.pop(sequence, None)

    def compose(
        self, batch: int, able: Mapping[int, int], holders: Mapping[int, Hashable] | None = None
    ) -> list[int]:
        """The sequences of the batch's next iteration, oldest first. It stands between two iterations.

        `able` has the tokens of every sequence that can run, in whichever batch it is, `holders` where the
        most of its KV is (None: it does not matter). New ones join the lightest batch, which is not always
        this one. Those of this batch that another is to have are given to it, and run there from its next
        iteration on: it has to be composed too if it rests.
        """
        for sequence in [key for key, at in self._members.items() if at == batch and key not in able]:
            del self._members[sequence]
        scale = _Scale(self._batches, able, holders or {}, self._members)
        for sequence in sorted(able.keys() - self._members.keys()):
            self._members[sequence] = scale.put(sequence, scale.lightest(sequence))
        own = sorted(key for key, at in self._members.items() if at == batch and key in able)
        if batch >= self._batches:
            for sequence in own:
                self._members[sequence] = scale.put(sequence, scale.lightest(sequence))
            return []
        if scale.above_least(batch) > self._UNEVEN * 2 / self._batches:
            for sequence in reversed(own):  # the oldest stay
                to = scale.lightest(sequence)
                if scale.evens(sequence, batch, to):
                    scale.take(sequence, batch)
                    self._members[sequence] = scale.put(sequence, to)
        return [key for key in own if self._members[key] == batch]


class _Scale:
    """Loads of batches: the share of all sequences that they have, and the share of all tokens, added."""

    def __init__(
        self,
        batches: int,
        tokens: Mapping[int, int],
        holders: Mapping[int, Hashable],
        members: Mapping[int, int],
    ) -> None:
        self._tokens, self._holders = tokens, holders
        self._all = max(sum(tokens.values()), 1)
        self._loads = [0.0] * batches
        self._held: list[Counter[Hashable]] = [Counter() for _ in range(batches)]  # tokens on a holder
        for sequence, batch in members.items():
            if sequence in tokens and batch < batches:
                self.put(sequence, batch)

    def above_least(self, batch: int) -> float:
        return self._loads[batch] - min(self._loads)

    def lightest(self, sequence: int) -> int:
        """The batch that the sequence should go to. What it has on the sequence's own holder counts twice:
        attention takes as long as the holder that has most of the batch."""
        holder = self._holders.get(sequence)
        return min(
            range(len(self._loads)),
            key=lambda batch: self._loads[batch] + self._held[batch][holder] / self._all,
        )

    def evens(self, sequence: int, batch: int, to: int) -> bool:
        """Whether its going over brings the two nearer to each other."""
        holder = self._holders.get(sequence)
        return (
            self._loads[batch] - self._loads[to] > self._of(sequence)
            and self._held[batch][holder] > self._held[to][holder]
        )

    def put(self, sequence: int, batch: int) -> int:
        self._loads[batch] += self._of(sequence)
        self._held[batch][self._holders.get(sequence)] += self._tokens[sequence]
        return batch

    def take(self, sequence: int, batch: int) -> None:
        self._loads[batch] -= self._of(sequence)
        self._held[batch][self._holders.get(sequence)] -= self._tokens[sequence]

    def _of(self, sequence: int) -> float:
        return 1 / len(self._tokens) + self._tokens[sequence] / self._all


class _Duration:
    """Seconds over an amount: of a half never less than half of them. Where all are of about one amount
    nothing is known of the slope: it is `flat`, or goes through zero."""

    _KEPT = 0.98
    _SPREAD = 0.05  # of the mean amount, that says something of the slope

    def __init__(self, *, flat: bool) -> None:
        self._flat = flat
        self._fit = Regression(kept=self._KEPT)

    def __bool__(self) -> bool:
        return bool(self._fit)

    def observe(self, amount: float, seconds: float) -> None:
        self._fit.observe(amount, seconds)

    def at(self, amount: float) -> float:
        slope, through_zero = self._fit.slope_s(spread=self._SPREAD), self._fit.proportional_s
        if slope is None:
            slope = 0.0 if self._flat else through_zero
        return self._fit.at(amount, min(max(slope, 0.0), through_zero))


def _over(one_s: float, other_s: float) -> float:
    return one_s / other_s if other_s > 0 else 0.0


class Staggering:
    """Whether the same sequences make more tokens as the scheme's batches than as one on each replica.

    Without pipelining it observes what the parts of an iteration take, and computes what pipelining would
    bring. With pipelining it observes what iterations take, and that is what counts then: batches that run at
    the same time may disturb each other (replicas and pool on the same cores). Pipelining that does not keep
    what it promised is given up, and tried again where the batch is another, or after `retry_after`
    iterations. A trial is short, so the unknown is taken at its best: slices of half a batch take half as
    long."""

    _ON, _OFF = 1.1, 1.0  # gains
    _ALIKE = 1.5  # tokens of batches over tokens of those measured, either way
    _TRIAL = 4  # iterations of each batch

    def __init__(self, scheme: Scheme, *, retry_after: int = 2000) -> None:
        self._scheme = scheme
        self._retry_after = retry_after
        self._slice = _Duration(flat=False)
        self._attend = _Duration(flat=False)
        self._network = _Duration(flat=True)
        self._moved = _Duration(flat=True)
        self._staggered: float | None = None  # seconds for a token
        self._staggered_tokens = 0
        self._trial = 0  # iterations that are left of it
        self._since = 0
        self.on = False

    def took_alone(self, sequences: int, tokens: int, timing: Timing) -> None:
        """A layer of a batch of so many sequences, with so many tokens of KV in all, no other batch being
        under way on its replica."""
        self._slice.observe(sequences, timing.slice_s)
        self._attend.observe(tokens, timing.attend_s)
        self._network.observe(sequences, timing.network_s)
        self._since += 1
        if self._since > self._retry_after:
            self._staggered = None

    def moved(self, sequences: int, seconds: float) -> None:
        """What the activations of a batch of so many sequences took on their way, of a layer's time."""
        self._moved.observe(sequences, seconds)

    def took_staggered(self, sequences: int, tokens: int, layer_s: float) -> None:
        """An iteration, over its layers, of one of the scheme's batches, from its first slice to the first of
        the next: waiting for the others is in it. `sequences` and `tokens` are of all batches."""
        self._trial = max(self._trial - 1, 0)
        self._since = 0
        if self._trial >= self._scheme.batches:  # batches are not staggered yet
            return
        token_s = layer_s / max(sequences, 1)
        self._staggered = token_s if self._staggered is None else 0.9 * self._staggered + 0.1 * token_s
        self._staggered_tokens = tokens

    def gain(self, sequences: int, tokens: int) -> float:
        """Tokens a second of these sequences in the scheme's batches over those in one per replica. 0 while
        nothing was measured, and where there is nothing to gain: no sequences, or no time that they take."""
        if not self._slice or sequences < 1:
            return 0.0
        n, replicas = self._scheme.batches, self._scheme.replicas
        whole_s = period_s(Fixed(replicas), self._timing(sequences / replicas, tokens / replicas))
        alike = (
            tokens < self._ALIKE * self._staggered_tokens and self._staggered_tokens < self._ALIKE * tokens
        )
        if self._staggered is not None and alike:
            return _over(whole_s, self._staggered * sequences)
        timing = self._timing(sequences / n, tokens / n)
        if self._moved:
            timing = replace(timing, network_s=timing.network_s + self._moved.at(sequences / n))
        return _over(whole_s, period_s(self._scheme, timing))

    def decide(self, sequences: int, tokens: int, over: float = 1.0) -> int:
        """Into how many batches these sequences should be divided. `over`: the gain of another scheme, which
        would be taken otherwise."""
        enough, gain = sequences >= 2 * self._scheme.batches, self.gain(sequences, tokens) / over
        if not self.on and enough and gain >= self._ON:
            self.on = True
            self._trial = self._TRIAL * self._scheme.batches
        elif not enough or (gain < self._OFF and not self._trial):
            self.on = False
        return self._scheme.batches if self.on else self._scheme.replicas

    def give_up(self) -> None:
        """The scheme's replicas are not all there."""
        self.on = False

    def _timing(self, sequences: float, tokens: float) -> Timing:
        return Timing(
            slice_s=self._slice.at(sequences),
            attend_s=self._attend.at(tokens),
            network_s=self._network.at(sequences),
        )
