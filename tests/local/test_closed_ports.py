"""A port of the destination that takes no connection of the source: both engines say which, and what to open."""

import ctypes
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.handoff import destination as handoff_destination
from kvferry.handoff.source import END
from kvferry.transport import nixl
from kvferry.transport.network import listeners, listens_at
from kvferry.transport.nixl import NixlEndPoint, NixlTransport, TcpMessages, TcpPorts
from kvferry.transport.protocol import NONCE_BYTES, decode_end_point, reach

from .engines_in_process import HOST
from .engines_that_write import Pairs, check_arrived, engines

__all__ = ["engines"]

SOURCE, TARGET = [5, 1, 4], [0, 3, 2]
RANGE = "23700-23799"


SO_ATTACH_FILTER = 26


def close_ports(ports: Sequence[int], *, drops: bool) -> None:
    """Let sockets of this process that listen on these ports refuse connections from now on, or drop their packets.

    UCX closes a listening socket that fails, and never takes its number out of its table: no agent of this process
    could open a socket of that number any more. So packets of UCX are dropped.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a program of "return 0"
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    closed = set()
    for _, listener in listeners():
        with listener:
            if (port := listener.getsockname()[1]) in ports:
                if drops:
                    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
                else:
                    listener.shutdown(socket.SHUT_RDWR)
                closed.add(port)
    assert closed == set(ports)


@pytest.fixture(params=[RANGE, ""])
def port_range(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let UCX use TCP, as between hosts, and ports of a range, or any free one."""
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl, "CONNECT_SECONDS", 1.0)
    found: str = request.param
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", found or "0")
    return found


def ports_of(end_point: bytes) -> TcpPorts:
    return msgspec.msgpack.decode(end_point, type=NixlEndPoint).tcp_ports


def expected(ports: TcpPorts, port_range: str) -> list[str]:
    [(address, port)] = ports.places
    what = f"Open TCP ports {port_range} of {address} " if port_range else f"Open TCP port {port} of {address} "
    return [f"at {address}:{port}", what, "UCX_TCP_PORT_RANGE"]


@pytest.mark.slow
def test_an_end_point_names_the_port_that_a_closed_connection_needs(port_range: str) -> None:
    before = listens_at()
    with closing(NixlTransport()) as source, closing(NixlTransport()) as destination:
        end_point = destination.register([])
        ports = ports_of(end_point)
        assert set(ports.places) <= {place for inode, place in listens_at().items() if inode not in before}
        assert ports.port_range == port_range
        close_ports([port for _, port in ports.places], drops=True)
        with pytest.raises(TransportError) as caught:
            reach(source, end_point)
        assert caught.value.reason is Reason.PEER_UNREACHABLE
        assert [text for text in expected(ports, port_range) if text not in str(caught.value)] == []
        assert expected(ports, port_range)[1] in caught.value.remedy


@pytest.mark.parametrize("port_range", [""], indirect=True)
def test_ports_that_others_open_meanwhile_are_not_those_of_an_agent(
    port_range: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads of an engine open servers while the agent starts: such a port says nothing of NIXL's."""
    create = NixlTransport._create_agent
    with ExitStack() as others:

        def busy(transport: NixlTransport) -> tuple[Any, Any]:
            for address in ("", "127.0.0.9"):  # every interface, and an address that no interface lists
                others.enter_context(socket.create_server((address, 0)))
            return create(transport)

        monkeypatch.setattr(NixlTransport, "_create_agent", busy)
        with closing(NixlTransport()) as transport:
            assert [address for address, _ in ports_of(transport.register([])).places] == [HOST]


def test_what_listens_on_every_interface_is_left_out() -> None:
    places = [("0.0.0.0", 1), ("::", 2), ("::ffff:10.0.0.2", 3)]
    assert TcpPorts.of(places, {}).places == (("10.0.0.2", 3),)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::ffff:0.0.0.0", "1.2.3.4.5", "::::"])
def test_an_end_point_at_no_address_is_refused(address: str) -> None:
    def sent(at: str) -> bytes:
        fields = (b"metadata", [], 4096, bytes(NONCE_BYTES), [], TcpMessages(), TcpPorts(((at, 23700),)))
        kept = dict(zip(NixlEndPoint.__struct_fields__[3:], fields, strict=True))
        return msgspec.msgpack.encode({"transport": "nixl", "version": 1, "agent_name": "decode", **kept})

    decode_end_point(sent(HOST), NixlEndPoint, "nixl")
    with pytest.raises(TransportError) as caught:
        decode_end_point(sent(address), NixlEndPoint, "nixl")
    assert caught.value.reason is Reason.MALFORMED_MESSAGE


@pytest.mark.slow
@pytest.mark.parametrize("port_range", [RANGE], indirect=True)
def test_both_engines_name_the_port_of_the_data(
    port_range: str, engines: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    sender, [receiver] = engines.open(transport="nixl")
    ports = ports_of(receiver.end_points["nixl"])
    close_ports([port for _, port in ports.places], drops=True)
    sender.compute(END, SOURCE)
    receiver.receive(sender.hold(), TARGET)
    error = receiver.result().error
    assert error is not None, "the engine logs it"
    assert error.reason is Reason.PEER_UNREACHABLE
    [line] = [line for line in caplog.messages if line.startswith("kvferry: write ")]
    for told in (line, str(error)):
        assert [text for text in expected(ports, port_range) if text not in told] == []


def test_both_engines_name_the_port_of_a_rank_to_which_reports_find_no_way(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a firewall drops packets, the load is asked for and done: nobody said why each load took two seconds."""
    sender, [receiver] = engines.open()
    port = receiver.listener.port
    monkeypatch.setattr(sender.ranks[0].client, "tell", lambda *_, **__: None)
    sender.compute(END, SOURCE)
    receiver.receive(sender.hold(), TARGET)
    assert receiver.result().error is None
    check_arrived(sender, [receiver], SOURCE, TARGET)
    what = f"Open TCP port {port} of {HOST} to the other engine"
    [of_source] = [line for line in caplog.messages if f"has not reached the decode rank at {HOST}:{port}" in line]
    [of_destination] = [line for line in caplog.messages if "has not come, and r has waited" in line]
    assert what in of_source
    assert what in of_destination


def test_a_source_that_waits_names_the_port_of_a_rank_that_takes_no_connection(
    engines: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    sender, [receiver] = engines.open()
    port = receiver.listener.port
    close_ports([port], drops=False)
    receiver.receive(sender.hold(), TARGET)
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.PEER_UNREACHABLE
    what = f"Open TCP port {port} of {HOST} to the other engine"
    assert what in error.remedy
    assert [line for line in caplog.messages if line.startswith("kvferry: write ") and what in line]


def test_a_report_that_comes_says_nothing_of_ports(engines: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), TARGET)
    assert receiver.is_waiting(handoff_destination.ASK_AGAIN_SECONDS + 0.5), "the destination asks once"
    sender.compute(END, SOURCE)
    assert receiver.result().error is None
    assert [line for line in caplog.messages if "Open TCP" in line] == []
