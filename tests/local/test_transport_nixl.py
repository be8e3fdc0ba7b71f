"""Properties of the NIXL transport alone: no idle core, no posting after a cancel, agents and their metadata."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport import network, nixl, registry
from kvferry.transport.network import THIS_HOST, Network, ucx_devices
from kvferry.transport.nixl import SENT_BYTES, SILENCE_SECONDS, NixlEndPoint, NixlTransport
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.transport.registry import open_transports

from ..support.transport_memory import HOST_MEMORY, HostMemory
from ..support.transport_peer import InProcessPeer, PeerProcess, pattern
from ..support.transport_suite import Pair, many_offsets, open_pair

pytestmark = pytest.mark.slow

pytest.importorskip("nixl")
FACTORY = "kvferry.transport.nixl:NixlTransport"
BYTES = 24 << 20


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with open_pair(FACTORY, BYTES) as pair:
        yield pair


@pytest.fixture
def own_pair() -> Iterator[Pair]:
    """Agents of this process, which may be harmed."""
    transport, local = NixlTransport(), HostMemory(4096)
    transport.register([local.region])
    with closing(InProcessPeer(FACTORY, 4096, HOST_MEMORY)) as remote:
        remote.fill(2)
        yield Pair(transport, local, remote, reach(transport, remote.end_point))
        transport.close()


def test_an_idle_agent_costs_no_core(pair: Pair) -> None:
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.1


def test_nothing_is_posted_after_a_cancel(pair: Pair) -> None:
    transfer = pair.start(Direction.READ, many_offsets())
    while transfer.running:
        pair.transport._reap(transfer)
    moved = transfer.bytes_done
    assert pair.transport.cancel(transfer) is Status.CANCELLED
    assert transfer.bytes_done == moved


def test_metadata_of_another_agent_is_refused_and_harms_nothing(pair: Pair) -> None:
    other = NixlTransport()
    decoded = msgspec.msgpack.decode(pair.remote.end_point, type=NixlEndPoint)
    foreign = msgspec.msgpack.decode(other.register([]), type=NixlEndPoint).metadata
    for metadata in (foreign, b"garbage" * 20):
        with pytest.raises(TransportError) as caught:
            reach(pair.transport, msgspec.msgpack.encode(msgspec.structs.replace(decoded, metadata=metadata)))
        assert caught.value.reason is Reason.MALFORMED_MESSAGE
    other.close()
    assert pair.finish(pair.submit(Direction.READ, np.array([[0, 0, 64]], np.uint64))) is Status.DONE


def test_a_new_end_point_waits_for_running_transfers(pair: Pair) -> None:
    decoded = msgspec.msgpack.decode(pair.remote.end_point, type=NixlEndPoint)
    pair.transport._running_handles[0] = decoded.agent_name
    with pytest.raises(TransportError) as caught:
        reach(pair.transport, msgspec.msgpack.encode(msgspec.structs.replace(decoded, metadata=b"other")))
    del pair.transport._running_handles[0]
    assert caught.value.reason is Reason.PEER_UNREACHABLE


PIECE = np.array([[0, 0, 4096]], np.uint64)


@pytest.fixture
def keeps_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_UNUSED", 0)


def is_known(transport: NixlTransport, agent_name: str) -> bool:
    """Return whether NIXL itself knows the agent."""
    rows = transport._nixl.nixlXferDList(transport._nixl.DRAM_SEG, [])
    return bool(transport._agent.checkRemoteMD(agent_name, rows) == transport._nixl.NIXL_SUCCESS)


def test_vllm_backport_33_a_living_peer_is_reached_again_after_its_connection_was_lost(own_pair: Pair) -> None:
    """NIXL forgets an agent when its connection ends, whoever still has a peer of it."""
    transport, name = own_pair.transport, own_pair.peer.agent_name
    transport._agent.invalidateRemoteMD(name)
    assert own_pair.finish(own_pair.submit(Direction.READ, PIECE)) is Status.FAILED
    again = Pair(transport, own_pair.memory, own_pair.remote, reach(transport, own_pair.remote.end_point))
    assert again.finish(again.submit(Direction.READ, PIECE)) is Status.DONE
    assert np.array_equal(own_pair.local, pattern(2, 4096))


def test_the_last_agents_without_a_peer_are_kept(own_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_UNUSED", 1)
    transport, name = own_pair.transport, own_pair.peer.agent_name
    own_pair.peer.close()
    connect_to_another(transport)
    assert is_known(transport, name)
    own_pair.peer = reach(transport, own_pair.remote.end_point)
    assert own_pair.finish(own_pair.submit(Direction.READ, PIECE)) is Status.DONE
    own_pair.peer.close()
    connect_to_another(transport)
    connect_to_another(transport)
    assert not is_known(transport, name)
    assert len(transport._remote_agents._metadata) <= 2


def test_an_agent_is_let_go_with_its_last_peer(own_pair: Pair, keeps_no_agent: None) -> None:
    transport, name = own_pair.transport, own_pair.peer.agent_name
    other = reach(transport, own_pair.remote.end_point)
    transfer = own_pair.submit(Direction.READ, PIECE)
    other.close()
    other.close()
    assert own_pair.finish(transfer) is Status.DONE
    assert is_known(transport, name)
    del transfer, other
    own_pair.peer = None  # collected, not closed
    connect_to_another(transport)
    assert not is_known(transport, name)
    own_pair.peer = reach(transport, own_pair.remote.end_point)
    assert own_pair.finish(own_pair.submit(Direction.READ, PIECE)) is Status.DONE


def test_an_agent_is_not_let_go_while_something_of_it_runs(own_pair: Pair, keeps_no_agent: None) -> None:
    transport, name = own_pair.transport, own_pair.peer.agent_name
    own_pair.peer.close()
    transport._running_handles[0] = name
    connect_to_another(transport)
    assert is_known(transport, name)
    del transport._running_handles[0]
    connect_to_another(transport)
    assert not is_known(transport, name)


def test_nothing_is_left_of_a_peer_that_is_refused(own_pair: Pair, keeps_no_agent: None) -> None:
    transport, name = own_pair.transport, own_pair.peer.agent_name
    own_pair.peer.close()
    decoded = msgspec.msgpack.decode(own_pair.remote.end_point, type=NixlEndPoint)
    with pytest.raises(TransportError) as caught:
        reach(transport, msgspec.msgpack.encode(msgspec.structs.replace(decoded, nonce=bytes(16))))
    assert caught.value.reason is Reason.PEER_CHANGED
    connect_to_another(transport)
    assert not is_known(transport, name)


def test_a_stopped_peer_is_asked_once_until_it_answers(
    pair: Pair, keeps_no_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection ends in time; what it has posted is kept until it is quiet, however often others try."""
    monkeypatch.setattr(nixl, "CONNECT_SECONDS", 0.3)
    assert isinstance(pair.remote, PeerProcess)
    transport = NixlTransport()
    pair.remote.stop()
    started_at = time.monotonic()
    try:
        for found in ("did not answer in time", "has not yet answered", "has not yet answered"):
            with pytest.raises(TransportError, match=found) as caught:
                reach(transport, pair.remote.end_point)
            assert caught.value.reason is Reason.PEER_UNREACHABLE
        assert time.monotonic() - started_at < 5.0
        assert len(transport._running_handles) == 1
        assert is_known(transport, pair.peer.agent_name)
    finally:
        pair.remote.resume()
    deadline = time.monotonic() + 20
    while transport._connections and time.monotonic() < deadline:
        time.sleep(0.01)
        connect_to_another(transport)
    assert not transport._running_handles
    assert len(transport._landings) == nixl._NUM_LANDINGS
    assert not is_known(transport, pair.peer.agent_name)
    reach(transport, pair.remote.end_point)
    transport.close()


def test_a_read_that_a_fence_could_not_end_is_pending_until_nothing_of_it_lands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is stopped, so the transport cannot be closed whole: what was posted lands when the peer goes on. Until
    then the blocks of the read must be kept.
    """
    monkeypatch.setattr(nixl, "CLOSE_SECONDS", 0.2)
    monkeypatch.setenv("UCX_TLS", "tcp")  # which reads with the help of the peer's process
    with open_pair(FACTORY, BYTES) as pair:
        assert isinstance(pair.remote, PeerProcess)
        pair.remote.fill(3)
        pair.remote.stop()
        reading = pair.submit(Direction.READ, np.array([[0, 0, BYTES]], np.uint64))
        while not reading.running:
            pair.transport.poll(reading)
        assert not pair.transport.close()
        assert pair.transport.poll(reading) is Status.PENDING
        pair.remote.resume()
        deadline = time.monotonic() + 20
        while pair.transport.poll(reading) is Status.PENDING and time.monotonic() < deadline:
            time.sleep(0.002)
        assert reading.error is not None
        assert reading.error.reason is Reason.CLOSED
        pair.local[:] = 7
        time.sleep(0.3)
        assert (pair.local == 7).all()


def test_a_connection_waits_for_a_place_for_the_nonce(own_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = own_pair.transport
    places, transport._landings = transport._landings, []
    connecting = transport.connect(own_pair.remote.end_point)
    assert [transport.poll(connecting) for _ in range(3)] == [Status.PENDING] * 3
    transport._landings = places
    assert own_pair.finish(connecting) is Status.DONE


def connect_to_another(transport: NixlTransport) -> None:
    """Make the transport tidy up, as it does when it connects."""
    other = NixlTransport()
    reach(transport, other.register([]))
    other.close()


def test_a_transport_does_not_connect_to_itself(pair: Pair) -> None:
    with pytest.raises(TransportError) as caught:
        reach(pair.transport, pair.transport.register([]))
    assert caught.value.reason is Reason.UNSUPPORTED


def listening_addresses() -> dict[str, str]:
    """Return where this process listens for TCP connections, as the kernel writes addresses, by the socket's number."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor that lists the directory
            inodes.add(os.readlink(entry))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = "0A"
    return {row[9]: row[1].split(":")[0] for row in rows if row[3] == listening and f"socket:[{row[9]}]" in inodes}


LOOPBACK_IN_HEXADECIMAL = "0100007F"


def opened(listens_at: str) -> list[str]:
    """Return the addresses on which ``auto`` opens listeners."""
    before = listening_addresses()
    transports = open_transports("auto", network=Network(listens_at))
    try:
        assert {"cma", "nixl"} <= transports.transports.keys()
        found = listening_addresses()
    finally:
        transports.close()
    return [address for number, address in found.items() if number not in before]


def own_address() -> str:
    """Return an address of this host that other hosts reach, or loopback where there is none."""
    own = re.findall(r"\|-- (\S+)\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    return next((address for address in own if not address.startswith("127.")), THIS_HOST)


def test_hole_14_mooncake_3151_auto_opens_no_listener_beyond_loopback() -> None:
    """Everybody who reaches a port of UCX can read and write the cache, also where only ``cma`` is used."""
    assert set(opened(THIS_HOST)) == {LOOPBACK_IN_HEXADECIMAL}


def test_engines_of_other_hosts_reach_an_agent_that_is_opened_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert NixlTransport()._devices == "lo"
    assert (set(opened("")) > {LOOPBACK_IN_HEXADECIMAL}) == (own_address() != THIS_HOST)


def test_an_agent_listens_where_its_engine_does_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys, an engine that other hosts reach opened UCX's ports on every interface."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    address = own_address()
    assert set(opened(address)) == {socket.inet_aton(address)[::-1].hex().upper()}


def test_every_device_that_an_agent_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first were dropped: RDMA devices too, beside the interface of an engine's address."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    expected = {socket.inet_aton(address)[::-1].hex().upper() for address in (own_address(), THIS_HOST)}
    devices = {"lo", network.interface_of(own_address())}
    monkeypatch.setattr(registry, "ucx_devices", lambda _: ",".join(sorted(devices)))
    assert set(opened(THIS_HOST)) == expected
    assert "UCX_NET_DEVICES" not in os.environ, "other users of UCX in this process"


def test_an_agent_on_loopback_says_why_it_does_not_reach_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if (device := ucx_devices(own_address())) == "lo":
        return  # this machine has no other interface
    remote, transport, local = NixlTransport(device), NixlTransport(), np.zeros(4096, np.uint8)
    try:
        end_point = remote.register([Region(int(local.ctypes.data), 4096)])
        with pytest.raises(TransportError) as refused:
            reach(transport, end_point)
    finally:
        transport.close()
        remote.close()
    assert refused.value.reason is Reason.PEER_UNREACHABLE
    assert "connects through lo alone" in refused.value.remedy
    assert "allowed_hosts" in refused.value.remedy


def test_devices_that_the_environment_names_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert set(opened("")) == {LOOPBACK_IN_HEXADECIMAL}


def test_an_ipv6_address_in_brackets_names_its_interface(caplog: pytest.LogCaptureFixture) -> None:
    """The setting ``host`` may have brackets: NIXL listened on every interface."""
    assert ucx_devices("[::1]") == ucx_devices("::1") == "lo"
    assert not caplog.records


def test_an_address_that_no_interface_has_leaves_every_interface(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a translated address, for example; the log says so."""
    assert ucx_devices("203.0.113.77") == ""
    assert "every interface" in caplog.text
    monkeypatch.setattr(network, "rdma_devices", lambda: ["mlx5_0:1"])
    device = ucx_devices(own_address())
    assert device == "lo" if own_address() == THIS_HOST else device.endswith(",mlx5_0:1")


@pytest.mark.parametrize(("receives", "is_raised"), [(None, True), ("128k", False)])
def test_a_read_over_tcp_comes_in_messages_of_64_kib(
    monkeypatch: pytest.MonkeyPatch, receives: str | None, is_raised: bool
) -> None:
    """UCX's own table shows up to which size one message goes; a user who sets the other end's size sets both."""
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    monkeypatch.delenv("UCX_TCP_TX_SEG_SIZE", raising=False)
    if receives is None:
        monkeypatch.delenv("UCX_TCP_RX_SEG_SIZE", raising=False)
    else:
        monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", receives)
    opening = "from kvferry.transport.nixl import NixlTransport; NixlTransport().close()"
    table = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True, check=True).stdout
    assert (f"0..{SENT_BYTES - 8} | short" in table) == is_raised, table
    assert "tcp/lo" in table


@pytest.mark.parametrize("longer", ["here", "there"])
def test_a_peer_that_sends_longer_messages_than_the_other_receives_is_refused(
    monkeypatch: pytest.MonkeyPatch, longer: str
) -> None:
    """UCX asks nobody, and would write beyond the receiver's buffer."""
    transports = {}
    for side in ("here", "there"):
        with monkeypatch.context() as context:
            for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
                context.delenv(name, raising=False)
                if side == longer:
                    context.setenv(name, "256k")
            transports[side] = NixlTransport()
    memory = HostMemory(4096)
    end_point = transports["there"].register([memory.region])
    with pytest.raises(TransportError) as caught:
        transports["here"].connect(end_point)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "262144" in caught.value.message
    assert "UCX_TCP_RX_SEG_SIZE" in caught.value.remedy
    for transport in transports.values():
        transport.close()


@pytest.mark.parametrize("written", ["64KiB", "inf", "", "-1", "9999999999k"])
def test_a_size_that_names_no_number_of_bytes_ends_the_start(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", written)
    with pytest.raises(TransportError) as caught:
        NixlTransport()
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
    assert "UCX_TCP_RX_SEG_SIZE" in caught.value.message


@pytest.mark.parametrize(("set_by_user", "seen"), [(None, "^efa"), ("^ib", "^ib")])
def test_ucx_leaves_its_module_for_amazons_cards_out_unless_the_user_says_which(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, seen: str
) -> None:
    """With Debian's ibverbs-providers it made each process with NIXL crash at its end. UCX's log says what it reads."""
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    monkeypatch.delenv("UCX_MODULES", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("UCX_MODULES", set_by_user)
    opening = "import os; from kvferry.transport.nixl import NixlTransport; NixlTransport().close(); "
    opening += "print('afterwards', os.environ.get('UCX_MODULES'))"
    said = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True, check=True).stdout
    assert f"UCX_MODULES={seen} " in f"{said} ".replace("\n", " "), said
    assert f"afterwards {set_by_user}" in said


def test_a_host_that_has_vanished_is_given_up(pair: Pair) -> None:
    """A transfer from a host that was cut off did not end, nor did the quarantine of its blocks."""
    transfer = pair.submit(Direction.READ, np.array([[0, 0, 4096]], np.uint64))
    assert pair.finish(transfer) is Status.DONE
    limits = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.family == socket.AF_INET and found.getpeername():
                limits.add(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    # UCX counts in ticks of its own clock.
    assert any(abs(limit - 1000 * SILENCE_SECONDS) < 10 for limit in limits), limits
