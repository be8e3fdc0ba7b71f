"""Measures the tiers behind the offload connector, each beside the roof of the same machine in the same run.

    python benchmarks/tiers.py --folder /var/tmp --json tiers.json

Four parts, interleaved round by round, medians shown:

* host: the connector's own copies between a cache and the slab, against ``memmove`` of as many bytes. A block is one
  piece where the cache is cross-layer too. A tier of per-layer blocks moves the same bytes in a piece for each layer:
  by the same copy, and by a call of torch for each piece. ``--pieces`` are bytes of a layer in a block.
* disk: the tier's blocks against ``pwritev`` and ``preadv`` with ``O_DIRECT``, pieces of the same size, as many
  threads. In runs of 4 MiB the same threads show what the disk can do at most.
* look-up: of a block, held or not, in each tier and through the stack.
* verify: ``kvferry tiers verify`` against reading the same files with as many threads.
"""

import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from disk import measure, threads_mover, tier_mover
from rich.console import Console
from rich.table import Table
from transport import parse_size
from transport_movers import allocate

sys.path.append(str(Path(__file__).parents[1]))

from kvferry.arrays import Bytes
from kvferry.cli.console import open_console, progress
from kvferry.execution.local_copy import LocalRoute, copy_blocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.disk.inspection import NUM_READERS, existing_directory, inspect, verify
from kvferry.tiers.disk.runs import RUN_BYTES
from kvferry.tiers.host_memory import HostMemory
from kvferry.tiers.local_disk import NUM_THREADS, LocalDisk
from kvferry.tiers.protocol import KEY_BYTES, BlockKey, Slots
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.tiers.stack import Stack
from kvferry.units import format_bytes
from tests.support.dense import shard_for

NUM_LAYERS, BLOCK_TOKENS = 36, 16
TOKEN_BYTES = 512
"""Most bytes of a token in one head and layer: 128 numbers of K and of V, in bfloat16."""
LOOK_UP_KEYS = 10_000
Row = dict[str, Any]


def main(
    folder: Annotated[Path | None, typer.Option(help="Where the disk tier's directory lies.")] = None,
    total: Annotated[str, typer.Option(help="Bytes to move in each measurement.")] = "144M",
    parts: Annotated[str, typer.Option(help="Parts to measure, separated by commas.")] = "host,look-up,disk,verify",
    pieces: Annotated[str, typer.Option(help="Bytes of a layer in a block of 16 tokens, separated by commas.")] = "64K",
    sizes: Annotated[str, typer.Option(help="Bytes of a block on disk, separated by commas.")] = "64K,512K,4M",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print a row for each figure: the tier, its roof, the share, and the target where there is one."""
    num_bytes, block_sizes = parse_size(total), [parse_size(size) for size in sizes.split(",")]
    measured: dict[str, Callable[[Path], list[Row]]] = {
        "host": lambda scratch: [
            row for piece in pieces.split(",") for row in host_rows(num_bytes, parse_size(piece), repeat)
        ],
        "look-up": lambda scratch: look_up_rows(scratch / "looked-up", repeat),
        "disk": lambda scratch: disk_rows(scratch, num_bytes, block_sizes, repeat),
        "verify": lambda scratch: verify_rows(scratch / "verified", num_bytes, repeat),
    }
    if unknown := set(parts.split(",")) - measured.keys():
        raise typer.BadParameter(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(measured)}.")
    rows: list[Row] = []
    with progress("measuring") as announce, tempfile.TemporaryDirectory(dir=folder) as scratch:
        for part in parts.split(","):
            announce(part)
            rows += measured[part](Path(scratch))
    command = "python " + " ".join(sys.argv)
    show(open_console(), rows, command)
    if json_path is not None:
        json_path.write_text(json.dumps({"command": command, "rows": rows}, indent=2))


# Host memory.


def host_rows(num_bytes: int, piece_bytes: int, repeat: int) -> list[Row]:
    """Return the rates of stores and loads for blocks of a bfloat16 model of 36 layers in blocks of 16 tokens."""
    kv_heads = max(1, piece_bytes // (BLOCK_TOKENS * TOKEN_BYTES))
    head_size, rest = divmod(piece_bytes, BLOCK_TOKENS * 2 * 2 * kv_heads)
    if not head_size or rest:
        raise typer.BadParameter(f"no layer has {piece_bytes} bytes in a block of {BLOCK_TOKENS} tokens.")

    def cache(layout: NamedLayout, num_blocks: int) -> Shard:
        return shard_for(
            layers=[str(layer) for layer in range(NUM_LAYERS)],
            num_kv_heads=kv_heads,
            head_size=head_size,
            itemsize=2,
            block_size=BLOCK_TOKENS,
            num_blocks=num_blocks,
            layout=layout,
        )

    block_bytes = cache(NamedLayout.BHLNC, 1).regions[0].length
    num_blocks = max(2, num_bytes // block_bytes)
    memory, slab_memory = allocate(num_blocks * block_bytes, huge=True), SlabMemory(num_blocks * block_bytes)
    base_address, slab_address = int(memory.ctypes.data), slab_memory.region.base_address
    slab = slab_shard([cache(NamedLayout.BHLNC, num_blocks)], {"full": num_blocks}, base_address=slab_address)
    order = np.random.default_rng(3).permutation(num_blocks)
    ids = GroupBlocks(
        group="full",
        first_token=0,
        last_token=num_blocks * BLOCK_TOKENS,
        source_block_ids=order.tolist(),
        destination_block_ids=list(range(num_blocks)),
    )
    moves: dict[str, Callable[[], None]] = {}
    kinds = {
        "a piece a block": (NamedLayout.BHLNC, slab),
        "a piece a layer": (NamedLayout.LBNHC, at(cache(NamedLayout.LBNHC, num_blocks), slab_address)),
        "per-layer cache, cross-layer slab": (NamedLayout.LBNHC, slab),
    }
    for name, (layout, place) in kinds.items():
        engine = at(cache(layout, num_blocks), base_address)
        moves[f"store, {name}"] = copying(LocalRoute([engine], place, own=[0]), ids)
        moves[f"load, {name}"] = copying(LocalRoute([place], engine, own=[0]), ids)
    cached, held = by_layer(base_address, num_blocks, piece_bytes), by_layer(slab_address, num_blocks, piece_bytes)
    moves["store, a torch copy a layer"] = copying_by_torch(cached, held, ids)
    moves["load, a torch copy a layer"] = copying_by_torch(held, cached, ids)
    moves["memcpy down"] = lambda: void(ctypes.memmove(slab_address, base_address, memory.nbytes))
    moves["memcpy up"] = lambda: void(ctypes.memmove(base_address, slab_address, memory.nbytes))
    check_copied(moves["store, a piece a block"], memory, slab_address, block_bytes, order)
    rates = rates_of(moves, memory.nbytes, repeat)
    slab_memory.close()
    what = f"{format_bytes(block_bytes)} blocks"
    rows = []
    for way, roof in (("store", "memcpy down"), ("load", "memcpy up")):
        whole, pieces = rates[f"{way}, a piece a block"], rates[f"{way}, a piece a layer"]
        rows.append(row(f"host {way}, cross-layer {what}", whole, "memcpy", rates[roof], target=0.8))
        many = f"{NUM_LAYERS} pieces of {format_bytes(piece_bytes)}"
        rows.append(row(f"host {way}, cross-layer {what}", whole, many, pieces, target=2.0))
        by_torch = rates[f"{way}, a torch copy a layer"]
        rows.append(row(f"host {way}, cross-layer {what}", whole, f"{many}, each by torch", by_torch))
        mixed = rates[f"{way}, per-layer cache, cross-layer slab"]
        rows.append(row(f"host {way}, per-layer cache", mixed, "memcpy", rates[roof]))
    return rows


def at(shard: Shard, base_address: int) -> Shard:
    """Return a shard in other memory."""
    [region] = shard.regions
    return msgspec.structs.replace(shard, regions=(Region(base_address, region.length),))


def copying(route: LocalRoute, blocks: GroupBlocks) -> Callable[[], None]:
    """Return the copy of these blocks, planned before."""
    copies = route.copies(0, [blocks])

    def copy() -> None:
        for each in copies:
            for _ in copy_blocks(each):
                pass

    return copy


def by_layer(address: int, num_blocks: int, piece_bytes: int) -> list[list[torch.Tensor]]:
    """Return the pieces in memory that has layers outermost: of each layer, of each block."""
    shape = NUM_LAYERS, num_blocks, piece_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * int(np.prod(shape))).from_address(address)).reshape(shape)
    return [list(layer) for layer in torch.from_numpy(memory)]


def copying_by_torch(
    source: Sequence[Sequence[torch.Tensor]], destination: Sequence[Sequence[torch.Tensor]], blocks: GroupBlocks
) -> Callable[[], None]:
    """Return the copy of these blocks by a call of torch for each block and layer, on one thread as the others."""
    ids = (np.asarray(chosen).tolist() for chosen in (blocks.source_block_ids, blocks.destination_block_ids))
    pairs = list(zip(*ids, strict=True))

    def copy() -> None:
        for of_source, of_destination in zip(source, destination, strict=True):
            for source_id, destination_id in pairs:
                of_destination[destination_id].copy_(of_source[source_id])

    torch.set_num_threads(1)
    return copy


def check_copied(store: Callable[[], None], memory: Bytes, slab_address: int, block_bytes: int, order: Any) -> None:
    """Compare all bytes of a store."""
    store()
    stored = np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(slab_address))
    expected = memory.reshape(-1, block_bytes)[order].reshape(-1)
    assert np.array_equal(stored, expected), "the slab has other bytes than the cache"


# Disk.


def disk_rows(scratch: Path, num_bytes: int, sizes: Sequence[int], repeat: int) -> list[Row]:
    """Return the rates of the disk tier and of the same pieces moved directly; the bytes read are compared."""
    rows = []
    for size in sizes:
        length = num_bytes // max(RUN_BYTES, size) * max(RUN_BYTES, size)
        memory = mmap.mmap(-1, length)
        raw = threads_mover(memory, NUM_THREADS)
        movers = {"tier": (tier_mover(memory, scratch / f"tier-{size}"), size), "raw": (raw, size)}
        if size < RUN_BYTES:
            movers["runs"] = (raw, RUN_BYTES)
        fd = os.open(scratch / f"pieces-{size}", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, length)
        seconds: dict[tuple[str, str], list[float]] = {}
        for turn in range(repeat + 1):
            for name, (mover, piece) in movers.items():
                for way, found in measure(mover, memory, fd, piece, turn).items():
                    if turn:  # the first turn writes the files for the first time
                        seconds.setdefault((name, way), []).append(found)
        os.close(fd)
        rates = {key: length / statistics.median(found) / 1e9 for key, found in seconds.items()}
        for way in ("write", "read"):
            what, threads = f"disk {way}, {format_bytes(size)} blocks", f"{NUM_THREADS} threads"
            rows.append(
                row(what, rates["tier", way], f"raw, the same pieces, {threads}", rates["raw", way], target=0.8)
            )
            if size < RUN_BYTES:
                rows.append(row(what, rates["tier", way], f"raw, runs of 4 MiB, {threads}", rates["runs", way]))
    return rows


def verify_rows(directory: Path, num_bytes: int, repeat: int) -> list[Row]:
    """Return the rate of ``kvferry tiers verify`` and of reading the same files, with as many threads."""
    size = 1 << 20
    memory = np.random.default_rng(5).integers(0, 256, num_bytes // size * size, np.uint8)
    region = Region(int(memory.ctypes.data), memory.nbytes)
    disk = LocalDisk(directory, memory.nbytes * 5 // 4, region)
    numbers = range(memory.nbytes // size)
    slots = Slots.of([region.base_address + number * size for number in numbers], [size] * len(numbers))
    store = disk.prepare_store(block_keys(*numbers), slots)
    while not store.has_ended:
        disk.poll()
        time.sleep(0.001)
    assert store.landed.all(), store.error
    disk.complete_store(store)
    disk.close()
    opened = existing_directory(directory)

    def verify_all() -> None:
        damaged = verify(opened, inspect(opened), lambda count: None)
        assert not damaged, damaged[0]

    def read_all() -> None:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(read_file, sorted(directory.glob("segment-*.kv"))))

    rates = rates_of({"verify": verify_all, "read": read_all}, memory.nbytes, repeat)
    opened.close()
    return [row("kvferry tiers verify", rates["verify"], f"reads of 4 MiB, {NUM_READERS} threads", rates["read"], 0.7)]


def block_keys(*numbers: int) -> list[BlockKey]:
    """Return the keys of these numbers."""
    return [number.to_bytes(KEY_BYTES, "big") for number in numbers]


def read_file(path: Path) -> None:
    """Read a file with direct access."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer, at = mmap.mmap(-1, RUN_BYTES), 0
    while found := os.preadv(fd, [buffer], at):
        at += found
    os.close(fd)


# Look-ups.


def look_up_rows(directory: Path, repeat: int) -> list[Row]:
    """Return the microseconds of a look-up of one block among 10,000, of which half are held."""
    held, other = block_keys(*range(LOOK_UP_KEYS // 2)), block_keys(*range(LOOK_UP_KEYS, LOOK_UP_KEYS * 3 // 2))
    cache = shard_for(
        layers=["0"],
        num_kv_heads=1,
        head_size=64,
        itemsize=2,
        block_size=BLOCK_TOKENS,
        num_blocks=1,
        layout=NamedLayout.BHLNC,
    )
    slot_bytes = cache.regions[0].length
    memory = SlabMemory(len(held) * slot_bytes)
    host = HostMemory(slab_shard([cache], {"full": len(held)}, base_address=memory.region.base_address))
    stored = host.prepare_store("full", held, num_parts=1)
    host.land(stored, 0)
    host.complete_store(stored)
    disk = LocalDisk(directory, 4 * len(held) * slot_bytes, memory.region)
    written = disk.prepare_store(held, stored.slots)
    while not written.has_ended:
        disk.poll()
    disk.complete_store(written)
    stack, keys = Stack(host, [disk]), held + other
    calls: dict[str, Callable[[], Any]] = {
        "host memory": lambda: host.look_up(keys),
        "disk": lambda: disk.look_up(keys),
        "stack of both": lambda: stack.locate(keys, 0.0),
    }
    seconds = {name: min(timed(call) for _ in range(5 * repeat)) for name, call in calls.items()}
    disk.close()
    memory.close()
    return [
        {
            "what": f"look-up of a block, {name}",
            "measured": found / len(keys) * 1e6,
            "unit": "us",
            "target": 1.0,
            "met": found / len(keys) < 1e-6,
        }
        for name, found in seconds.items()
    ]


# Both.


def rates_of(calls: Mapping[str, Callable[[], None]], num_bytes: int, repeat: int) -> dict[str, float]:
    """Return GB/s of each call, which take turns, so that a disturbance affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            found = timed(call)
            if turn:
                seconds[name].append(found)
    return {name: num_bytes / statistics.median(found) / 1e9 for name, found in seconds.items()}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def void(result: object) -> None:
    """Drop a result."""


def row(what: str, rate: float, roof: str, roof_rate: float, target: float | None = None) -> Row:
    """Return a figure beside its roof, both in GB/s."""
    found: Row = {"what": what, "measured": rate, "unit": "GB/s", "against": roof, "roof": roof_rate}
    found["share"] = rate / roof_rate
    if target is not None:
        found |= {"target": target, "met": found["share"] >= target}
    return found


def show(console: Console, rows: Sequence[Row], command: str) -> None:
    """Print all figures, and the command that measured them."""
    table = Table("what", "measured", "against", "roof", "share", "wanted", "", caption=command)
    for one in rows:
        has_roof, wanted = "roof" in one, one.get("target")
        sign = "" if has_roof else "< "
        table.add_row(
            one["what"],
            f"{one['measured']:.2f} {one['unit']}",
            one.get("against", ""),
            f"{one['roof']:.2f} GB/s" if has_roof else "",
            f"{one['share']:.2f}" if has_roof else "",
            "" if wanted is None else f"{sign}{wanted:g}",
            "" if wanted is None else "met" if one["met"] else "missed",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
