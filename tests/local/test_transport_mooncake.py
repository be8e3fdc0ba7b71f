"""Properties of the Mooncake transport alone: fences, true ends, loopback only, settings in the environment."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.handoff.wire.trust import Trust
from kvferry.layout.shard import Region
from kvferry.transport import mooncake
from kvferry.transport.mooncake import LOOPBACK, Greeting, MooncakeEndPoint, MooncakeTransport
from kvferry.transport.protocol import Direction, Status, reach

from ..support.transport_peer import PeerProcess, pattern
from ..support.transport_suite import Pair, many_offsets, open_pair
from ..waits import wait_until

pytest.importorskip("mooncake.engine", exc_type=ImportError)
pytestmark = pytest.mark.mooncake
FACTORY = "kvferry.transport.mooncake:MooncakeTransport"
BYTES = 24 << 20
PIECE = np.array([[0, 0, 4096]], np.uint64)


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with open_pair(FACTORY, BYTES) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    shared_pair.local[:] = 0
    shared_pair.remote.fill(2)
    return shared_pair


@pytest.fixture
def own_pair() -> Iterator[Pair]:
    with open_pair(FACTORY, BYTES) as pair:
        pair.remote.fill(2)
        yield pair


@pytest.fixture
def transport() -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport()
    yield transport
    transport.close()


def changed(end_point: bytes, **fields: object) -> bytes:
    decoded = msgspec.msgpack.decode(end_point, type=MooncakeEndPoint)
    return msgspec.msgpack.encode(msgspec.structs.replace(decoded, **fields))


def refusal(action: Callable[[], object]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        action()
    assert caught.value.remedy
    return caught.value


def is_quiet(pair: Pair) -> bool:
    """Return whether local memory stays as it is although the peer's changes."""
    landed = pair.local.copy()
    pair.remote.fill(9)
    time.sleep(0.2)
    return np.array_equal(pair.local, landed)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_fence_ends_after_all_that_was_posted_before_it(pair: Pair, direction: Direction) -> None:
    """The order that every end of a transfer relies on; with more lanes the fence overtakes."""
    transport, engine = pair.transport, pair.transport._engine
    post = {Direction.READ: engine.batch_transfer_async_read, Direction.WRITE: engine.batch_transfer_async_write}
    batch = post[direction](pair.peer.name, [int(pair.local.ctypes.data)], [pair.remote.address], [BYTES])
    fence = mooncake.Slice(pair.peer, batch=0, num_descriptors=0, num_bytes=0)
    transport._post_fence(fence)
    while transport._fence_status(fence) in mooncake._RUNNING:
        time.sleep(0.0001)
    assert engine.transfer_check_status(batch) == mooncake._COMPLETED


def test_a_transfer_with_a_refused_descriptor_fails_when_all_others_have_ended(pair: Pair) -> None:
    """Mooncake calls the batch failed at once; the descriptors after the refused one land nevertheless."""
    below = pair.remote.address - 4096
    wider = changed(pair.remote.end_point, regions=[(below, BYTES + 4096)])
    peer = reach(pair.transport, wider)
    offsets = np.arange(60, dtype=np.uint64) * np.uint64(65536)
    sources = np.append(np.uint64(below), np.uint64(pair.remote.address) + offsets[1:])
    descriptors = np.column_stack([sources, np.uint64(pair.local.ctypes.data) + offsets, np.full(60, 65536, np.uint64)])
    descriptors[0, 2] = 4096
    transfer = pair.transport.submit(peer, Direction.READ, descriptors)
    assert pair.finish(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is Reason.TRANSFER_FAILED
    last = slice(59 * 65536, 60 * 65536)
    assert np.array_equal(pair.local[last], pattern(2, BYTES)[last])
    assert is_quiet(pair)
    assert pair.finish(pair.submit(Direction.READ, PIECE)) is Status.DONE


def test_bytes_of_a_peer_with_another_nonce_are_not_believed(own_pair: Pair) -> None:
    wrong = changed(own_pair.remote.end_point, nonce=bytes(16))
    assert refusal(lambda: reach(own_pair.transport, wrong)).reason is Reason.PEER_CHANGED
    own_pair.peer.nonce = bytes(16)
    transfer = own_pair.submit(Direction.READ, PIECE)
    assert own_pair.finish(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is Reason.PEER_CHANGED


def test_a_stopped_peer_delays_the_end_of_a_cancelled_transfer_and_nobody_else(
    own_pair: Pair, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CONNECT_SECONDS", 0.5)
    assert isinstance(own_pair.remote, PeerProcess)
    other = reach(own_pair.transport, pair.remote.end_point)
    transfer = own_pair.start(Direction.READ, many_offsets())
    own_pair.remote.stop()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert own_pair.transport.cancel(transfer) is Status.PENDING
        connecting = refusal(lambda: reach(own_pair.transport, own_pair.remote.end_point))
        assert connecting.reason is Reason.PEER_UNREACHABLE
        beside = Pair(own_pair.transport, own_pair.memory, pair.remote, other)
        assert beside.finish(beside.submit(Direction.READ, PIECE)) is Status.DONE
    finally:
        own_pair.remote.resume()
    assert own_pair.finish(transfer) is Status.CANCELLED
    assert is_quiet(own_pair)


def test_hole_15_a_name_whose_look_up_hangs_delays_no_other_transfer_and_ends_in_time(
    pair: Pair, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer thread, which connects, must not wait for the operating system's look-up."""
    monkeypatch.setattr(mooncake, "CONNECT_SECONDS", 0.3)
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, *arguments: Any, **options: Any) -> Any:
        may_answer.wait(20.0)
        return look_up(LOOPBACK, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    named = changed(pair.remote.end_point, host="prefill-0")
    try:
        before = time.monotonic()
        connecting = transport.connect(named)
        while transport.poll(connecting) is Status.PENDING:
            time.sleep(0.001)
        assert time.monotonic() - before < 5.0
        assert connecting.error is not None
        assert connecting.error.reason is Reason.PEER_UNREACHABLE
        assert refusal(lambda: reach(transport, named)).reason is Reason.PEER_UNREACHABLE
        assert len(transport._lookups) == 1
    finally:
        may_answer.set()
    wait_until(lambda: not any(each.is_running for each in transport._lookups.values()))
    monkeypatch.setattr(mooncake, "CONNECT_SECONDS", 10.0)
    peer = reach(transport, named)
    assert (peer.name.partition(":")[0], peer.place.partition(":")[0]) == ("prefill-0", LOOPBACK)


def test_a_name_that_does_not_exist_is_an_error(transport: MooncakeTransport, pair: Pair) -> None:
    unknown = changed(pair.remote.end_point, host="no-such-host.invalid")
    found = refusal(lambda: reach(transport, unknown))
    assert found.reason is Reason.PEER_UNREACHABLE
    assert "cannot be looked up" in found.message


def test_an_end_point_that_names_a_foreign_host_is_refused_before_anything_connects(
    pair: Pair, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories and introductions name hosts, and whoever reaches a control end point can send an introduction."""
    asked, connected, connect = [], [], socket.socket.connect

    def noted(self: socket.socket, address: Any) -> None:
        connected.append(address[0])
        connect(self, address)

    def allowed(host: str, port: int) -> list[str]:
        asked.append(threading.current_thread())
        return Trust(allowed_hosts=["10.1.0.0/16"]).addresses_named_by_peers(host, port)

    monkeypatch.setattr(socket.socket, "connect", noted)
    monkeypatch.setattr(transport, "_addresses_of", allowed)
    for host in ("203.0.113.1", "0.0.0.0", "3405803777"):
        found = refusal(lambda host=host: reach(transport, changed(pair.remote.end_point, host=host)))  # type: ignore[misc]
        assert found.reason is Reason.PERMISSION_DENIED
    assert connected == []
    reach(transport, pair.remote.end_point)
    assert connected == [LOOPBACK]
    assert threading.current_thread() not in asked, "a name may be looked up for it"


def test_nothing_lands_after_close_even_from_a_stopped_peer(own_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_SECONDS", 0.2)
    assert isinstance(own_pair.remote, PeerProcess)
    transfer = own_pair.start(Direction.READ, many_offsets())
    own_pair.remote.stop()
    try:
        started = time.monotonic()
        own_pair.transport.close()
        assert time.monotonic() - started < 5.0
    finally:
        own_pair.remote.resume()
    assert own_pair.transport.poll(transfer) is Status.FAILED
    assert is_quiet(own_pair)


@pytest.mark.parametrize("status", [1, 3, 0], ids=["landed", "failed", "running"])
def test_a_write_may_land_once_its_transport_is_closed_unless_it_was_known_to_have_landed(
    status: int, own_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_SECONDS", 2.0 if status else 0.1)
    transport = own_pair.transport
    assert isinstance(transport, MooncakeTransport)
    transfer = own_pair.submit(Direction.WRITE, PIECE)
    monkeypatch.setattr(transport, "_reap", lambda _: None)
    assert transport.poll(transfer) is Status.PENDING
    if status != 1:
        monkeypatch.setattr(transport, "_fence_status", lambda _: status)
    transport.close()
    assert transport.poll(transfer) is Status.FAILED
    assert transfer.may_land is (status != 1)


def test_a_batch_that_the_engine_refuses_may_have_begun(own_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(own_pair.transport, "_engine", SimpleNamespace(batch_transfer_async_write=lambda *_: 0))
        transfer = own_pair.submit(Direction.WRITE, PIECE)
        assert own_pair.transport.poll(transfer) is Status.FAILED
    assert transfer.may_land


def test_a_write_over_a_connection_that_breaks_may_still_land(own_pair: Pair) -> None:
    transfer = own_pair.start(Direction.WRITE, many_offsets())
    own_pair.remote.kill()
    assert own_pair.finish(transfer, 60.0) is Status.FAILED
    assert transfer.may_land


def test_a_full_queue_of_a_peer_gets_no_more_descriptors(pair: Pair) -> None:
    """Mooncake fails descriptors that a full queue does not take, and out of order."""
    queued = pair.transport._num_queued
    assert queued[pair.peer.name] == 0
    queued[pair.peer.name] += mooncake.MAX_QUEUED_DESCRIPTORS - mooncake.MAX_DESCRIPTORS_PER_SLICE
    transfer = pair.submit(Direction.READ, PIECE)
    assert pair.transport.poll(transfer) is Status.PENDING
    assert not transfer.running
    queued.clear()
    assert pair.finish(transfer) is Status.DONE
    assert queued[pair.peer.name] == 0


def test_memory_registered_later_is_reached_by_the_later_end_point(pair: Pair, transport: MooncakeTransport) -> None:
    later = pattern(1, 4096).copy()
    transport.register([])
    early = reach(pair.transport, transport.register([]))
    late = reach(pair.transport, transport.register([Region(int(later.ctypes.data), 4096)]))
    descriptors = np.array([[later.ctypes.data, pair.local.ctypes.data, 4096]], np.uint64)
    unknown = refusal(lambda: pair.transport.submit(early, Direction.READ, descriptors))
    assert unknown.reason is Reason.UNREGISTERED_RANGE
    assert pair.finish(pair.transport.submit(late, Direction.READ, descriptors)) is Status.DONE
    assert np.array_equal(pair.local[:4096], later)
    twice = refusal(lambda: transport.register([Region(int(later.ctypes.data) + 1, 4)]))
    assert twice.reason is Reason.INVALID_REQUEST


def test_a_transport_does_not_connect_to_itself(transport: MooncakeTransport) -> None:
    assert refusal(lambda: reach(transport, transport.register([]))).reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("wrong", [{"host": "a b"}, {"host": ""}, {"host": "::1"}, {"port": 0}, {"port": 65536}])
def test_an_end_point_with_an_impossible_address_is_refused(
    transport: MooncakeTransport, wrong: dict[str, object]
) -> None:
    end_point = changed(transport.register([]), **wrong)
    assert refusal(lambda: reach(transport, end_point)).reason is Reason.MALFORMED_MESSAGE


def device_of(found: socket.socket) -> bytes:
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)


def test_mooncake_3151_only_loopback_reaches_the_engine_and_other_listeners_are_left_alone() -> None:
    with socket.create_server(("", 0)) as foreign:
        before = mooncake._listener_ids()
        transport = MooncakeTransport()
        devices = [device_of(found) for identity, found in mooncake._listeners() if identity not in before]
        assert devices == [b"lo\0", b"lo\0"]
        assert device_of(foreign) == b""
        transport.close()


def test_an_engine_that_cannot_be_confined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_INTERFACE", b"absent\0")
    error = refusal(MooncakeTransport)
    assert error.reason is Reason.TRANSPORT_UNAVAILABLE
    assert "MC_TCP_BIND_ADDRESS" in error.remedy
    monkeypatch.undo()
    monkeypatch.setattr(mooncake, "_NUM_LISTENERS", 3)
    assert refusal(MooncakeTransport).reason is Reason.TRANSPORT_UNAVAILABLE


def test_an_address_for_other_hosts_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "kvferry.invalid")
    transport = MooncakeTransport()
    assert msgspec.msgpack.decode(transport.register([]), type=MooncakeEndPoint).host == "kvferry.invalid"
    transport.close()
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "can read and write registered memory" in caplog.text
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "no host")
    with pytest.raises(SettingsError, match="MC_TCP_BIND_ADDRESS"):
        MooncakeTransport()


def test_settings_hold_while_an_engine_starts_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    monkeypatch.setenv("MC_USE_TENT", "1")
    before = dict(os.environ)
    with mooncake.mooncake_environment(mooncake._ENVIRONMENT):
        assert os.environ["MC_FORCE_TCP"] == "1"
        assert "MC_USE_TENT" not in os.environ
    assert dict(os.environ) == before


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_installed_version", lambda name: "0.3.130")
    error = refusal(MooncakeTransport)
    assert error.reason is Reason.TRANSPORT_UNAVAILABLE
    assert "0.3.130" in error.message
    assert "0.3.13.post1" in error.remedy


def test_a_check_of_a_peer_waits_while_it_connects() -> None:
    # A full queue of connections leaves the next one where a slow wire does: begun, and not yet accepted by the kernel.
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        listening.settimeout(20)
        address = listening.getsockname()
        stack.enter_context(socket.create_connection(address))
        greeting = Greeting(*address)
        stack.callback(greeting.close)
        assert not greeting.is_over()
        assert not greeting.is_over()
        for _ in range(2):
            peer, _ = listening.accept()
            peer.close()
        wait_until(greeting.is_over, each=lambda: greeting.wait(0.1))
