"""Measures reads and writes with O_DIRECT: the disk tier, preadv and pwritev on threads, and NIXL's POSIX plug-in.

    python benchmarks/disk.py --folder /var/tmp --sizes 64K,256K,1M,4M,8M --json disk.json

Each mover writes its bytes to shuffled places of a file and reads them back, where they are compared. All take turns.
The disk tier stores and loads the same pieces as blocks, in one batch, with their checksums.
"""

import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from rich.table import Table
from transport import parse_size

from kvferry.cli.console import open_console, progress
from kvferry.layout.shard import Region
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import Load, Slots, Store
from kvferry.units import format_bytes


class Mover(Protocol):
    """Moves pieces of ``size`` bytes between a file and memory; ``places`` are indices of pieces in both."""

    def __call__(self, write: bool, fd: int, size: int, places: list[int]) -> None: ...


def threads_mover(memory: mmap.mmap, num_threads: int) -> Mover:
    """Return a mover that calls preadv and pwritev on ``num_threads`` threads."""
    pool = ThreadPoolExecutor(num_threads)
    view = memoryview(memory)

    def move(write: bool, fd: int, size: int, places: list[int]) -> None:
        def one(place: int) -> None:
            pieces = [view[place * size : (place + 1) * size]]
            moved = (os.pwritev if write else os.preadv)(fd, pieces, place * size)
            assert moved == size, f"moved {moved} of {size} bytes"

        for _ in pool.map(one, places):
            pass

    return move


def nixl_mover(memory: mmap.mmap, queue: str) -> Mover:
    """Return a mover of NIXL's POSIX plug-in. ``queue`` is ``use_aio`` or ``use_uring``."""
    from nixl import _bindings as nixl  # type: ignore[import-untyped]

    config = nixl.nixlAgentConfig()
    config.useProgThread = False
    name = f"disk-{queue}"
    agent = nixl.nixlAgent(name, config)
    backend = agent.createBackend("POSIX", {queue: "true"})
    address = np.frombuffer(memory, np.uint8).ctypes.data
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, len(memory), 0, "")]), [backend])
    files: dict[int, Any] = {}

    def move(write: bool, fd: int, size: int, places: list[int]) -> None:
        if fd not in files:
            files[fd] = nixl.nixlRegDList(nixl.FILE_SEG, [(0, len(memory), fd, "")])
            agent.registerMem(files[fd], [backend])
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(address + place * size, size, 0) for place in places])
        remote = nixl.nixlXferDList(nixl.FILE_SEG, [(place * size, size, fd) for place in places])
        operation = nixl.NIXL_WRITE if write else nixl.NIXL_READ
        handle = agent.createXferReq(operation, local, remote, name, "", [backend])
        status = agent.postXferReq(handle)
        while status == nixl.NIXL_IN_PROG:
            status = agent.getXferStatus(handle)
        agent.releaseXferReq(handle)

    return move


def tier_mover(memory: mmap.mmap, directory: Path) -> Mover:
    """Return a mover of the disk tier, which holds the blocks of the last write."""
    region = Region(int(np.frombuffer(memory, np.uint8).ctypes.data), len(memory))
    disk = LocalDisk(directory, len(memory) * 3 // 2, region)
    generation = 0

    def move(write: bool, fd: int, size: int, places: list[int]) -> None:
        nonlocal generation
        generation += write
        keys = [(generation << 32 | place).to_bytes(48, "big") for place in places]
        slots = Slots.of([region.base_address + place * size for place in places], [size] * len(places))
        copy = (disk.prepare_store if write else disk.prepare_load)(keys, slots)
        while not copy.has_ended:
            disk.poll()
            time.sleep(0.0001)
        assert copy.landed.all(), copy.error
        if isinstance(copy, Store):
            disk.complete_store(copy)
        elif isinstance(copy, Load):
            disk.complete_load(copy)

    return move


def main(
    folder: Annotated[Path | None, typer.Option(help="Where the file lies.")] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of one piece, separated by commas.")] = "64K,256K,1M,4M,8M",
    total: Annotated[str, typer.Option(help="Bytes of the file, a multiple of every size.")] = "256M",
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2,4,8",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print the rates in GB/s, write and read."""
    num_bytes, piece_sizes = parse_size(total), [parse_size(size) for size in sizes.split(",")]
    memory = mmap.mmap(-1, num_bytes)
    movers = {f"threads {count}": threads_mover(memory, int(count)) for count in threads.split(",")}
    movers |= {f"nixl {queue}": nixl_mover(memory, queue) for queue in ("use_aio", "use_uring")}
    rates: dict[tuple[str, int, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch, progress("measuring") as announce:
        movers["disk tier"] = tier_mover(memory, Path(scratch) / "tier")
        fd = os.open(f"{scratch}/pieces", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, num_bytes)
        for size in piece_sizes:
            announce(format_bytes(size))
            for turn in range(repeat + 1):
                for name, mover in movers.items():
                    for direction, seconds in measure(mover, memory, fd, size, turn).items():
                        if turn:  # the first turn writes the file for the first time
                            rates.setdefault((name, size, direction), []).append(num_bytes / seconds / 1e9)
        os.close(fd)
    show(movers, piece_sizes, {key: statistics.median(found) for key, found in rates.items()})
    if json_path is not None:
        rows = [{"mover": key[0], "size": key[1], "direction": key[2], "rates": found} for key, found in rates.items()]
        json_path.write_text(json.dumps(rows, indent=2))


def measure(mover: Mover, memory: mmap.mmap, fd: int, size: int, turn: int) -> dict[str, float]:
    """Return the seconds of writing and of reading the whole file; the bytes read are compared."""
    places = list(range(len(memory) // size))
    random.Random(turn).shuffle(places)
    label = random.Random(turn).randbytes(4096)
    for place in places:
        memory[place * size : place * size + 4096] = label
    seconds = {"write": timed(lambda: mover(True, fd, size, places))}
    for place in places:
        memory[place * size : place * size + 4096] = bytes(4096)
    seconds["read"] = timed(lambda: mover(False, fd, size, places))
    assert all(memory[place * size : place * size + 4096] == label for place in places), "other bytes came back"
    return seconds


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def show(movers: dict[str, Mover], sizes: list[int], rates: dict[tuple[str, int, str], float]) -> None:
    """Print a row for each mover: write / read rates for each size."""
    table = Table(title="GB/s, write / read, medians")
    table.add_column("mover")
    for size in sizes:
        table.add_column(format_bytes(size), justify="right")
    for name in movers:
        table.add_row(name, *(f"{rates[name, size, 'write']:.2f} / {rates[name, size, 'read']:.2f}" for size in sizes))
    open_console().print(table)


if __name__ == "__main__":
    typer.run(main)
