"""One push as the rank that sends it sees it: what has been computed, what is on its way, what has landed.

Pure: progress, messages and the time are inputs. What is wanted are the tokens of each *span*: all layers of a cache
group, or some of them. The engine says how far each span is final; what is final, wanted and not on its way goes with
the next batch, so that a pusher that falls behind sends fewer and larger ones, and nothing queues up. One
batch is on its way at a time: after a preemption the same bytes are never written by two.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.plan.layer_spans import Span

END = 1 << 62
"""Progress of a span whose prompt has been computed to its end, partly filled last block and state included."""


class Need(msgspec.Struct, frozen=True):
    """Tokens wanted of a span, half-open. But for the last, batches end at tokens that are a ``multiple_of``.

    A state is token 0 to 1, and there only when the prompt has ended: its ``multiple_of`` is larger than it.
    """

    first_token: int
    end_token: int
    multiple_of: int


class Cut(NamedTuple):
    """Tokens of a span that go with one batch."""

    span: Span
    first_token: int
    end_token: int


Batch = tuple[Cut, ...]


class PushState(Enum):
    """Where a push stands."""

    OPEN = "pushing"
    STOPPING = "waiting for what is on its way"
    OVER = "over"


class Sending:
    """``error`` is None for a push that is open or complete.

    >>> span = Span("full")
    >>> push = Sending("r", {span: Need(0, 40, 16)}, deadline=30.0)
    >>> push.take({span: 39}), push.take({span: END}), push.landed(), push.take({span: END})
    ((Cut(span=Span(group='full', number=0), first_token=0, end_token=32),), (), None, \
(Cut(span=Span(group='full', number=0), first_token=32, end_token=40),))
    >>> push.landed(), push.state.value, push.error
    (None, 'over', None)
    """

    def __init__(self, transfer_id: str, needs: Mapping[Span, Need], deadline: float) -> None:
        self._transfer_id = transfer_id
        self._needs = dict(needs)
        self._deadline = deadline
        self._reached = {span: need.first_token for span, need in needs.items()}
        self._on_its_way: Batch = ()
        self._is_void = False
        self.state = PushState.OPEN
        self.error: KVFerryError | None = None
        self._end_if_complete()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written."""
        return not self._on_its_way

    def take(self, final: Mapping[Span, int]) -> Batch:
        """Return what is final and wanted and goes now; empty while something else is on its way."""
        if self.state is not PushState.OPEN or self._on_its_way:
            return ()
        cuts = [Cut(span, begin, self._ready(span, final.get(span, 0))) for span, begin in self._reached.items()]
        self._on_its_way = tuple(cut for cut in cuts if cut.end_token > cut.first_token)
        self._is_void = False
        return self._on_its_way

    def landed(self) -> None:
        """What was on its way has landed; it counts unless its source changed meanwhile."""
        batch, self._on_its_way = self._on_its_way, ()
        if not self._is_void:
            self._reached |= {cut.span: cut.end_token for cut in batch}
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
        if self.state is PushState.OVER:
            return
        if self.error is None:
            self.error = error.without_traceback()
        self.state = PushState.STOPPING
        self._settle()

    def tick(self, now: float) -> None:
        """Give up once the deadline has passed."""
        if self.state is PushState.OPEN and now >= self._deadline:
            self.fail(_late(self._transfer_id))

    def _ready(self, span: Span, final: int) -> int:
        need = self._needs[span]
        if final >= END:
            return need.end_token
        return max(self._reached[span], min(final, need.end_token) // need.multiple_of * need.multiple_of)

    def _settle(self) -> None:
        if self.state is PushState.STOPPING and not self._on_its_way:
            self.state = PushState.OVER
        elif self.state is PushState.OPEN:
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if all(self._reached[span] == need.end_token for span, need in self._needs.items()):
            self.state = PushState.OVER


def _late(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the prompt of {transfer_id} was not pushed within the time that the receiver gave.",
        "push_timeout_seconds on the decode side sets the limit.",
    )
