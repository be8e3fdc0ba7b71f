"""``kvferry plan``: the descriptors between two engines, as a table and explained."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli.console import AsJson, open_console, progress, refused
from kvferry.cli.plan_report import (
    MAX_TOKENS,
    Blocks,
    Engine,
    PairReport,
    PlanReport,
    Summary,
    make_report,
    parse_engine,
)
from kvferry.layout.shard import CacheGroup, CacheKind, Shard
from kvferry.models.config import ITEM_SIZES
from kvferry.models.families import caches_of, layer_of
from kvferry.models.groups import LayerGroup
from kvferry.plan.match import ComponentHeads
from kvferry.plan.planner import GroupPlan, PairPlan, StridedCopy
from kvferry.plan.request import GroupBlocks
from kvferry.units import format_bytes

ENGINE_HELP = (
    "The {} engine, with any of: tp=2,pp=2,layout=LBHNC,block_size=32,layers=20+16 (of each pipeline stage). The "
    "layout is BHLNC unless given."
)
MAX_COPIES = 6
"""Patterns of one template in the explanation."""
MAX_RUN_LENGTHS = 4
"""Run lengths of one row of the table; the JSON object has all."""


def plan(
    layers: Annotated[int | None, typer.Option(help="Layers of the model.", min=1, max=4096)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model, over all ranks.", min=1)] = None,
    head_size: Annotated[int | None, typer.Option(help="Channels of K, and of V, per head.", min=1)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of the cache: {', '.join(ITEM_SIZES)}. Default: the model's; without --model, bfloat16."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, unless an engine sets its own.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.", min=1, max=MAX_TOKENS)] = 1024,
    prefill: Annotated[str, typer.Option(help=ENGINE_HELP.format("prefill"))] = "tp=1",
    decode: Annotated[str, typer.Option(help=ENGINE_HELP.format("decode"))] = "tp=1",
    blocks: Annotated[Blocks, typer.Option(help="Order of the block ids.")] = Blocks.SCATTERED,
    model: Annotated[Path | None, typer.Option(help="Hugging Face config.json, or a folder with one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of scattered ids and of the choice among replicas.", min=0)] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Explain sources, runs, refusals.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the descriptors from a prefill to a decode engine, per pair of ranks and cache group.

    No bytes are moved. A proof that shares no code with the planner checks every list.

    Try:

    kvferry plan --layers 36 --kv-heads 8 --head-size 128 --prefill tp=2,layout=BHLNC --decode tp=1,layout=BHLNC

    kvferry plan --model path/to/config.json --tokens 10240 --prefill tp=4 --decode tp=2,pp=2 --explain
    """
    with refused(as_json):
        caches = caches_of(model, layers, kv_heads, head_size, dtype)
        engines = parse_engine("--prefill", prefill, block_size), parse_engine("--decode", decode, block_size)
        with progress("planning") as announce:
            report = make_report(caches, *engines, tokens, blocks, seed, announce=announce)
            announce("explaining")
            explanation = explain_plan(report) if explain else []
    if as_json:
        more = {"explanation": explanation} if explain else {}
        typer.echo(json.dumps({**report.as_json(), **more}, indent=2))
    else:
        _print_report(report, explanation)
    if not report.verified:
        raise typer.Exit(1)


def _print_report(report: PlanReport, explanation: list[str]) -> None:
    table = Table(title="Descriptors from prefill to decode", caption="run lengths: number x length")
    for column in ("prefill rank", "decode rank", "group", "descriptors", "bytes", "run lengths", "verified"):
        table.add_column(column, justify="left" if column in ("group", "run lengths", "verified") else "right")
    for pair in report.pairs:
        ranks = [_rank(report.prefill, pair.pair.assignment.source_index), _rank(report.decode, pair.decode_rank)]
        for group, summary in pair.groups:
            table.add_row(*ranks, group, *_cells(summary), "NO" if pair.failure else "yes")
            ranks = ["", ""]
        table.add_section()
    total = "yes" if report.verified else "NO"
    table.add_row("", "", "total", str(report.descriptors), format_bytes(report.bytes), "", total)
    console = open_console()
    for line in (f"shapes of the caches: {report.origin}", *report.notes):
        console.print(line, markup=False, highlight=False)
    console.print(table)
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
    for line in explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rank(engine: Engine, index: int) -> str:
    stage, rank = divmod(index, engine.wanted.tp)
    return f"pp {stage} tp {rank}" if engine.wanted.pp > 1 else str(index)


def _cells(summary: Summary) -> list[str]:
    runs = [f"{count}x{format_bytes(length)}" for length, count in summary.run_lengths]
    more = [f"and {len(runs) - MAX_RUN_LENGTHS} more"] if len(runs) > MAX_RUN_LENGTHS else []
    return [str(summary.descriptors), format_bytes(summary.bytes), " ".join(runs[:MAX_RUN_LENGTHS] + more)]


def explain_plan(report: PlanReport) -> list[str]:
    """Return the explanation of a whole plan: engines and groups, then each pair, then refusals and changes."""
    lines = [f"shapes of the caches: {report.origin}"]
    for engine in (report.prefill, report.decode):
        sizes = f"TP {engine.wanted.tp}, PP {engine.wanted.pp}, blocks of {engine.block_size} tokens"
        lines.append(f"{engine.name}: {sizes}, layout {engine.layout}, cache groups: {len(engine.groups)}")
    for group, request in zip(report.prefill.groups, report.requests, strict=True):
        lines.append(_group_line(group, request))
    for pair in report.pairs:
        lines += _pair_lines(pair, report)
    refused = [*report.notes, *report.failures]
    lines.append("refused or changed:" if refused else "refused or changed: nothing")
    return [*lines, *(f"  {line}" for line in refused)]


def spans(numbers: Iterable[str]) -> str:
    """Return the numbers of layers as ranges.

    >>> spans(["0", "1", "2", "5", "7", "8"])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(map(layer_of, numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


def _group_line(group: LayerGroup, request: GroupBlocks) -> str:
    if group.kind is CacheKind.STATE:
        requested = "one block, which holds the last state"
    else:
        requested = f"tokens {request.first_token} to {request.last_token}"
    if group.cache.window:
        requested += f", from the first block that reaches into the window of {group.cache.window} tokens"
    return f"group {group.name}: {len(group.layers)} layers ({spans(group.layers)}), {requested}"


def _pair_lines(report: PairReport, plan: PlanReport) -> list[str]:
    pair = report.pair
    lines = [f"{pair.source.rank_name} (prefill) to {pair.destination.rank_name} (decode): {report.summary}"]
    for name, group in pair.groups.items():
        matched = spans(group.source_group.layers & group.destination_group.layers)
        components = [component for component in pair.assignment.components if component.group == name]
        lines.append(f"  {name}: layers {matched} match by name")
        lines += [f"    {_source_line(component, group, pair, plan)}" for component in components]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, group in pair.groups.items():
        alike.setdefault(tuple(_template_lines(group)), []).append(name)
    for template, names in alike.items():
        lines += [f"  {', '.join(names)}:", *(f"    {line}" for line in template)]
    return lines


def _source_line(component: ComponentHeads, group: GroupPlan, pair: PairPlan, plan: PlanReport) -> str:
    replicas = _replicas(component, group.source_group, plan.sources)
    heads = " ".join(map(repr, component.heads))
    chosen = f"{component.component} heads {heads} from {pair.source.rank_name}"
    if replicas == 1:
        return f"{chosen}, the only rank that holds them"
    return f"{chosen}, one of {replicas} ranks that hold them, by selector {plan.selector}"


def _replicas(component: ComponentHeads, sent: CacheGroup, sources: Sequence[Shard]) -> int:
    """Return the number of source ranks that hold these heads of these layers."""
    groups = [found for source in sources if (found := source.group(component.group)) and found.layers == sent.layers]
    held = [group.component(component.component).heads for group in groups]
    return sum(
        all(any(one.start <= head.start and head.end <= one.end for one in heads) for head in component.heads)
        for heads in held
    )


def _template_lines(group: GroupPlan) -> list[str]:
    """Return the templates of whole blocks of a group; equal templates are told once, equal copies share a line."""
    found: dict[tuple[int, tuple[str, ...]], None] = {}
    for template in (template for phase in group.first_phases() for template in group.templates(phase)):
        counts = Counter(map(copy_line, template.copies))
        copies = tuple(f"{count} of: {line}" if count > 1 else line for line, count in counts.items())
        found[len(template.runs), copies] = None
    lines = []
    for num_runs, copies in found:
        lines.append(f"a block moves in {num_runs} run{'s' if num_runs > 1 else ''}:")
        lines += [f"  {line}" for line in copies[:MAX_COPIES]]
        lines += [f"  and {len(copies) - MAX_COPIES} other patterns"] if len(copies) > MAX_COPIES else []
    return lines


def copy_line(copy: StridedCopy) -> str:
    """Return a copy as its run and the loops around the run.

    >>> copy_line(StridedCopy(0, 0, 4096, ((8, 8192, 4096),)))
    'run of 4.0 KiB, times 8 (source every 8192 bytes, destination every 4096)'
    >>> copy_line(StridedCopy(0, 0, 4096))
    'run of 4.0 KiB, all joined'
    """
    run = f"run of {format_bytes(copy.run_bytes)}"
    loops = [f"times {count} (source every {one} bytes, destination every {other})" for count, one, other in copy.loops]
    return f"{run}, {', '.join(loops)}" if loops else f"{run}, all joined"
