"""Failures that a real NIXL does not show on demand, by the stand-in of ``tests/device_memory``."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport import nixl
from kvferry.transport.nixl import NixlTransport, TcpPorts
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, reach

from ..device_memory import standin_nixl
from ..device_memory.standin_nixl import nixlAgent


class Ends:
    """A transport, one of a peer in this process, and memory of both."""

    def __init__(self) -> None:
        self.ours, self.theirs = (np.arange(64, dtype=np.uint8) for _ in range(2))
        self.transport, self.other = NixlTransport(), NixlTransport()
        self.transport.register([Region(int(self.ours.ctypes.data), 64)])
        self.end_point = self.other.register([Region(int(self.theirs.ctypes.data), 64)])

    def submit(self, peer: Peer, direction: Direction = Direction.READ) -> Transfer:
        ours, theirs = int(self.ours.ctypes.data), int(self.theirs.ctypes.data)
        row = [[theirs, ours, 64]] if direction is Direction.READ else [[ours, theirs, 64]]
        return self.transport.submit(peer, direction, np.array(row, np.uint64))

    def ended(self, transfer: Transfer) -> Transfer:
        until = time.monotonic() + 5.0
        while self.transport.poll(transfer) is Status.PENDING:
            assert time.monotonic() < until, "it does not end"
        return transfer


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(nixl, "_import_bindings", lambda: standin_nixl)
    ends = Ends()
    yield ends
    monkeypatch.undo()
    ends.transport.close()
    ends.other.close()


def disconnect(*_: object) -> int:
    raise standin_nixl.nixlRemoteDisconnectError("gone")


def test_a_known_agent_that_does_not_answer_is_loaded_again_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL may have dropped it: a second failure is the peer's."""
    loads: list[bytes] = []
    load = nixlAgent.loadRemoteMD
    monkeypatch.setattr(
        nixlAgent, "loadRemoteMD", lambda agent, metadata: (loads.append(metadata), load(agent, metadata))[1]
    )
    peer = reach(ends.transport, ends.end_point)
    assert len(loads) == 1
    monkeypatch.setattr(nixlAgent, "getXferStatus", disconnect)
    again = ends.ended(ends.transport.connect(ends.end_point))
    assert again.error is not None
    assert again.error.reason is Reason.PEER_DIED
    assert len(loads) == 2
    peer.close()


def test_an_agent_with_a_running_transfer_is_not_loaded_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL would crash: the transfer's own failure comes first."""
    peer = reach(ends.transport, ends.end_point)
    monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *_: standin_nixl.NIXL_IN_PROG)
    running = ends.submit(peer)
    ends.transport.poll(running)
    assert len(ends.transport._running_handles) == 1

    forgotten: list[str] = []
    forget = nixlAgent.invalidateRemoteMD
    monkeypatch.setattr(
        nixlAgent, "invalidateRemoteMD", lambda agent, name: (forgotten.append(name), forget(agent, name))[1]
    )
    monkeypatch.setattr(nixlAgent, "getXferStatus", disconnect)
    again = ends.ended(ends.transport.connect(ends.end_point))
    assert again.error is not None
    assert again.error.reason is Reason.PEER_DIED
    assert forgotten == []
    assert ends.ended(running).error is not None


def test_an_agent_that_is_closed_while_a_peer_may_write_stays(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "CLOSE_SECONDS", 0.05)
    peer = reach(ends.transport, ends.end_point)
    monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *_: standin_nixl.NIXL_IN_PROG)
    running = ends.submit(peer)
    ends.transport.poll(running)
    agent, kept = ends.transport._agent, len(nixl._still_writing)
    assert not ends.transport.close()
    assert not ends.transport.close()
    assert [each[0] for each in nixl._still_writing[kept:]] == [agent]  # type: ignore[index]
    del nixl._still_writing[kept:]


@pytest.mark.parametrize(
    ("fails", "may_land"), [("createXferReq", False), ("postXferReq", True), ("getXferStatus", True)]
)
def test_a_write_that_was_posted_and_failed_may_still_land(
    fails: str, may_land: bool, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that NIXL did not even make, no byte has left."""
    peer = reach(ends.transport, ends.end_point)
    monkeypatch.setattr(nixlAgent, "postXferReq", lambda *_: standin_nixl.NIXL_IN_PROG)
    monkeypatch.setattr(nixlAgent, fails, disconnect)
    transfer = ends.ended(ends.submit(peer, Direction.WRITE))
    assert (transfer.status, transfer.may_land) == (Status.FAILED, may_land)


def test_a_write_that_was_revoked_and_failed_may_still_land(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = reach(ends.transport, ends.end_point)
    monkeypatch.setattr(nixlAgent, "postXferReq", lambda *_: standin_nixl.NIXL_IN_PROG)
    monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *_: standin_nixl.NIXL_IN_PROG)
    transfer = ends.submit(peer, Direction.WRITE)
    ends.transport.poll(transfer)
    assert ends.transport.cancel(transfer) is Status.PENDING
    monkeypatch.setattr(nixlAgent, "getXferStatus", disconnect)
    assert ends.transport.poll(transfer) is Status.FAILED
    assert transfer.may_land


@pytest.mark.parametrize("fails", [True, False])
def test_a_write_that_ended_while_its_transport_was_closed_may_land_only_where_it_failed(
    fails: bool, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence closes it: if each such write counted, the fence of one engine would cost one of the other."""
    peer = reach(ends.transport, ends.end_point)
    monkeypatch.setattr(nixlAgent, "postXferReq", lambda *_: standin_nixl.NIXL_IN_PROG)
    monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *_: standin_nixl.NIXL_IN_PROG)
    transfer = ends.submit(peer, Direction.WRITE)
    ends.transport.poll(transfer)
    ended = disconnect if fails else lambda *_: standin_nixl.NIXL_SUCCESS
    monkeypatch.setattr(nixlAgent, "getXferStatus", ended)
    assert ends.transport.close()
    assert ends.transport.poll(transfer) is Status.FAILED
    assert transfer.error is not None
    assert (transfer.error.reason, transfer.may_land) == (Reason.CLOSED, fails)


@pytest.mark.parametrize(
    ("places", "port_range", "told"),
    [
        ([("10.0.0.2", 23712)], "23700-23799", "Open TCP ports 23700-23799 of 10.0.0.2 "),
        ([("10.0.0.2", 43712)], "", "Open TCP port 43712 of 10.0.0.2 "),
        ([("10.0.0.2", 5), ("fd00::1", 6)], "", "Open TCP ports 5 of 10.0.0.2, 6 of fd00::1 "),
        ([], "", ""),
    ],
)
@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_connection_that_fails_names_the_ports_of_the_peer(
    is_dropped: bool,
    places: list[tuple[str, int]],
    port_range: str,
    told: str,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a firewall drops packets, and no answer comes, or ends a connection."""
    variables = {"UCX_TCP_PORT_RANGE": port_range} if port_range else {}
    ends.other._tcp_ports = TcpPorts.of(places, variables)
    end_point = ends.other.register([])
    monkeypatch.setattr(nixl, "CONNECT_SECONDS", 0.1)
    for name in ("postXferReq", "getXferStatus"):
        monkeypatch.setattr(nixlAgent, name, (lambda *_: standin_nixl.NIXL_IN_PROG) if is_dropped else disconnect)
    for _ in range(2):  # the second meets a connection that waits
        try:
            error = ends.ended(ends.transport.connect(end_point)).error
        except TransportError as raised:
            error = raised
        assert error is not None
        assert error.reason is (Reason.PEER_UNREACHABLE if is_dropped else Reason.PEER_DIED)
        assert (told in error.remedy, "Open TCP" in error.remedy) == (True, bool(told))
        assert all(address in error.message and f":{port}" in error.message for address, port in places)
