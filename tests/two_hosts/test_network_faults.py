"""The faults themselves: what each does to a plain TCP connection between two hosts, and that nothing of it stays."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.harness.virtual_hosts import VirtualHost

from ..host.vllm.chaos.relay import Relay
from ..virtual_network import Hosts
from .network_faults import dropped, known_as, lossy, no_way, slow, unplugged

NUM_BYTES = 4 << 20
SECONDS = 10.0


@contextmanager
def sink(host: VirtualHost) -> Iterator[int]:
    """Receive ``NUM_BYTES`` of each connection on a host and answer with a byte; yield the port."""
    with host.entered():
        listener = socket.create_server((host.ipv4, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received = 0
                while received < NUM_BYTES and (part := connection.recv(1 << 20)):
                    received += len(part)
                connection.sendall(b"x")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def sent(host: VirtualHost, address: str, port: int, timeout_seconds: float = SECONDS) -> float:
    """Send bytes from a host and return the seconds. Raises :class:`OSError` where they do not arrive."""
    began_at = time.monotonic()
    with host.entered(), socket.create_connection((address, port), timeout_seconds) as connection:
        connection.sendall(bytes(NUM_BYTES))
        assert connection.recv(1) == b"x"
    return time.monotonic() - began_at


def test_a_slow_link_has_the_rate_that_was_asked_for(hosts: Hosts) -> None:
    prefill, decode, _ = hosts
    with sink(decode) as port:
        assert sent(prefill, decode.ipv4, port) < 0.5
        with slow(prefill, megabits=16):
            assert 1.5 < sent(prefill, decode.ipv4, port) < 5.0
        assert sent(prefill, decode.ipv4, port) < 0.5


@pytest.mark.parametrize("fault", [unplugged, dropped, no_way], ids=lambda fault: str(fault.__name__))
def test_nothing_passes_a_link_that_is_cut(hosts: Hosts, fault: object) -> None:
    prefill, decode, _ = hosts
    cut = no_way(prefill, decode.ipv4) if fault is no_way else fault(prefill)  # type: ignore[operator]
    with sink(decode) as port:
        with cut, pytest.raises(OSError):
            sent(prefill, decode.ipv4, port, timeout_seconds=1.5)
        assert sent(prefill, decode.ipv4, port) < 5.0


def test_a_lossy_wire_delays_and_loses_packets_and_goes_away(hosts: Hosts) -> None:
    prefill, decode, _ = hosts
    with sink(decode) as port:
        with lossy(prefill, delay_seconds=0.02, loss=0.01) as wire:
            assert sent(prefill, decode.ipv4, port) > 0.2
        assert wire.num_carried > NUM_BYTES / 1500
        assert wire.num_carried / 400 < wire.num_lost < wire.num_carried / 40
        assert sent(prefill, decode.ipv4, port) < 0.5


def test_a_name_leads_elsewhere_on_one_host_only_and_for_a_while(hosts: Hosts) -> None:
    prefill, decode, _ = hosts
    with known_as(decode, "prefill-9", prefill.ipv4):
        assert decode.run("getent", "ahostsv4", "prefill-9").split()[0] == prefill.ipv4
        assert "prefill-9" not in prefill.run("cat", "/etc/hosts")
    assert "prefill-9" not in decode.run("cat", "/etc/hosts")
    assert decode.run("getent", "ahostsv4", prefill.name).split()[0] == prefill.ipv4


def test_a_third_host_forwards_connections(hosts: Hosts) -> None:
    prefill, decode, router = hosts
    with sink(prefill) as port:
        with router.entered():
            relay = Relay(router.ipv4, prefill.ipv4)
            relay.open([port])
        try:
            assert sent(decode, router.ipv4, port) < 5.0
            assert relay.num_links == 1
        finally:
            relay.close()
        with pytest.raises(OSError):
            sent(decode, router.ipv4, port)
