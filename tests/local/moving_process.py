"""A process that moves labelled bytes to and from a process on another host.

    python -m tests.local.moving_process serve TRANSPORT ADDRESS
    python -m tests.local.moving_process move TRANSPORT ADDRESS < what the other one printed
    python -m tests.local.moving_process move-once TRANSPORT ADDRESS READ|WRITE < what the other one printed

``serve`` prints where its buffer lies, and prints the checksum of the buffer for each line of its input. ``move`` reads
the buffer, writes another pattern to it, and prints what it found. ``move-once`` moves in one direction, says when the
first bytes have moved, and how the transfer ended. ADDRESS is where the process listens.
"""

import json
import os
import sys
import time
import zlib
from typing import Any

import numpy as np

from kvferry.arrays import Bytes
from kvferry.layout.shard import Region
from kvferry.transport.network import Network
from kvferry.transport.protocol import Direction, Status
from kvferry.transport.registry import Link, TransportSet, open_transports

from .. import mooncake_libraries
from ..support.transport_peer import pattern

NUM_BYTES = 8 << 20
READ_SEED, WRITTEN_SEED = 14, 41
PIECE_BYTES = 64 << 10
SECONDS = 30.0
SETTLE_SECONDS = 1.0


def main(role: str, setting: str, listens_at: str, direction: str = "") -> None:
    """Open the transports and play one role."""
    mooncake_libraries.make_loadable()
    transports = open_transports(setting, network=Network(listens_at))
    buffer = np.zeros(NUM_BYTES, np.uint8)
    end_points = transports.register([Region(int(buffer.ctypes.data), NUM_BYTES)])
    if role == "serve":
        buffer[:] = pattern(READ_SEED, NUM_BYTES)
        say(address=int(buffer.ctypes.data), end_points={name: each.hex() for name, each in end_points.items()})
        for _ in sys.stdin:
            say(checksum=zlib.crc32(buffer.data))
    elif role == "move-once":
        move_once(transports, json.loads(sys.stdin.readline()), buffer, Direction[direction])
    else:
        there = json.loads(sys.stdin.readline())
        link = connect(transports, there)
        move(link, Direction.READ, there["address"], int(buffer.ctypes.data))
        is_right = bool(np.array_equal(buffer, pattern(READ_SEED, NUM_BYTES)))
        buffer[:] = pattern(WRITTEN_SEED, NUM_BYTES)
        move(link, Direction.WRITE, int(buffer.ctypes.data), there["address"])
        say(transport=link.name, is_right=is_right)
    transports.close()


def connect(transports: TransportSet, there: dict[str, Any]) -> Link:
    """Connect with the first transport that works."""
    end_points = {name: bytes.fromhex(each) for name, each in there["end_points"].items()}
    connecting, deadline = transports.connect(end_points), time.monotonic() + SECONDS
    while (link := connecting.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return link


def move(link: Link, direction: Direction, source: int, destination: int) -> None:
    """Move the whole buffer."""
    transfer = link.transport.submit(link.peer, direction, np.array([[source, destination, NUM_BYTES]], np.uint64))
    deadline = time.monotonic() + SECONDS
    while link.transport.poll(transfer) is Status.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert transfer.status is Status.DONE, transfer.error


def move_once(transports: TransportSet, there: dict[str, Any], buffer: Bytes, direction: Direction) -> None:
    """Move the whole buffer in one direction, in pieces, until the transfer ends in any way."""
    if direction is Direction.WRITE:
        buffer[:] = pattern(WRITTEN_SEED, NUM_BYTES)
    link = connect(transports, there)
    begin = np.arange(0, NUM_BYTES, PIECE_BYTES, dtype=np.uint64)
    here, remote = begin + np.uint64(buffer.ctypes.data), begin + np.uint64(there["address"])
    source, destination = (remote, here) if direction is Direction.READ else (here, remote)
    descriptors = np.column_stack([source, destination, np.full(len(begin), PIECE_BYTES, np.uint64)])
    transfer, has_begun = link.transport.submit(link.peer, direction, descriptors), False
    while link.transport.poll(transfer) is Status.PENDING:
        if not has_begun:
            time.sleep(SETTLE_SECONDS)
            say(has_begun=True)
            has_begun = True
        time.sleep(0.001)
    expected = pattern(READ_SEED if direction is Direction.READ else WRITTEN_SEED, NUM_BYTES)
    is_right = bool(np.array_equal(buffer, expected))
    say(status=transfer.status.value, is_right=is_right, error=str(transfer.error or ""))
    sys.stdout.flush()
    os._exit(0)  # an agent with a cut connection takes its time to close


def say(**what: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
