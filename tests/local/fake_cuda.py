"""The part of ``torch.cuda`` that kvferry uses, on a CPU: streams do their work only when a test runs them."""

import threading
from collections import deque
from collections.abc import Callable


class FakeEvent:
    """Over once its stream has come to where it was recorded."""

    def __init__(self, check_thread: Callable[[], None], blocking: bool = False) -> None:
        assert blocking, "a thread that waits would spin"
        self._check_thread = check_thread
        self._is_over = threading.Event()

    def record(self, stream: "FakeStream") -> None:
        stream.launch(self._is_over.set)

    def query(self) -> bool:
        self._check_thread()
        return self._is_over.is_set()

    def synchronize(self) -> None:
        self._check_thread()
        assert self._is_over.wait(30), "the event never comes"


class FakeStream:
    """Does the launched work in order, on command, as far as its waits allow."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda_stream = id(self)
        self._work: deque[Callable[[], object] | FakeEvent] = deque()

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self._work.append(event)

    @property
    def num_waiting(self) -> int:
        """How many launches and waits are not done."""
        return len(self._work)

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Do the next launch or end the next wait; return whether there was one that could be done."""
        if not self._work or (isinstance(work := self._work[0], FakeEvent) and not work.query()):
            return False
        if not isinstance(work, FakeEvent):
            work()
        self._work.popleft()
        return True


class FakeCuda:
    """A thread may do nothing here until it has set its device: it would use another."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.streams: list[FakeStream] = []

    @classmethod
    def of_this_thread(cls, device: str) -> "FakeCuda":
        """Return one in which the calling thread is an engine's: it has set the device and a stream."""
        cuda = cls()
        cuda.set_device(device)
        cuda.set_stream(cuda.Stream(device))
        return cuda

    def Event(self, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self._check_thread, blocking)

    def Stream(self, device: str) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def set_device(self, device: str) -> None:
        self._local.device = device

    def set_stream(self, stream: FakeStream) -> None:
        assert stream.device == self._local.device
        self._local.stream = stream

    def current_stream(self, device: str) -> FakeStream:
        self._check_thread()
        assert self._local.device == device
        found: FakeStream = self._local.stream
        return found

    def _check_thread(self) -> None:
        assert hasattr(self._local, "device"), "this thread has not set its device"
