"""Checks that a plan between source ranks and a destination rank can exist. Each raises with a reason and remedy."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvferry.errors import PlanError, Reason
from kvferry.layout.component import Atom, Component
from kvferry.layout.group import CacheGroup, TokenShare
from kvferry.layout.shard import Shard

EVERY_RANK = "Name every rank of the source engine."


def check_layers(sources: Sequence[Shard], destination: Shard) -> None:
    """Raise unless the sources hold the destination's groups and layers, each layer in one pipeline stage."""
    if not sources:
        _refuse(Reason.MISSING_SOURCE, "there are no source ranks.", EVERY_RANK)
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
                f"group {group.name!r}: only the sources have layers {_some(held - group.layers)}.",
            )
        if sum(map(len, stages)) != len(held):
            _refuse(
                Reason.LAYER_MISMATCH, f"group {group.name!r}: source ranks hold overlapping, unequal sets of layers."
            )
    unknown = {group.name for source in sources for group in source.groups}
    unknown -= {group.name for group in destination.groups}
    if destination.pp_size == 1 and unknown:
        _refuse(Reason.GROUP_MISMATCH, f"only the sources have cache groups {_some(unknown)}.")


def check_shares(held: Sequence[CacheGroup], wanted: CacheGroup) -> None:
    """Raise unless the sources, which hold the same layers, split tokens alike and hold all needed tokens."""
    splits = {group.token_share.split for group in held}
    if len(splits) > 1:
        _refuse(
            Reason.GROUP_MISMATCH,
            f"group {wanted.name!r}: the sources split tokens by different (size, interleave) {sorted(splits)}.",
        )
    size, interleave = splits.pop()
    ranks = {group.token_share.rank for group in held}
    shares = (TokenShare(rank, size, interleave) for rank in range(size) if rank not in ranks)
    missing = next((share for share in shares if share.overlaps(wanted.token_share)), None)
    if missing is not None:
        _refuse(
            Reason.MISSING_SOURCE,
            f"group {wanted.name!r}: no source rank holds the tokens of {missing!r}.",
            EVERY_RANK,
        )


def check_group(source: CacheGroup, destination: CacheGroup, between: str) -> None:
    """Raise unless both groups have the same components, scales and kind."""
    if source.kind is not destination.kind:
        _refuse(Reason.GROUP_MISMATCH, f"{between}: cache kinds {source.kind} and {destination.kind} differ.")
    if source.window != destination.window:
        windows = f"{source.window} and {destination.window}"
        _refuse(Reason.MODEL_MISMATCH, f"{between}: windows of {windows} tokens differ.")
    _check_scales(source, destination, between)
    components = {component.name: component for component in source.components if not component.is_padding}
    needed = [component for component in destination.components if not component.is_padding]
    wanted = {component.name for component in needed}
    if components.keys() != wanted:
        _refuse(
            Reason.SPLIT_ATOM,
            f"{between}: the components {sorted(components)} and {sorted(wanted)} differ.",
            "Describe K and V as separate components in both engines.",
        )
    for component in needed:
        where = f"{between}, component {component.name!r}"
        _check_component(components[component.name], component, where)
        if component.atom is Atom.PAGE:
            _check_pages(source, destination, where)


def _check_pages(source: CacheGroup, destination: CacheGroup, where: str) -> None:
    if source.block_size != destination.block_size:
        _refuse(
            Reason.BLOCK_SIZE_MISMATCH,
            f"{where}: packed pages of {source.block_size} and {destination.block_size} tokens differ.",
            "Start both engines with one block size.",
        )
    if source.token_share.split != destination.token_share.split:
        _refuse(
            Reason.SPLIT_ATOM,
            f"{where}: packed pages hold {source.token_share!r} and {destination.token_share!r} of the tokens.",
            "Start both engines with one context-parallel size and interleave.",
        )


def _check_scales(source: CacheGroup, destination: CacheGroup, between: str) -> None:
    """Raise unless the common layers are quantised with the same scales."""
    common = source.layers & destination.layers
    sent, received = (
        {(scale.layer, scale.tensor): scale.value for scale in group.scales if scale.layer in common}
        for group in (source, destination)
    )
    differing = min(
        (name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name)), default=None
    )
    if differing is not None:
        layer, tensor = differing
        values = f"{sent.get(differing, 'none')} and {received.get(differing, 'none')}"
        _refuse(Reason.MODEL_MISMATCH, f"{between}: layer {layer!r} has {tensor!r} scales of {values}.")


def _check_component(source: Component, destination: Component, where: str) -> None:
    for what, reason, sent, received in (
        ("numbers of heads", Reason.MODEL_MISMATCH, source.total_heads, destination.total_heads),
        ("item sizes in bytes", Reason.DTYPE_MISMATCH, source.itemsize, destination.itemsize),
        ("numbers of channels", Reason.HEAD_SIZE_MISMATCH, source.num_channels, destination.num_channels),
    ):
        if sent != received:
            _refuse(reason, f"{where}: {what} {sent} and {received} differ.")
    if source.packing != destination.packing:
        _refuse(
            Reason.PACKING_MISMATCH,
            f"{where}: pages are packed as {source.packing or 'plain'!r} and {destination.packing or 'plain'!r}.",
            "Run both engines on one kind of processor with one dtype and block size.",
        )


def _refuse(
    reason: Reason, message: str, remedy: str = "Serve the same model with the same cache settings on both engines."
) -> NoReturn:
    raise PlanError(reason, message, remedy)


def _some(names: Iterable[str]) -> str:
    """Return the first names of many."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
