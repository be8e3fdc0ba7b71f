"""The replacement of the waits in vLLM's message queues, and its variable."""

import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvferry.errors import Reason, SettingsError
from kvferry.integrations.vllm.waiting_workers import POLLING_SECONDS, QUIET_SECONDS, VARIABLE, make_waits_sleep

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
NUM_WAITS = 10


@pytest.fixture(autouse=True)
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import utils

    for module in (shm_broadcast, utils):
        monkeypatch.setattr(module, "sched_yield", module.sched_yield)
    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def conditions(tmp_path: Path) -> Iterator[Any]:
    """Return a function that makes a reader's condition and its writer's, as vLLM's queues do."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Any] = []

    def make() -> tuple[Any, Any]:
        address = f"ipc://{tmp_path}/notify"
        for is_reader in (False, True):
            made.append(shm_broadcast.SpinCondition(is_reader, context, address))
        time.sleep(0.2)  # a subscription takes its time
        return made[1], made[0]

    yield make
    for each in made:
        for socket in (each.local_notify_socket, each.write_cancel_socket, each.read_cancel_socket):
            if socket is not None:
                socket.close(0)
    context.term()


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_worker_sleeps_between_polls_where_the_variable_is_set(
    value: str | None, conditions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    make_waits_sleep()
    reader, _ = conditions()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    reader.record_read()
    for _ in range(NUM_WAITS):
        reader.wait()
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    # A wait that is preempted just before it would sleep is not counted.
    assert (switches > NUM_WAITS // 2) == (value == "1")


def test_after_many_polls_a_worker_sleeps_until_a_message_or_the_next_poll(
    conditions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    make_waits_sleep()
    make_waits_sleep()
    reader, writer = conditions()
    reader.wait()
    time.sleep(1.5 * POLLING_SECONDS)
    waits = [0.0] * 3
    for index in range(len(waits)):
        began_at = time.monotonic()
        reader.wait()
        waits[index] = time.monotonic() - began_at
    assert min(waits) > 4 * POLLING_SECONDS, "asleep until the time is over"
    reader.last_read -= QUIET_SECONDS
    began_at = time.monotonic()
    reader.wait(timeout_ms=200)
    assert time.monotonic() - began_at > 0.15, "after a second without a message for as long as vLLM says"
    reader.record_read()
    reader.wait()
    time.sleep(1.5 * POLLING_SECONDS)
    notified = threading.Timer(0.005, writer.notify)
    notified.start()
    began_at, used = time.monotonic(), time.thread_time()
    reader.wait(timeout_ms=10_000)
    assert time.thread_time() - used < 0.005
    assert time.monotonic() - began_at < 5, "a notice ends it"
    notified.join()
    reader.record_read()
    began_at = time.monotonic()
    reader.wait()
    assert reader.last_read >= began_at, "the next wait looks first"


def echo(handle: Any, answers: Any) -> None:
    """Answer each message of a queue, until the empty one."""
    make_waits_sleep()
    queue = shm_broadcast.MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()
    while message := queue.dequeue(timeout=30):
        answers.put(message)


def test_messages_come_in_order_whatever_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own queue to another process: at once, while it looks, and while it sleeps."""
    monkeypatch.setenv(VARIABLE, "1")
    make_waits_sleep()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    queue = shm_broadcast.MessageQueue(1, 1)
    reader = context.Process(target=echo, args=(queue.export_handle(), answers))
    reader.start()
    try:
        queue.wait_until_ready()
        for number in range(1, 301):
            queue.enqueue(number)
            time.sleep((0.0, 0.0005, 0.003)[number % 3])
        assert [answers.get(timeout=30) for _ in range(300)] == list(range(1, 301))
        queue.enqueue(0)
        reader.join(30)
        assert reader.exitcode == 0
    finally:
        reader.kill()


def test_an_unknown_value_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(SettingsError, match=f"{VARIABLE} is 'yes'. Set it to 1") as found:
        make_waits_sleep()
    assert found.value.reason is Reason.INVALID_SETTING
