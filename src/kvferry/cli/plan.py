"""``kvferry plan``: the descriptors between two engines, as a table and explained."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli.console import AsJson, open_console, progress, refused
from kvferry.cli.plan_picture import draw_plan
from kvferry.cli.plan_report import (
    MAX_TOKENS,
    Blocks,
    Engine,
    PairReport,
    PlanReport,
    Summary,
    describe_links,
    make_report,
    name_groups,
    parse_engine,
    parse_link,
    per_layer_layouts,
    spans,
)
from kvferry.errors import Reason, SettingsError
from kvferry.layout.shard import CacheGroup, CacheKind, Shard
from kvferry.models.config import ITEM_SIZES
from kvferry.models.families import caches_of
from kvferry.models.groups import LayerGroup
from kvferry.plan.match import ComponentHeads, GroupBlocks
from kvferry.plan.planner import GroupPlan, StridedCopy
from kvferry.units import format_bytes, format_seconds

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
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face config.json, a folder with one, or a public model's name: Qwen/Qwen3-0.6B. Not fetched."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of scattered ids and of the choice among replicas.", min=0)] = 0,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s (10^9 bytes) of each rank's link; predicts the time.", min=1e-3)
    ] = None,
    link_name: Annotated[
        str | None, typer.Option("--link", help=f"Nominal --bandwidth, one way: {describe_links()}.")
    ] = None,
    per_descriptor: Annotated[
        float | None, typer.Option(help="Microseconds that each descriptor adds at its sender; 0 unless given.", min=0)
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the plan to this file.", dir_okay=False)] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain sources, runs, refusals.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the descriptors from a prefill to a decode engine, per pair of ranks and cache group.

    No bytes are moved. A proof that shares no code with the planner checks every list. "per layer" counts the
    descriptors of the same request where each layer's memory is apart, as in vLLM without kvferry.

    Try:

    kvferry plan --layers 36 --kv-heads 8 --head-size 128 --prefill tp=2,layout=BHLNC --decode tp=1,layout=BHLNC

    kvferry plan --model meta-llama/Llama-3.1-8B --tokens 10240 --prefill tp=4 --decode tp=2,pp=2 --link 400g
    """
    with refused(as_json):
        caches = caches_of(model, layers, kv_heads, head_size, dtype)
        engines = parse_engine("--prefill", prefill, block_size), parse_engine("--decode", decode, block_size)
        link = parse_link(bandwidth, per_descriptor, link_name)
        with progress("planning") as announce:
            report = make_report(caches, *engines, tokens, blocks, seed, link=link, announce=announce)
            announce("explaining")
            explanation = explain_plan(report) if explain else []
            if svg:
                _write(svg, draw_plan(report))
    if as_json:
        more = {"explanation": explanation} if explain else {}
        typer.echo(json.dumps({**report.as_json(), **more}, indent=2))
    else:
        _print_report(report, explanation)
    if not report.verified:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    """Write a file. Raises :class:`SettingsError` where that is not possible."""
    try:
        path.write_text(text)
    except OSError as error:
        what = f"--svg: {path} cannot be written: {error.strerror}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Name a file in a folder that exists.") from error


def _print_report(report: PlanReport, explanation: list[str]) -> None:
    table = Table(title="Descriptors from prefill to decode", caption="run lengths: number x length")
    columns = ("prefill rank", "decode rank", "group", "descriptors", "per layer", "bytes", "run lengths", "verified")
    for column in columns:
        table.add_column(column, justify="left" if column in ("group", "run lengths", "verified") else "right")
    for pair in report.pairs:
        ranks = [_rank(report.prefill, pair.pair.assignment.source_index), _rank(report.decode, pair.decode_rank)]
        for group, summary in pair.groups:
            per_layer = _count_or_dash(pair.per_layer_groups.get(group))
            verified = "NO" if pair.failure else "yes"
            table.add_row(
                *ranks,
                group,
                str(summary.descriptors),
                per_layer,
                format_bytes(summary.bytes),
                _run_lengths(summary),
                verified,
            )
            ranks = ["", ""]
        table.add_section()
    total = [str(report.descriptors), _count_or_dash(report.per_layer_descriptors), format_bytes(report.bytes)]
    table.add_row("", "", "total", *total, "", "yes" if report.verified else "NO")
    console = open_console()
    for line in (f"shapes of the caches: {report.origin}", *report.notes):
        console.print(line, markup=False, highlight=False)
    console.print(table)
    for line in totals(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
    for line in explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _count_or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def totals(report: PlanReport) -> list[str]:
    """Return what the table leaves out: bytes per token, the per-layer layouts, the predicted time, replicas."""
    lines = [
        f"bytes per token: {report.bytes_per_token:,.0f} on average over {report.tokens} tokens",
        f"per layer: the same request in layout {per_layer_layouts(report)}, where each layer's memory is apart",
    ]
    if report.link and report.seconds is not None:
        cost = f"{report.link.seconds_per_descriptor * 1e6:g} us per descriptor"
        beside = report.per_layer_seconds
        per_layer = "" if beside is None else f", per layer {format_seconds(beside)}"
        lines.append(
            f"predicted time of the busiest rank, at {report.link.bandwidth / 1e9:g} GB/s and {cost}: "
            f"{format_seconds(report.seconds)}{per_layer}"
        )
    replicated = [str(each) for each in report.replicas if each.is_replicated]
    return lines + ([f"replicas: {each}" for each in replicated] or ["replicas: none, so all bytes are sent once"])


def _rank(engine: Engine, index: int) -> str:
    stage, rank = divmod(index, engine.wanted.tp)
    return f"pp {stage} tp {rank}" if engine.wanted.pp > 1 else str(index)


def _run_lengths(summary: Summary) -> str:
    runs = [f"{count}x{format_bytes(length)}" for length, count in summary.run_lengths]
    more = [f"and {len(runs) - MAX_RUN_LENGTHS} more"] if len(runs) > MAX_RUN_LENGTHS else []
    return " ".join(runs[:MAX_RUN_LENGTHS] + more)


def explain_plan(report: PlanReport) -> list[str]:
    """Return the explanation of a whole plan: engines and groups, descriptors, sources, runs, refusals and changes.

    A sentence that holds for several groups or ranks stands there once, with their names.
    """
    lines = [f"shapes of the caches: {report.origin}"]
    for engine in (report.prefill, report.decode):
        sizes = f"TP {engine.wanted.tp}, PP {engine.wanted.pp}, blocks of {engine.block_size} tokens"
        lines.append(f"{engine.name}: {sizes}, layout {engine.layout}, cache groups: {len(engine.groups)}")
    lines += _group_lines(report)
    lines += ["descriptors:", *(f"  {line}" for line in _descriptor_lines(report))]
    lines += ["sources of the heads:", *(f"  {line}" for line in _source_lines(report))]
    lines += ["runs:", *(f"  {line}" for line in _run_lines(report))]
    refused = [*report.notes, *report.failures]
    lines.append("refused or changed:" if refused else "refused or changed: nothing")
    return [*lines, *(f"  {line}" for line in refused)]


def _group_lines(report: PlanReport) -> list[str]:
    alike: dict[tuple[int, str], list[LayerGroup]] = {}
    for group, request in zip(report.prefill.groups, report.requests, strict=True):
        alike.setdefault((len(group.layers), _requested(group, request)), []).append(group)
    lines = []
    for (num_layers, requested), groups in alike.items():
        names, layers = name_groups(group.name for group in groups), spans(itertools.chain(*(g.layers for g in groups)))
        each = " each" if len(groups) > 1 else ""
        lines.append(f"group {names}: {num_layers} layers{each} ({layers}), {requested}")
    return lines


def _requested(group: LayerGroup, request: GroupBlocks) -> str:
    if group.kind is CacheKind.STATE:
        return "one block, which holds the last state"
    requested = f"tokens {request.first_token} to {request.last_token}"
    if group.cache.window:
        requested += f", from the first block that reaches into the window of {group.cache.window} tokens"
    return requested


def _between(report: PlanReport, pairs: Sequence[PairReport]) -> str:
    """Return the ranks of some pairs, or that it is all of them."""
    if len(pairs) == len(report.pairs) > 1:
        return "every pair of ranks"
    return ", ".join(
        f"prefill {_rank(report.prefill, pair.pair.assignment.source_index)} to "
        f"decode {_rank(report.decode, pair.decode_rank)}"
        for pair in pairs
    )


def _descriptor_lines(report: PlanReport) -> list[str]:
    alike: dict[str, list[PairReport]] = {}
    for pair in report.pairs:
        alike.setdefault(str(pair.summary), []).append(pair)
    return [
        f"{_between(report, pairs)}: {summary}{' each' if len(pairs) > 1 else ''}" for summary, pairs in alike.items()
    ]


def _source_lines(report: PlanReport) -> list[str]:
    """Return which heads come from where, said once for all groups of which it is true."""
    moves: dict[tuple[str, int, str], list[str]] = {}
    for pair in report.pairs:
        for component in pair.pair.assignment.components:
            group = pair.pair.groups[component.group]
            replicas = _replicas(component, group.source_group, report.sources)
            heads = " ".join(map(repr, component.heads))
            move = f"{heads} from {_between(report, [pair])}"
            layers = group.source_group.layers & group.destination_group.layers
            if layers < _all_layers(report, component.group):
                move += f" (layers {spans(layers)})"
            moves.setdefault((component.group, replicas, component.component), []).append(move)
    alike: dict[tuple[int, tuple[str, ...]], dict[str, list[str]]] = {}
    for (group_name, replicas, name), of_component in moves.items():
        alike.setdefault((replicas, tuple(of_component)), {}).setdefault(group_name, []).append(name)
    return [
        f"{subject}, {_chosen(replicas, report.selector)}: {'; '.join(of_component)}"
        for (replicas, of_component), groups in alike.items()
        for subject in _subjects(groups)
    ]


def _all_layers(report: PlanReport, name: str) -> frozenset[str]:
    return next(frozenset(group.layers) for group in report.prefill.groups if group.name == name)


def _subjects(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return components with their groups; groups with the same components are named together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for group, components in groups.items():
        alike.setdefault(tuple(components), []).append(group)
    return [f"{' and '.join(names)} heads of {name_groups(members)}" for names, members in alike.items()]


def _chosen(replicas: int, selector: int) -> str:
    if replicas == 1:
        return "from the only rank that holds them"
    return f"from one of {replicas} ranks that hold them, by selector {selector}"


def _replicas(component: ComponentHeads, sent: CacheGroup, sources: Sequence[Shard]) -> int:
    """Return the number of source ranks that hold these heads of these layers."""
    groups = [found for source in sources if (found := source.group(component.group)) and found.layers == sent.layers]
    held = [group.component(component.component).heads for group in groups]
    return sum(
        all(any(one.start <= head.start and head.end <= one.end for one in heads) for head in component.heads)
        for heads in held
    )


def _run_lines(report: PlanReport) -> list[str]:
    """Return the runs of a block, said once for all groups and pairs of ranks that have the same."""
    by_group: dict[tuple[tuple[str, ...], str], list[PairReport]] = {}
    for pair in report.pairs:
        for name, group in pair.pair.groups.items():
            by_group.setdefault((tuple(_template_lines(group)), name), []).append(pair)
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (template, name), pairs in by_group.items():
        alike.setdefault((template, _between(report, pairs)), []).append(name)
    lines = []
    for (template, ranks), names in alike.items():
        lines += [f"{name_groups(names)}, {ranks}:", *(f"  {line}" for line in template)]
    return lines


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
