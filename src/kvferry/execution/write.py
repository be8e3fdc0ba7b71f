"""Writes of one source rank: takes announcements, writes computed blocks, and reports how each push ended.

:class:`kvferry.handoff.push.sender.Sender` decides. A :class:`Write`, a job of the transfer thread, carries out one
push, a :class:`Writer` all pushes of a rank.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.device import DeferredActions, DeviceOrder
from kvferry.execution.executor import Executor
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase, clock
from kvferry.execution.pair_cells import check_kept
from kvferry.execution.peers import Peers
from kvferry.execution.push_digests import PushDigests, PushedCells, WrittenDigests
from kvferry.execution.route import Route
from kvferry.handoff.handshake import compare_identities
from kvferry.handoff.holds import check_epoch, handle_of_transfer
from kvferry.handoff.messages import (
    Announce,
    Announced,
    Answer,
    Bounded,
    DigestTable,
    EndPoint,
    Identity,
    Introduce,
    Met,
    Noted,
    Pushed,
    PushFailed,
    PushKey,
    Question,
    Release,
    Revoke,
    Revoked,
)
from kvferry.handoff.push.part import Part
from kvferry.handoff.push.sender import Batch, Prompt, PushRequest, Sender, not_held
from kvferry.handoff.versions import Versions, agree
from kvferry.handoff.wire.client import Client
from kvferry.layout.shard import decode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.layer_spans import SHORT_TOKENS, LayerSpans, Span, goes_whole
from kvferry.plan.match import selector_of
from kvferry.plan.planner import PairPlan
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Connecting, Link, TransportSet

logger = PeerLog(logging.getLogger(__name__))

CHECK_ALIVE_SECONDS = 1.0
"""Seconds between two checks that the destination of a push is alive."""
MAX_BATCHES = 1024
"""Batches kept of one push's events; later ones are only counted."""
MAX_PAGE_WRITES = 16
"""How often a push writes the page in which its prompt ends again, since the engine generates on and changes it."""
Report = Callable[[JobResult], None]


class PushEvents:
    """The events of one push, for the transfer log: plain data, times on the monotonic clock.

    ``layers_of`` names the layers of each span that is not all layers of its group.
    """

    def __init__(self, request: PushRequest, layers_of: Mapping[Span, Sequence[str]]) -> None:
        self._request, self._layers_of = request, layers_of
        self._announced_at = time.monotonic()
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

    def as_dict(self) -> dict[str, Any]:
        """Return the events, ready for JSON; empty ``layers`` mean all layers of the group."""
        return {
            "transfer_id": self._request.transfer_id,
            "receiver": self._request.key.receiver,
            "num_tokens": self._request.num_tokens,
            "clock": clock(),
            "announced_at": self._announced_at,
            "batches": self._batches,
            "batches_left_out": self._num_left_out,
        }


class Write:
    """One push at its source; ``report`` tells the destination its result once no batch is in flight.

    ``check_alive`` raises :class:`KVFerryError` where the destination has ended: a push that waits for its prompt would
    not notice. ``digests`` are added up while the transport writes, or between its writes.

    ``lock`` guards ``sender``, which the engine's and the server's threads change.
    """

    fills_blocks = False
    can_wait = False

    def __init__(
        self,
        sender: Sender,
        lock: threading.Lock,
        key: PushKey,
        part: Part,
        connect: Callable[[], Link | None],
        report: Report,
        events: PushEvents | None = None,
        check_alive: Callable[[], None] = lambda: None,
        digests: WrittenDigests | None = None,
    ) -> None:
        self.job_id = f"push {key.number} to {key.receiver} {key.receiver_epoch}"
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._sender, self._lock, self._key, self._part = sender, lock, key, part
        self._connect, self._report, self._check_alive = connect, report, check_alive
        self._check_alive_at = 0.0
        self._events, self._digests = events, digests
        self._link: Link | None = None
        self._transfer: Transfer | None = None
        self._created_at = time.monotonic()
        self._submitted_at = 0.0
        self._is_writing = False
        self._transfer_seconds = 0.0
        self._num_bytes = self._num_descriptors = self._num_page_writes = 0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Write the next batch, poll the one in flight, or end."""
        with self._lock:
            self._sender.tick(self._key, now)
            is_stopping = self._sender.is_stopping(self._key)
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
        """Return whether the push is being stopped."""
        with self._lock:
            return self._sender.is_stopping(self._key)

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        with self._lock:
            self._sender.fail(self._key, error)

    def result(self, finished_at: float) -> JobResult:
        """Return how the push ended."""
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=self._num_bytes,
            num_staged_bytes=0,
            num_descriptors=self._num_descriptors,
            num_sources=1,
            transport="" if self._link is None else self._link.name,
            way="" if self._link is None else "written",
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=self._transfer_seconds,
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
            prompt = self._sender.prompt_of(self._key)
            batch = self._sender.take(self._key)
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
            self._transfer_seconds += time.monotonic() - self._submitted_at
        if is_stopping:
            self.phase = Phase.STOPPING
            self.given_up_at = self.given_up_at or time.monotonic()
        elif self._digests is not None and not self._digests.advance():
            return True
        if transfer.status is Status.PENDING:
            return transfer.bytes_done != bytes_before
        self._transfer, self.phase = None, Phase.PREPARING
        if is_stopping:
            self._stopped(None)
        elif transfer.status is Status.DONE:
            self._num_bytes += transfer.num_bytes
            self._landed()
        else:
            self._stopped(transfer.error or _write_failed(transfer.status))
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
            counts = self._sender.landed(self._key, changed)
        if counts and self._digests is not None:
            self._digests.landed()

    def _stopped(self, error: KVFerryError | None) -> None:
        with self._lock:
            self._sender.stopped(self._key, error)

    def _end(self) -> bool:
        with self._lock:
            outcome = self._sender.outcome(self._key)
        if outcome is None:
            return False
        self.error = outcome.error
        self.phase = Phase.DONE
        self._report(self.result(time.monotonic()))
        return True


def _write_failed(status: Status) -> TransportError:
    return TransportError(Reason.TRANSFER_FAILED, f"a write ended {status}.", "Check that the decode engine runs.")


def _never_rests(key: PushKey) -> HandoffError:
    return HandoffError(
        Reason.SOURCE_CHANGED,
        f"push {key.number} to {key.receiver}: the engine has changed the page in which the prompt ends during each of "
        f"{MAX_PAGE_WRITES + 1} writes.",
        "Let the prefill engine generate one token only (max_tokens 1): it writes further ones between the prompt's.",
    )


MAX_DESTINATIONS = 4096
MAX_MEETINGS = 1024
"""Destinations to which a rank connects at a time because they have introduced themselves."""
MAX_STEPS = 1024
"""Steps kept until :meth:`Writer.take_steps`; of more only the latest are kept."""
MAX_OPEN = 1 << 14
"""Open pushes of a rank: more than any engine has requests."""
MAX_SECONDS = 3600.0
"""Longest time that a push waits for its prompt, whatever its destination asks for."""
REPORT_SECONDS = 60.0
"""How long a report is sent again until it is acknowledged."""
TELL_SECONDS = 10.0
"""How long a destination is told again that this rank reaches it, and the time between two meetings with it."""
LATE_WORD_SECONDS = 10.0
"""The longest time for which a prompt that is to be written on request may be unknown here."""


class Meeting:
    """Connects to a destination that was introduced, and then tells it so: before, nothing need be announced."""

    fills_blocks = False
    can_wait = True
    given_up_at = None

    def __init__(self, job_id: str, link: Connecting | Link, tell: Callable[[], None]) -> None:
        self.job_id = job_id
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.began_at = time.monotonic()
        self._link, self._tell = link, tell

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Go on connecting."""
        try:
            if self._link.poll() is None:
                return False
        except KVFerryError as error:
            logger.warning("kvferry: %s failed, so it reads: %s", self.job_id, error, peer=self.job_id)
            self.cancel(error)
        else:
            self._tell()
            self.phase = Phase.DONE
        return True

    def is_ending(self, now: float) -> bool:
        """Return whether the meeting is being stopped."""
        return False

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        if self.phase is not Phase.DONE:
            self.error, self.phase = error.without_traceback(), Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        """Return how the meeting ended."""
        return JobResult(self.job_id, self.error, transport=self._link.name)


@dataclass
class DestinationRank:
    """A destination rank in one epoch: the route to the rank, connected by the first write of this rank's part."""

    answers_at: EndPoint
    end_points: dict[str, bytes]
    route: Route
    source_index: int
    registration: int
    meeting: Meeting | None = None
    _cells: dict[tuple[PairPlan, Integrity], PushedCells] = field(default_factory=dict)

    def cells(self, plan: PairPlan, wanted: Integrity) -> PushedCells:
        """Return the cells of a plan whose digests the destination compares, made once. Raises :class:`PlanError`."""
        if (plan, wanted) not in self._cells:
            self._cells[plan, wanted] = PushedCells(plan, wanted, at_source=True)
        return self._cells[plan, wanted]

    @property
    def link(self) -> Connecting | Link:
        """The connection, or the attempt to connect, for the next push."""
        return self.route.links[self.source_index]

    def plan(self, transfer_id: str) -> PairPlan:
        """Return this rank's plan for a transfer. Raises :class:`HandoffError` (missing-source) where there is none."""
        for plan in self.route.own_plans(selector_of(transfer_id)):
            return plan
        raise HandoffError(
            Reason.MISSING_SOURCE,
            f"source rank {self.source_index} has no part in {transfer_id}, but got an announcement.",
            "Run the same kvferry version on both sides.",
        )


class Writer:
    """All pushes of one rank, whose encoded shard is ``shard``.

    A prompt of more than ``short_tokens`` is sent in ``spans``, each as soon as its layers have run; spans of which the
    engine does not report every layer move at the end of the step, and the first such step is logged with the reason,
    ``why_silent``. With ``keeps_events`` the result of each push has its events, and :meth:`take_steps` returns the
    steps. ``engine`` is where this rank's own engine answers, once that is known. ``digests`` says which digests a
    destination may ask for. With ``is_on_request`` the rank writes prompts that it holds (:meth:`hold`) and computes
    none for pushes.

    The server's thread calls :meth:`answer`, the engine's thread the other methods, none of which waits for a transfer.
    """

    def __init__(
        self,
        shard: bytes,
        epoch: int,
        identity: Identity,
        transports: TransportSet,
        executor: Executor,
        client: Client,
        order: DeviceOrder,
        spans: LayerSpans,
        *,
        keeps_events: bool,
        short_tokens: int = SHORT_TOKENS,
        digests: DigestTable | None = None,
        why_silent: Callable[[], str] = lambda: "the engine does not say why",
        is_on_request: bool = False,
    ) -> None:
        self._kept = digests
        self._is_on_request = is_on_request
        self._why_silent, self._is_silence_told = why_silent, False
        self._shard, self.epoch, self._identity = shard, epoch, identity
        self._transports, self._executor, self._client = transports, executor, client
        self._order = order
        self._deferred = DeferredActions(order)
        self._peers = Peers(client.trust)
        self._sender = Sender()
        self._lock = threading.Lock()
        self._destinations: Bounded[tuple[str, int], DestinationRank] = Bounded(MAX_DESTINATIONS)
        self._meetings: list[Meeting] = []
        self._num_preemptions: dict[str, int] = {}
        self.spans, self._short_tokens = spans, short_tokens
        self.engine: EndPoint | None = None
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
        """The step has launched all work of these prompts: their tokens are final once the device has done it."""
        if self._to_run and prompts and not self._is_silence_told:
            self._is_silence_told = True
            num_spans = len(self.spans.layers_of)
            told = (
                "kvferry: a step reported the layers of %d of %d spans, so pushes send chunks at the end of each such "
                "step and not layer by layer: %s."
            )
            logger.warning(told, num_spans - len(self._to_run), num_spans, self._why_silent())
        self._to_run = {}
        step, self._step = self._step, None
        if prompts:
            self._after_launched(partial(self._publish, prompts, self._preemptions_of(prompts), step))

    def _after_launched(self, action: Callable[[], None]) -> None:
        """Run the action once the device has done all work launched so far, in the order of the steps and their layers.

        In another order a layer of one step could declare blocks final that the next step has only launched.
        """
        if self._order.is_immediate:
            action()
        else:
            self._deferred.add(self._order.mark(), action)

    def _preemptions_of(self, prompts: Sequence[tuple[str, Prompt]]) -> dict[str, int]:
        return {transfer_id: self._num_preemptions.get(transfer_id, 0) for transfer_id, _ in prompts}

    def _not_preempted_since(
        self, prompts: Sequence[tuple[str, Prompt]], preemptions: dict[str, int]
    ) -> dict[str, Prompt]:
        """Return the prompts that were not preempted since. A transfer that has ended stays ended all the same."""
        return {tid: prompt for tid, prompt in prompts if self._num_preemptions.get(tid, 0) == preemptions[tid]}

    def _begun(self, prompts: Sequence[tuple[str, Prompt]], preemptions: dict[str, int]) -> None:
        with self._lock:
            self._sender.begin_step(self._not_preempted_since(prompts, preemptions))

    def _reached(self, layer: str, span: Span, step: dict[str, Any] | None) -> None:
        if step is not None:
            step["ran_at"][layer] = time.monotonic()
        with self._lock:
            is_wanted = self._sender.reach(span)
        if is_wanted:
            self._executor.wake()

    def _publish(
        self, prompts: Sequence[tuple[str, Prompt]], preemptions: dict[str, int], step: dict[str, Any] | None
    ) -> None:
        if step is not None:
            self._steps.append({**step, "step_ended_at": time.monotonic()})
        with self._lock:
            for transfer_id, prompt in self._not_preempted_since(prompts, preemptions).items():
                self._sender.compute(transfer_id, prompt)
        self._executor.wake()

    def hold(self, transfer_id: str, prompt: Prompt) -> None:
        """The prompt is held, and what of it is final may be written until :meth:`end`. Any thread may call it."""
        with self._lock:
            self._sender.compute(transfer_id, prompt)
            may_be_awaited = self._sender.num_open > 0
        if may_be_awaited:
            self._executor.wake()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """The engine may overwrite these prompts' blocks from now on, and will compute them again."""
        with self._lock:
            for transfer_id in transfer_ids:
                self._num_preemptions[transfer_id] = self._num_preemptions.get(transfer_id, 0) + 1
                self._sender.preempt(transfer_id)

    def end(self, transfer_ids: Sequence[str], error_of: Callable[[str], HandoffError] | None = None) -> None:
        """The engine may overwrite these prompts' blocks from now on. Pushes that still need them fail, each with its
        error; by default it says that the prompt is no longer held.
        """
        error_of = error_of or (_no_longer_held if not self._is_on_request else lambda _: not_held())
        with self._lock:
            for transfer_id in transfer_ids:
                self._num_preemptions.pop(transfer_id, None)
                self._sender.end(transfer_id, error_of(transfer_id), may_return=self._is_on_request)
        if transfer_ids:
            self._executor.wake()

    def take_steps(self) -> list[dict[str, Any]]:
        """Return the steps that have ended since the last call, at most the latest :data:`MAX_STEPS`, ready for JSON.

        A step has the times of its begin and end, the token up to which it has computed each prompt, by transfer id,
        and the times at which the last layer of each span had run.
        """
        return [self._steps.popleft() for _ in range(len(self._steps))]

    @property
    def is_quiet(self) -> bool:
        """Whether no push is open, so that nothing is written any more."""
        with self._lock:
            return self._sender.num_open == 0

    def close(self) -> None:
        """Stop the actions that wait for the device; pushes end with the executor."""
        self._deferred.close()

    # The server's thread.

    def answer(self, question: Question) -> Answer:
        """Answer a destination. Raises :class:`KVFerryError` for a question that is refused."""
        if isinstance(question, Introduce | Announce | Revoke):
            check_epoch(question.epoch, self.epoch, "rank")
        if isinstance(question, Introduce):
            self._introduce(question)
            return Noted(self.epoch)
        if isinstance(question, Announce):
            return Announced(self.epoch, self._announce(question))
        if isinstance(question, Revoke):
            with self._lock:
                is_quiet = self._sender.revoke(question.key)
            self._executor.wake()
            return Revoked(self.epoch, is_quiet)
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"a {type(question).__name__} is not for a rank that pushes.",
            "Ask the prefill engine's own port.",
        )

    def _introduce(self, question: Introduce) -> None:
        agree(decode=Versions(question.version, question.version))
        compare_identities(self._identity, question.identity)
        key = question.receiver, question.answers_at.epoch
        known = self._destinations.get(key)
        if known is not None and known.registration >= question.registration:
            self._meet(question.receiver, known)
            return
        if self._shard not in question.sources:
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"{question.receiver} names {len(question.sources)} source shards, and none of them is this rank's.",
                "Send the prompt again.",
            )
        index = question.sources.index(self._shard)
        links = {index: self._transports.connect(question.end_points)}
        route = Route([decode_shard(source) for source in question.sources], decode_shard(question.shard), links)
        # The connection to a former registration is not closed: it ends with the last batch in flight over it.
        self._destinations[key] = destination = DestinationRank(
            question.answers_at, question.end_points, route, index, question.registration
        )
        self._meet(question.receiver, destination)

    def _meet(self, receiver: str, destination: DestinationRank) -> None:
        """Connect to a destination and tell it so; anew where it introduces itself again, as one does that was not told
        in time.
        """
        self._meetings = [each for each in self._meetings if each.phase is not Phase.DONE]
        before, where = destination.meeting, destination.answers_at
        if not self._is_on_request or before in self._meetings:
            return
        if before is not None and time.monotonic() < before.began_at + TELL_SECONDS:
            return
        if len(self._meetings) >= MAX_MEETINGS:
            logger.warning("kvferry: %s is not met: %d meetings are under way.", receiver, MAX_MEETINGS, peer=receiver)
            return
        if before is not None and before.error is not None:
            self.connect_anew(destination)
        met = Met(self.epoch, receiver, where.epoch, destination.registration)
        job_id = f"meeting {receiver} {where.epoch} {destination.registration}"
        destination.meeting = meeting = Meeting(job_id, destination.link, partial(self._tell_met, where, met))
        self._meetings.append(meeting)
        self._executor.submit(meeting)

    def _tell_met(self, where: EndPoint, met: Met) -> None:
        self._client.tell(where.host, where.port, met, TELL_SECONDS, is_trusted=self._client.knows_peers)

    def _announce(self, question: Announce) -> str:
        """Begin a push; return the transport over which alone it writes, empty where that is still open."""
        key = question.key
        destination = self._destinations.get((key.receiver, key.receiver_epoch))
        if destination is None:
            raise HandoffError(
                Reason.UNKNOWN_REQUEST, f"{key.receiver} has not introduced itself.", "Introduce it first."
            )
        if question.registration != destination.registration:
            is_late = question.registration < destination.registration
            raise HandoffError(
                Reason.FENCED if is_late else Reason.UNKNOWN_REQUEST,
                f"{key.receiver} announced blocks of its registration {question.registration}; known here is "
                f"{destination.registration}.",
                "Send the prompt again." if is_late else "Introduce it first.",
            )
        self._destinations.move_to_end((key.receiver, key.receiver_epoch))
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
            is_computed = self._sender.is_computed(question.transfer_id)
        digests = self._digests(question, destination, plan, part)
        is_whole = goes_whole(question.num_tokens, is_computed=is_computed, short_tokens=self._short_tokens)
        part = part.as_whole() if is_whole else part.in_spans(self.spans.plans(plan))
        now = time.monotonic()
        request = PushRequest(
            key,
            question.transfer_id,
            question.num_tokens,
            question.prompt_digest,
            part.needs,
            now + min(question.seconds, MAX_SECONDS),
            question.adapter,
            self._known_by(question, now),
        )
        with self._lock:
            if self._sender.num_open >= MAX_OPEN:
                raise HandoffError(
                    Reason.INVALID_REQUEST,
                    f"this rank has {MAX_OPEN} open pushes, the most that it takes.",
                    "Let only decode engines reach this port: no engine has so many requests.",
                )
            if not self._sender.announce(request, now):
                return ""
            events = PushEvents(request, self.spans.layers_of) if self._keeps_events else None
        # This connection and no later one, which may be over another transport.
        link = destination.link
        self._executor.submit(self._job(request, part, destination, link, events, digests))
        return link.name

    def _known_by(self, question: Announce, now: float) -> float | None:
        """Return when the prompt must be known, as in :class:`PushRequest`: one that is held, at once or soon."""
        return now + min(question.late_seconds, LATE_WORD_SECONDS) if self._is_on_request else None

    def _digests(
        self, question: Announce, destination: DestinationRank, plan: PairPlan, part: Part
    ) -> WrittenDigests | None:
        """Return the digests that the destination asks for. Raises :class:`PlanError` (unsupported)."""
        wanted = Integrity(question.integrity)
        if wanted is Integrity.OFF:
            return None
        check_kept(self._kept, wanted)
        cells = destination.cells(plan, wanted)
        return WrittenDigests(PushDigests(cells, part.announced, question.key))

    def _job(
        self,
        request: PushRequest,
        part: Part,
        destination: DestinationRank,
        link: Connecting | Link,
        events: PushEvents | None,
        digests: WrittenDigests | None,
    ) -> Write:
        return Write(
            self._sender,
            self._lock,
            request.key,
            part,
            connect=link.poll,
            report=lambda result: self._report(request, part, destination, result, digests),
            events=events,
            check_alive=lambda: self._check_alive(destination.answers_at),
            digests=digests,
        )

    # The transfer thread.

    def _check_alive(self, where: EndPoint) -> None:
        """Raise :class:`HandoffError` (peer-unreachable) where a destination refuses connections.

        To give a push up is always safe; the destination is told, where it lives.
        """
        if self._peers.refuses(where):
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"nothing listens on {where.host}:{where.port}, where the decode rank answered.",
                "Check the decode engine's log: it may have ended.",
            )

    def _report(
        self,
        request: PushRequest,
        part: Part,
        destination: DestinationRank,
        result: JobResult,
        digests: WrittenDigests | None,
    ) -> None:
        key, error = request.key, result.error
        if isinstance(error, TransportError):
            self.connect_anew(destination)
        if isinstance(error, TransportError) or (error is not None and error.reason is Reason.PEER_UNREACHABLE):
            self._give_up(request.transfer_id)
        if error is not None:
            logger.warning("kvferry: push %d to %s failed: %s", key.number, key.receiver, error, peer=key.receiver)
        index, where = destination.source_index, destination.answers_at
        report: Pushed | PushFailed
        if error is None:
            done = result.num_bytes, result.num_descriptors, result.transport, result.transfer_seconds
            report = Pushed(key, index, part.digest, *done, b"" if digests is None else digests.encoded())
        else:
            report = PushFailed.of(error, key=key, source_index=index)
        self._client.tell(where.host, where.port, report, REPORT_SECONDS, is_trusted=self._client.knows_peers)

    def connect_anew(self, destination: DestinationRank) -> None:
        """Connect for the next push; running pushes keep their connection."""
        destination.route.links[destination.source_index] = self._transports.connect(destination.end_points)

    def _give_up(self, transfer_id: str) -> None:
        """Ask this rank's engine to end the hold: the destination, which would release it, may be dead."""
        if (engine := self.engine) is not None:
            question = Release(engine.epoch, (handle_of_transfer(transfer_id),))
            self._client.tell(engine.host, engine.port, question, REPORT_SECONDS, is_trusted=True)


def _no_longer_held(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.LEASE_EXPIRED,
        f"the prefill engine no longer holds the blocks of {transfer_id}: the request was aborted or released, or its "
        "lease ended.",
        "Send the prompt again to both engines, with a transfer id of its own. If this repeats under load, raise "
        "lease_seconds on the prefill side.",
    )
