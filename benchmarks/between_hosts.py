"""The rates at which transports read and write between two virtual hosts, and at which a held prompt is read and
written on request, beside one plain TCP connection.

    sudo python benchmarks/between_hosts.py
    sudo python benchmarks/between_hosts.py --mtu 9000 --transports nixl
    sudo UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=256k python benchmarks/between_hosts.py

64 MiB move in equal pieces, in random order and with gaps, in memory in huge pages. Every figure is a median. A held
prompt is read and written in turn; its time is that of the whole load, with all messages. Variables of UCX reach both
sides.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from held_prompts import PIECES
from plain_tcp import plain_tcp_rate, set_mtu
from rich.console import Console
from rich.table import Table
from transport_movers import allocate, scattered_offsets

from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts
from kvferry.layout.shard import Region
from kvferry.transport.network import Network
from kvferry.transport.protocol import Direction, Peer, Status, Transport, reach
from kvferry.transport.registry import open_transport

NUM_BYTES = 64 << 20
PIECE_BYTES = (8 << 20, 64 << 10, 16 << 10, 4 << 10)
SMALLEST_OF_MOONCAKE = 16 << 10
MOVE_SECONDS = 60.0


def main(
    transports: Annotated[str, typer.Option(help="Transports, with commas.")] = "nixl,mooncake",
    mtu: Annotated[int, typer.Option(help="The longest packet of the link, in bytes.")] = 1500,
    repeat: Annotated[int, typer.Option(min=1, help="Moves of each kind.")] = 9,
) -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory() as folder, virtual_hosts(["source", "destination"], Path(folder)) as hosts:
        for host in hosts:
            set_mtu(host, mtu)
        source, destination = hosts
        before = plain_tcp_rate(source, destination)
        table = Table("transport", "piece", "read", "written", title=f"GB/s between two virtual hosts, MTU {mtu}")
        for name in transports.split(","):
            for row in measure(name, source, destination, repeat):
                table.add_row(name, f"{row['piece'] >> 10} KiB", f"{row['read']:.2f}", f"{row['write']:.2f}")
        held = Table("transport", "piece", "read", "written", "auto", title="a held prompt, GB/s with all messages")
        for name in transports.split(","):
            for layout in PIECES:
                held.add_row(*held_row(name, measure_held(name, layout, source, destination, repeat)))
        after = plain_tcp_rate(source, destination)
    Console().print(table)
    Console().print(held)
    print(f"plain TCP: {before:.2f} GB/s before, {after:.2f} after")
    print({name: value for name, value in os.environ.items() if name.startswith("UCX_")})


def measure(name: str, source: VirtualHost, destination: VirtualHost, repeat: int) -> list[dict[str, Any]]:
    """Return the rates of one transport, with one process on each host."""
    moving = command(destination, "move", name, str(repeat))
    return measured(command(source, "serve", name), moving)


def measure_held(name: str, layout: str, source: VirtualHost, destination: VirtualHost, repeat: int) -> dict[str, Any]:
    """Return the seconds of loads of a held prompt, read and written."""
    program = str(Path(__file__).with_name("held_prompts.py"))
    loading = command(destination, "load", name, layout, str(repeat), program=program)
    [row] = measured(command(source, "hold", name, layout, program=program), loading)
    return row


def held_row(name: str, row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    rates = {way: NUM_BYTES / float(np.median(taken)) / 1e9 for way, taken in row["seconds"].items()}
    chosen = "written" if row["slow_reads"] else "read"
    return [name, f"{row['piece'] >> 10} KiB", *(f"{rates[way]:.2f}" for way in ("read", "written")), chosen]


def measured(serving: Sequence[str], moving: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that the moving side prints, which gets what the serving side says of itself."""
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            there = next(line for line in process.stdout if line.startswith("{"))
            found = subprocess.check_output(moving, input=there, text=True)
        finally:
            process.kill()
    return [json.loads(line) for line in found.splitlines() if line.startswith("{")]


def command(host: VirtualHost, *arguments: str, program: str = __file__) -> list[str]:
    """Return the command of one side, which listens at its host's address."""
    environment = ["env", f"MC_TCP_BIND_ADDRESS={host.ipv4}"]
    return host.command([*environment, sys.executable, program, *arguments, host.ipv4])


def serve(name: str, address: str) -> None:
    """Register memory, print where it is, and wait for the end of the input."""
    transport = open_transport(name, network=Network(address))
    buffer = allocate(2 * NUM_BYTES, huge=True)
    end_point = transport.register([Region(int(buffer.ctypes.data), buffer.nbytes)])
    print(json.dumps({"address": int(buffer.ctypes.data), "end_point": end_point.hex()}), flush=True)
    sys.stdin.read()


def move(name: str, repeat: int, address: str) -> None:
    """Read from and write to the other side; print the rates for each size of pieces."""
    there = json.loads(sys.stdin.readline())
    transport = open_transport(name, network=Network(address))
    buffer = allocate(2 * NUM_BYTES, huge=True)
    transport.register([Region(int(buffer.ctypes.data), buffer.nbytes)])
    peer = reach(transport, bytes.fromhex(there["end_point"]))
    for piece in PIECE_BYTES:
        if name == "mooncake" and piece < SMALLEST_OF_MOONCAKE:
            continue
        bases = np.array([there["address"], buffer.ctypes.data, 0], np.uint64)
        reads = scattered_offsets(NUM_BYTES, piece) + bases
        rates = {}
        for direction, descriptors in ((Direction.READ, reads), (Direction.WRITE, reads[:, [1, 0, 2]])):
            seconds = [moved(transport, peer, direction, descriptors) for _ in range(repeat + 1)]
            rates[direction.value] = NUM_BYTES / float(np.median(seconds[1:])) / 1e9
        print(json.dumps({"piece": piece, **rates}), flush=True)
    os._exit(0)


def moved(transport: Transport, peer: Peer, direction: Direction, descriptors: np.ndarray) -> float:
    """Return the seconds of one move."""
    started = time.perf_counter()
    transfer = transport.submit(peer, direction, np.ascontiguousarray(descriptors))
    while transport.poll(transfer) is Status.PENDING:
        if time.perf_counter() - started > MOVE_SECONDS:
            raise SystemExit(f"not moved within {MOVE_SECONDS} s")
        time.sleep(0.00005)
    if transfer.error is not None:
        raise transfer.error
    return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["move"]:
        move(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        typer.run(main)
