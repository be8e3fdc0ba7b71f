"""The rate of one TCP connection between two virtual hosts: what a transport without RDMA can at most reach.

    python benchmarks/plain_tcp.py receive ADDRESS
    python benchmarks/plain_tcp.py send ADDRESS PORT

Memory of the sender is written to a socket and read into memory of the receiver, which answers with one byte.
"""

import socket
import statistics
import subprocess
import sys
import time

from kvferry.harness.virtual_hosts import DEVICE, VirtualHost

COPY_BYTES = 128 << 20
NUM_COPIES = 9
SEND_SECONDS = 120.0


def set_mtu(host: VirtualHost, mtu: int) -> None:
    """Let packets of up to ``mtu`` bytes through a host's cable, at both ends: each end drops what is longer."""
    assert host.switch is not None
    host.run("ip", "link", "set", DEVICE, "mtu", str(mtu))
    host.switch.run("ip", "link", "set", host.switch_port, "mtu", str(mtu))


def plain_tcp_rate(sender: VirtualHost, receiver: VirtualHost) -> float:
    """Return the median rate from one host to another, in GB/s.

    Raises :class:`subprocess.TimeoutExpired` after ``SEND_SECONDS``.
    """
    receiving = receiver.command([sys.executable, __file__, "receive", receiver.ipv4])
    with subprocess.Popen(receiving, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            sending = sender.command([sys.executable, __file__, "send", receiver.ipv4, port])
            return float(subprocess.check_output(sending, text=True, timeout=SEND_SECONDS))
        finally:
            process.kill()


def receive(address: str) -> None:
    """Receive copies until the sender leaves."""
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    memory = memoryview(bytearray(COPY_BYTES))
    with connection:
        while True:
            received = 0
            while received < COPY_BYTES:
                count = connection.recv_into(memory[received:])
                if not count:
                    return
                received += count
            connection.sendall(b"x")


def send(address: str, port: int) -> None:
    """Send copies and print the median rate."""
    memory, seconds = bytearray(b"x") * COPY_BYTES, []
    with socket.create_connection((address, port)) as connection:
        for _ in range(NUM_COPIES):
            started = time.perf_counter()
            connection.sendall(memory)
            connection.recv(1)
            seconds.append(time.perf_counter() - started)
    print(COPY_BYTES / statistics.median(seconds) / 1e9)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]))
