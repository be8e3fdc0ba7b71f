"""The interfaces where NIXL listens: those of an address of this machine, and those on the way to other hosts."""

import ctypes
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from struct import pack, unpack

import pytest

from kvferry.transport import network
from kvferry.transport.network import rdma_ports, ucx_devices

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
    """Let this machine have the addresses listed, more of ``lo`` than fit a first question."""
    listed = b"".join(entry("lo", f"127.1.{number}.1") for number in range(70))
    listed += b"".join(entry(*each) for each in sorted(LISTED))

    def ioctl(_: object, request: int, argument: bytes) -> bytes:
        assert request == 0x8912
        room, place = unpack("iL", argument)
        found = listed[: room // 40 * 40]
        ctypes.memmove(place, found, len(found))
        return pack("iL", len(found), place)

    monkeypatch.setattr(network.fcntl, "ioctl", ioctl)
    monkeypatch.setattr(network, "rdma_devices", list)


def test_every_address_of_this_machine_has_an_interface() -> None:
    own = re.findall(r"\|-- (\S+)\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    names = {name for _, name in socket.if_nameindex()}
    assert {network.interface_of(address) for address in own} <= names


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


@pytest.mark.parametrize("address", ["127.8.8.8", "::ffff:127.8.8.8"])
def test_a_loopback_address_that_no_interface_lists_is_on_loopback(address: str, two_interfaces: None) -> None:
    """The kernel answers at all of 127.0.0.0/8, and lists one address."""
    assert ucx_devices(address) == "lo"


def test_a_name_of_loopback_and_of_another_address_names_both(
    two_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "any_addresses", lambda *_: ["127.0.0.1", "10.7.0.2"])
    assert ucx_devices("prefill-0") == "eth0,lo"


def test_an_address_that_no_interface_has_listens_on_every_interface(
    two_interfaces: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert ucx_devices("10.99.0.1") == ""
    assert "no interface has the address" in caplog.text


def test_rdma_devices_open_no_port_and_belong_to_every_interface_but_loopback(
    two_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "rdma_devices", lambda: ["mlx5_0:1"])
    assert ucx_devices("127.0.0.1") == "lo"
    assert ucx_devices("10.7.0.2") == "eth0,mlx5_0:1"


def test_an_rdma_port_counts_where_ucx_can_open_its_device_and_the_port_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container sees the devices of its host; kvferry named them to UCX, and said that reads go over RDMA."""
    states = {"mlx5_0": {1: "4: ACTIVE", 2: "1: DOWN"}, "mlx5_1": {1: "4: ACTIVE"}, "mlx5_2": {1: "4: ACTIVE"}}
    for device, ports in states.items():
        for port, state in ports.items():
            (tmp_path / f"infiniband/{device}/ports/{port}").mkdir(parents=True)
            (tmp_path / f"infiniband/{device}/ports/{port}/state").write_text(f"{state}\n")
    for number, device in enumerate(("mlx5_0", "mlx5_1")):
        (tmp_path / f"infiniband_verbs/uverbs{number}").mkdir(parents=True)
        (tmp_path / f"infiniband_verbs/uverbs{number}/ibdev").write_text(f"{device}\n")
    (tmp_path / "uverbs0").touch()
    ports_found = rdma_ports(tmp_path, tmp_path)
    assert ports_found == {
        "mlx5_0:1": "",
        "mlx5_0:2": "its state is 1: DOWN",
        "mlx5_1:1": f"this process cannot open {tmp_path}/uverbs1",
        "mlx5_2:1": "the kernel module ib_uverbs gives it no file",
    }
    monkeypatch.setattr(network, "rdma_ports", lambda: ports_found)
    assert network.rdma_devices() == ["mlx5_0:1"]


def test_a_device_of_amazons_is_told_by_its_driver(tmp_path: Path) -> None:
    for device, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s31", "efa")):
        assert not network.has_efa_device(tmp_path)
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / f"infiniband/{device}/device").mkdir(parents=True)
        (tmp_path / f"infiniband/{device}/device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.has_efa_device(tmp_path)


def test_the_scope_of_an_address_does_not_hide_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_addresses", lambda: [("eth0", ip_address("fe80::7"))])
    assert network.interface_of("fe80::7%eth0") == "eth0"
    assert network.interface_of("fe80::8%eth0") is None
