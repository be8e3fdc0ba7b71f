"""One push at its source rank: a job of the transfer thread that writes computed blocks, batch by batch.

:class:`kvferry.handoff.source.SourceWrites` decides what each batch has, a :class:`Write` carries it out.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase, clock
from kvferry.execution.push_digests import WrittenDigests
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.part import Part
from kvferry.handoff.source import Batch, WriteRequest, SourceWrites
from kvferry.plan.layer_spans import Span
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Link

CHECK_ALIVE_SECONDS = 1.0
"""Seconds between two checks that the destination of a push is alive."""
MAX_BATCHES = 1024
"""Batches kept of one push's events; later ones are only counted."""
MAX_PAGE_WRITES = 16
"""How often a push writes the page in which its prompt ends again, since the engine generates on and changes it."""
Report = Callable[[JobResult, bool], None]
"""Tells the destination how the push ended, and whether bytes of it may still land."""


class WriteEvents:
    """The events of one push, for the transfer log: plain data, times on the monotonic clock.

    ``layers_of`` names the layers of each span that is not all layers of its group.
    """

    def __init__(self, request: WriteRequest, layers_of: Mapping[Span, Sequence[str]]) -> None:
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
    is_for_log = True
    can_wait = False

    def __init__(
        self,
        sender: SourceWrites,
        lock: threading.Lock,
        key: WriteKey,
        part: Part,
        connect: Callable[[], Link | None],
        report: Report,
        events: WriteEvents | None = None,
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
        """Return whether the push is being stopped, or is over and keeps its blocks until it is reported."""
        with self._lock:
            return self._sender.is_stopping(self._key) or self._sender.outcome(self._key) is not None

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
        may_land = transfer.status is Status.FAILED and transfer.may_land
        if is_stopping:
            self._stopped(None, may_land=may_land)
        elif transfer.status is Status.DONE:
            self._num_bytes += transfer.num_bytes
            self._landed()
        else:
            self._stopped(transfer.error or _write_failed(transfer.status), may_land=may_land)
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

    def _stopped(self, error: KVFerryError | None, *, may_land: bool = False) -> None:
        with self._lock:
            self._sender.stopped(self._key, error, may_land=may_land)

    def _end(self) -> bool:
        with self._lock:
            outcome = self._sender.outcome(self._key)
        if outcome is None:
            return False
        self.error = outcome.error
        self.phase = Phase.DONE
        self._report(self.result(time.monotonic()), outcome.may_land)
        return True


def _write_failed(status: Status) -> TransportError:
    return TransportError(Reason.TRANSFER_FAILED, f"a write ended {status}.", "Check that the decode engine runs.")


def _never_rests(key: WriteKey) -> HandoffError:
    return HandoffError(
        Reason.SOURCE_CHANGED,
        f"push {key.number} to {key.receiver}: the engine has changed the page in which the prompt ends during each of "
        f"{MAX_PAGE_WRITES + 1} writes.",
        "Let the prefill engine generate one token only (max_tokens 1): it writes further ones between the prompt's.",
    )
