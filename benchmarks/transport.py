"""Measures transports between two processes, and for comparison memcpy in one process and a plain NIXL program.

    python benchmarks/transport.py --transport cma --sizes 64K,512K --no-small --json transport.json

Each transport's bytes are compared before any is timed. All take turns, so that a disturbance affects all of them.
"""

import json
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transport_movers import (
    MemcpyMover,
    PlainNixl,
    allocate,
    copied_exactly,
    huge_share,
    open_movers,
    scattered_offsets,
)

from kvferry.arrays import Descriptors
from kvferry.cli.console import open_console, progress
from kvferry.transport.registry import check_setting
from kvferry.units import format_bytes

IDLE_SECONDS = 2.0
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Measure = Callable[[Descriptors], float]


def main(
    transport: Annotated[str, typer.Option(help="Transports to measure, separated by commas.")] = "cma,nixl",
    huge: Annotated[bool, typer.Option(help="Measure in huge pages.")] = True,
    small: Annotated[bool, typer.Option(help="Measure in 4 KiB pages.")] = True,
    sizes: Annotated[str, typer.Option(help="Bytes of a descriptor, separated by commas.")] = "4K,16K,64K,512K,64M",
    total: Annotated[str, typer.Option(help="Bytes to move, a multiple of every size.")] = "64M",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print the rates, and in huge pages whether they meet the targets."""
    names = [name.strip() for name in transport.split(",")]
    num_bytes, descriptor_bytes = parse_size(total), [parse_size(size) for size in sizes.split(",")]
    for size in descriptor_bytes:
        if num_bytes % size:
            raise typer.BadParameter(f"{num_bytes} bytes are not a multiple of descriptors of {size} bytes.")
    for name in names:
        check_setting(name)
    halves = []
    with progress("measuring") as announce:
        for kind, wanted in ((True, huge), (False, small)):
            if wanted:
                announce("transports in huge pages" if kind else "transports in 4 KiB pages")
                halves.append(measure_pages(names, num_bytes, descriptor_bytes, repeat, kind))
    verdicts = [verdict for half in halves if half["pages"] == "huge" for verdict in judge(half)]
    console = open_console()
    for half in halves:
        print_half(console, half)
    if verdicts:
        print_verdicts(console, verdicts)
    if json_path is not None:
        measured = {"bytes": num_bytes, "repeat": repeat, "halves": halves, "targets": verdicts}
        json_path.write_text(json.dumps(measured, indent=2))


def parse_size(text: str) -> int:
    """Return a size such as ``64K`` in bytes.

    >>> parse_size("512K"), parse_size("1M"), parse_size("100")
    (524288, 1048576, 100)
    """
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)(iB)?", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 4K, 512K or 64M.")
    return int(match[1]) * UNITS[match[2]]


def measure_pages(
    names: Sequence[str], num_bytes: int, sizes: Sequence[int], repeat: int, huge: bool
) -> dict[str, Any]:
    """Return one half of the report: all sizes in one kind of pages."""
    with ExitStack() as stack:
        source, local = allocate(2 * num_bytes, huge), allocate(2 * num_bytes, huge)
        movers, child = stack.enter_context(open_movers(names, num_bytes, local, huge))
        measures: dict[str, Measure] = {"memcpy": MemcpyMover(source, local), **movers}
        idle = _idle_share(child.cpu_seconds) if "nixl" in names else None
        if "nixl" in names:
            plain = PlainNixl(num_bytes, huge)
            stack.callback(plain.close)
            measures["plain nixl"] = plain
        rows = []
        for size in sizes:
            offsets = scattered_offsets(num_bytes, size)
            for name in names:
                local[:] = 0
                movers[name](offsets)
                if not copied_exactly(offsets, source, local):
                    raise AssertionError(f"{name} did not copy descriptors of {size} bytes exactly")
            rows.append(_measure_size(measures, offsets, repeat))
        return {"pages": "huge" if huge else "4 KiB", "huge_share": huge_share(local), "idle": idle, "rows": rows}


def _measure_size(measures: Mapping[str, Measure], offsets: Descriptors, repeat: int) -> dict[str, Any]:
    """Run one after the other in every round, so that a disturbance affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for measure in measures.values():
        measure(offsets)
    for _ in range(repeat):
        for name, measure in measures.items():
            seconds[name].append(measure(offsets))
    num_bytes = int(offsets[:, 2].sum())
    rates = {name: num_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {"descriptor_bytes": int(offsets[0, 2]), "descriptors": len(offsets), "gb_per_second": rates}


def _idle_share(child_cpu_seconds: Callable[[], float]) -> dict[str, float]:
    """Return the fractions of a core that this process and the child process use while no bytes move."""
    time.sleep(0.2)
    before, child_before, started = _own_cpu_seconds(), child_cpu_seconds(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    elapsed = time.perf_counter() - started
    return {
        "initiator": (_own_cpu_seconds() - before) / elapsed,
        "target": (child_cpu_seconds() - child_before) / elapsed,
    }


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def judge(half: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the targets, which are for huge pages, with the measured values."""
    verdicts = []
    for row in half["rows"]:
        rates, size = row["gb_per_second"], row["descriptor_bytes"]
        if "cma" in rates and size >= 64 << 10:
            verdicts.append(
                _verdict(size, "cma / memcpy", rates["cma"] / rates["memcpy"], 0.7 if size >= 512 << 10 else 0.6)
            )
        if "cma" in rates and "nixl" in rates and size == 4 << 10:
            verdicts.append(_verdict(size, "cma / nixl", rates["cma"] / rates["nixl"], 2.5))
            verdicts.append(_verdict(size, "cma / plain nixl", rates["cma"] / rates["plain nixl"], 2.5))
        if "nixl" in rates:
            verdicts.append(_verdict(size, "nixl / plain nixl", rates["nixl"] / rates["plain nixl"], 1.0))
    if half["idle"] is not None:
        share = max(half["idle"].values())
        verdicts.append({"what": "idle core share of nixl", "measured": share, "target": 0.05, "met": share <= 0.05})
    return verdicts


def _verdict(size: int, what: str, measured: float, target: float) -> dict[str, Any]:
    return {
        "what": f"{what} at {format_bytes(size)}",
        "measured": measured,
        "target": target,
        "met": measured >= target,
    }


def print_half(console: Console, half: Mapping[str, Any]) -> None:
    """Print the rates in one kind of pages."""
    names = list(half["rows"][0]["gb_per_second"])
    share = f"{half['huge_share']:.0%} of them huge"
    columns = ("size", "descriptors", *(f"{name} GB/s" for name in names))
    table = Table(*columns, title=f"{half['pages']} pages ({share})")
    for row in half["rows"]:
        rates = [f"{row['gb_per_second'][name]:.2f}" for name in names]
        table.add_row(format_bytes(row["descriptor_bytes"]), str(row["descriptors"]), *rates)
    console.print(table)


def print_verdicts(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print each target with the measured value."""
    table = Table("target", "measured", "wanted", "", title="Targets (huge pages)")
    for verdict in verdicts:
        wanted = f"{verdict['target']:.2f}"
        table.add_row(verdict["what"], f"{verdict['measured']:.2f}", wanted, "met" if verdict["met"] else "missed")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
