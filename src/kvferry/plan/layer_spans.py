"""Plans of some layers of a group, for a source that sends them before it has computed the rest."""

from collections.abc import Sequence

import msgspec

from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheGroup
from kvferry.layout.shard import Shard
from kvferry.plan.match import Assignment
from kvferry.plan.planner import GroupPlan, PairPlan, plan_pair

Spans = tuple[tuple[str, ...], ...]


def cut_layers(layers: Sequence[str], layers_per_span: int) -> Spans:
    """Cut layers, in the order in which they are computed, into spans of so many; the last may be shorter.

    >>> cut_layers(["0", "1", "2", "3", "4"], 2)
    (('0', '1'), ('2', '3'), ('4',))
    """
    if layers_per_span < 1:
        raise PlanError(Reason.INVALID_REQUEST, f"spans of {layers_per_span} layers were asked for.", "Ask for 1.")
    return tuple(tuple(layers[start : start + layers_per_span]) for start in range(0, len(layers), layers_per_span))


def plan_spans(plan: PairPlan, group: str, spans: Spans) -> dict[int, GroupPlan]:
    """Return the plan of each span of a group's layers, by number; together they write what the whole plan does.

    Layers that only one side holds are left out, as between stages of two pipelines, and spans of which none is left.
    """
    both = plan.groups[group].source_group.layers & plan.groups[group].destination_group.layers
    return {
        number: _plan_layers(plan, group, both & set(layers))
        for number, layers in enumerate(spans)
        if both & set(layers)
    }


def _plan_layers(plan: PairPlan, group: str, layers: frozenset[str]) -> GroupPlan:
    parts = tuple(part for part in plan.assignment.parts if part.group == group)
    source, destination = (_with_layers(shard, group, layers) for shard in (plan.source, plan.destination))
    return plan_pair(source, destination, Assignment(plan.assignment.source_index, parts)).groups[group]


def _with_layers(shard: Shard, group: str, layers: frozenset[str]) -> Shard:
    held = next(each for each in shard.groups if each.name == group)
    return msgspec.structs.replace(shard, groups=(_group_with(held, layers),))


def _group_with(group: CacheGroup, layers: frozenset[str]) -> CacheGroup:
    components = []
    for component in group.components:
        kept = [index for index, layer in enumerate(component.layers) if layer in layers]
        components.append(
            msgspec.structs.replace(
                component,
                layers=tuple(component.layers[index] for index in kept),
                layer_offsets=tuple(component.layer_offsets[index] for index in kept),
            )
        )
    scales = tuple(scale for scale in group.scales if scale.layer in layers)
    return msgspec.structs.replace(group, components=tuple(components), scales=scales)
