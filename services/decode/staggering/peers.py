"""Another decode instance of the same model that computes slices for this one: asked for one at a time, left
alone while it does not answer, met again every so often."""

from __future__ import annotations

import logging
import threading
import time

from torch import Tensor

from kvcommons.engine.core import Core
from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.model.slices import State
from kvcommons.pb import data_pb2 as pb
from kvcommons.rpc.dialer import Dialer
from kvcommons.transport.deadline import Deadline
from services.decode.staggering.slice_exchange import begin_slice

log = logging.getLogger(__name__)

MEET_EVERY_S = 0.5
MEET_S = 1.0  # for the answer
# Decode has nothing else to do while it waits for a slice, and needs it at once.
_ASK_S = 400e-6


class PeerHealth:
    """Whether a peer is given slices: not before it was met, and not for a while after it failed one, longer
    each time. A peer that meets but is too slow for slices costs its deadline ever more rarely. Pure."""

    OUT_S, OUT_S_MAX = 1.0, 60.0

    def __init__(self) -> None:
        self._met = False
        self._out_s = self.OUT_S
        self._out_until_s = 0.0

    def well(self, now_s: float) -> bool:
        return self._met and now_s >= self._out_until_s

    def met(self, now_s: float) -> None:
        """It answered, and has the same model. After a long time without failures all is forgiven."""
        self._met = True
        if now_s > self._out_until_s + self.OUT_S_MAX:
            self._out_s = self.OUT_S

    def missed(self) -> None:
        """It did not answer, or is of another model."""
        self._met = False

    def failed(self, now_s: float) -> None:
        """It let a slice fail. Of slices that fail at once only the first counts."""
        if self.well(now_s):
            self._out_until_s = now_s + self._out_s
            self._out_s = min(2 * self._out_s, self.OUT_S_MAX)
        self._met = False


class Peer:
    """`advance` blocks and may be called from any thread, at the same time."""

    def __init__(self, address: str, core: Core, *, deadline_s: float, dialer: Dialer) -> None:
        """`deadline_s`: for a slice."""
        self.address = address
        self.load = pb.MetReplica()  # as it last said
        self._core = core
        self._deadline_s = deadline_s
        self._client = dialer.client(address, "decode", ask_s=_ASK_S)
        self._health = PeerHealth()
        self._lock = threading.Lock()  # of `_health`
        self._said = ""
        self._wake = threading.Event()
        self._stopping = False
        self._message = pb.MeetReplica(model=core.info.fingerprint)
        self._thread = threading.Thread(target=self._meet_for_ever, name="decode-peer", daemon=True)

    def start(self, own_address: str, *, rotate: bool) -> None:
        """`rotate` goes with each meeting, until `announce` changes it."""
        self._message.address, self._message.rotate = own_address, rotate
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._stopping = True
        self._wake.set()
        self._client.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def well(self) -> bool:
        with self._lock:
            return self._health.well(time.monotonic())

    def announce(self, rotate: bool) -> None:
        """Meets the peer at once, with a new `rotate`, which goes with each meeting from then on."""
        self._message = pb.MeetReplica(
            model=self._message.model, address=self._message.address, rotate=rotate
        )
        self._wake.set()

    def advance(
        self, layer: int, state: State, attention: Tensor, *, positions: list[int], unrotated: bool
    ) -> tuple[State, pb.ComputedSlice] | None:
        """The model's `advance`, computed there. None: it was not, and the peer is left alone for a while."""
        try:
            return begin_slice(
                self._client,
                self._core.model,
                self._core.info.fingerprint,
                layer,
                state,
                attention,
                positions=positions,
                unrotated=unrotated,
                deadline=Deadline.after(self._deadline_s),
            ).finish()
        except KVCommonsError as error:
            with self._lock:
                self._health.failed(time.monotonic())
            self._say(f"did not compute a slice: {error.message}")
            return None

    def _meet_for_ever(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self._meet()
            self._wake.wait(MEET_EVERY_S)

    def _meet(self) -> None:
        request = pb.DataRequest(meet_replica=self._message)
        try:
            reply = self._client.call(request, deadline=Deadline.after(MEET_S))
        except KVCommonsError as error:
            with self._lock:
                self._health.missed()
            self._say(error.message, refused=isinstance(error, InvalidInput))
            return
        self.load = reply.met_replica
        with self._lock:
            self._health.met(time.monotonic())
            well = self._health.well(time.monotonic())
        if well:
            self._say("")

    def _say(self, reason: str, *, refused: bool = False) -> None:
        """Once, when it changes."""
        news = "refused" if refused else "away" if reason else "well"
        if self._stopping or news == self._said:
            return
        self._said = news
        extra = {"peer": self.address, "reason": reason}
        if refused:
            log.error("a replica of the group is set up wrongly: its slices are computed here", extra=extra)
        elif reason:
            log.warning("a replica of the group is not well: its slices are computed here", extra=extra)
        else:
            log.info("a replica of the group computes slices", extra={"peer": self.address})
