"""Measures the GPU kernel that copies a stage into the cache, and for comparison one large copy within the device.

    python benchmarks/device_merge.py --json device_merge.json

A case is one decode rank's request in scattered blocks: the kernel copies a stage that the planner fills for a pair of
engines into a cache (TP 2 to 1: the heads of two ranks side by side; TP 1 to 2: half the heads of each page). For cases
of up to 512 MiB the bytes are first compared with the CPU's copies. Kernel and large copy take turns and are timed by
CUDA events behind a pause, so that launches are not part of the time; the result is the median. Each byte counts once.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from kvferry.cli.console import open_console
from kvferry.execution.device_merge import DeviceCopies, prepare
from kvferry.execution.stage import put_in_place
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.planner import Planner
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import Merge, ScatterPlan, stage_offsets
from kvferry.plan.staging.strategy import TYPICAL_COSTS
from kvferry.units import format_bytes

BLOCK_SIZE, KV_HEADS, HEAD_SIZE, ITEMSIZE = 16, 8, 128, 2
MODELS = {"Llama 8B": 32, "Llama 70B": 80}
"""Numbers of layers; both models have 8 KV heads of 128 channels."""
LAYOUTS = (NamedLayout.LBNHC, NamedLayout.BLNHC, NamedLayout.BHLNC)
LARGE_BYTES = 1 << 30
CHECKED_BYTES = 512 << 20
PAUSE_CYCLES = 1_000_000
NO_DEVICE = 2


@dataclass(frozen=True)
class Case:
    """A request of ``tokens`` between engines of these tensor-parallel sizes."""

    model: str
    layers: int
    source_tp: int
    destination_tp: int
    tokens: int
    layout: NamedLayout

    @property
    def num_blocks(self) -> int:
        """The blocks of the request, which are all blocks of the cache."""
        return -(-self.tokens // BLOCK_SIZE)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the decode rank's cache."""
        return self._shard(0, 1 << 40, self.destination_tp).regions[0].length

    def merges(self, cache_address: int) -> tuple[list[Merge], int]:
        """Return the copies from a stage with the whole request, and the bytes of that stage."""
        sources = [self._shard(rank, (rank + 1) << 44, self.source_tp) for rank in range(self.source_tp)]
        generator = np.random.default_rng(0)
        request = GroupBlocks(
            group="full",
            first_token=0,
            last_token=self.tokens,
            source_block_ids=generator.permutation(self.num_blocks),
            destination_block_ids=generator.permutation(self.num_blocks),
        )
        gap_bytes = TYPICAL_COSTS["nixl"].gap_bytes
        plans = Planner(sources, self._shard(0, cache_address, self.destination_tp)).plans(0)
        staged = [(0, blocks) for plan in plans for blocks in ScatterPlan(plan, gap_bytes).staged_blocks([request])]
        offsets, num_bytes = stage_offsets(staged)
        merges = [merge for at, (_, blocks) in zip(offsets, staged, strict=True) for merge in blocks.merges(at)]
        return merges, num_bytes

    def _shard(self, tp_rank: int, base_address: int, tp_size: int) -> Shard:
        return shard_for(
            layers=[str(layer) for layer in range(self.layers)],
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            layout=self.layout,
            tp_rank=tp_rank,
            tp_size=tp_size,
            base_address=base_address,
        )


@dataclass(frozen=True)
class Row:
    """One case. Rates are 10^9 bytes per second; ``share`` is the kernel's rate divided by the large copy's."""

    model: str
    engines: str
    tokens: int
    layout: str
    bytes: int
    shortest_run: int
    prepare_ms: float
    merge_gb_s: float
    large_copy_gb_s: float
    share: float
    checked: bool


class Bench:
    """Memory on the device for one case, and its copies."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.cache = torch.zeros(case.cache_bytes, dtype=torch.uint8, device=device)
        self.merges, stage_bytes = case.merges(self.cache.data_ptr())
        self.stage = torch.randint(0, 256, (stage_bytes,), dtype=torch.uint8, device=device)
        self.moved = sum(merge.num_runs * merge.run_bytes for merge in self.merges)

    def prepared(self) -> DeviceCopies:
        """Return the copies, ready to launch."""
        copies = prepare(self.merges, self.stage.data_ptr(), self.cache.device)
        assert copies is not None
        return copies

    def is_exact(self) -> bool:
        """Return whether the kernel moves the bytes that the CPU's copies move."""
        self.cache.zero_()
        self.prepared().merge()
        stage = self.stage.cpu().numpy()
        by_cpu = np.zeros(self.cache.numel(), dtype=np.uint8)
        shift = int(by_cpu.ctypes.data) - self.cache.data_ptr()
        for merge in self.merges:
            put_in_place(replace(merge, destination_address=merge.destination_address + shift), stage.ctypes.data)
        return np.array_equal(self.cache.cpu().numpy(), by_cpu)


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    tokens: Annotated[str, typer.Option(help="Tokens of a request, separated by commas.")] = "1024,10240",
    repeat: Annotated[int, typer.Option(min=1)] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Print the table. Exit code 1 if a byte is wrong, 2 without a GPU."""
    unknown = set(models.split(",")) - set(MODELS)
    if unknown:
        raise typer.BadParameter(f"there is no {sorted(unknown)}; there are {list(MODELS)}.")
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs a CUDA device, and torch finds none: no measurement.", err=True)
        raise typer.Exit(NO_DEVICE)
    device = torch.device("cuda", torch.cuda.current_device())
    large = tuple(torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    rows = [measure(case, device, large, repeat) for case in fitting(cases(models, tokens), device)]
    print_rows(rows, torch.cuda.get_device_name(device))
    if json_path is not None:
        report = {"device": torch.cuda.get_device_name(device), "repeat": repeat, "rows": list(map(asdict, rows))}
        json_path.write_text(json.dumps(report, indent=2))


def cases(models: str, tokens: str) -> Iterator[Case]:
    """Yield the cases of all models, requests, pairs of engines and layouts."""
    for model, number, engines, layout in product(models.split(","), tokens.split(","), ((2, 1), (1, 2)), LAYOUTS):
        yield Case(model, MODELS[model], *engines, int(number), layout)


def fitting(found: Iterator[Case], device: torch.device) -> Iterator[Case]:
    """Yield the cases that fit into the device's memory; print the others."""
    for case in found:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        needed = case.cache_bytes + case.merges(0)[1]
        if needed < 0.9 * free:
            yield case
        else:
            typer.echo(f"left out, {format_bytes(needed)} do not fit: {case}", err=True)


def measure(case: Case, device: torch.device, large: Sequence[torch.Tensor], repeat: int) -> Row:
    """Time one case."""
    bench = Bench(case, device)
    checked = bench.moved <= CHECKED_BYTES
    if checked and not bench.is_exact():
        typer.echo(f"wrong bytes: {case}", err=True)
        raise typer.Exit(1)
    began_at = time.perf_counter()
    copies = bench.prepared()
    prepare_ms = (time.perf_counter() - began_at) * 1e3
    merge, copy = medians([copies.merge, lambda: large[0].copy_(large[1])], repeat)
    rates = [bench.moved / merge / 1e9, LARGE_BYTES / copy / 1e9]
    return Row(
        model=case.model,
        engines=f"TP {case.source_tp} to {case.destination_tp}",
        tokens=case.tokens,
        layout=case.layout.value,
        bytes=bench.moved,
        shortest_run=min(found.run_bytes for found in bench.merges),
        prepare_ms=prepare_ms,
        merge_gb_s=rates[0],
        large_copy_gb_s=rates[1],
        share=rates[0] / rates[1],
        checked=checked,
    )


def medians(operations: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Return the median seconds of each operation. They take turns; the first run of each does not count."""
    seconds: list[list[float]] = [[] for _ in operations]
    for number in range(repeat + 1):
        for operation, found in zip(operations, seconds, strict=True):
            elapsed = elapsed_seconds(operation)
            if number:
                found.append(elapsed)
    return [statistics.median(found) for found in seconds]


def elapsed_seconds(operation: Callable[[], object]) -> float:
    """Return the device's seconds for an operation. The pause before it hides the time of the launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    operation()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def print_rows(rows: Sequence[Row], device: str) -> None:
    """Print one line for each case."""
    table = Table(title=f"Stage to cache on {device}, GB/s; large copy of {format_bytes(LARGE_BYTES)}")
    for column in ("model", "engines", "layout"):
        table.add_column(column)
    for column in ("tokens", "bytes", "run", "prepare", "merge", "copy", "share"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = format_bytes(row.bytes), format_bytes(row.shortest_run), f"{row.prepare_ms:.2f} ms"
        rates = (f"{rate:.0f}" for rate in (row.merge_gb_s, row.large_copy_gb_s))
        table.add_row(row.model, row.engines, row.layout, str(row.tokens), *sizes, *rates, f"{row.share:.2f}")
    open_console().print(table)


if __name__ == "__main__":
    typer.run(main)
