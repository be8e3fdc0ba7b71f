"""One push on the sender's transfer thread: write what is final, batch by batch, then say how it ended."""

import threading
import time
from collections.abc import Callable

from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.handoff.messages import PushKey
from kvferry.handoff.push.events import PushEvents
from kvferry.handoff.push.part import Part
from kvferry.handoff.push.sender import SendingSide
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Connecting, Link

Report = Callable[[JobResult], None]


class PushJob:
    """Advances one push; ``report`` tells the receiver, once nothing is being written any more.

    ``lock`` guards ``side``, which the engine's and the listener's threads change.
    """

    fills_blocks = False

    def __init__(
        self,
        side: SendingSide,
        lock: threading.Lock,
        key: PushKey,
        part: Part,
        connect: Callable[[], Connecting],
        report: Report,
        events: PushEvents | None = None,
    ) -> None:
        self.job_id = f"push {key.number} to {key.receiver} {key.receiver_epoch}"
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._side, self._lock, self._key, self._part = side, lock, key, part
        self._connect, self._report = connect, report
        self._events = events
        self._connecting: Connecting | None = None
        self._link: Link | None = None
        self._transfer: Transfer | None = None
        self._created_at = time.monotonic()
        self._submitted_at = 0.0
        self._transfer_seconds = 0.0
        self._num_bytes = self._num_descriptors = 0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Write the next batch, look after the one on its way, or end."""
        with self._lock:
            self._side.tick(self._key, now)
            is_stopping = self._side.is_stopping(self._key)
        if self._transfer is not None and self._link is not None:
            return self._look_after(self._link, self._transfer, is_stopping)
        if is_stopping:
            # What was taken was never submitted.
            self._stopped(None)
        try:
            return self._end() or self._begin_batch()
        except KVFerryError as error:
            self._stopped(error)
            return True

    def is_ending(self, now: float) -> bool:
        """Return whether the push is being stopped."""
        with self._lock:
            return self._side.is_stopping(self._key)

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        with self._lock:
            self._side.fail(self._key, error)

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
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=self._transfer_seconds,
            events=None if self._events is None else self._events.as_dict(),
        )

    def _find_link(self) -> Link | None:
        """Go on reaching the receiver's memory; others may wait for the same connection."""
        if self._link is None:
            if self._connecting is None:
                self._connecting = self._connect()
            self._link = self._connecting.poll()
        return self._link

    def _begin_batch(self) -> bool:
        link = self._find_link()
        if link is None:
            return False
        with self._lock:
            prompt = self._side.prompt_of(self._key)
            batch = self._side.take(self._key)
        if not batch or prompt is None:
            return False
        self._submitted_at = time.monotonic()
        rows = self._part.lower(batch, prompt.blocks)
        self._transfer = transfer = link.transport.submit(link.peer, Direction.WRITE, rows)
        self._num_descriptors += transfer.num_descriptors
        if self._events is not None:
            self._events.posted(batch, transfer.num_descriptors, transfer.num_bytes, self._submitted_at)
        self.phase = Phase.MOVING
        return True

    def _look_after(self, link: Link, transfer: Transfer, is_stopping: bool) -> bool:
        bytes_before = transfer.bytes_done
        status = link.transport.cancel(transfer) if is_stopping else link.transport.poll(transfer)
        if is_stopping:
            self.phase = Phase.STOPPING
            self.given_up_at = self.given_up_at or time.monotonic()
        if status is Status.PENDING:
            return transfer.bytes_done != bytes_before
        self._transfer, self.phase = None, Phase.PREPARING
        now = time.monotonic()
        self._transfer_seconds += now - self._submitted_at
        if is_stopping:
            self._stopped(None)
        elif status is Status.DONE:
            self._num_bytes += transfer.num_bytes
            if self._events is not None:
                self._events.landed(now)
            with self._lock:
                self._side.landed(self._key)
        else:
            self._stopped(transfer.error or _ended(status))
        return True

    def _stopped(self, error: KVFerryError | None) -> None:
        with self._lock:
            self._side.stopped(self._key, error)

    def _end(self) -> bool:
        with self._lock:
            over = self._side.outcome(self._key)
        if over is None:
            return False
        self.error = over.error
        self.phase = Phase.DONE
        self._report(self.result(time.monotonic()))
        return True


def _ended(status: Status) -> TransportError:
    return TransportError(Reason.TRANSFER_FAILED, f"a write ended {status}.", "Check that the decode engine runs.")
