"""What goes wrong in a network: slow links, lost packets, cables that are pulled, addresses that are wrong."""

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvferry.harness.virtual_hosts import DEVICE, SWITCH, VirtualHost

CABLE = "cable"
TUNNELS = ("wire0", "wire1")
PACKET_BYTES = 65536
SET_INTERFACE = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000


@contextmanager
def slow(host: VirtualHost, megabits: int) -> Iterator[None]:
    """Let the host send so many megabits a second."""
    host.run(
        "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "limit", "4mb"
    )
    try:
        yield
    finally:
        with suppress(Exception):  # another fault has replaced the queue
            host.run("tc", "qdisc", "delete", "dev", DEVICE, "root")


@contextmanager
def unplugged(host: VirtualHost) -> Iterator[None]:
    """Take the host's interface down."""
    host.run("ip", "link", "set", DEVICE, "down")
    try:
        yield
    finally:
        host.run("ip", "link", "set", DEVICE, "up")


@contextmanager
def dropped(host: VirtualHost) -> Iterator[None]:
    """Drop each packet that the host sends, as a firewall does."""
    host.run("tc", "qdisc", "replace", "dev", DEVICE, "root", "blackhole")
    try:
        yield
    finally:
        host.run("tc", "qdisc", "delete", "dev", DEVICE, "root")


@contextmanager
def lossy(host: VirtualHost, delay_seconds: float, loss: float) -> Iterator["LossyWire"]:
    """Delay each packet from and to a host, and lose some.

    The host's cable ends at a bridge of its own, and two tunnel devices with a thread between them join this bridge
    with the switch, since not every kernel has ``netem``. Nothing changes on the host.
    """
    switch = host.switch
    assert switch is not None
    wire = LossyWire((_tunnel(switch, TUNNELS[0]), _tunnel(switch, TUNNELS[1])), delay_seconds, loss)
    try:
        switch.run("ip", "link", "add", CABLE, "type", "bridge")
        switch.run("ip", "link", "set", CABLE, "up")
        for port, bridge in (*zip(TUNNELS, (CABLE, SWITCH), strict=True), (host.switch_port, CABLE)):
            switch.run("ip", "link", "set", port, "master", bridge, "up")
        yield wire
    finally:
        switch.run("ip", "link", "set", host.switch_port, "master", SWITCH)
        switch.run("ip", "link", "delete", CABLE)
        wire.close()


def _tunnel(host: VirtualHost, name: str) -> int:
    """Return the descriptor of a new tunnel device, which ends with the descriptor. It carries Ethernet frames."""
    with host.entered():
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER))
    return descriptor


@contextmanager
def no_way(host: VirtualHost, address: str) -> Iterator[None]:
    """Drop each packet that the host sends to an address, as where the address is of another network."""
    host.run("ip", "route", "add", "blackhole", f"{address}/32")
    try:
        yield
    finally:
        host.run("ip", "route", "delete", "blackhole", f"{address}/32")


@contextmanager
def known_as(host: VirtualHost, name: str, address: str) -> Iterator[None]:
    """Let the host take an address for that of a name."""
    before = host.run("cat", "/etc/hosts")
    _write_hosts_file(host, f"{before}{address} {name}\n")
    try:
        yield
    finally:
        _write_hosts_file(host, before)


def _write_hosts_file(host: VirtualHost, text: str) -> None:
    host.run("sh", "-c", 'printf %s "$1" > /etc/hosts', "sh", text)


class LossyWire:
    """Carries packets between two tunnel devices on a thread of its own."""

    def __init__(self, tunnels: tuple[int, int], delay_seconds: float, loss: float) -> None:
        self.num_carried = self.num_lost = 0
        self._tunnels, self._delay_seconds, self._loss = tunnels, delay_seconds, loss
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and both devices."""
        self._is_over = True
        self._thread.join()
        for tunnel in self._tunnels:
            os.close(tunnel)

    def _carry(self) -> None:
        generator = random.Random(0)
        waiting: list[tuple[float, int, int, bytes]] = []
        others = dict(zip(self._tunnels, reversed(self._tunnels), strict=True))
        while not self._is_over:
            pause = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for tunnel in select.select(self._tunnels, [], [], pause)[0]:
                packet = os.read(tunnel, PACKET_BYTES)
                if generator.random() < self._loss:
                    self.num_lost += 1
                    continue
                self.num_carried += 1
                due = time.monotonic() + self._delay_seconds
                heapq.heappush(waiting, (due, self.num_carried, others[tunnel], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                *_, tunnel, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the queue of the device is full: one more lost packet
                    os.write(tunnel, packet)
