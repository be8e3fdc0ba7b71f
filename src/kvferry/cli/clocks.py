"""The clocks of several hosts on one axis, from what cannot be otherwise: a message arrives after it was sent.

The *offset* of a clock is what is added to its time to get that of the reference clock. A message from clock ``a`` to
clock ``b`` bounds a difference of offsets from above; messages in the other direction bound it from below. Two clocks
of hosts run apart, by :data:`MAX_DRIFT` at most, so that a message says less about a moment the longer ago the moment
is. At each moment the bounds of all pairs are closed under addition, as shortest paths are; the middle between the
lowest and the highest possible offsets then satisfies every bound.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import KVFerryError, Reason

MAX_DRIFT = 1e-4
"""Seconds in a second by which two monotonic clocks run apart: quartz without any correction stays within half."""
TOLERANCE = 1e-6
"""Seconds by which bounds may contradict each other: the rounding of times."""
MOST_SAMPLES = 1 << 16
"""Messages between two clocks that are kept before those that say nothing new are forgotten."""
Matrix = list[list[float]]


class Message(NamedTuple):
    """A message from one clock to another: when it was sent, and the time of arrival less that of sending."""

    sent_at: float
    seconds: float
    name: str


class Offset(NamedTuple):
    """The offset of a clock at a moment: the chosen one, and the interval in which the true one lies."""

    chosen: float
    lowest: float
    highest: float

    @property
    def uncertainty(self) -> float:
        """By how many seconds the chosen offset may be wrong; infinite where messages bound one side only."""
        return max(self.highest - self.chosen, self.chosen - self.lowest)


@dataclass
class _Messages:
    """The messages from one clock to another."""

    kept: list[Message] = field(default_factory=list)
    limit: int = MOST_SAMPLES

    def add(self, message: Message) -> None:
        self.kept.append(message)
        if len(self.kept) >= self.limit:
            bound = Bound((each.sent_at, each.seconds) for each in self.kept)
            self.kept = [each for each in self.kept if each.seconds <= bound.at(each.sent_at)]
            self.limit = max(MOST_SAMPLES, 2 * len(self.kept))


class Bound:
    """An upper bound as a function of time, from its values at some moments.

    >>> bound = Bound([(0.0, 1.0), (10.0, 3.0)])
    >>> bound.at(0.0), round(bound.at(10.0), 6), Bound([]).at(0.0)
    (1.0, 1.001, inf)
    """

    def __init__(self, samples: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(samples)
        self._times = array("d", (time for time, _ in ordered))
        self._values = values = array("d", (value for _, value in ordered))
        for order in (range(1, len(values)), range(len(values) - 2, -1, -1)):
            step = order.step
            for index in order:
                apart = abs(self._times[index] - self._times[index - step])
                values[index] = min(values[index], values[index - step] + MAX_DRIFT * apart)

    def at(self, time: float) -> float:
        """Return the bound at a time; infinite without any value."""
        index, bound = bisect_left(self._times, time), math.inf
        for near in (index - 1, index):
            if 0 <= near < len(self._times):
                bound = min(bound, self._values[near] + MAX_DRIFT * abs(time - self._times[near]))
        return bound


class Messages:
    """The messages between clocks, and the wall clock of each."""

    def __init__(self) -> None:
        self.between: dict[tuple[str, str], _Messages] = {}
        self.walls: dict[str, float] = {}
        """The time of day less the monotonic time, from each clock's first record."""

    def note_clock(self, clock: str, wall: float, monotonic: float) -> None:
        """Know a clock."""
        self.walls.setdefault(clock, wall - monotonic)

    def add(self, name: str, sent: tuple[str, float], arrived: tuple[str, float]) -> None:
        """Add a message that was sent and arrived, each by a clock. Both clocks are known.

        Raises :class:`KVFerryError` (invalid-request) where one and the same clock says that it arrived first.
        """
        (sender, sent_at), (receiver, arrived_at) = sent, arrived
        if sender != receiver:
            between = self.between.setdefault((sender, receiver), _Messages())
            between.add(Message(sent_at, arrived_at - sent_at, name))
        elif arrived_at < sent_at:
            raise _contradiction(sent_at - arrived_at, name, "though both hosts say that they share one clock")


class Alignment:
    """The offsets of all clocks at every moment. Raises :class:`KVFerryError` (invalid-request) where there are none.

    ``reference`` is the clock with most messages; its offset is 0.
    """

    def __init__(self, messages: Messages) -> None:
        count = dict.fromkeys(messages.walls, 0)
        for pair, between in messages.between.items():
            for clock in pair:
                count[clock] += len(between.kept)
        self.clocks = sorted(count, key=lambda clock: (-count[clock], clock))
        self._walls = messages.walls
        self._index = {clock: index for index, clock in enumerate(self.clocks)}
        self._rough = self._rough_offsets(messages)
        moments = {pair: self._moments(pair, between.kept) for pair, between in messages.between.items()}
        self._bounds = {pair: Bound(samples) for pair, samples in moments.items()}
        self._check(messages, moments)

    @property
    def reference(self) -> str:
        """The clock of the axis."""
        return self.clocks[0]

    def offset(self, clock: str, time: float) -> Offset:
        """Return a clock's offset at a time of this clock."""
        index = self._index[clock]
        if not index:
            return Offset(0.0, 0.0, 0.0)
        matrix = self._closed(time + self._rough[clock])
        lowest, highest = -matrix[0][index], matrix[index][0]
        for other in range(1, len(self.clocks)):
            if math.isinf(matrix[0][other]) or math.isinf(matrix[other][0]):
                self._fix(matrix, other)
        return Offset((matrix[index][0] - matrix[0][index]) / 2, lowest, highest)

    def _fix(self, matrix: Matrix, index: int) -> None:
        """Choose, by the time of day, the offset of a clock that messages do not bound on both sides."""
        guess = self._walls[self.clocks[index]] - self._walls[self.reference]
        chosen = min(max(guess, -matrix[0][index]), matrix[index][0])
        matrix[index][0], matrix[0][index] = chosen, -chosen
        _close(matrix)

    def _rough_offsets(self, messages: Messages) -> dict[str, float]:
        """Return offsets that are wrong by some seconds at most, for the age of messages; by walls where there is none.

        The first message between two clocks says what their difference is, but for the time of the way.
        """
        first = {pair: between.kept[0].seconds for pair, between in messages.between.items()}
        apart = {pair: -seconds for pair, seconds in first.items()}
        apart |= {(after, before): seconds for (before, after), seconds in first.items()}
        rough = {self.reference: 0.0} if self.clocks else {}
        reached = list(rough)
        for known in reached:
            for clock in self.clocks:
                if clock not in rough and (known, clock) in apart:
                    rough[clock] = rough[known] + apart[known, clock]
                    reached.append(clock)
        return {clock: rough.get(clock, self._walls[clock] - self._walls[self.reference]) for clock in self.clocks}

    def _moments(self, pair: tuple[str, str], kept: Sequence[Message]) -> list[tuple[float, float]]:
        """Return for each message its moment and its bound of the sender's offset less the receiver's.

        The moment is that at the clock which is not the reference, since :meth:`offset` asks for this clock's times.
        """
        sender, receiver = pair
        if sender == self.reference:
            shift = self._rough[receiver]
            return [(each.sent_at + each.seconds + shift, each.seconds) for each in kept]
        return [(each.sent_at + self._rough[sender], each.seconds) for each in kept]

    def _closed(self, moment: float) -> Matrix:
        """Return the highest differences of two clocks' offsets at a moment, of the first's less the second's."""
        size = len(self.clocks)
        matrix = [[0.0 if row == column else math.inf for column in range(size)] for row in range(size)]
        for (sender, receiver), bound in self._bounds.items():
            matrix[self._index[sender]][self._index[receiver]] = bound.at(moment)
        _close(matrix)
        return matrix

    def _check(self, messages: Messages, moments: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> None:
        for pair, samples in moments.items():
            for (moment, _), message in zip(samples, messages.between[pair].kept, strict=True):
                matrix = self._closed(moment)
                excess = -min(matrix[index][index] for index in range(len(matrix)))
                if excess > TOLERANCE:
                    raise _contradiction(excess, message.name, "whatever the offsets of the hosts' clocks are")


def _close(matrix: Matrix) -> None:
    """Replace each bound by the lowest sum of bounds on a way between both clocks."""
    size = range(len(matrix))
    for via in size:
        for row in size:
            if (first := matrix[row][via]) < math.inf:
                for column in size:
                    matrix[row][column] = min(matrix[row][column], first + matrix[via][column])


def _contradiction(seconds: float, name: str, why: str) -> KVFerryError:
    return KVFerryError(
        Reason.INVALID_REQUEST,
        f"the logs contradict each other by {seconds * 1e3:.3f} ms at {name[:200]!r}: a message arrives before it was "
        f"sent, {why}.",
        "Give the logs of one run of each engine, unchanged; a log is appended to when an engine is started again.",
    )
