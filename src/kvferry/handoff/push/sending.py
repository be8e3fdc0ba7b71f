"""One push as the rank that sends it sees it: what has been computed, what is on its way, what has landed.

Pure: progress, messages and the time are inputs. What is wanted lies in *lanes*: the tokens of one cache group, in
all layers or in one span of them. The engine says how far each lane is final; whatever is final, wanted and not on its
way goes with the next batch, so that a pusher that falls behind sends fewer and larger ones, and nothing queues up. One
batch is on its way at a time: after a preemption the same bytes are never written by two.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason

END = 1 << 62
"""Progress of a lane whose prompt has been computed to its end, partly filled last block and state included."""


class Lane(NamedTuple):
    """Layers of one cache group that are pushed together: all, or span number ``span`` of them."""

    group: str
    span: int = 0


class Need(msgspec.Struct, frozen=True):
    """Tokens wanted of a lane, half-open. But for the last, batches end at multiples of ``grain`` tokens.

    A state is token 0 to 1, and there only when the prompt has ended: its grain is larger than it.
    """

    first_token: int
    end_token: int
    grain: int


class Cut(NamedTuple):
    """Tokens of a lane that go with one batch."""

    lane: Lane
    first_token: int
    end_token: int


Batch = tuple[Cut, ...]


class Stage(Enum):
    """Where a push stands."""

    OPEN = "pushing"
    STOPPING = "waiting for what is on its way"
    OVER = "over"


class Sending:
    """``error`` is None for a push that is open or complete.

    >>> lane = Lane("full")
    >>> push = Sending("r", {lane: Need(0, 40, 16)}, deadline=30.0)
    >>> push.take({lane: 39}), push.take({lane: END}), push.landed(), push.take({lane: END})
    ((Cut(lane=Lane(group='full', span=0), first_token=0, end_token=32),), (), None, \
(Cut(lane=Lane(group='full', span=0), first_token=32, end_token=40),))
    >>> push.landed(), push.stage.value, push.error
    (None, 'over', None)
    """

    def __init__(self, transfer_id: str, needs: Mapping[Lane, Need], deadline: float) -> None:
        self._transfer_id = transfer_id
        self._needs = dict(needs)
        self._deadline = deadline
        self._reached = {lane: need.first_token for lane, need in needs.items()}
        self._on_its_way: Batch = ()
        self._is_void = False
        self.stage = Stage.OPEN
        self.error: KVFerryError | None = None
        self._end_if_complete()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written."""
        return not self._on_its_way

    def take(self, final: Mapping[Lane, int]) -> Batch:
        """Return what is final and wanted and goes now; empty while something else is on its way."""
        if self.stage is not Stage.OPEN or self._on_its_way:
            return ()
        cuts = [Cut(lane, begin, self._ready(lane, final.get(lane, 0))) for lane, begin in self._reached.items()]
        self._on_its_way = tuple(cut for cut in cuts if cut.end_token > cut.first_token)
        self._is_void = False
        return self._on_its_way

    def landed(self) -> None:
        """What was on its way has landed; it counts unless its source changed meanwhile."""
        batch, self._on_its_way = self._on_its_way, ()
        if not self._is_void:
            self._reached |= {cut.lane: cut.end_token for cut in batch}
        self._settle()

    def stopped(self, error: KVFerryError | None) -> None:
        """What was on its way has ended without landing whole; nothing of it is written any more."""
        self._on_its_way = ()
        if error is not None:
            self.fail(error)
        self._settle()

    def void(self) -> None:
        """The blocks that are being read may be overwritten: what is on its way is to be sent again."""
        self._is_void = True

    def fail(self, error: KVFerryError) -> None:
        """Give up, for the first reason there is. Over once nothing is on its way."""
        if self.stage is Stage.OVER:
            return
        if self.error is None:
            self.error = error.without_traceback()
        self.stage = Stage.STOPPING
        self._settle()

    def tick(self, now: float) -> None:
        """Give up once the deadline has passed."""
        if self.stage is Stage.OPEN and now >= self._deadline:
            self.fail(_late(self._transfer_id))

    def _ready(self, lane: Lane, final: int) -> int:
        need = self._needs[lane]
        if final >= END:
            return need.end_token
        return max(self._reached[lane], min(final, need.end_token) // need.grain * need.grain)

    def _settle(self) -> None:
        if self.stage is Stage.STOPPING and not self._on_its_way:
            self.stage = Stage.OVER
        elif self.stage is Stage.OPEN:
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if all(self._reached[lane] == need.end_token for lane, need in self._needs.items()):
            self.stage = Stage.OVER


def _late(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the prompt of {transfer_id} was not pushed within the time that the receiver gave.",
        "push_timeout_seconds on the decode side sets the limit.",
    )
