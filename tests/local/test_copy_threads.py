"""Copies on several threads: after the end of ``run`` no thread copies any more, also after an error."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.transport.cma import CopyThreads


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    threads = CopyThreads()
    yield threads
    threads.close()


class SlowCopy:
    """A call that takes a while once it has begun."""

    def __init__(self) -> None:
        self.has_begun, self.has_ended = threading.Event(), False

    def __call__(self) -> str:
        self.has_begun.set()
        time.sleep(0.2)
        self.has_ended = True
        return "copied"


def refuse() -> str:
    raise MemoryError("no more")


def test_other_copies_have_ended_when_the_callers_own_copy_raises(threads: CopyThreads) -> None:
    slow = SlowCopy()

    def own() -> str:
        slow.has_begun.wait(20)
        return refuse()

    with pytest.raises(MemoryError):
        threads.run([slow, own])
    assert slow.has_ended


def test_other_copies_have_ended_when_one_of_them_raises(threads: CopyThreads) -> None:
    slow = SlowCopy()
    with pytest.raises(MemoryError):
        threads.run([refuse, slow, lambda: "own"])
    assert slow.has_ended


def test_started_copies_have_ended_when_no_further_thread_can_start(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCopy()
    pool = threads._started_pool()
    submit = pool.submit

    def submit_once(call: Callable[[], str]) -> object:
        monkeypatch.setattr(pool, "submit", refuse_thread)
        future = submit(call)
        slow.has_begun.wait(20)
        return future

    def refuse_thread(call: Callable[[], str]) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "submit", submit_once)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.run([slow, slow, lambda: "own"])
    assert slow.has_ended


def test_other_threads_use_the_cores_that_the_calling_thread_has_now(threads: CopyThreads) -> None:
    every = os.sched_getaffinity(0)
    try:
        for cores in ({min(every)}, every, {max(every)}):
            os.sched_setaffinity(0, cores)
            assert threads.run([lambda: os.sched_getaffinity(0)] * 3) == [cores] * 3
    finally:
        os.sched_setaffinity(0, every)


def test_threads_copy_where_the_kernel_refuses_their_cores(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's set of cores may change between two calls; the bytes must move all the same."""

    def refuse(pid: int, cores: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    assert threads.run([lambda: "one", lambda: "two"]) == ["one", "two"]
