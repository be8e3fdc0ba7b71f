"""A stored error keeps its whole text and no object of the frames that raised it."""

import gc
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.destination import Announcement, AwaitedLoad
from kvferry.execution.executor import Phase
from kvferry.handoff.destination import DestinationLoad
from kvferry.handoff.messages import EndPoint, WriteKey
from kvferry.handoff.source import END, Need, Prompt, SourceWrites, WriteRequest
from kvferry.handoff.wire.client import BackgroundCall, BackgroundCalls
from kvferry.plan.planner import Span
from kvferry.transport.protocol import Transfer
from kvferry.transport.registry import TransportSet

from ..support.null_transport import NullTransport
from .engines_that_write import SECONDS, Pairs, engines

__all__ = ["engines"]

KEY, SPAN = WriteKey("d", 1, 1), Span("full")
PARTS = Reason.TRANSFER_FAILED, "a write failed.", "Check the peer."


class Frames:
    """Raises errors in frames that hold an array, and tells whether any of these is alive."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[np.ndarray]] = []

    def fail(self, *_: object) -> NoReturn:
        descriptors = np.zeros((1000, 3), np.uint64)
        self._held.append(weakref.ref(descriptors))
        try:
            raise ValueError("bytes are missing.")
        except ValueError as cause:
            raise HandoffError(*PARTS) from cause

    def hold(self, call: Callable[[], Any]) -> None:
        """Call from a frame that holds an array."""
        descriptors = np.zeros((1000, 3), np.uint64)
        self._held.append(weakref.ref(descriptors))
        with pytest.raises(KVFerryError) as raised:
            call()
        assert parts_of(raised.value) == PARTS

    def error(self, give: Callable[[KVFerryError], Any]) -> None:
        """Give an error away that was raised and caught."""
        try:
            self.fail()
        except KVFerryError as error:
            give(error)

    def are_alive(self) -> bool:
        gc.collect()
        assert self._held, "nothing was raised"
        return any(each() is not None for each in self._held)


def parts_of(error: KVFerryError | None) -> tuple[Reason, str, str]:
    assert error is not None
    return error.reason, error.message, error.remedy


@pytest.fixture
def frames() -> Frames:
    return Frames()


def write_request(key: WriteKey = KEY) -> WriteRequest:
    return WriteRequest(key, "x", 32, "p", {SPAN: Need(0, 32, 16)}, deadline=30.0)


@pytest.mark.parametrize("way", ["fail", "stopped", "end"])
def test_a_write_that_is_over(way: str, frames: Frames) -> None:
    side = SourceWrites()
    side.announce(write_request(), now=0.0)
    side.compute("x", Prompt(32, "p", {}, END))
    if way == "end":
        frames.error(lambda error: side.end("x", error))
    else:
        frames.error(lambda error: getattr(side, way)(KEY, error))
    assert not frames.are_alive()
    over = side.outcome(KEY)
    assert over is not None
    assert parts_of(over.error) == PARTS
    frames.hold(lambda: side.announce(write_request(), now=0.0))
    if way == "end":
        frames.hold(lambda: side.announce(write_request(WriteKey("d", 1, 2)), now=0.0))
    assert not frames.are_alive()


def test_a_write_that_cannot_be_stopped_yet(frames: Frames) -> None:
    side = SourceWrites()
    side.announce(write_request(), now=0.0)
    side.compute("x", Prompt(32, "p", {}, END))
    assert side.take(KEY)
    frames.error(lambda error: side.fail(KEY, error))
    assert side.is_stopping(KEY)
    assert not frames.are_alive()


def test_a_load_whose_sources_are_not_quiet(frames: Frames) -> None:
    load = DestinationLoad("r", "x", {0: "a"}, {0: EndPoint("h", 1, 1)}, deadline=30.0, fence_seconds=15.0)
    load.announcing(0)
    frames.error(load.fail)
    assert not load.is_over
    assert not frames.are_alive()
    assert parts_of(load.error) == PARTS


def test_a_load_without_sources(frames: Frames) -> None:
    asked = Announcement("r", "x", 32, "p", time.monotonic() + SECONDS, engine_epoch=1)
    load = AwaitedLoad(asked, KEY, frames.fail, Forgetting())  # type: ignore[arg-type]
    load.advance(time.monotonic())
    assert load.phase is Phase.DONE
    assert not frames.are_alive()
    assert parts_of(load.error) == PARTS


class Forgetting:
    """What a load asks of its rank where it has no source."""

    def collect(self) -> None:
        pass

    def forget(self, number: int) -> None:
        pass


def test_a_call_on_a_thread_of_its_own(frames: Frames) -> None:
    calls: BackgroundCalls[str, int] = BackgroundCalls("handshake")
    while (call := calls.get("a", frames.fail)) is None:
        time.sleep(0.001)
    assert not frames.are_alive()
    for _ in range(2):
        frames.hold(call.result)
    assert not frames.are_alive()


def test_a_call_whose_result_is_of_no_use(frames: Frames) -> None:
    call = BackgroundCall("handshake", lambda: 7)
    call.start()
    while call.is_running:
        time.sleep(0.001)
    frames.error(call.fail)
    assert not frames.are_alive()
    frames.hold(call.result)
    assert not frames.are_alive()


def test_a_transport_that_does_not_reach_a_peer(
    frames: Frames, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")  # a handler may keep records, and with them what they name

    def refuse(self: NullTransport, end_point: bytes) -> Transfer:
        try:
            frames.fail()
        except HandoffError as error:
            raise TransportError(*PARTS) from error

    end_points = TransportSet({"null": NullTransport()}).register([])
    monkeypatch.setattr(NullTransport, "connect", refuse)
    connecting = TransportSet({"null": NullTransport()}).connect(end_points)
    for _ in range(2):
        frames.hold(connecting.poll)
    assert not frames.are_alive()


def test_a_write_that_failed_keeps_no_descriptors(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """23040 of them were 551 KiB for each of up to 65536 writes that are remembered."""
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    held: list[weakref.ref[np.ndarray]] = []

    def refuse(peer: object, direction: object, descriptors: np.ndarray) -> NoReturn:
        held.append(weakref.ref(descriptors))
        raise TransportError(*PARTS)

    [transport] = source.transports.transports.values()
    monkeypatch.setattr(transport, "submit", refuse)
    sender.compute(END, [5, 1])
    receiver.receive(sender.hold(), [0, 3])
    assert parts_of(receiver.result().error) == PARTS
    [result] = sender.written(1)
    assert parts_of(result.error) == PARTS
    gc.collect()
    assert held
    assert all(each() is None for each in held)
