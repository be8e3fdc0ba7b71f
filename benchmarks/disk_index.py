"""Measures how long a disk tier needs to find its blocks again after SIGKILL: the time to open its directory.

    python benchmarks/disk_index.py --blocks 100000 --repeat 5

A child stores the blocks, of one page each, and is killed once their headers are written. Then the directory is opened
several times: with the segment files in the page cache, and after the kernel was asked to drop them. Blocks that are
longer have the same headers; with them the files are longer, and the index is not.
"""

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvferry.cli.console import open_console, progress
from kvferry.layout.shard import Region
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import Slots

BLOCK_BYTES, BATCH, TARGET_SECONDS = 4096, 2000, 2.0


def key_of(number: int) -> bytes:
    """Return the key of a block."""
    return number.to_bytes(48, "big")


def store_and_be_killed(directory: Path, capacity: int, num_blocks: int) -> None:
    """Store blocks of one page each in a child, which is killed with SIGKILL."""
    child = os.fork()
    if not child:
        try:
            memory = np.zeros((BATCH + 1) * BLOCK_BYTES, np.uint8)
            first = int(memory.ctypes.data) // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES
            disk = LocalDisk(directory, capacity, Region(first, BATCH * BLOCK_BYTES))
            for start in range(0, num_blocks, BATCH):
                keys = [key_of(number) for number in range(start, min(start + BATCH, num_blocks))]
                slots = Slots.of([first + place * BLOCK_BYTES for place in range(len(keys))], [BLOCK_BYTES] * len(keys))
                store = disk.prepare_store(keys, slots)
                while not store.has_ended:
                    disk.poll()
                disk.complete_store(store)
            while disk.snapshot()["num_waiting"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL, f"the child ended with status {status}"


def drop_from_page_cache(directory: Path) -> None:
    """Ask the kernel to drop the clean pages of all files."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def open_seconds(directory: Path, capacity: int, num_blocks: int) -> tuple[float, float]:
    """Open the directory; return the seconds by the clock and of this process, once all blocks were found."""
    began_at, began_cpu = time.perf_counter(), time.process_time()
    disk = LocalDisk(directory, capacity, Region(BLOCK_BYTES, BLOCK_BYTES))
    seconds, cpu = time.perf_counter() - began_at, time.process_time() - began_cpu
    found = disk.snapshot()["num_blocks"]
    disk.close()
    assert found == num_blocks, f"{found} of {num_blocks} blocks were found"
    return seconds, cpu


def main(
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 100_000,
    repeat: Annotated[int, typer.Option(min=1, help="How often the directory is opened.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where the directory is made.")] = None,
) -> None:
    """Print the time to open a directory."""
    capacity = int(blocks * BLOCK_BYTES * 1.1) + (1 << 20)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        directory = Path(made) / "tier"
        times: dict[str, list[tuple[float, float]]] = {"from the page cache": [], "after it was dropped": []}
        with progress("storing") as announce:
            store_and_be_killed(directory, capacity, blocks)
            for turn in range(repeat):
                announce(f"opening, turn {turn + 1}")
                for name, found in times.items():
                    if name.startswith("after"):
                        drop_from_page_cache(directory)
                    found.append(open_seconds(directory, capacity, blocks))
    for name, found in times.items():
        seconds, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        slowest = max(each for each, _ in found)
        verdict = "met" if slowest <= TARGET_SECONDS else "missed"
        open_console().print(
            f"{blocks} blocks {name}: {seconds:.2f} s (slowest {slowest:.2f} s, processor time {cpu:.2f} s); "
            f"target {TARGET_SECONDS:g} s, {verdict}"
        )


if __name__ == "__main__":
    typer.run(main)
