"""Device order: on a GPU a launch returns before its work is done, so whoever reads or writes behind it must wait.

* A source's blocks are read only once everything that its step wrote is done: until then the guard word says so
  (:class:`kvferry.execution.guard_words.StepWords`).
* A load touches no block before everything is done that the engine had launched when it gave the blocks away.
* The engine's stream waits for the last copy from a stage into its cache before it goes on.
* Every thread that launches or waits sets its device first, and launches on a stream of its own.

A *mark* is a place in the stream of the thread that made it. On a CPU every launch is done when it returns, and nothing
here does anything. Torch is imported only where there is a GPU.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvferry.errors import Reason, TransportError

logger = logging.getLogger(__name__)


class Mark(Protocol):
    """Everything that was launched on a thread's stream up to some moment."""

    def is_over(self) -> bool:
        """Return whether all of it is done, without waiting."""

    def wait(self) -> None:
        """Return once all of it is done."""


class DeviceOrder(Protocol):
    """What must be known of the device on which caches lie."""

    device: str
    """As torch names it."""
    is_immediate: bool
    """Whether a launch is done when it returns, so that every mark is over."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, one of kvferry's own: its device, and a stream for what it launches."""

    def mark(self) -> Mark:
        """Return a mark behind everything launched on the calling thread's stream so far."""

    def wait_for(self, mark: Mark) -> None:
        """Let what the calling thread launches from now on begin only once the mark is over; returns at once."""


class _Over:
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


OVER: Mark = _Over()
"""A mark behind nothing."""


class HostOrder:
    """On a CPU there is nothing to wait for."""

    device = "cpu"
    is_immediate = True

    def enter_thread(self) -> None:
        """Do nothing."""

    def mark(self) -> Mark:
        """Return a mark that is over."""
        return OVER

    def wait_for(self, mark: Mark) -> None:
        """Do nothing."""


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
        """Set the thread's device and give it a stream: a new thread has device 0 and the engine's default stream."""
        self._cuda.set_device(self.device)
        self._cuda.set_stream(self._cuda.Stream(self.device))

    def mark(self) -> Mark:
        """Record an event on the thread's stream; waiting for it takes no processor."""
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self.device))
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        """Put a wait for the event into the thread's stream."""
        if isinstance(mark, CudaMark):
            self._cuda.current_stream(self.device).wait_event(mark.event)


def device_order(devices: Iterable[str]) -> DeviceOrder:
    """Return the order of the one device on which a rank's regions lie.

    Raises :class:`TransportError` (``unsupported``) for several devices, or one that is neither CPU nor CUDA.

    >>> device_order(["cpu", "cpu"]).is_immediate
    True
    """
    names = set(devices)
    if names == {"cpu"}:
        return HOST
    if len(names) != 1 or not next(iter(names)).startswith("cuda"):
        raise TransportError(
            Reason.UNSUPPORTED,
            f"a rank's caches lie on {', '.join(sorted(names)) or 'no device'}.",
            "Keep them on one CUDA device, or on the CPU.",
        )
    import torch

    return CudaOrder(names.pop(), torch.cuda)


class Afterwards:
    """Does things once marks are over, in order, on a thread that starts with the first of them.

    What follows a mark that cannot be waited for, since the device failed, is not done.
    """

    def __init__(self, order: DeviceOrder) -> None:
        self._order = order
        self._pending: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, mark: Mark, action: Callable[[], None]) -> None:
        """Do this once the mark is over."""
        self._pending.put((mark, action))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-afterwards", daemon=True)
            self._thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Do what was added before and stop, within the time; twice is fine."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        self._order.enter_thread()
        while (entry := self._pending.get()) is not None:
            mark, action = entry
            try:
                mark.wait()
                action()
            except Exception:
                logger.exception("kvferry: the device failed; what waited for it is given up")
