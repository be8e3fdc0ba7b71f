"""What goes wrong in a network: slow links, lost packets, cables that are pulled."""

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

from kvferry.harness.virtual_hosts import DEVICE, VirtualHost

TUNNEL = "wire0"
PACKET_BYTES = 65536
SET_INTERFACE = 0x400454CA
TUN_WITHOUT_HEADER = 0x0001 | 0x1000


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
def lossy(first: VirtualHost, second: VirtualHost, delay_seconds: float, loss: float) -> Iterator["LossyWire"]:
    """Send all IPv4 packets between two hosts over a wire that delays each packet and loses some.

    The wire is a thread and two tunnel devices, since not every kernel has ``netem``.
    """
    wire = LossyWire((_tunnel(first), _tunnel(second)), delay_seconds, loss)
    try:
        for here, there in ((first, second), (second, first)):
            here.run("ip", "link", "set", TUNNEL, "up")
            here.run("ip", "route", "add", f"{there.ipv4}/32", "dev", TUNNEL, "src", here.ipv4)
        yield wire
    finally:
        wire.close()


def _tunnel(host: VirtualHost) -> int:
    """Return the descriptor of a new tunnel device of a host, which ends with the descriptor."""
    with host.entered():
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH", TUNNEL.encode(), TUN_WITHOUT_HEADER))
    return descriptor


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
