"""The interfaces where NIXL listens: those of an address of this machine, and those on the way to other hosts."""

import ctypes
import re
import socket
from ipaddress import ip_network
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest

from kvferry.transport import network
from kvferry.transport.network import any_addresses, ucx_devices

LISTED = {
    ("lo", "127.0.0.1"),
    ("eth0", "10.7.0.2"),
    ("eth0:9", "10.8.0.5"),
    ("eth0", "10.7.0.77"),
    ("eth1", "10.9.0.2"),
}
"""Labels and addresses, as Linux lists them of two interfaces with several addresses."""


def entry(label: str, address: str) -> bytes:
    """Return an entry as Linux writes it."""
    return label.encode().ljust(16, b"\0") + pack("HH", socket.AF_INET, 0) + socket.inet_aton(address).ljust(20, b"\0")


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have the addresses listed, more of ``lo`` than fit a first question, and routes to networks."""
    listed = b"".join(entry("lo", f"127.1.{number}.1") for number in range(70))
    listed += b"".join(entry(*each) for each in sorted(LISTED))

    def ioctl(_: object, request: int, argument: bytes) -> bytes:
        assert request == 0x8912
        room, place = unpack("iL", argument)
        found = listed[: room // 40 * 40]
        ctypes.memmove(place, found, len(found))
        return pack("iL", len(found), place)

    routes = {"eth0": "10.7.0.0/24", "eth1": "10.9.0.0/24", "lo": "127.0.0.0/8"}
    ways = {"10.7.0.1": "eth0", "10.9.0.1": "eth1", "172.16.0.1": "eth1", "192.0.2.1": "eth0", "127.0.0.1": "lo"}
    monkeypatch.setattr(network.fcntl, "ioctl", ioctl)
    monkeypatch.setattr(network, "_routes", lambda: ((name, ip_network(each)) for name, each in routes.items()))
    monkeypatch.setattr(
        network, "_interfaces_to_address", lambda address: {ways[address]} if address in ways else set()
    )
    monkeypatch.setattr(network, "_rdma_devices", list)


def test_every_address_of_this_machine_has_an_interface() -> None:
    own = re.findall(r"\|-- (\S+)\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    names = {name for _, name in socket.if_nameindex()}
    assert {network._interface_of(address) for address in own} <= names


@pytest.mark.parametrize(
    ("address", "device"),
    [
        ("10.7.0.2", "eth0"),
        ("10.7.0.77", "eth0"),
        ("10.8.0.5", "eth0"),
        ("10.9.0.2", "eth1"),
        ("::ffff:10.9.0.2", "eth1"),
        ("127.1.69.1", "lo"),
    ],
)
def test_each_address_of_an_interface_names_the_interface(address: str, device: str, two_interfaces: None) -> None:
    """Only the first IPv4 address did: NIXL listened on every interface for an engine at another one."""
    assert ucx_devices(address) == device


@pytest.mark.parametrize(
    ("reaches", "devices"),
    [
        ((), "lo"),
        (("127.0.0.1",), "lo"),
        (("10.7.0.0/24",), "eth0,lo"),
        (("10.9.0.1",), "eth1,lo"),
        (("10.0.0.0/8",), "eth0,eth1,lo"),
        (("172.16.0.0/12",), "eth1,lo"),
        (("10.7.0.1", "10.9.0.1"), "eth0,eth1,lo"),
    ],
)
def test_an_engine_on_loopback_connects_through_the_interfaces_to_its_hosts(
    reaches: tuple[str, ...], devices: str, two_interfaces: None
) -> None:
    assert ucx_devices("127.0.0.1", reaches) == devices


def test_a_host_to_which_there_is_no_way_opens_no_interface(
    two_interfaces: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ucx_devices("127.0.0.1", ["198.51.100.0/24"]) == "lo"
    assert "no route to 198.51.100.0/24" in caplog.text

    def look_up(host: str, port: int) -> Any:
        if host == "prefill-0":
            raise socket.gaierror("unknown yet")
        return any_addresses(host, port)

    monkeypatch.setattr(network, "any_addresses", look_up)
    assert ucx_devices("127.0.0.1", ["prefill-0"]) == "eth0,lo", "the default route"
    assert "through the default route, eth0" in caplog.text


def test_the_way_to_an_address_is_the_kernels() -> None:
    assert network._interfaces_to("127.0.0.1") == network._interfaces_to("localhost") == {"lo"}
    assert network._interfaces_to("[::1]") <= {"lo"}
