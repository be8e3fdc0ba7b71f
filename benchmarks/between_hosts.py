"""The rates at which transports read and write between two virtual hosts, beside one plain TCP connection.

    sudo python benchmarks/between_hosts.py
    sudo python benchmarks/between_hosts.py --mtu 9000 --transports nixl --json
    sudo UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=256k python benchmarks/between_hosts.py

64 MiB move in equal pieces, in random order and with gaps, in memory in huge pages. Reads and writes take turns. Each
run has processes of its own and gives a median; the table shows the median of all runs with the smallest and the
greatest, and the ratio of write to read within each run. Variables of UCX reach both sides. Mooncake is found as the
tests find it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from plain_tcp import plain_tcp_rate, set_mtu
from rich.table import Table
from transport_movers import allocate, scattered_offsets

sys.path.append(str(Path(__file__).parents[1]))

from kvferry.cli.console import open_console, progress
from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts
from kvferry.layout.shard import Region
from kvferry.transport.network import Network
from kvferry.transport.protocol import Direction, Peer, Status, Transport, reach
from kvferry.transport.registry import open_transport
from tests import mooncake_libraries

NUM_BYTES = 64 << 20
PIECE_BYTES = (8 << 20, 64 << 10, 16 << 10, 4 << 10)
SMALLEST_OF_MOONCAKE = 16 << 10
MOVE_SECONDS = 60.0


def main(
    transports: Annotated[str, typer.Option(help="Transports, with commas.")] = "nixl,mooncake",
    mtu: Annotated[int, typer.Option(help="The longest packet of the link, in bytes.")] = 1500,
    repeat: Annotated[int, typer.Option(min=1, help="Moves of each kind in a run.")] = 9,
    runs: Annotated[int, typer.Option(min=1, help="Runs.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print every run as JSON.")] = False,
) -> None:
    """Measure and print a table."""
    found = []
    with tempfile.TemporaryDirectory() as folder, virtual_hosts(["source", "destination"], Path(folder)) as hosts:
        source, destination = hosts
        for host in hosts:
            set_mtu(host, mtu)
        with progress("measuring") as announce:
            for number in range(runs):
                announce(f"run {number + 1} of {runs}")
                found.append(one_run(transports.split(","), source, destination, repeat))
    ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    if as_json:
        print(json.dumps({"mtu": mtu, "environment": ucx, "runs": found}))
        return
    open_console().print(table_of(f"GB/s between two virtual hosts, MTU {mtu}", [run["moves"] for run in found]))
    print(f"plain TCP: {spread([rate for run in found for rate in run['plain_tcp']])} GB/s; {ucx}")


def one_run(transports: Sequence[str], source: VirtualHost, destination: VirtualHost, repeat: int) -> dict[str, Any]:
    """Return the rates of plain TCP before and after, and of moves."""
    before = plain_tcp_rate(source, destination)
    moves = [row for name in transports for row in measure(name, source, destination, repeat)]
    return {"plain_tcp": [before, plain_tcp_rate(source, destination)], "moves": moves}


def table_of(title: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """Return a table of rows that every run has."""
    table = Table("transport", "piece", "read", "written", "written / read", title=title)
    for rows in zip(*runs, strict=True):
        rates = [[row[way] for row in rows] for way in ("read", "written")]
        ratios = [row["written"] / row["read"] for row in rows]
        table.add_row(rows[0]["transport"], f"{rows[0]['piece'] >> 10} KiB", *map(spread, [*rates, ratios]))
    return table


def spread(values: Sequence[float]) -> str:
    """Return the median, and between which values it lies.

    >>> spread([1.0, 1.5, 1.25])
    '1.25 (1.00 to 1.50)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(name: str, source: VirtualHost, destination: VirtualHost, repeat: int) -> list[dict[str, Any]]:
    """Return the rates of one transport, with one process on each host."""
    moving = command(destination, "move", name, str(repeat))
    return measured(command(source, "serve", name), moving)


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


def command(host: VirtualHost, *arguments: str) -> list[str]:
    """Return the command of one side, which listens at its host's address."""
    variables = {"MC_TCP_BIND_ADDRESS": host.ipv4}
    if "mooncake" in arguments:
        variables |= mooncake_libraries.variables()
    environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
    return host.command([*environment, sys.executable, __file__, *arguments, host.ipv4])


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
        ways = {"read": (Direction.READ, reads), "written": (Direction.WRITE, reads[:, [1, 0, 2]])}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeat + 1):
            for way, (direction, descriptors) in ways.items():
                seconds[way].append(moved(transport, peer, direction, descriptors))
        rates = {way: NUM_BYTES / statistics.median(taken[1:]) / 1e9 for way, taken in seconds.items()}
        print(json.dumps({"transport": name, "piece": piece, **rates}), flush=True)
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
