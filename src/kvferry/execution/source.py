"""Writes of one source rank: it takes announcements, learns what is computed, and reports how each write ended.

:class:`Destinations` are the ranks that have introduced themselves, and the connections to them. A :class:`Write` is a
job of the transfer thread and carries out one write, batch by batch; :class:`WriteEvents` are its entry in a log.
The :class:`Writer` has all writes of the rank. :class:`kvferry.handoff.source.SourceWrites` decides which tokens go.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError, open_port
from kvferry.execution.device import DeferredActions
from kvferry.execution.digests import Integrity, PartCells, PartDigests, WrittenDigests, check_computes
from kvferry.execution.executor import JobResult, Phase, clock
from kvferry.execution.peers import OwnRank, Peers
from kvferry.handoff.destination import LATE_REPORT_SECONDS
from kvferry.handoff.handshake import Versions, agree, compare_identities
from kvferry.handoff.holds import check_epoch, handle_of_transfer, is_of_hold
from kvferry.handoff.messages import (
    Announce,
    Announced,
    Answer,
    Bounded,
    EndPoint,
    Introduce,
    Noted,
    Question,
    Release,
    Revoke,
    Revoked,
    WriteFailed,
    WriteKey,
    WriteSeconds,
    Written,
)
from kvferry.handoff.source import Batch, Part, Prompt, SourceWrites, WriteRequest, no_longer_held
from kvferry.layout.shard import decode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.match import selector_of
from kvferry.plan.planner import SHORT_TOKENS, LayerSpans, PairPlan, Planner, Span, goes_whole
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Connecting, Link

logger = PeerLog(logging.getLogger(__name__))

MAX_DESTINATIONS = 4096
MAX_INTRODUCED_BYTES = 256 << 20
"""Of all introductions that are remembered: each may have as many as a question."""
MAX_STEPS = 1024
"""Steps kept until :meth:`Writer.take_steps`; of more only the latest are kept."""
MAX_OPEN = 1 << 14
"""Open writes of a rank: more than any engine has requests."""
MAX_OPEN_BLOCKS = 1 << 23
"""Blocks of all open writes of a rank: the blocks of an announcement are kept until its write is over."""
MAX_OPEN_BYTES = MAX_INTRODUCED_BYTES
"""Of the introductions of destinations with open writes, which may be forgotten meanwhile."""
MAX_GIVEN_UP = 16
"""Writes that were given up for others and have not ended, each of which still keeps its blocks."""
MAX_SECONDS = 3600.0
"""Longest time that a write waits for its prompt, whatever its destination asks for."""
REPORT_SECONDS = 60.0
"""How long a report is sent again until it is acknowledged."""
LATE_SECONDS = 10.0
"""The longest time for which a hold of this engine may be unknown here, whatever its destination asks for."""
MAX_REPORTS = 1024
"""Reports that are kept, so that a destination can ask for one that was lost; each may have as many digests as a
message."""
MAX_REPORT_BYTES = 64 << 20
CHECK_ALIVE_SECONDS = 1.0
"""Seconds between two checks that the destination of a write is alive."""
MAX_BATCHES = 1024
"""Batches kept of one write's events; later ones are only counted."""
MAX_PAGE_WRITES = 16
"""How often a write sends the page in which its prompt ends again, since the engine generates on and changes it."""
Report = Callable[[JobResult, WriteSeconds, bool], None]
"""Tells the destination how the write ended, where its time went, and whether bytes of it may still land."""
Preemptions = Mapping[str, tuple[int, int]]
"""How often each prompt was preempted, and the engine reset."""


@dataclass
class DestinationRank:
    """A destination rank in one epoch: its plans, and its link, which the first write of this rank's part connects."""

    answers_at: EndPoint
    end_points: dict[str, bytes]
    planner: Planner
    link: Connecting | Link
    """The connection, or the attempt to connect, for the next write."""
    source_index: int
    registration: int
    num_bytes: int
    """Of its introduction."""
    num_fences: int
    """Of this rank's transports, before the connection."""
    num_open: int = 0
    """Its open writes, each of which keeps it."""
    _cells: dict[tuple[PairPlan, Integrity], PartCells] = field(default_factory=dict)

    def cells(self, plan: PairPlan, wanted: Integrity) -> PartCells:
        """Return the cells of a plan whose digests the destination compares, made once. Raises :class:`PlanError`."""
        if (plan, wanted) not in self._cells:
            self._cells[plan, wanted] = PartCells(plan, wanted, at_source=True)
        return self._cells[plan, wanted]

    def plan(self, transfer_id: str) -> PairPlan:
        """Return this rank's plan for a transfer. Raises :class:`HandoffError` (missing-source) where there is none."""
        for plan in self.planner.plans(selector_of(transfer_id)):
            if plan.assignment.source_index == self.source_index:
                return plan
        raise HandoffError(
            Reason.MISSING_SOURCE,
            f"source rank {self.source_index} has no part in {transfer_id}, but got an announcement.",
            "Run the same kvferry version on both sides.",
        )


class Destinations:
    """The destination ranks that have introduced themselves to one rank.

    The server's thread calls :meth:`introduce` and :meth:`announced`, the transfer thread :meth:`connect_anew`.
    """

    def __init__(self, rank: OwnRank) -> None:
        self._rank = rank
        self.known: Bounded[tuple[str, int, int], DestinationRank] = Bounded(MAX_DESTINATIONS)

    def introduce(self, question: Introduce) -> None:
        """Know a destination from now on, in place of its former registration. Raises :class:`KVFerryError` for one
        that this rank cannot write to.
        """
        agree(decode=Versions(question.version, question.version))
        self._check_allowed(question)
        compare_identities(self._rank.identity, question.identity)
        key = question.receiver, question.answers_at.epoch, question.token
        before = self.known.get(key)
        if before is not None and before.registration >= question.registration:
            return
        if self._rank.shard not in question.sources:
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"{question.receiver} names {len(question.sources)} source shards, and none of them is this rank's.",
                "Send the prompt again.",
            )
        index = question.sources.index(self._rank.shard)
        num_fences = self._rank.transports.num_fences
        link = self._rank.transports.connect(question.end_points)
        planner = Planner([decode_shard(source) for source in question.sources], decode_shard(question.shard))
        # The connection to a former registration is not closed: it ends with the last batch in flight over it.
        self.known[key] = DestinationRank(
            question.answers_at,
            question.end_points,
            planner,
            link,
            index,
            question.registration,
            sum(map(len, (question.shard, *question.sources, *question.end_points.values()))),
            num_fences,
        )
        self.known.move_to_end(key)
        self._make_room()

    def announced(self, key: WriteKey, registration: int, token: int) -> DestinationRank:
        """Return the destination of an announcement, which names its registration and its introduction. Raises
        :class:`HandoffError`: unknown-request, and fenced for a registration that has ended.
        """
        introduced = key.receiver, key.receiver_epoch, token
        destination = self.known.get(introduced)
        if destination is None:
            raise HandoffError(
                Reason.UNKNOWN_REQUEST, f"{key.receiver} has not introduced itself.", "Introduce it first."
            )
        if registration != destination.registration:
            is_late = registration < destination.registration
            raise HandoffError(
                Reason.FENCED if is_late else Reason.UNKNOWN_REQUEST,
                f"{key.receiver} announced blocks of its registration {registration}; known here is "
                f"{destination.registration}.",
                "Send the prompt again." if is_late else "Introduce it first.",
            )
        self.known.move_to_end(introduced)
        return destination

    def _check_allowed(self, question: Introduce) -> None:
        """Refuse a destination to which this engine may not connect: its loads would wait for reports until their
        deadlines. Raises :class:`HandoffError` (permission-denied).
        """
        client = self._rank.client
        if client.knows_peers:
            return
        where = question.answers_at
        try:
            client.trust.refuse_numeric(where.host)
        except KVFerryError as error:
            refused = HandoffError(
                Reason.PERMISSION_DENIED,
                f"the prefill engine may not connect to the decode rank {question.receiver} at "
                f"{where.host}:{where.port}, where it reports what it has written: {error.message}",
                'Add the decode engine\'s host to "allowed_hosts" of the prefill engine.',
            )
            logger.warning("kvferry: %s", refused, peer=question.receiver)
            raise refused from error

    def _make_room(self) -> None:
        """Forget those that have announced nothing for longest: where they live, they introduce themselves again."""
        num_bytes = sum(each.num_bytes for each in self.known.values())
        while num_bytes > MAX_INTRODUCED_BYTES and len(self.known) > 1:
            _, forgotten = self.known.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def link(self, destination: DestinationRank) -> Connecting | Link:
        """Return the connection for the next write: a new one where this rank's own fence has closed a transport."""
        if destination.num_fences != self._rank.transports.num_fences:
            return self.connect_anew(destination)
        return destination.link

    def connect_anew(self, destination: DestinationRank) -> Connecting | Link:
        """Connect for the next write; running ones keep their connection."""
        num_fences = self._rank.transports.num_fences
        destination.link = self._rank.transports.connect(destination.end_points)
        # Last: another thread takes the link where the number is that of the transports.
        destination.num_fences = num_fences
        return destination.link


class WriteEvents:
    """The events of one write, for the transfer log: plain data, times on the monotonic clock.

    ``source_index`` is that of the rank at the destination; ``layers_of`` names the layers of each span that is not
    all layers of its group.
    """

    def __init__(self, request: WriteRequest, source_index: int, layers_of: Mapping[Span, Sequence[str]]) -> None:
        self._request, self._source_index, self._layers_of = request, source_index, layers_of
        self._announced_at = time.monotonic()
        self._reported_at: float | None = None
        self._batches: list[dict[str, Any]] = []
        self._num_left_out = 0
        self._latest: dict[str, Any] = {}

    def posted(self, batch: Batch, num_descriptors: int, num_bytes: int, now: float) -> None:
        """The source has submitted a batch to the transport."""
        self._latest = {"posted_at": now, "landed_at": None, "bytes": num_bytes, "descriptors": num_descriptors}
        if len(self._batches) == MAX_BATCHES:
            self._num_left_out += 1
            return
        self._latest["spans"] = [
            {
                "group": cut.span.group,
                "layers": list(self._layers_of.get(cut.span, ())),
                "tokens": [cut.first_token, cut.end_token],
            }
            for cut in batch
        ]
        self._batches.append(self._latest)

    def landed(self, now: float) -> None:
        """The batch has landed. A batch that failed or was stopped never lands."""
        self._latest["landed_at"] = now

    def reported(self, now: float) -> None:
        """The source is about to tell the destination how the write ended."""
        self._reported_at = now

    def as_dict(self) -> dict[str, Any]:
        """Return the events, ready for JSON; empty ``layers`` mean all layers of the group."""
        return {
            "transfer_id": self._request.transfer_id,
            "receiver": self._request.key.receiver,
            "source_index": self._source_index,
            "num_tokens": self._request.num_tokens,
            "clock": clock(),
            "announced_at": self._announced_at,
            "batches": self._batches,
            "batches_left_out": self._num_left_out,
            "reported_at": self._reported_at,
        }


class Write:
    """One write at its source; ``report`` tells the destination its result once no batch is in flight.

    ``check_alive`` raises :class:`KVFerryError` where the destination has ended: a write that waits for its prompt
    would not notice. ``digests`` are added up while the transport writes, or between its writes.

    ``lock`` guards ``writes``, which the engine's and the server's threads change.
    """

    fills_blocks = False
    is_for_log = True
    can_wait = False

    def __init__(
        self,
        writes: SourceWrites,
        lock: threading.Lock,
        key: WriteKey,
        part: Part,
        connect: Callable[[], Link | None],
        report: Report,
        events: WriteEvents | None = None,
        check_alive: Callable[[], None] = lambda: None,
        digests: WrittenDigests | None = None,
    ) -> None:
        self.job_id = key.name
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._writes, self._lock, self._key, self._part = writes, lock, key, part
        self._connect, self._report, self._check_alive = connect, report, check_alive
        self._check_alive_at = 0.0
        self._events, self._digests = events, digests
        self._link: Link | None = None
        self._transfer: Transfer | None = None
        self._created_at = time.monotonic()
        self._submitted_at = self._moved_at = 0.0
        self._is_writing = False
        self._move_seconds = 0.0
        self._num_bytes = self._num_descriptors = self._num_page_writes = 0

    def advance(self, now: float) -> bool:
        """Write the next batch, poll the one in flight, or end."""
        with self._lock:
            self._writes.tick(self._key, now)
            is_stopping = self._writes.is_stopping(self._key)
        if self._transfer is not None and self._link is not None:
            return self._poll_batch(self._link, self._transfer, is_stopping)
        if is_stopping:
            # The batch that was taken was never submitted.
            self._stopped(None)
        try:
            if now >= self._check_alive_at:
                self._check_alive_at = now + CHECK_ALIVE_SECONDS
                self._check_alive()
            return self._end() or self._begin_batch()
        except KVFerryError as error:
            self._stopped(error)
            return True

    def is_ending(self, now: float) -> bool:
        """Return whether the write is being stopped, or is over and keeps its blocks until it is reported."""
        with self._lock:
            return self._writes.is_stopping(self._key) or self._writes.outcome(self._key) is not None

    def cancel(self, error: KVFerryError) -> None:
        with self._lock:
            self._writes.fail(self._key, error)

    def result(self, finished_at: float) -> JobResult:
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=self._num_bytes,
            num_descriptors=self._num_descriptors,
            num_sources=1,
            transport="" if self._link is None else self._link.name,
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=self._move_seconds,
            num_compared_bytes=0 if self._digests is None else self._digests.num_bytes,
            compare_seconds=0.0 if self._digests is None else self._digests.seconds,
            events=None if self._events is None else self._events.as_dict(),
        )

    def _begin_batch(self) -> bool:
        # Others may wait for the same connection.
        link = self._link = self._link or self._connect()
        if link is None:
            return False
        with self._lock:
            prompt = self._writes.prompt_of(self._key)
            batch = self._writes.take(self._key)
        if not batch or prompt is None:
            return False
        self._submitted_at = time.monotonic()
        rows = self._part.lower(batch, prompt.blocks)
        if self._digests is not None:
            self._digests.begin(self._part.cuts(batch, prompt.blocks))
        self._is_writing = True
        self._transfer = transfer = link.transport.submit(link.peer, Direction.WRITE, rows)
        self._num_descriptors += transfer.num_descriptors
        if self._events is not None:
            self._events.posted(batch, transfer.num_descriptors, transfer.num_bytes, self._submitted_at)
        self.phase = Phase.MOVING
        return True

    def _poll_batch(self, link: Link, transfer: Transfer, is_stopping: bool) -> bool:
        bytes_before = transfer.bytes_done
        if transfer.status is Status.PENDING:
            _ = link.transport.cancel(transfer) if is_stopping else link.transport.poll(transfer)
        if transfer.status is not Status.PENDING and self._is_writing:
            self._is_writing = False
            self._moved_at = time.monotonic()
            self._move_seconds += self._moved_at - self._submitted_at
        if is_stopping:
            self.phase = Phase.STOPPING
            self.given_up_at = self.given_up_at or time.monotonic()
        elif self._digests is not None and not self._digests.advance():
            return True
        if transfer.status is Status.PENDING:
            return transfer.bytes_done != bytes_before
        self._transfer, self.phase = None, Phase.PREPARING
        may_land = transfer.status is Status.FAILED and transfer.may_land
        if is_stopping:
            self._stopped(None, may_land=may_land)
        elif transfer.status is Status.DONE:
            self._num_bytes += transfer.num_bytes
            self._landed()
        else:
            ended = f"a write ended {transfer.status}."
            error = TransportError(Reason.TRANSFER_FAILED, ended, "Check that the decode engine runs.")
            self._stopped(transfer.error or error, may_land=may_land)
        return True

    def _landed(self) -> None:
        if self._events is not None:
            self._events.landed(time.monotonic())
        changed = {} if self._digests is None else self._digests.changed_pages()
        self._num_page_writes += bool(changed)
        if self._num_page_writes > MAX_PAGE_WRITES:
            self._stopped(_never_rests(self._key))
            return
        with self._lock:
            counts = self._writes.landed(self._key, changed)
        if counts and self._digests is not None:
            self._digests.landed()

    def _stopped(self, error: KVFerryError | None, *, may_land: bool = False) -> None:
        with self._lock:
            self._writes.stopped(self._key, error, may_land=may_land)

    def _end(self) -> bool:
        with self._lock:
            outcome = self._writes.outcome(self._key)
        if outcome is None:
            return False
        self.error = outcome.error
        self.phase = Phase.DONE
        now = time.monotonic()
        if self._events is not None:
            self._events.reported(now)
        self._report(self.result(now), self._seconds(now), outcome.may_land)
        return True

    def _seconds(self, now: float) -> WriteSeconds:
        """Return where the time went, up to now."""
        moved_at = self._moved_at or now
        waited = max(0.0, moved_at - self._created_at - self._move_seconds)  # of sums that were rounded
        return WriteSeconds(waited, self._move_seconds, now - moved_at)


def _never_rests(key: WriteKey) -> HandoffError:
    return HandoffError(
        Reason.SOURCE_CHANGED,
        f"write {key.number} to {key.receiver}: the engine has changed the page in which the prompt ends during each "
        f"of {MAX_PAGE_WRITES + 1} writes.",
        "Let the prefill engine generate one token only (max_tokens 1): it writes further ones between the prompt's.",
    )


class Writer:
    """All writes of one rank in its ``epoch``.

    A prompt of more than ``short_tokens`` is sent in ``spans``, each as soon as its layers have run; spans of which the
    engine does not report every layer move at the end of the step, and the first such step is logged with the reason,
    ``why_silent``. With ``keeps_events`` the result of each write has its events, and :meth:`take_steps` returns the
    steps. ``engine`` is where this rank's own engine answers, once that is known. ``digests`` says which digests a
    destination may ask for.

    The server's thread calls :meth:`answer`, the engine's thread the other methods, none of which waits for a transfer.
    """

    def __init__(
        self,
        rank: OwnRank,
        epoch: int,
        spans: LayerSpans,
        *,
        keeps_events: bool,
        short_tokens: int = SHORT_TOKENS,
        digests: Integrity = Integrity.OFF,
        why_silent: Callable[[], str] = lambda: "the engine does not say why",
    ) -> None:
        self._computes = digests
        self._why_silent, self._is_silence_told = why_silent, False
        self.epoch = epoch
        self._rank = rank
        self._deferred = DeferredActions(rank.order)
        self._peers = Peers(rank.client.trust)
        self._writes = SourceWrites()
        self._lock = threading.Lock()
        self.destinations = Destinations(rank)
        self._num_preemptions: dict[str, int] = {}
        self._num_resets = 0
        self._open: dict[WriteKey, tuple[DestinationRank, int]] = {}
        self._given_up: set[WriteKey] = set()
        self._num_open_blocks = self._num_open_bytes = 0
        self._reports: OrderedDict[WriteKey, Written | WriteFailed] = OrderedDict()
        self._late_at: dict[WriteKey, float] = {}
        self._num_report_bytes = 0
        self.spans, self._short_tokens = spans, short_tokens
        self.engine: EndPoint | None = None
        self._reset_to: int | None = None
        """The engine's epoch since its last reset, which may come before its first step."""
        self._to_run: dict[Span, set[str]] = {}
        self._keeps_events = keeps_events
        self._step: dict[str, Any] | None = None
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)

    # The engine's thread.

    def begin_step(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """A step that computes these prompts is about to run, layer by layer."""
        self._to_run = {span: set(layers) for span, layers in self.spans.layers_of.items()} if prompts else {}
        if self._keeps_events and prompts:
            computed = {transfer_id: min(prompt.num_final, prompt.num_tokens) for transfer_id, prompt in prompts}
            self._step = {"step_began_at": time.monotonic(), "prompts": computed, "ran_at": {}}
        if self._to_run:
            self._after_launched(partial(self._begun, prompts, self._preemptions_of(prompts)))

    def reach(self, layer: str) -> None:
        """The step has launched this layer."""
        span = self.spans.span_of.get(layer)
        if span is None or span not in self._to_run:
            return
        self._to_run[span].discard(layer)
        if not self._to_run[span]:
            del self._to_run[span]
            self._after_launched(partial(self._reached, layer, span, self._step))

    def compute(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """The step has launched all work of these prompts: their tokens are final once the device has done it.

        Those of holds are known at once: they may be announced as soon as the engine has answered.
        """
        if self._to_run and prompts and not self._is_silence_told:
            self._is_silence_told = True
            num_spans = len(self.spans.layers_of)
            told = (
                "kvferry: a step reported the layers of %d of %d spans, so chunks are written at the end of each such "
                "step and not layer by layer: %s."
            )
            logger.warning(told, num_spans - len(self._to_run), num_spans, self._why_silent())
        self._to_run = {}
        step, self._step = self._step, None
        self._tell(prompts, step)

    def hold(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """Earlier steps have computed these prompts: they are final once the device has done all work launched so far,
        and may be written until :meth:`end`.
        """
        self._tell(prompts, None)

    def _tell(self, prompts: Sequence[tuple[str, Prompt]], step: dict[str, Any] | None) -> None:
        if not prompts:
            return
        if not self._rank.order.is_immediate:
            with self._lock:
                for transfer_id, prompt in prompts:
                    if is_of_hold(transfer_id):
                        self._writes.compute(transfer_id, msgspec.structs.replace(prompt, num_final=0))
        self._after_launched(partial(self._publish, prompts, self._preemptions_of(prompts), step))

    def _after_launched(self, action: Callable[[], None]) -> None:
        """Run the action once the device has done all work launched so far, in the order of the steps and their layers.

        In another order a layer of one step could declare blocks final that the next step has only launched.
        """
        if self._rank.order.is_immediate:
            action()
        else:
            self._deferred.add(self._rank.order.mark(), action)

    def _preemptions_of(self, prompts: Sequence[tuple[str, Prompt]]) -> Preemptions:
        return {tid: (self._num_preemptions.get(tid, 0), self._num_resets) for tid, _ in prompts}

    def _not_preempted_since(
        self, prompts: Sequence[tuple[str, Prompt]], preemptions: Preemptions
    ) -> dict[str, Prompt]:
        """Return the prompts that were not preempted since, by requests or by a reset. A transfer that has ended stays
        ended all the same.
        """
        now = self._preemptions_of(prompts)
        return {tid: prompt for tid, prompt in prompts if now[tid] == preemptions[tid]}

    def _begun(self, prompts: Sequence[tuple[str, Prompt]], preemptions: Preemptions) -> None:
        with self._lock:
            self._writes.begin_step(self._not_preempted_since(prompts, preemptions))

    def _reached(self, layer: str, span: Span, step: dict[str, Any] | None) -> None:
        if step is not None:
            step["ran_at"][layer] = time.monotonic()
        with self._lock:
            is_wanted = self._writes.reach(span)
        if is_wanted:
            self._rank.executor.wake()

    def _publish(
        self, prompts: Sequence[tuple[str, Prompt]], preemptions: Preemptions, step: dict[str, Any] | None
    ) -> None:
        if step is not None:
            self._steps.append({**step, "step_ended_at": time.monotonic(), "clock": clock()})
        with self._lock:
            for transfer_id, prompt in self._not_preempted_since(prompts, preemptions).items():
                self._writes.compute(transfer_id, prompt)
        self._rank.executor.wake()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """The engine may overwrite these prompts' blocks from now on, and will compute them again."""
        with self._lock:
            for transfer_id in transfer_ids:
                self._num_preemptions[transfer_id] = self._num_preemptions.get(transfer_id, 0) + 1
                self._writes.preempt(transfer_id)

    def end(self, transfer_ids: Sequence[str], error_of: Callable[[str], HandoffError] = no_longer_held) -> None:
        """The engine may overwrite these prompts' blocks from now on. Writes that still need them fail, each with its
        error; by default it says that the prompt is no longer held.
        """
        with self._lock:
            for transfer_id in transfer_ids:
                self._num_preemptions.pop(transfer_id, None)
                self._writes.end(transfer_id, error_of(transfer_id))
        if transfer_ids:
            self._rank.executor.wake()

    def end_epoch(self, engine_epoch: int) -> None:
        """The engine's cache was reset, and its epoch is this one from now on: every open write fails, all prompts are
        forgotten, and blocks that are announced for a former epoch are refused.
        """
        with self._lock:
            self._num_resets += 1
            self._reset_to = engine_epoch
            self._writes.fail_all(_reset())
            if self.engine is not None:
                self.engine = msgspec.structs.replace(self.engine, epoch=engine_epoch)
        self._rank.executor.wake()

    def take_steps(self) -> list[dict[str, Any]]:
        """Return the steps that have ended since the last call, at most the latest :data:`MAX_STEPS`, ready for JSON.

        A step has the times of its begin and end, the token up to which it has computed each prompt, by transfer id,
        and the times at which the last layer of each span had run.
        """
        return [self._steps.popleft() for _ in range(len(self._steps))]

    @property
    def is_quiet(self) -> bool:
        """Whether no write is open, so that nothing is written any more."""
        with self._lock:
            return self._writes.num_open == 0

    def close(self) -> None:
        """Stop the actions that wait for the device; writes end with the executor."""
        self._deferred.close()

    # The server's thread.

    def answer(self, question: Question) -> Answer:
        """Answer a destination. Raises :class:`KVFerryError` for a question that is refused."""
        if isinstance(question, Introduce | Announce | Revoke):
            check_epoch(question.epoch, self.epoch, "rank")
        if isinstance(question, Introduce):
            self.destinations.introduce(question)
            return Noted(self.epoch)
        if isinstance(question, Announce):
            try:
                return self._told_again(question) or Announced(self.epoch, self._announce(question))
            except KVFerryError as error:
                with self._lock:
                    self._writes.refuse(question.key, error)
                raise
        if isinstance(question, Revoke):
            with self._lock:
                is_quiet = self._writes.revoke(question.key, time.monotonic())
                over = self._writes.outcome(question.key)
            self._rank.executor.wake()
            return Revoked(self.epoch, is_quiet, may_land=over is not None and over.may_land)
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"a {type(question).__name__} is not for a rank that writes.",
            "Ask the prefill engine's own port.",
        )

    def _told_again(self, question: Announce) -> Announced | None:
        """Return the answer to an announcement that is known, with the report of a write that is over; None for a new
        one.
        """
        key = question.key
        with self._lock:
            report = self._reports.get(key)
            is_late = report is not None and time.monotonic() >= self._late_at[key]
            is_known = report is not None or key in self._open or key in self._given_up
        destination = self.destinations.known.get((key.receiver, key.receiver_epoch, question.token))
        if is_late and destination is not None:
            where = destination.answers_at
            told = "kvferry: the report of write %d has not reached the decode rank at %s:%d, which asks for it. %s"
            remedy = open_port(where.port, where.host)
            logger.warning(told, key.number, where.host, where.port, remedy, peer=key.receiver)
        return Announced(self.epoch, "", report) if is_known else None

    def _announce(self, question: Announce) -> str:
        """Begin a write; return the transport over which alone it writes, empty where that is still open."""
        key = question.key
        with self._lock:
            num_resets = self._num_resets
            if self._reset_to is not None:
                check_epoch(question.engine_epoch, self._reset_to)
            elif self.engine is not None:
                check_epoch(question.engine_epoch, self.engine.epoch)
        destination = self.destinations.announced(key, question.registration, question.token)
        plan = destination.plan(question.transfer_id)
        part = Part(plan, question.blocks)
        if part.digest != question.digest:
            raise HandoffError(
                Reason.PROTOCOL_MISMATCH,
                f"{key.receiver} announced part {question.digest} of {question.transfer_id}; this rank plans part "
                f"{part.digest}.",
                "Run the same kvferry version on both sides.",
            )
        with self._lock:
            is_computed = self._writes.is_computed(question.transfer_id)
        digests = None
        if (wanted := Integrity(question.integrity)) is not Integrity.OFF:
            check_computes(self._computes, wanted)
            digests = WrittenDigests(PartDigests(destination.cells(plan, wanted), part.announced, key))
        is_whole = goes_whole(question.num_tokens, is_computed=is_computed, short_tokens=self._short_tokens)
        part = part.as_whole() if is_whole else part.in_spans(self.spans.plans(plan))
        now = time.monotonic()
        request = WriteRequest(
            key,
            question.transfer_id,
            question.num_tokens,
            question.prompt_digest,
            part.needs,
            now + min(question.seconds, MAX_SECONDS),
            question.adapter,
            now + min(question.late_seconds, LATE_SECONDS) if is_of_hold(question.transfer_id) else None,
        )
        num_blocks = sum(len(blocks.block_ids) for blocks in question.blocks)
        with self._lock:
            if self._num_resets != num_resets:
                raise _reset()
            if not self._writes.announce(request, now):
                return ""
            self._open[key] = destination, num_blocks
            self._num_open_blocks += num_blocks
            self._num_open_bytes += 0 if destination.num_open else destination.num_bytes
            destination.num_open += 1
            self._make_room(key)
            if key not in self._open:
                raise _no_room()
        index = destination.source_index
        events = WriteEvents(request, index, self.spans.layers_of) if self._keeps_events else None
        # This connection and no later one, which may be over another transport.
        link = self.destinations.link(destination)
        write = Write(
            self._writes,
            self._lock,
            key,
            part,
            connect=link.poll,
            report=partial(self._report, request, part, destination, digests),
            events=events,
            check_alive=partial(self._check_alive, destination.answers_at),
            digests=digests,
        )
        self._rank.executor.submit(write)
        return link.name

    def _make_room(self, newcomer: WriteKey) -> None:
        """Give up writes that wait for their prompts until no more are open than this rank takes, the ``newcomer``
        where no other is left or too many given up have not ended. The lock is held.
        """
        while newcomer in self._open and (surplus := self._surplus()) is not None:
            if not surplus or len(self._given_up) >= MAX_GIVEN_UP:
                surplus = [newcomer]
            for key in surplus:
                self._writes.fail(key, _no_room())
                self._close(key)
            self._given_up.update(key for key in surplus if key != newcomer)

    def _surplus(self) -> list[WriteKey] | None:
        """Return which of the writes that wait for their prompts go: of too many the one that came first, of too many
        blocks the one with most, of too many bytes those to the destination with the largest introduction. None where
        all have room.
        """
        waiting = filter(self._writes.awaits_prompt, self._open)
        if len(self._open) > MAX_OPEN:
            return list(islice(waiting, 1))
        if self._num_open_blocks > MAX_OPEN_BLOCKS:
            most = max(waiting, key=lambda key: self._open[key][1], default=None)
            return [] if most is None else [most]
        if self._num_open_bytes > MAX_OPEN_BYTES:
            destinations = {key: self._open[key][0] for key in waiting}
            largest = max(destinations.values(), key=lambda each: each.num_bytes, default=None)
            return [key for key, each in destinations.items() if each is largest]
        return None

    def _close(self, key: WriteKey) -> None:
        """The write is over, or given up: it needs no room any more. The lock is held."""
        if (opened := self._open.pop(key, None)) is None:
            return
        destination, num_blocks = opened
        self._num_open_blocks -= num_blocks
        destination.num_open -= 1
        if not destination.num_open:
            self._num_open_bytes -= destination.num_bytes

    # The transfer thread.

    def _check_alive(self, where: EndPoint) -> None:
        """Raise :class:`HandoffError` (peer-unreachable) where a destination refuses connections.

        To give a write up is always safe; the destination is told, where it lives.
        """
        if self._peers.refuses(where):
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"nothing listens on {where.host}:{where.port}, where the decode rank answered.",
                "Check the decode engine's log: it may have ended. If it runs: " + open_port(where.port, where.host),
            )

    def _report(
        self,
        request: WriteRequest,
        part: Part,
        destination: DestinationRank,
        digests: WrittenDigests | None,
        result: JobResult,
        seconds: WriteSeconds,
        may_land: bool,
    ) -> None:
        key, error = request.key, result.error
        if isinstance(error, TransportError):
            self.destinations.connect_anew(destination)
        if isinstance(error, TransportError) or (error is not None and error.reason is Reason.PEER_UNREACHABLE):
            self._give_up(request.transfer_id)
        if error is not None:
            logger.warning("kvferry: write %d to %s failed: %s", key.number, key.receiver, error, peer=key.receiver)
        index, where = destination.source_index, destination.answers_at
        report: Written | WriteFailed
        if error is None:
            moved = result.num_bytes, result.num_descriptors, result.transport
            encoded = b"" if digests is None else digests.encoded()
            report = Written(key, index, part.digest, *moved, seconds, encoded)
        else:
            report = WriteFailed.of(error, key=key, source_index=index, may_land=may_land)
        with self._lock:
            self._keep(report)
            self._close(key)
            self._given_up.discard(key)
        self._rank.client.tell(where.host, where.port, report, REPORT_SECONDS, is_trusted=self._rank.client.knows_peers)

    def _keep(self, report: Written | WriteFailed) -> None:
        """Keep a report for a destination that asks again. The lock is held."""
        self._reports[report.key] = report
        self._late_at[report.key] = time.monotonic() + LATE_REPORT_SECONDS
        self._num_report_bytes += _num_bytes(report)
        while len(self._reports) > MAX_REPORTS or self._num_report_bytes > MAX_REPORT_BYTES:
            key, forgotten = self._reports.popitem(last=False)
            del self._late_at[key]
            self._num_report_bytes -= _num_bytes(forgotten)

    def _give_up(self, transfer_id: str) -> None:
        """Ask this rank's engine to end the hold: the destination, which would release it, may be dead."""
        if (engine := self.engine) is not None:
            question = Release(engine.epoch, (handle_of_transfer(transfer_id),))
            self._rank.client.tell(engine.host, engine.port, question, REPORT_SECONDS, is_trusted=True)


def _no_room() -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"this rank takes at most {MAX_OPEN} open writes of {MAX_OPEN_BLOCKS} blocks, to destinations whose "
        f"introductions have {MAX_OPEN_BYTES} bytes, and gives up those that wait for their prompts.",
        "Let only decode engines reach this port: no engine has so many requests.",
    )


def _reset() -> HandoffError:
    return HandoffError(
        Reason.WEIGHTS_CHANGED,
        "the cache of the prefill engine was reset, and what it computed before is not written.",
        "Send the prompt again.",
    )


def _num_bytes(report: Written | WriteFailed) -> int:
    return len(report.digests) if isinstance(report, Written) else 0
