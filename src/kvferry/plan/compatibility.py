"""Whether two ranks' caches can be matched at all. Each check raises with its reason and a remedy."""

from collections.abc import Iterable, Sequence

from kvferry.errors import PlanError, Reason
from kvferry.layout.cache_group import CacheGroup
from kvferry.layout.shard import Shard
from kvferry.layout.strided import Atom, Component


def check_layers(sources: Sequence[Shard], destination: Shard) -> None:
    """Raise unless the sources hold the destination's groups and layers, each layer by one pipeline stage."""
    if not sources:
        raise PlanError(Reason.MISSING_SOURCE, "there are no source ranks.", "Name every rank of the source engine.")
    for group in destination.groups:
        stages = {found.layers for source in sources if (found := source.group(group.name))}
        if not stages:
            names = sorted({held.name for source in sources for held in source.groups})
            _refuse(Reason.GROUP_MISMATCH, f"no source has a cache group {group.name!r}; they have {names}.")
        held = frozenset[str]().union(*stages)
        if group.layers - held:
            _refuse(Reason.LAYER_MISMATCH, f"group {group.name!r}: no source has layers {_some(group.layers - held)}.")
        if destination.pp_size == 1 and held - group.layers:
            _refuse(
                Reason.LAYER_MISMATCH,
                f"group {group.name!r}: the sources have layers {_some(held - group.layers)}, the destination has not.",
            )
        if sum(map(len, stages)) != len(held):
            _refuse(
                Reason.LAYER_MISMATCH, f"group {group.name!r}: source ranks hold overlapping, unequal sets of layers."
            )
    _check_no_more_groups(sources, destination)


def _check_no_more_groups(sources: Sequence[Shard], destination: Shard) -> None:
    known = {group.name for group in destination.groups}
    more = {group.name for source in sources for group in source.groups} - known
    if destination.pp_size == 1 and more:
        _refuse(Reason.GROUP_MISMATCH, f"the sources have cache groups {_some(more)}, the destination has not.")


def check_groups(
    held: Sequence[tuple[int, CacheGroup]], sources: Sequence[Shard], wanted: CacheGroup, destination: Shard
) -> None:
    """Raise unless every source's group holds what the destination's does, piece by piece."""
    for index, group in held:
        between = f"group {wanted.name!r} between {sources[index].rank_name} and {destination.rank_name}"
        _check_group(group, wanted, between)


def _check_group(source: CacheGroup, destination: CacheGroup, between: str) -> None:
    if source.kind is not destination.kind:
        _refuse(Reason.GROUP_MISMATCH, f"{between}: cache kinds {source.kind} and {destination.kind} differ.")
    if source.num_kv_heads != destination.num_kv_heads:
        heads = f"{source.num_kv_heads} and {destination.num_kv_heads}"
        _refuse(Reason.MODEL_MISMATCH, f"{between}: numbers of KV heads {heads} differ.")
    components = {component.name: component for component in source.components}
    wanted = {component.name for component in destination.components}
    if components.keys() != wanted:
        raise PlanError(
            Reason.SPLIT_ATOM,
            f"{between}: content is kept as {sorted(components)} and as {sorted(wanted)}.",
            "Describe K and V as separate components on both sides.",
        )
    for component in destination.components:
        where = f"{between}, component {component.name!r}"
        _check_component(components[component.name], component, where)
        if component.atom is Atom.PAGE and source.block_size != destination.block_size:
            raise PlanError(
                Reason.BLOCK_SIZE_MISMATCH,
                f"{where}: packed pages of {source.block_size} and {destination.block_size} tokens differ.",
                "Start both engines with one block size.",
            )


def _check_component(source: Component, destination: Component, where: str) -> None:
    if source.itemsize != destination.itemsize:
        sizes = f"{source.itemsize} and {destination.itemsize}"
        _refuse(Reason.DTYPE_MISMATCH, f"{where}: item sizes of {sizes} bytes differ.")
    if source.num_channels != destination.num_channels:
        channels = f"{source.num_channels} and {destination.num_channels}"
        _refuse(Reason.HEAD_SIZE_MISMATCH, f"{where}: channels {channels} differ.")
    if source.packing != destination.packing:
        raise PlanError(
            Reason.PACKING_MISMATCH,
            f"{where}: pages are packed as {source.packing or 'plain'!r} and {destination.packing or 'plain'!r}.",
            "Run both engines on one kind of processor with one dtype and block size.",
        )


def _refuse(reason: Reason, message: str) -> None:
    raise PlanError(reason, message, "Serve the same model with the same cache settings on both engines.")


def _some(names: Iterable[str]) -> str:
    """Return the first names of many."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
