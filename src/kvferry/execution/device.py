"""Device order: on a GPU a launch returns before its work is done, so later reads and writes must wait for it.

* A destination reads a source's blocks only once the step that writes them is done: until then their guard word says
  "being written" (:class:`kvferry.execution.guard_words.StepWords`).
* A job writes a block only once all work is done that the engine had launched when the block got its request.
* The engine's stream waits for the last copy from a stage into the cache before it goes on.
* Every thread that launches or waits sets its device first, and launches on a stream of its own.

A *mark* is a place in the stream of the thread that made it. On a CPU every launch is done when it returns, and marks
do nothing. Torch is imported only where there is a GPU.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import HOST_DEVICE
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))


class Mark(Protocol):
    """All work that was launched on a thread's stream before the mark was made."""

    def is_over(self) -> bool:
        """Return whether that work is done, without waiting."""

    def wait(self) -> None:
        """Return once that work is done."""


class DeviceOrder(Protocol):
    """Streams and marks of the device on which a rank's caches lie."""

    device: str
    """The device's name in torch."""
    is_immediate: bool
    """Whether a launch is done when it returns, so that every mark is over."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, one of kvferry's: set its device, and a stream for its launches."""

    def mark(self) -> Mark:
        """Return a mark behind all work launched on the calling thread's stream so far."""

    def wait_for(self, mark: Mark) -> None:
        """Make later launches of the calling thread begin only once the mark is over; returns at once."""

    def stream(self) -> int:
        """Return the calling thread's stream as the CUDA driver names it; 0 on a CPU, which has none."""


class _Over:
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


OVER: Mark = _Over()
"""A mark that is always over."""


class HostOrder:
    """The order of a CPU, on which every mark is over."""

    device = HOST_DEVICE
    is_immediate = True

    def enter_thread(self) -> None:
        """Do nothing."""

    def mark(self) -> Mark:
        """Return a mark that is over."""
        return OVER

    def wait_for(self, mark: Mark) -> None:
        """Do nothing."""

    def stream(self) -> int:
        """Return 0."""
        return 0


HOST: DeviceOrder = HostOrder()


class CudaMark:
    """A ``torch.cuda.Event`` that has been recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_over(self) -> bool:
        """Ask the event."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Sleep until the event."""
        self.event.synchronize()


class CudaOrder:
    """Streams and events of one GPU; ``cuda`` is ``torch.cuda``."""

    is_immediate = False

    def __init__(self, device: str, cuda: Any) -> None:
        self.device = device
        self._cuda = cuda

    def enter_thread(self) -> None:
        """Set the thread's device and stream: a new thread has device 0 and the engine's default stream."""
        self._cuda.set_device(self.device)
        self._cuda.set_stream(self._cuda.Stream(self.device))

    def mark(self) -> Mark:
        """Record an event on the thread's stream; a wait for the event uses no processor."""
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self.device))
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        """Put a wait for the event into the thread's stream."""
        if isinstance(mark, CudaMark):
            self._cuda.current_stream(self.device).wait_event(mark.event)

    def stream(self) -> int:
        """Return the handle of the thread's stream."""
        return int(self._cuda.current_stream(self.device).cuda_stream)


def device_order(devices: Iterable[str]) -> DeviceOrder:
    """Return the order of the one device on which a rank's regions lie.

    Raises :class:`TransportError` (``unsupported``) for several devices, or one that is neither CPU nor CUDA.

    >>> device_order(["cpu", "cpu"]).is_immediate
    True
    """
    names = set(devices)
    if names == {HOST_DEVICE}:
        return HOST
    if len(names) != 1 or not next(iter(names)).startswith("cuda"):
        raise TransportError(
            Reason.UNSUPPORTED,
            f"a rank's caches lie on {', '.join(sorted(names)) or 'no device'}.",
            "Keep them on one CUDA device, or on the CPU.",
        )
    import torch

    return CudaOrder(names.pop(), torch.cuda)


class DeferredActions:
    """Runs actions once their marks are over, in order, on a thread that starts with the first action.

    An action is dropped where the device fails: as the thread turns to it, or in the wait for the mark.
    """

    def __init__(self, order: DeviceOrder) -> None:
        self._order = order
        self._pending: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, mark: Mark, action: Callable[[], None]) -> None:
        """Run the action once the mark is over."""
        self._pending.put((mark, action))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvferry-deferred", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The engine's thread calls: the action waits for the next one, its write for its deadline.
                logger.exception("kvferry: the process can start no thread")
            else:
                self._thread = thread

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Run the actions added before, within ``timeout_seconds``, and stop; twice is fine."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        has_entered = False
        while (entry := self._pending.get()) is not None:
            mark, action = entry
            try:
                if not has_entered:
                    self._order.enter_thread()
                    has_entered = True
                mark.wait()
                action()
            except Exception:
                logger.exception("kvferry: the device failed: an action that waited for the device is dropped")
