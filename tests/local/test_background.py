"""Calls on threads of their own: slots, the wait for a slot, and a process that can start no thread."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire import client
from kvferry.handoff.wire.client import BackgroundCall, BackgroundCalls

from ..waits import wait_until

SECONDS = 10.0


class Hanging:
    """Calls that hang until the end of the test, and the keys in the order in which the calls began."""

    def __init__(self) -> None:
        self.calls: BackgroundCalls[str, str] = BackgroundCalls("look-up")
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def hang(self, key: str) -> bool:
        return self.calls.get(key, lambda: self._answer(key, hangs=True)) is None

    def ask(self, key: str) -> str | None:
        call = self.calls.get(key, lambda: self._answer(key, hangs=False))
        return None if call is None else call.result()

    def _answer(self, key: str, *, hangs: bool) -> str:
        self.begun.append(key)
        if hangs:
            self.may_end.wait(SECONDS)
        return key


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.may_end.set()


def test_calls_that_wait_for_a_slot_begin_in_the_order_in_which_they_were_asked_for(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks most often does not overtake the others."""
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    assert hanging.hang("first")
    assert hanging.ask("second") is None
    for _ in range(10):
        assert hanging.ask("third") is None
    hanging.may_end.set()
    wait_until(lambda: hanging.ask("third") == "third")
    assert hanging.begun == ["first", "second", "third"]


def test_hole_3_a_call_that_waits_too_long_for_a_slot_fails(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.05)
    assert hanging.hang("first")
    assert hanging.ask("second") is None
    time.sleep(0.1)
    with pytest.raises(HandoffError) as refused:
        hanging.ask("second")
    assert refused.value.reason is Reason.DEADLINE_EXCEEDED
    assert refused.value.remedy
    assert hanging.begun == ["first"]


def test_a_call_that_hangs_gives_its_slot_to_another_and_such_calls_are_bounded(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of a name in the operating system has no deadline and cannot be stopped."""
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    monkeypatch.setattr(client, "MAX_LATE", 1)
    monkeypatch.setattr(client, "LATE_SECONDS", 0.05)
    assert hanging.hang("a")
    time.sleep(0.1)
    assert hanging.hang("b")
    wait_until(lambda: hanging.begun == ["a", "b"])
    time.sleep(0.1)
    for _ in range(20):
        assert hanging.ask("c") is None
        time.sleep(0.002)
    assert hanging.begun == ["a", "b"]


def test_calls_that_wait_are_bounded(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    monkeypatch.setattr(client, "MAX_WAITING", 2)
    for key in "abcdef":
        assert hanging.hang(key)
    assert len(hanging.calls) == 3


def test_hole_18_calls_that_nobody_asks_for_any_more_make_room(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the queue was full of calls whose requests had gone, no other call began until the process ended."""
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    monkeypatch.setattr(client, "MAX_WAITING", 2)
    for key in "abc":
        assert hanging.hang(key)
    assert hanging.ask("d") is None
    hanging.may_end.set()
    wait_until(lambda: hanging.ask("d") == "d")
    assert hanging.begun == ["a", "b", "c", "d"]


def test_hole_15_a_process_that_can_start_no_thread_fails_the_call_and_nothing_else(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread asks: an exception there would end the engine."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(HandoffError) as refused:
            hanging.ask("a")
    assert refused.value.reason is Reason.PEER_UNREACHABLE
    assert "can't start new thread" in refused.value.message
    monkeypatch.setattr(client, "FAILURE_SECONDS", 0.0)
    time.sleep(0.001)
    wait_until(lambda: hanging.ask("a") == "a")


def test_thousands_of_calls_that_wait_do_not_slow_whoever_asks(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler asks for each of its waiting requests in each step: 4,000 look-ups at hosts that do not answer made
    every step take two seconds of its thread.
    """
    monkeypatch.setattr(client, "MAX_RUNNING", 2)
    names = [str(number) for number in range(300)]
    assert all(hanging.hang(name) for name in names)
    looks = 0
    is_late = BackgroundCall.is_late

    def looked_at(call: BackgroundCall[str], now: float) -> bool:
        nonlocal looks
        looks += 1
        return is_late(call, now)

    def is_running(call: BackgroundCall[str]) -> bool:
        nonlocal looks
        looks += 1
        return call._ended_at is None

    monkeypatch.setattr(BackgroundCall, "is_late", looked_at)
    monkeypatch.setattr(BackgroundCall, "is_running", property(is_running))
    assert all(hanging.hang(name) for name in names)
    assert looks <= 10 * len(names)
