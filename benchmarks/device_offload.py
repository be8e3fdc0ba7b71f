"""Measures offload's copies between a device and a pinned slab, and for comparison one large copy by torch.

    python benchmarks/device_offload.py --json device_offload.json

A case is one rank of a model with 8 KV heads of 128 channels in two bytes, whose request of scattered blocks is stored
in a slab and loaded again by jobs of a transfer thread, as the connector does: with the buffer for short pieces, and
without it, where the driver copies each piece. Jobs and large copies take turns; the result is the median of their
times as the thread that submits sees them. Before that the bytes of a store one way and a load the other way are
compared.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
import typer
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from kvferry.cli.console import open_console
from kvferry.execution.device import device_order
from kvferry.execution.device_gather import take_buffer
from kvferry.execution.executor import Executor
from kvferry.execution.local_copy import LocalCopy, LocalRoute, PinnedMemory
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.slab_memory import SlabMemory
from tests.support.dense import shard_for

LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, ITEMSIZE = 36, 16, 8, 128, 2
RATES = ("store", "load", "store by pieces", "load by pieces", "store by torch", "load by torch")
JOB_SECONDS = 60.0
PIECEWISE_REPEAT = 3
NO_DEVICE = 2


@dataclass(frozen=True)
class Row:
    """One case; rates are 10^9 bytes per second."""

    layout: str
    tp_size: int
    tokens: int
    bytes: int
    runs: int
    store_gb_s: float
    load_gb_s: float
    piecewise_store_gb_s: float
    piecewise_load_gb_s: float
    torch_store_gb_s: float
    torch_load_gb_s: float


class Bench:
    """One rank's cache on the device, a slab for all ranks, and the jobs between them."""

    def __init__(self, layout: NamedLayout, tp_size: int, tokens: int, device: str) -> None:
        self.num_blocks = tokens // BLOCK_SIZE
        shards = [
            shard_for(
                layers=[str(layer) for layer in range(LAYERS)],
                num_kv_heads=KV_HEADS,
                head_size=HEAD_SIZE,
                itemsize=ITEMSIZE,
                block_size=BLOCK_SIZE,
                num_blocks=self.num_blocks,
                layout=layout,
                tp_rank=rank,
                tp_size=tp_size,
                base_address=(rank + 1) << 44,
            )
            for rank in range(tp_size)
        ]
        self.cache = torch.zeros(shards[0].regions[0].length, dtype=torch.uint8, device=device)
        region = Region(self.cache.data_ptr(), self.cache.numel(), device)
        shards[0] = msgspec.structs.replace(shards[0], regions=(region,))
        slab = slab_shard(shards, {"full": self.num_blocks})
        self.slab = SlabMemory(slab.regions[0].length)
        slab = msgspec.structs.replace(slab, regions=(self.slab.region,))
        self.stores, self.loads = LocalRoute(shards, slab, own=[0]), LocalRoute([slab], shards[0], own=[0])
        self.order = device_order([device])
        self.buffer = take_buffer(self.order)
        if self.buffer is None:
            typer.echo("no buffer can be taken; the log says why.", err=True)
            raise typer.Exit(NO_DEVICE)
        self.pinned = PinnedMemory(self.slab.region, self.order, self.buffer)
        self.executor = Executor(order=self.order)
        self.ids = np.random.default_rng(0).permutation(self.num_blocks)
        self.runs = 0

    def copy(self, *, is_load: bool, by_piece: bool = False) -> None:
        """Store or load the request; ``by_piece`` without the buffer."""
        here, there = self.ids, self.ids[::-1]
        blocks = GroupBlocks(
            group="full",
            first_token=0,
            last_token=self.num_blocks * BLOCK_SIZE,
            source_block_ids=there if is_load else here,
            destination_block_ids=here if is_load else there,
        )
        route, after = (self.loads if is_load else self.stores), self.order.mark()
        self.pinned.buffer = None if by_piece else self.buffer
        self.executor.submit(LocalCopy("copy", route, 0, [blocks], after, self.pinned.copying, fills_blocks=is_load))
        [result] = self.executor.collect(JOB_SECONDS)
        if result.error is not None:
            raise result.error
        self.runs = result.num_descriptors

    def is_exact(self, *, by_piece: bool) -> bool:
        """Return whether a load brings back what a store has taken, where only one of the two uses the buffer."""
        content = torch.randint(0, 256, self.cache.shape, dtype=torch.uint8, device=self.cache.device)
        self.cache.copy_(content)
        self.copy(is_load=False, by_piece=by_piece)
        self.cache.zero_()
        self.copy(is_load=True, by_piece=not by_piece)
        return torch.equal(self.cache, content)

    def close(self) -> None:
        """Give the memory back."""
        self.executor.close()
        self.pinned.close()
        self.slab.close()


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of a request, separated by commas.")] = "1024,8192",
    repeat: Annotated[int, typer.Option(min=1)] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Print the table. Exit code 1 if a byte is wrong, 2 without a GPU."""
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs a CUDA device, and torch finds none: no measurement.", err=True)
        raise typer.Exit(NO_DEVICE)
    device = "cuda:0"
    cases = product(NamedLayout, (1, 2), map(int, tokens.split(",")))
    rows = [measure(layout, tp_size, number, device, repeat) for layout, tp_size, number in cases]
    print_rows(rows, torch.cuda.get_device_name(device))
    if json_path is not None:
        report = {"device": torch.cuda.get_device_name(device), "repeat": repeat, "rows": list(map(asdict, rows))}
        json_path.write_text(json.dumps(report, indent=2))


def measure(layout: NamedLayout, tp_size: int, tokens: int, device: str, repeat: int) -> Row:
    """Time one case."""
    bench = Bench(layout, tp_size, tokens, device)
    if not (bench.is_exact(by_piece=False) and bench.is_exact(by_piece=True)):
        typer.echo(f"wrong bytes: {layout}, TP {tp_size}, {tokens} tokens", err=True)
        raise typer.Exit(1)
    num_bytes = bench.cache.numel()
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    operations = [
        lambda: bench.copy(is_load=False),
        lambda: bench.copy(is_load=True),
        lambda: _finished(on_host.copy_(bench.cache, non_blocking=True), device),
        lambda: _finished(bench.cache.copy_(on_host, non_blocking=True), device),
    ]
    by_piece = [
        lambda: bench.copy(is_load=False, by_piece=True),
        lambda: bench.copy(is_load=True, by_piece=True),
    ]
    # These may take seconds each.
    store, load, *by_torch = medians(operations, repeat)
    seconds = [store, load, *medians(by_piece, min(repeat, PIECEWISE_REPEAT)), *by_torch]
    rates = [num_bytes / each / 1e9 for each in seconds]
    bench.close()
    return Row(layout.value, tp_size, tokens, num_bytes, bench.runs, *rates)


def _finished(_: torch.Tensor, device: str) -> None:
    torch.cuda.synchronize(device)


def medians(operations: Sequence[Callable[[], None]], repeat: int) -> list[float]:
    """Return the median seconds of each operation. They take turns; the first run of each does not count."""
    seconds: list[list[float]] = [[] for _ in operations]
    for number in range(repeat + 1):
        for operation, found in zip(operations, seconds, strict=True):
            began_at = time.perf_counter()
            operation()
            if number:
                found.append(time.perf_counter() - began_at)
    return [statistics.median(found) for found in seconds]


def print_rows(rows: Sequence[Row], device: str) -> None:
    """Print one line for each case."""
    table = Table(title=f"Between {device} and a pinned slab, GB/s")
    for column in ("layout", "TP", "tokens", "bytes", "runs", *RATES):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        gathered, by_piece = (row.store_gb_s, row.load_gb_s), (row.piecewise_store_gb_s, row.piecewise_load_gb_s)
        rates = *gathered, *by_piece, row.torch_store_gb_s, row.torch_load_gb_s
        counts = row.tp_size, row.tokens, row.bytes, row.runs
        table.add_row(row.layout, *map(str, counts), *(f"{rate:.1f}" for rate in rates))
    open_console().print(table)


if __name__ == "__main__":
    typer.run(main)
