"""Device order, with streams that a test runs: without the wait the test sees the race, with the wait it does not."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvferry.errors import Reason, TransportError
from kvferry.execution.device import HOST, OVER, CudaOrder, DeferredActions, DeviceOrder, device_order
from kvferry.handoff.messages import Handle
from kvferry.handoff.source import END
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.worker import role as worker_role

from ..local.fake_cuda import FakeCuda, FakeStream
from .test_vllm_workers import HOLD, TRANSFER, Workers, arrived
from .worker_roles import make_worker_role

DEVICE = "cpu"
"""Memory that every transport reaches, with a device that is not: the fake's."""


@pytest.fixture
def cuda() -> FakeCuda:
    """The test's thread is the engine's."""
    return FakeCuda.of_this_thread(DEVICE)


@pytest.fixture
def forward(cuda: FakeCuda) -> FakeStream:
    return cuda.current_stream(DEVICE)


@pytest.fixture
def order(cuda: FakeCuda) -> CudaOrder:
    return CudaOrder(DEVICE, cuda)


@pytest.fixture
def make_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """Return a function that makes workers of engines whose devices have these orders."""
    made: list[Workers] = []
    # Streams here do nothing until the test runs them.
    monkeypatch.setattr(worker_role.WorkerRole, "_try", lambda *_: None)

    def make(source: DeviceOrder, destination: DeviceOrder, handle: Handle = TRANSFER) -> Workers:
        with monkeypatch.context() as patch:
            patch.setattr(worker_role, "device_order", lambda _: source)
            workers = Workers(patch, tmp_path, handle=handle, integrity="off")
            made.append(workers)
            workers.receiver.shutdown()
            settings = Settings(transport="cma", integrity="off")
            workers.receiver = make_worker_role(patch, settings, workers.target.shard, "d", device_order=destination)
        return workers

    yield make
    for workers in made:
        workers.close()


@pytest.mark.parametrize("handle", [TRANSFER, HOLD], ids=["transfer", "hold"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_prompt_is_written_only_once_its_step_is_done_on_the_device(
    make_workers: Callable[..., Workers], order: CudaOrder, forward: FakeStream, is_ordered: bool, handle: Handle
) -> None:
    workers = make_workers(order if is_ordered else HOST, HOST, handle)
    for rank in workers.sources:
        rank.cache[:] = 0
        forward.launch(rank.fill)
    workers.compute(END)
    workers.announce()
    if is_ordered:
        time.sleep(0.1)
        assert workers.receiver.take_finished() == (set(), set())
        assert not workers.target.cache.any()
        forward.run()
    assert workers.finished() == ({"r"}, set())
    forward.run()
    assert arrived(workers) == is_ordered, "without the wait, what was there before the step is believed"


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_load_waits_for_what_was_launched_when_it_got_its_blocks(
    make_workers: Callable[..., Workers], order: CudaOrder, forward: FakeStream, is_ordered: bool
) -> None:
    workers = make_workers(HOST, order if is_ordered else HOST)
    forward.launch(lambda: workers.target.cache.fill(0))
    workers.compute(END)
    workers.announce()
    if is_ordered:
        time.sleep(0.1)
        assert workers.receiver.take_finished() == (set(), set())
        assert not workers.target.cache.any()
        forward.run()
    assert workers.finished() == ({"r"}, set())
    forward.run()
    assert arrived(workers) == is_ordered, "without the wait, the engine's zeros come after what was loaded"


def test_what_waits_for_a_failed_device_is_not_done_and_the_rest_is(order: CudaOrder) -> None:
    class Failed:
        def is_over(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    deferred, done = DeferredActions(order), []
    deferred.add(Failed(), lambda: done.append("failed"))
    deferred.add(OVER, lambda: done.append("over"))
    deferred.close()
    assert done == ["over"]


def test_what_waits_for_a_device_that_the_thread_cannot_turn_to_is_dropped(
    order: CudaOrder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Actions that no thread runs would pile up."""
    entered: list[bool] = []

    def enter() -> None:
        entered.append(bool(entered))
        if not entered[-1]:
            raise RuntimeError("no device")

    monkeypatch.setattr(order, "enter_thread", enter)
    deferred, done = DeferredActions(order), []
    for name in ("first", "second", "third"):
        deferred.add(OVER, lambda name=name: done.append(name))
    deferred.close()
    assert done == ["second", "third"]
    assert entered == [False, True]
    assert "the device failed" in caplog.text


def test_what_waits_for_a_device_is_done_later_where_the_process_can_start_no_thread_now(
    order: CudaOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread adds it: an exception there would end the engine."""
    deferred, done = DeferredActions(order), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        deferred.add(OVER, lambda: done.append("first"))
        deferred.close()
    deferred.add(OVER, lambda: done.append("second"))
    deferred.close()
    assert done == ["first", "second"]


def test_a_thread_of_its_own_needs_its_device(order: CudaOrder, cuda: FakeCuda) -> None:
    found: list[object] = []

    def use(enter: bool) -> None:
        try:
            if enter:
                order.enter_thread()
            order.mark()
            found.append(cuda.current_stream(DEVICE))
        except AssertionError as error:
            found.append(str(error))

    for enter in (False, True):
        thread = threading.Thread(target=use, args=(enter,))
        thread.start()
        thread.join()
    assert found == ["this thread has not set its device", cuda.streams[-1]]
    assert cuda.streams[-1] is not cuda.current_stream(DEVICE)


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"], ["npu:0"], []])
def test_regions_on_several_devices_or_others_are_refused(devices: list[str]) -> None:
    with pytest.raises(TransportError) as caught:
        device_order(devices)
    assert caught.value.reason is Reason.UNSUPPORTED


def test_a_gpu_gets_an_order_of_its_own() -> None:
    found = device_order(["cuda:1", "cuda:1"])
    assert isinstance(found, CudaOrder)
    assert found.device == "cuda:1"
    assert not found.is_immediate
