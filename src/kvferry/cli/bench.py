"""``kvferry bench``: how long a request's plan takes on one core, and rates of transports between two processes."""

import json
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli.console import open_console, progress
from kvferry.cli.plan_report import RANK_SPACING, Blocks, EngineShape, block_ids, engine_of
from kvferry.cli.transport_measurement import (
    MemcpyMover,
    PlainNixl,
    allocate,
    copied_exactly,
    huge_share,
    open_movers,
    scattered_pieces,
)
from kvferry.errors import Reason, SettingsError
from kvferry.layout.group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.shapes import ModelShapes
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof.verify import verify_pair
from kvferry.plan.request import GroupBlocks
from kvferry.transport.protocol import Descriptors
from kvferry.transport.registry import check_setting
from kvferry.units import format_bytes, format_seconds

IDLE_SECONDS = 2.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Measure = Callable[[Descriptors], float]


@dataclass(frozen=True)
class Case:
    """One plan to lower, and the time that it may take."""

    name: str
    num_layers: int
    num_blocks: int
    prefill: EngineShape
    decode: EngineShape
    budget_s: float | None = None
    first_token: int = 0


@dataclass(frozen=True)
class Timing:
    """What lowering one case took. Seconds; ``lower_s`` and ``verify_s`` are medians, ``template_s`` a single run."""

    name: str
    descriptors: int
    lower_s: float
    slowest_s: float
    budget_s: float | None
    within_budget: bool
    template_s: float
    verify_s: float


def _engine(layout: NamedLayout, tp: int = 1, block_size: int = 16) -> EngineShape:
    return EngineShape(tp, layout, block_size)


BHLNC, LBHNC, LBNHC = NamedLayout.BHLNC, NamedLayout.LBHNC, NamedLayout.LBNHC
CASES = (
    Case("BHLNC, 640 scattered blocks", 36, 640, _engine(BHLNC), _engine(BHLNC), 1e-3),
    Case("BHLNC, 640 scattered blocks, TP 2 to 1", 36, 640, _engine(BHLNC, 2), _engine(BHLNC), 1e-3),
    Case("LBHNC, 640 scattered blocks", 36, 640, _engine(LBHNC), _engine(LBHNC), 5e-3),
    Case("LBHNC, 4000 scattered blocks", 28, 4000, _engine(LBHNC), _engine(LBHNC), 25e-3),
    Case("LBNHC, 97 scattered blocks, TP 2 to 1", 36, 97, _engine(LBNHC, 2), _engine(LBNHC), 25e-3),
    Case("LBHNC, block 16 to 32", 36, 640, _engine(LBHNC), _engine(LBHNC, 1, 32)),
    Case("BHLNC, from token 8 on", 36, 640, _engine(BHLNC), _engine(BHLNC), first_token=8),
)
"""8 KV heads of 128 bfloat16 channels throughout. The last two need the slower joining by address."""


def bench_plan(
    repeats: Annotated[int, typer.Option(help="Times that each plan is lowered.", min=3)] = 51,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Time the lowering of one request's plan, from Python lists of block ids to the array of descriptors.

    Exit code 1 if a median is above its budget.

    Try:

    kvferry bench plan --repeats 101 --json
    """
    timings = []
    with progress("measuring") as announce:
        for case in CASES:
            announce(case.name)
            timings.append(measure(case, repeats))
    within = all(timing.within_budget for timing in timings)
    if as_json:
        rows = [asdict(timing) for timing in timings]
        typer.echo(json.dumps({"within_budget": within, "repeats": repeats, "cases": rows}, indent=2))
    else:
        _print_table(timings)
    if not within:
        raise typer.Exit(1)


def measure(case: Case, repeats: int) -> Timing:
    """Lower one case again and again and return the times."""
    caches = ModelShapes(case.num_layers, 8, 128, "bfloat16", CacheKind.ATTENTION).caches()
    tokens = case.num_blocks * case.prefill.block_size
    num_destination = -(-tokens // case.decode.block_size)
    ids = block_ids(Blocks.SCATTERED, case.num_blocks, num_destination, seed=0)
    prefill, decode = engine_of("prefill", case.prefill, caches), engine_of("decode", case.decode, caches)
    sources = prefill.shards(case.num_blocks + 1, RANK_SPACING)
    destination = decode.shards(num_destination + 1, RANK_SPACING * (case.prefill.num_ranks + 1))[0]

    def request() -> GroupBlocks:
        return GroupBlocks(
            group="full",
            first_token=case.first_token,
            last_token=tokens,
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
        )

    began = time.perf_counter()
    pairs = Planner(sources, destination).plans(0)
    first = [pair.lower([request()]) for pair in pairs]
    template_s = time.perf_counter() - began
    seconds = _seconds(lambda: [pair.lower([request()]) for pair in pairs], repeats)
    median = statistics.median(seconds)
    return Timing(
        name=case.name,
        descriptors=sum(map(len, first)),
        lower_s=median,
        slowest_s=max(seconds),
        budget_s=case.budget_s,
        within_budget=case.budget_s is None or median < case.budget_s,
        template_s=template_s,
        verify_s=statistics.median(_seconds(lambda: _verify(pairs, request()), 3)),
    )


def _verify(pairs: tuple[PairPlan, ...], request: GroupBlocks) -> None:
    for pair in pairs:
        verify_pair(pair.lower([request]), pair.source, pair.destination, [request], pair.heads)


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def _print_table(timings: list[Timing]) -> None:
    table = Table(title="Lowering one request's plan")
    table.add_column("plan")
    for column in ("descriptors", "median", "slowest", "budget", "first time", "verify"):
        table.add_column(column, justify="right")
    for timing in timings:
        budget = format_seconds(timing.budget_s) if timing.budget_s else "-"
        style = None if timing.within_budget else "red"
        lowered = format_seconds(timing.lower_s), format_seconds(timing.slowest_s), budget
        rest = format_seconds(timing.template_s), format_seconds(timing.verify_s)
        table.add_row(timing.name, str(timing.descriptors), *lowered, *rest, style=style)
    open_console().print(table)


def bench_transport(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    transport: Annotated[str, typer.Option(help="Transports to measure, separated by commas.")] = "cma,nixl",
    huge: Annotated[bool, typer.Option(help="Measure in huge pages.")] = True,
    small: Annotated[bool, typer.Option(help="Measure in 4 KiB pages.")] = True,
    sizes: Annotated[str, typer.Option(help="Piece sizes, separated by commas.")] = "4K,16K,64K,512K,64M",
    total: Annotated[str, typer.Option(help="Bytes to move, a multiple of every size.")] = "64M",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
) -> None:
    """Measure transports between two processes, beside memcpy in one process and a plain NIXL program.

    Try:

    kvferry bench transport --transport cma --sizes 64K,512K --no-small --json
    """
    names = [name.strip() for name in transport.split(",")]
    for name in names:
        check_setting(name)
    num_bytes, piece_bytes = parse_size(total), [parse_size(size) for size in sizes.split(",")]
    for size in piece_bytes:
        if num_bytes % size:
            raise SettingsError(Reason.INVALID_SETTING, f"{num_bytes} bytes are not a multiple of pieces of {size}.")
    halves = []
    with progress("measuring") as announce:
        for kind, wanted in ((True, huge), (False, small)):
            if wanted:
                announce("transports in huge pages" if kind else "transports in 4 KiB pages")
                halves.append(measure_pages(names, num_bytes, piece_bytes, repeat, kind))
    verdicts = [verdict for half in halves if half["pages"] == "huge" for verdict in judge(half)]
    if json_output:
        print(json.dumps({"bytes": num_bytes, "repeat": repeat, "halves": halves, "targets": verdicts}, indent=2))
        return
    console = open_console()
    for half in halves:
        _print_half(console, half)
    if verdicts:
        _print_verdicts(console, verdicts)


def parse_size(text: str) -> int:
    """Return a size such as ``64K`` in bytes.

    >>> parse_size("512K"), parse_size("1M"), parse_size("100")
    (524288, 1048576, 100)
    """
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)(iB)?", text.strip())
    if match is None:
        raise SettingsError(Reason.INVALID_SETTING, f"{text!r} is no size.", "Write it like 4K, 512K or 64M.")
    return int(match[1]) * _UNITS[match[2]]


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
            pieces = scattered_pieces(num_bytes, size)
            for name in names:
                local[:] = 0
                movers[name](pieces)
                if not copied_exactly(pieces, source, local):
                    raise AssertionError(f"{name} did not copy pieces of {size} bytes exactly")
            rows.append(_measure_size(measures, pieces, repeat))
        return {"pages": "huge" if huge else "4 KiB", "huge_share": huge_share(local), "idle": idle, "rows": rows}


def _measure_size(measures: Mapping[str, Measure], pieces: Descriptors, repeat: int) -> dict[str, Any]:
    """Interleave: one round of all, so that a disturbance meets every one of them."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for measure in measures.values():
        measure(pieces)
    for _ in range(repeat):
        for name, measure in measures.items():
            seconds[name].append(measure(pieces))
    num_bytes = int(pieces[:, 2].sum())
    rates = {name: num_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {"piece_bytes": int(pieces[0, 2]), "descriptors": len(pieces), "gb_per_second": rates}


def _idle_share(child_cpu_seconds: Callable[[], float]) -> dict[str, float]:
    """Return which share of a core this process and the other one use while nothing moves."""
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
    """Return the targets with what was measured; they are for huge pages."""
    verdicts = []
    for row in half["rows"]:
        rates, size = row["gb_per_second"], row["piece_bytes"]
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


def _print_half(console: Console, half: Mapping[str, Any]) -> None:
    names = list(half["rows"][0]["gb_per_second"])
    share = f"{half['huge_share']:.0%} of them huge"
    table = Table("piece", "descriptors", *(f"{name} GB/s" for name in names), title=f"{half['pages']} pages ({share})")
    for row in half["rows"]:
        rates = [f"{row['gb_per_second'][name]:.2f}" for name in names]
        table.add_row(format_bytes(row["piece_bytes"]), str(row["descriptors"]), *rates)
    console.print(table)


def _print_verdicts(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = Table("target", "measured", "wanted", "", title="Targets (huge pages)")
    for verdict in verdicts:
        wanted = f"{verdict['target']:.2f}"
        table.add_row(verdict["what"], f"{verdict['measured']:.2f}", wanted, "met" if verdict["met"] else "missed")
    console.print(table)
