"""Loads, writes, steps, holds and requests of both engines on one axis, as jobs with spans that a drawing can show.

The logs are read twice: to pair the records of both sides and to align their clocks, then to draw. What is kept in
between grows with the number of records that wait for the other side's, and both kinds are bounded.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from kvferry.cli.clocks import Alignment, Messages, Offset
from kvferry.cli.transfer_records import (
    NAME_LOGS,
    HoldTimes,
    Lines,
    Load,
    LoadedRequest,
    Log,
    Record,
    Step,
    Write,
    clock_of,
    merge,
)
from kvferry.errors import KVFerryError, Reason, did_you_mean
from kvferry.units import format_bytes

MOST_UNPAIRED = 1 << 16
"""Writes, and loads, that wait for the record of the other side."""
MOST_NAMES = 1000
"""Requests that are remembered, for the error that a wanted one is none of them."""


Key = tuple[str, str]
"""A write's name, a transfer's id or that of a request that loads, after ``write``, ``transfer`` or ``request``."""


class Kind(StrEnum):
    """The spans of a timeline; the value is the name in the drawing's legend."""

    STEP = "step"
    LAYERS = "layers computed"
    HOLD = "hold"
    FIRST_TOKEN = "first step until first token"
    KEPT = "held for the other engine"
    WRITE = "write"
    WAIT = "wait for the prompt"
    MOVE = "batch"
    REPORT = "digests and report"
    LOAD = "load"
    FIND = "find"
    SOURCE = "announced until done"
    CONFIRM = "compare"
    NEXT_STEP = "until the next step"
    REQUEST = "request"


class Span(NamedTuple):
    """What happened from ``began`` to ``ended``, in seconds on the reference clock; ``details`` are for people."""

    kind: Kind
    name: str
    began: float
    ended: float
    details: tuple[tuple[str, str], ...] = ()


class Arrow(NamedTuple):
    """One end of a message between two ranks; both ends have the same name."""

    name: str
    at: float
    is_sent: bool


class Job(NamedTuple):
    """A load, write or step of one rank, a hold or request of a scheduler: the whole, its parts within it, and the
    messages that came and went.

    ``keys`` are the write of a load and of a write, the transfers of a step and of a hold, the id of a request.
    """

    log: str
    whole: Span
    parts: tuple[Span, ...]
    arrows: tuple[Arrow, ...]
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Wanted:
    """What is shown: all records, or those of requests whose id contains a text; of these the ``most`` slowest loads
    in tables and pages.
    """

    request: str
    most: int

    def matches(self, record: Load) -> bool:
        """Return whether a load is wanted."""
        events = record.events
        names = record.request_id, record.remote_request_id or "", "" if events is None else events.transfer_id
        return any(self.request in name for name in names)


class Shown(NamedTuple):
    """A load that is shown; ordered by its wait."""

    wait_seconds: float
    number: int
    log: str
    load: Load


@dataclass
class Found:
    """What the first reading has found."""

    alignment: Alignment
    lines: dict[str, Lines]
    clock_of_log: dict[str, list[str]]
    shown: list[Shown]
    num_loads: int
    num_pairs: int
    unpaired_loads: int
    unpaired_writes: int
    writes: frozenset[str]
    """Names of the writes of all wanted loads; empty where every record is wanted."""
    transfers: frozenset[str]
    worst: dict[str, Offset] = field(default_factory=dict)
    """The least certain offset of each clock that :meth:`on_axis` has used."""

    def on_axis(self, clock: str, time: float) -> float:
        """Return a clock's time on the axis."""
        offset = self.alignment.offset(clock, time)
        worst = self.worst.setdefault(clock, offset)
        if offset.uncertainty > worst.uncertainty:
            self.worst[clock] = offset
        return time + offset.chosen


class _Pairs:
    """Pairs what both sides say about one part of a load, and adds the messages of the pair."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._loads: OrderedDict[tuple[str, str], tuple[str, float, float | None]] = OrderedDict()
        self._writes: OrderedDict[tuple[str, str], tuple[str, float, float | None]] = OrderedDict()
        self.num_pairs = self._num_lost_loads = self._num_lost_writes = 0

    @property
    def unpaired_loads(self) -> int:
        return len(self._loads) + self._num_lost_loads

    @property
    def unpaired_writes(self) -> int:
        return len(self._writes) + self._num_lost_writes

    def add(self, record: Load | Write) -> None:
        if record.events is None:
            return
        clock = record.events.clock.boot
        if isinstance(record, Load):
            for index, announced_at in record.events.announced_at.items():
                key = record.events.write, index
                self._loads[key] = clock, announced_at, record.events.done_at.get(index)
                self._pair(key)
            self._num_lost_loads += _forget(self._loads)
        else:
            key = record.write, str(record.events.source_index)
            self._writes[key] = clock, record.events.announced_at, record.events.reported_at
            self._pair(key)
            self._num_lost_writes += _forget(self._writes)

    def _pair(self, key: tuple[str, str]) -> None:
        if key not in self._loads or key not in self._writes:
            return
        there, announced_at, done_at = self._loads.pop(key)
        here, heard_at, reported_at = self._writes.pop(key)
        self.num_pairs += 1
        self._messages.add(key[0], (there, announced_at), (here, heard_at))
        if done_at is not None and reported_at is not None:
            self._messages.add(key[0], (here, reported_at), (there, done_at))


def _forget(waiting: OrderedDict[Any, Any]) -> int:
    """Forget the oldest beyond :data:`MOST_UNPAIRED`; return how many."""
    surplus = max(0, len(waiting) - MOST_UNPAIRED)
    for _ in range(surplus):
        waiting.popitem(last=False)
    return surplus


def find(logs: Sequence[Log], wanted: Wanted) -> Found:
    """Read all logs once. Raises :class:`KVFerryError`: invalid-request for logs that contradict each other or hold no
    record, unknown-request where no load is wanted.
    """
    lines = {log.label: Lines() for log in logs}
    messages, clocks = Messages(), {log.label: dict[str, None]() for log in logs}
    pairs, shown, names = _Pairs(messages), list[Shown](), dict[str, None]()
    writes, transfers = set[str](), set[str]()
    num_loads = 0
    for log, record in merge(logs, lines):
        if (clock := clock_of(record)) is not None:
            messages.note_clock(clock.boot, clock.wall, clock.monotonic)
            clocks[log.label][clock.boot] = None
        if not isinstance(record, Load | Write):
            continue
        pairs.add(record)
        if not isinstance(record, Load):
            continue
        if len(names) < MOST_NAMES:
            names[record.request_id] = None
        if wanted.matches(record):
            num_loads += 1
            heapq.heappush(shown, Shown(record.wait_seconds, -num_loads, log.label, record))
            if len(shown) > wanted.most:
                heapq.heappop(shown)
            if wanted.request and record.events is not None:
                writes.add(record.events.write)
                transfers.add(record.events.transfer_id)
    _check(lines, wanted, num_loads, list(names))
    return Found(
        Alignment(messages),
        lines,
        {label: list(of_log) for label, of_log in clocks.items()},
        sorted(shown, reverse=True),
        num_loads,
        pairs.num_pairs,
        pairs.unpaired_loads,
        pairs.unpaired_writes,
        frozenset(writes),
        frozenset(transfers),
    )


def _check(lines: dict[str, Lines], wanted: Wanted, num_loads: int, names: Sequence[str]) -> None:
    if not any(each.records for each in lines.values()):
        broken = sum(each.broken + each.half for each in lines.values())
        raise KVFerryError(
            Reason.INVALID_REQUEST,
            f"none of the {broken} lines of the logs is a whole record of this version of kvferry."
            if broken
            else "the logs are empty: no load has ended yet.",
            NAME_LOGS,
        )
    if wanted.request and not num_loads:
        raise KVFerryError(
            Reason.UNKNOWN_REQUEST,
            f"no load in the logs is of a request whose id contains {wanted.request!r}.",
            did_you_mean(wanted.request, names, "Name the logs of the decode engine too: they have the ids."),
        )


def jobs(logs: Sequence[Log], found: Found, wanted: Wanted) -> Iterator[Job]:
    """Read all logs again, and yield every wanted job with times, within the bytes that :func:`find` has read."""
    counted = {log.label: Lines() for log in logs}
    for log, record in merge(logs, counted):
        if (clock := clock_of(record)) is None or not _is_wanted(record, found, wanted):
            continue
        on_axis = partial(found.on_axis, clock.boot)
        if isinstance(record, Load):
            yield _load_job(log.label, record, on_axis)
        elif isinstance(record, Write):
            yield _write_job(log.label, record, on_axis)
        elif isinstance(record, Step):
            yield _step_job(log.label, record, on_axis)
        elif isinstance(record, HoldTimes):
            yield _hold_job(log.label, record, on_axis)
        else:
            yield _request_job(log.label, record, on_axis)


def _is_wanted(record: Record, found: Found, wanted: Wanted) -> bool:
    if not wanted.request:
        return True
    if isinstance(record, Load):
        return wanted.matches(record)
    if isinstance(record, Write):
        return record.write in found.writes
    if isinstance(record, Step):
        return not found.transfers.isdisjoint(record.prompts)
    return (record.hold if isinstance(record, HoldTimes) else record.loaded) in found.transfers


def _load_job(log: str, load: Load, on_axis: Callable[[float], float]) -> Job:
    events = load.events
    assert events is not None, "a load without times is not drawn"
    ordered_at, committed_at = on_axis(events.ordered_at), None
    ended = on_axis(events.clock.monotonic)
    if events.committed_at is not None:
        committed_at = on_axis(events.committed_at)
        ended = on_axis(events.committed_at + load.next_step_seconds)
    announced_at = {index: on_axis(time) for index, time in events.announced_at.items()}
    done_at = {index: on_axis(time) for index, time in events.done_at.items()}
    parts = [Span(Kind.FIND, "find", ordered_at, min(announced_at.values(), default=committed_at or ended))]
    for index, began in announced_at.items():
        name = f"source {index}" if index in done_at else f"source {index}: never done"
        parts.append(Span(Kind.SOURCE, name, began, done_at.get(index, ended)))
    if committed_at is not None:
        compared = (("seconds that digests took", f"{load.compare_seconds:.6f}"),)
        last_done_at = max(done_at.values(), default=committed_at)
        parts.append(Span(Kind.CONFIRM, "compare", last_done_at, committed_at, compared))
        parts.append(Span(Kind.NEXT_STEP, "next step", committed_at, ended))
    arrows = [Arrow(_arrow("announced", events.write, index), at, True) for index, at in announced_at.items()]
    arrows += [Arrow(_arrow("done", events.write, index), at, False) for index, at in done_at.items()]
    tokens = () if load.num_tokens is None else (("tokens", str(load.num_tokens)),)
    details = (("request", load.request_id), *tokens, *_moved(load), ("transfer", events.transfer_id))
    whole = Span(Kind.LOAD, load.request_id, ordered_at, ended, details)
    return Job(log, whole, tuple(parts), tuple(arrows), (("write", events.write),))


def _write_job(log: str, write: Write, on_axis: Callable[[float], float]) -> Job:
    events = write.events
    began = on_axis(events.announced_at)
    ended = on_axis(events.clock.monotonic if events.reported_at is None else events.reported_at)
    first_at = on_axis(events.batches[0].posted_at) if events.batches else ended
    parts, moved_at = [Span(Kind.WAIT, "wait for the prompt", began, first_at)], first_at
    for number, batch in enumerate(events.batches):
        posted_at = on_axis(batch.posted_at)
        landed_at = ended if batch.landed_at is None else on_axis(batch.landed_at)
        name = f"batch {number}" + (" never landed" if batch.landed_at is None else "")
        details = (
            ("bytes", f"{batch.bytes} ({format_bytes(batch.bytes)})"),
            ("descriptors", str(batch.descriptors)),
            *((f"group {each.group}", _tokens(each.tokens, each.layers)) for each in batch.spans),
        )
        parts.append(Span(Kind.MOVE, name, posted_at, landed_at, details))
        moved_at = landed_at
    if events.batches and not events.batches_left_out:
        parts.append(Span(Kind.REPORT, "report", moved_at, ended))
    index = str(events.source_index)
    arrows = [Arrow(_arrow("announced", write.write, index), began, False)]
    if events.reported_at is not None:
        arrows.append(Arrow(_arrow("done", write.write, index), ended, True))
    left_out = (("batches without times", str(events.batches_left_out)),) if events.batches_left_out else ()
    details = (("receiver", events.receiver), ("tokens", str(events.num_tokens)), *_moved(write), *left_out)
    details = (*details, ("transfer", events.transfer_id))
    whole = Span(Kind.WRITE, f"write to {events.receiver}", began, ended, details)
    return Job(log, whole, tuple(parts), tuple(arrows), (("write", write.write),))


def _step_job(log: str, step: Step, on_axis: Callable[[float], float]) -> Job:
    began, ended = on_axis(step.step_began_at), on_axis(step.step_ended_at)
    ran = sorted((on_axis(time), layer) for layer, time in step.ran_at.items())
    ends = [(began, ""), *ran]
    parts = [
        Span(Kind.LAYERS, f"to {layer}", before, at, (("layers up to", layer),))
        for (before, _), (at, layer) in pairwise(ends)
    ]
    details = tuple((f"computed of {transfer}", f"{tokens} tokens") for transfer, tokens in step.prompts.items())
    keys = tuple(("transfer", transfer) for transfer in step.prompts)
    return Job(log, Span(Kind.STEP, "step", began, ended, details), tuple(parts), (), keys)


def _hold_job(log: str, hold: HoldTimes, on_axis: Callable[[float], float]) -> Job:
    ended, parts = on_axis(hold.clock.monotonic), _until_first_token(hold, on_axis)
    if hold.held_at is not None:
        parts.append(Span(Kind.KEPT, "held", on_axis(hold.held_at), ended))
    details = (("request", hold.request_id), ("ended", hold.ending), ("transfer", hold.hold))
    whole = Span(Kind.HOLD, f"hold of {hold.request_id}", on_axis(hold.began_at), ended, details)
    return Job(log, whole, tuple(parts), (), (("transfer", hold.hold),))


def _request_job(log: str, request: LoadedRequest, on_axis: Callable[[float], float]) -> Job:
    name = f"request {request.request_id}" + (": no token" if request.first_token_at is None else "")
    ended = on_axis(request.first_token_at or request.clock.monotonic)
    details = (("request", request.request_id), ("transfer", request.loaded))
    whole = Span(Kind.REQUEST, name, on_axis(request.ordered_at), ended, details)
    return Job(log, whole, tuple(_until_first_token(request, on_axis)), (), (("request", request.request_id),))


def _until_first_token(times: HoldTimes | LoadedRequest, on_axis: Callable[[float], float]) -> list[Span]:
    if times.first_step_at is None or times.first_token_at is None:
        return []
    return [Span(Kind.FIRST_TOKEN, "first token", on_axis(times.first_step_at), on_axis(times.first_token_at))]


def _moved(record: Load | Write) -> tuple[tuple[str, str], ...]:
    """Return what a load or write has moved, and how it failed."""
    error = (("error", f"{record.error}: {record.message}"),) if record.error else ()
    return (
        ("bytes", f"{record.bytes} ({format_bytes(record.bytes)})"),
        ("descriptors", str(record.descriptors)),
        ("by", record.transport or "-"),
        *error,
    )


def _tokens(tokens: tuple[int, int], layers: Sequence[str]) -> str:
    """Return the tokens and layers of a span.

    >>> _tokens((0, 16), ()), _tokens((0, 16), ("a.0", "a.1"))
    ('tokens 0 to 16, all layers', 'tokens 0 to 16, layers a.0, a.1')
    """
    return f"tokens {tokens[0]} to {tokens[1]}, " + (f"layers {', '.join(layers)}" if layers else "all layers")


def _arrow(what: str, write: str, index: str) -> str:
    return f"{what}, source {index}, {write}"
