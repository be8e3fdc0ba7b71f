"""Why a plan is as it is, in lines of text: what matched, who sends, what was joined, what was refused."""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvferry.cli.plan_report import Engine, PairReport, PlanReport
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.layout.shard import Shard
from kvferry.models.groups import LayerGroup
from kvferry.plan.describe import describe_choice
from kvferry.plan.match import ComponentHeads
from kvferry.plan.planner import GroupPlan, PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.strategy import Costs, choose
from kvferry.plan.strided_copy import StridedCopy
from kvferry.plan.template import Template
from kvferry.units import format_bytes

MAX_COPIES = 6
"""Patterns shown of one template."""


def explain_plan(report: PlanReport, costs: Sequence[Costs]) -> list[str]:
    """Return the explanation of a whole plan: engines and groups, then each pair, then what was refused."""
    lines = [_engine_line(engine) for engine in (report.prefill, report.decode)]
    for group, request in zip(report.prefill.groups, report.requests, strict=True):
        lines.append(_group_line(group, request))
    for pair in report.pairs:
        lines += _pair_lines(pair, report)
        lines += [f"  {line}" for line in explain_choice(pair.pair, costs)]
    refused = [*report.prefill.notes(), *report.decode.notes(), *report.failures]
    lines.append("refused or changed:" if refused else "refused or changed: nothing")
    return [*lines, *(f"  {line}" for line in refused)]


def explain_pair(pair: PairPlan) -> list[str]:
    """Return why one pair's list is as it is: the templates of whole blocks, once for all groups that share them."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, group in pair.groups.items():
        alike.setdefault(tuple(_template_lines(group)), []).append(name)
    return [line for lines, names in alike.items() for line in (f"{', '.join(names)}:", *(f"  {one}" for one in lines))]


def explain_choice(pair: PairPlan, costs: Iterable[Costs]) -> list[str]:
    """Return the strategy that each transport's costs choose for engines that have stages, and what was rejected."""
    choices = [describe_choice(choose(pair, each)).splitlines() for each in costs]
    return [line for first, *others in choices for line in (f"strategy {first}", *others)]


def spans(numbers: Iterable[str]) -> str:
    """Return layer numbers as ranges.

    >>> spans(["0", "1", "2", "5", "7", "8"])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


def _engine_line(engine: Engine) -> str:
    sizes = f"TP {engine.wanted.tp}, PP {engine.wanted.pp}, blocks of {engine.block_size} tokens"
    return f"{engine.name}: {sizes}, layout {engine.layout}, {len(engine.groups)} cache groups"


def _group_line(group: LayerGroup, request: GroupBlocks) -> str:
    if group.kind is CacheKind.STATE:
        asked = "one block, which holds the last state"
    else:
        asked = f"tokens {request.first_token} to {request.last_token}"
    if group.cache.window:
        asked += f", all that a window of {group.cache.window} needs, from the first block that reaches into it"
    return f"group {group.name}: {len(group.layers)} layers ({spans(group.layers)}), {asked}"


def _pair_lines(report: PairReport, plan: PlanReport) -> list[str]:
    pair = report.pair
    lines = [f"{pair.source.rank_name} (prefill) to {pair.destination.rank_name} (decode): {report.summary}"]
    for name, group in pair.groups.items():
        matched = spans(group.source_group.layers & group.destination_group.layers)
        parts = [part for part in pair.assignment.parts if part.group == name]
        lines.append(f"  {name}: layers {matched} match by name")
        lines += [f"    {_source_line(part, group, pair, plan)}" for part in parts]
    return lines + [f"  {line}" for line in explain_pair(pair)]


def _source_line(part: ComponentHeads, group: GroupPlan, pair: PairPlan, plan: PlanReport) -> str:
    replicas = _replicas(part, group.source_group, plan.sources)
    heads = " ".join(map(repr, part.heads))
    chosen = f"{part.component} heads {heads} from {pair.source.rank_name}"
    if replicas == 1:
        return f"{chosen}, the only rank that holds them"
    return f"{chosen}, one of {replicas} ranks that hold them, by selector {plan.selector}"


def _replicas(part: ComponentHeads, sent: CacheGroup, sources: Sequence[Shard]) -> int:
    """Count the source ranks that could have sent these heads of these layers."""
    groups = [found for source in sources if (found := source.group(part.group)) and found.layers == sent.layers]
    held = [group.component(part.component).heads for group in groups]
    return sum(
        all(any(one.start <= head.start and head.end <= one.end for one in heads) for head in part.heads)
        for heads in held
    )


def _template_lines(group: GroupPlan) -> list[str]:
    lines = []
    templates = [template for phase in group.first_phases() for template in group.templates(phase)]
    for template in dict.fromkeys(_described(template) for template in templates):
        num_pieces, copies = template
        lines.append(f"a block moves in {num_pieces} piece{'s' if num_pieces > 1 else ''}:")
        lines += [f"  {line}" for line in copies[:MAX_COPIES]]
        lines += [f"  and {len(copies) - MAX_COPIES} other patterns"] if len(copies) > MAX_COPIES else []
    return lines


def _described(template: Template) -> tuple[int, tuple[str, ...]]:
    """Return a template's pieces and its copies in words, equal ones counted."""
    counts = Counter(map(copy_line, template.copies))
    lines = (f"{count} of: {line}" if count > 1 else line for line, count in counts.items())
    return len(template.pieces), tuple(lines)


def copy_line(copy: StridedCopy) -> str:
    """Return a copy as its run and the loops that could not be joined with it.

    >>> copy_line(StridedCopy(0, 0, 4096, ((8, 8192, 4096),)))
    'run of 4.0 KiB, times 8 (source every 8192 bytes, destination every 4096)'
    >>> copy_line(StridedCopy(0, 0, 4096))
    'run of 4.0 KiB, all joined'
    """
    run = f"run of {format_bytes(copy.run_bytes)}"
    loops = [f"times {count} (source every {one} bytes, destination every {other})" for count, one, other in copy.loops]
    return f"{run}, {', '.join(loops)}" if loops else f"{run}, all joined"
