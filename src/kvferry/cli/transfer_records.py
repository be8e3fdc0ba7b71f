"""The records of transfer logs, read line by line: loads, writes and steps of many ranks, holds and requests of their
schedulers.

Nobody guarantees a log: a process may end within a line, a disk may damage it, a client chooses the id of a request.
What is no record, or contradicts itself, is counted and left out.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from os.path import isfile
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from kvferry.errors import KVFerryError, Reason

MAX_LINE_BYTES = 64 << 20
"""Of one line; a longer one is no record."""

NAME_LOGS = "Name the files that the setting transfer_log has made, one for each rank: FILE.rank0, ..."
SCHEDULER_LOG = ".scheduler"
"""The end of the name of a scheduler's log, which lies beside those of the engine's ranks."""

PHASES = ("find", "announce", "post", "move", "confirm", "next_step")
"""Of a load, in their order."""

Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds: of a monotonic or wall clock, or how long something took."""
Difference = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
"""Seconds between two times; below 0 where the clocks of two hosts have drifted apart."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Clock(msgspec.Struct, frozen=True):
    """One moment on the clocks of a host; processes with the same ``boot`` share the monotonic clock."""

    wall: Time
    monotonic: Time
    boot: str


class LoadEvents(msgspec.Struct, frozen=True):
    """Events of a load, as :meth:`kvferry.execution.destination.AwaitedLoad.result` gives them.

    ``announced_at`` and ``done_at`` are by the source's index. ``phases`` lack ``next_step`` where the load failed.
    """

    clock: Clock
    write: str
    transfer_id: str
    ordered_at: Time
    announced_at: dict[str, Time]
    done_at: dict[str, Time]
    committed_at: Time | None
    phases: dict[str, Difference] | None

    def __post_init__(self) -> None:
        _ordered(self.ordered_at, min(self.announced_at.values(), default=self.ordered_at))
        for index, done_at in self.done_at.items():
            _ordered(self.announced_at.get(index), done_at, self.committed_at)
        _ordered(self.ordered_at, self.committed_at, self.clock.monotonic)


class Load(msgspec.Struct, frozen=True):
    """The load of one rank; without ``events`` it was refused before it began."""

    rank: Number
    request_id: str
    bytes: Number
    descriptors: Number
    num_tokens: Number | None = None
    remote_request_id: str | None = None
    transport: str = ""
    wait_seconds: Time = 0.0
    compare_seconds: Time = 0.0
    phases: dict[str, Difference] | None = None
    error: str | None = None
    message: str | None = None
    events: LoadEvents | None = None

    @property
    def next_step_seconds(self) -> float:
        """How long the committed load waited until the engine took it."""
        return max(0.0, (self.phases or {}).get("next_step", 0.0))


class SpanOfBatch(msgspec.Struct, frozen=True):
    """Tokens of some layers in a batch; without ``layers`` all of the group."""

    group: str
    layers: tuple[str, ...]
    tokens: tuple[Number, Number]


class BatchEvents(msgspec.Struct, frozen=True):
    """A batch of a write; one that failed never landed."""

    posted_at: Time
    landed_at: Time | None
    bytes: Number
    descriptors: Number
    spans: tuple[SpanOfBatch, ...] = ()


class WriteEvents(msgspec.Struct, frozen=True):
    """Events of a write, as :meth:`kvferry.execution.source.WriteEvents.as_dict` gives them."""

    clock: Clock
    transfer_id: str
    receiver: str
    source_index: Number
    num_tokens: Number
    announced_at: Time
    batches: tuple[BatchEvents, ...]
    batches_left_out: Number
    reported_at: Time | None

    def __post_init__(self) -> None:
        times = [self.announced_at]
        for batch in self.batches:
            times += [batch.posted_at, *(() if batch.landed_at is None else (batch.landed_at,))]
        _ordered(*times, self.reported_at, self.clock.monotonic)


class Write(msgspec.Struct, frozen=True):
    """The write of one source rank to one destination rank."""

    rank: Number
    write: str
    bytes: Number
    descriptors: Number
    events: WriteEvents
    transport: str = ""
    error: str | None = None
    message: str | None = None


class Step(msgspec.Struct, frozen=True):
    """A step of a source rank: up to which token it has computed each transfer, and when each span's last layer ran."""

    rank: Number
    step_began_at: Time
    step_ended_at: Time
    prompts: dict[str, Number]
    ran_at: dict[str, Time]
    clock: Clock

    def __post_init__(self) -> None:
        _ordered(self.step_began_at, *sorted(self.ran_at.values()), self.step_ended_at, self.clock.monotonic)


class HoldTimes(msgspec.Struct, frozen=True):
    """A hold that has ended: ``hold`` is its transfer id. The request of a hold that was ended while the request ran
    has no ``held_at``.
    """

    hold: str
    request_id: str
    began_at: Time
    first_step_at: Time | None
    first_token_at: Time | None
    held_at: Time | None
    ending: str
    clock: Clock

    def __post_init__(self) -> None:
        _ordered(self.began_at, self.first_step_at, self.first_token_at, self.held_at, self.clock.monotonic)


class LoadedRequest(msgspec.Struct, frozen=True):
    """A request whose prompt was ``loaded``, by transfer id; without ``first_token_at`` it ended before."""

    loaded: str
    request_id: str
    ordered_at: Time
    first_step_at: Time | None
    first_token_at: Time | None
    clock: Clock

    def __post_init__(self) -> None:
        _ordered(self.ordered_at, self.first_step_at, self.first_token_at, self.clock.monotonic)


Record = Load | Write | Step | HoldTimes | LoadedRequest


class _Kind(msgspec.Struct):
    """What tells the records apart."""

    hold: str | None = None
    loaded: str | None = None
    request_id: str | None = None
    write: str | None = None


_decode_kind = msgspec.json.Decoder(_Kind).decode
_decode_load = msgspec.json.Decoder(Load).decode
_decode_write = msgspec.json.Decoder(Write).decode
_decode_step = msgspec.json.Decoder(Step).decode
_decode_hold = msgspec.json.Decoder(HoldTimes).decode
_decode_loaded = msgspec.json.Decoder(LoadedRequest).decode


def _ordered(*times: float | None) -> None:
    """Raise ``ValueError`` unless the times that are known ascend."""
    known = [time for time in times if time is not None]
    if any(later < earlier for earlier, later in pairwise(known)):
        raise ValueError("the times of a record contradict each other")


def decode(line: bytes) -> Record:
    """Return the record of a line. Raises ``ValueError`` for another line.

    >>> decode(b'{"rank": 0, "request_id": "a", "bytes": 0, "descriptors": 0}').request_id
    'a'
    """
    kind = _decode_kind(line)
    if kind.hold is not None:
        return _decode_hold(line)
    if kind.loaded is not None:
        return _decode_loaded(line)
    if kind.request_id is not None:
        return _decode_load(line)
    return _decode_step(line) if kind.write is None else _decode_write(line)


@dataclass
class Lines:
    """How many lines of a log are records, and how many are none: ``half`` of them lack their end."""

    records: int = 0
    broken: int = 0
    half: int = 0


@dataclass(frozen=True)
class Log:
    """The log of one rank: what it is called in output, and how many of its bytes are read, now and later."""

    path: Path
    label: str
    num_bytes: int

    def read(self, lines: Lines) -> Iterator[tuple[float, "Log", Record]]:
        """Yield each record with the time of day by which logs are merged, and count the lines.

        Raises :class:`KVFerryError` (invalid-request) where the file cannot be read any more.
        """
        wall = 0.0
        with _readable(self.path) as file:
            for line in _lines(file, self.num_bytes):
                try:
                    record = decode(line)
                except (ValueError, RecursionError):  # msgspec's errors too
                    lines.half += not line.endswith(b"\n")
                    lines.broken += line.endswith(b"\n")
                    continue
                lines.records += 1
                clock = clock_of(record)
                wall = wall if clock is None else clock.wall
                yield wall, self, record


@contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    """Open a log. Raises :class:`KVFerryError` (invalid-request) where it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        what = f"the log {str(path)!r} cannot be read: {error.strerror}."
        raise KVFerryError(Reason.INVALID_REQUEST, what, NAME_LOGS) from error


def _lines(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the lines of the first bytes of a file that are not empty; one that is too long in pieces, no records."""
    while num_bytes > 0 and (line := file.readline(min(MAX_LINE_BYTES, num_bytes))):
        num_bytes -= len(line)
        if line.strip():
            yield line


def clock_of(record: Record) -> Clock | None:
    """Return when a record was made; None for a load that was refused before it began."""
    if isinstance(record, Load | Write):
        return None if record.events is None else record.events.clock
    return record.clock


def open_logs(paths: Sequence[Path]) -> list[Log]:
    """Return the logs, each once, and the schedulers' logs beside them. Raises :class:`KVFerryError` (invalid-request)
    for one that cannot be read.
    """
    beside = [path.with_name(re.sub(r"\.rank\d+$", SCHEDULER_LOG, path.name)) for path in paths]
    paths = [*paths, *(path for path in beside if path.name.endswith(SCHEDULER_LOG) and isfile(path))]
    distinct = list({path.resolve(): path for path in paths}.values())
    names = [path.name for path in distinct]
    logs = []
    for path in distinct:
        with _readable(path):
            num_bytes = path.stat().st_size
        logs.append(Log(path, path.name if names.count(path.name) == 1 else str(path), num_bytes))
    return logs


def merge(logs: Sequence[Log], lines: Mapping[str, Lines]) -> Iterator[tuple[Log, Record]]:
    """Yield the records of all logs, roughly in the order of the time of day; ``lines`` counts by label."""
    streams = [log.read(lines[log.label]) for log in logs]
    for _, log, record in heapq.merge(*streams, key=itemgetter(0)):
        yield log, record
