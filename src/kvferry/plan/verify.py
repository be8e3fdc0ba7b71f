"""Checks a lowered list against the shards and the request, by arithmetic of its own.

Nothing here comes from the planner. The needed bytes are enumerated plainly: tokens one by one, located in both
sides' blocks; layers by name; heads by global index. That gives *units*, contiguous on both sides, each with the one
source address that it must come from. The list is right when it covers exactly the units' bytes, once, from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import Reason, VerificationError
from kvferry.layout.cache_group import CacheGroup
from kvferry.layout.shard import Region, Shard
from kvferry.layout.strided import Atom, Component, HeadRange
from kvferry.plan.request import GroupBlocks

Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]
Heads = Mapping[str, Sequence[HeadRange]]


def verify_pair(
    descriptors: Rows, source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads
) -> None:
    """Check the list by which one source rank sends these heads (global, by group) of the layers that both hold.

    Raises :class:`VerificationError`: ``out-of-region``, ``bytes-doubled``, ``bytes-foreign`` (written but not needed),
    ``bytes-missing`` (needed but not written) or ``wrong-source`` (written from elsewhere than the same coordinates).
    """
    units = _units(source, destination, _whole_blocks(requests, source, destination), heads)
    rows = _sorted_in_bounds(descriptors, source, destination)
    _check_once(rows)
    found = _compare(rows, units)
    _check_need(found, units)
    _check_source(found, rows, units)


def verify_destination(
    lists: Sequence[tuple[Shard, Rows]], destination: Shard, requests: Sequence[GroupBlocks]
) -> None:
    """Check the lists of all source ranks together: they fill the destination's need exactly, whoever sends what.

    Raises as :func:`verify_pair`; a rank that sends what it does not hold is a ``wrong-source``.
    """
    sorted_lists = [(source, _sorted_in_bounds(rows, source, destination)) for source, rows in lists]
    together = np.concatenate([np.empty((0, 3), dtype=np.int64), *(rows for _, rows in sorted_lists)])
    together = together[np.argsort(together[:, 1], kind="stable")]
    _check_once(together)
    need = _need(lists, destination, requests)
    _check_need(_compare(together, need), need)
    everything = {group.name: group.heads for group in destination.groups}
    for source, rows in sorted_lists:
        units = _units(source, destination, _whole_blocks(requests, source, destination), everything)
        _check_source(_compare(rows, units), rows, units)


@dataclass(frozen=True)
class _Units:
    """Needed intervals sorted by destination, and what each holds."""

    source: Integers
    destination: Integers
    length: Integers
    chunks: tuple["_Chunk", ...]
    order: Integers

    def name(self, index: int) -> str:
        """Return the logical coordinates of a unit."""
        position = int(self.order[index])
        for chunk in self.chunks:
            if position < chunk.size:
                return chunk.name(position)
            position -= chunk.size
        raise IndexError(index)


@dataclass(frozen=True)
class _Chunk:
    """Units of one request and component, in the order layer, token, head, channel."""

    group: str
    component: str
    layers: tuple[str, ...]
    tokens: Integers
    heads: tuple[int, ...]
    num_inner: int

    @property
    def size(self) -> int:
        return len(self.layers) * len(self.tokens) * len(self.heads) * self.num_inner

    def name(self, position: int) -> str:
        shape = (len(self.layers), len(self.tokens), len(self.heads), self.num_inner)
        layer, token, head, _ = np.unravel_index(position, shape)
        where = f"layer {self.layers[layer]!r}, token {self.tokens[token]}, head {self.heads[head]}"
        return f"group {self.group!r}, component {self.component!r}, {where}"


class _Tokens(NamedTuple):
    """Consecutive tokens that stay within one block on each side, or single tokens."""

    first: Integers
    num_tokens: Integers
    source_block: Integers
    source_slot: Integers
    destination_block: Integers
    destination_slot: Integers


def _end_of_need(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> int:
    """Return where the needed tokens end: a partly filled last block is needed whole where both sides agree on it."""
    size = destination.block_size
    apart = blocks.source_first_token - blocks.destination_first_token
    if blocks.num_tokens == 0 or source.block_size != size or apart % size:
        return blocks.last_token
    in_last_block = (blocks.last_token - blocks.destination_first_token) % size
    return blocks.last_token + (size - in_last_block if in_last_block else 0)


def _whole_blocks(requests: Sequence[GroupBlocks], source: Shard, destination: Shard) -> list[GroupBlocks]:
    """Return the requests with their ends moved to where the need ends."""
    whole = []
    for blocks in requests:
        held, wanted = source.group(blocks.group), _group(destination, blocks.group)
        if held is not None:
            whole.append(replace(blocks, last_token=_end_of_need(blocks, held, wanted)))
    return whole


def _need(lists: Sequence[tuple[Shard, Rows]], destination: Shard, requests: Sequence[GroupBlocks]) -> _Units:
    """Return the destination's need; its own blocks stand in for the source's."""
    needs = []
    for blocks in requests:
        wanted = _group(destination, blocks.group)
        ends = {_end_of_need(blocks, held, wanted) for source, _ in lists if (held := source.group(blocks.group))}
        if len(ends) > 1:
            raise VerificationError(Reason.INVALID_REQUEST, f"group {blocks.group!r}: sources differ in block size.")
        needs.append(
            GroupBlocks(
                group=blocks.group,
                first_token=blocks.first_token,
                last_token=ends.pop() if ends else blocks.last_token,
                source_block_ids=blocks.destination_ids,
                destination_block_ids=blocks.destination_ids,
                source_first_token=blocks.destination_first_token,
                destination_first_token=blocks.destination_first_token,
            )
        )
    return _units(destination, destination, needs, {group.name: group.heads for group in destination.groups})


def _units(source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads) -> _Units:
    arrays: list[tuple[Integers, Integers, Integers]] = []
    chunks: list[_Chunk] = []
    for blocks in requests:
        wanted, held = _group(destination, blocks.group), source.group(blocks.group)
        if held is None or blocks.group not in heads:
            continue
        for component in wanted.components:
            sent = next(other for other in held.components if other.name == component.name)
            bases = (source.regions[sent.region].base_address, destination.regions[component.region].base_address)
            chunk, *columns = _component_units(blocks, (held, wanted), (sent, component), bases, heads[blocks.group])
            chunks.append(chunk)
            arrays.append((columns[0], columns[1], columns[2]))
    empty = np.empty(0, dtype=np.int64)
    joined = [np.concatenate([empty, *(array[column] for array in arrays)]) for column in range(3)]
    order = np.argsort(joined[1], kind="stable")
    units = _Units(joined[0][order], joined[1][order], joined[2][order], tuple(chunks), order)
    twice = np.flatnonzero(units.destination[1:] < (units.destination + units.length)[:-1])
    if twice.size:
        both = f"{units.name(int(twice[0]))} and {units.name(int(twice[0]) + 1)}"
        raise VerificationError(Reason.INVALID_REQUEST, f"two needs share a destination byte: {both}.")
    return units


def _component_units(
    blocks: GroupBlocks,
    groups: tuple[CacheGroup, CacheGroup],
    components: tuple[Component, Component],
    bases: tuple[int, int],
    heads: Sequence[HeadRange],
) -> tuple[_Chunk, Integers, Integers, Integers]:
    sent, received = components
    tokens, channels, lengths = _granularity(blocks, groups, components)
    layers = tuple(layer for layer in received.layers if layer in set(sent.layers))
    names = [head for head in _global_heads(received) if any(held.start <= head < held.end for held in heads)]
    names = [head for head in names if head in set(_global_heads(sent))]
    columns = []
    sides = zip(components, bases, ((tokens[2], tokens[3]), (tokens[4], tokens[5])), strict=True)
    for component, base, (block, slot) in sides:
        place = dict(zip(component.layers, component.layer_offsets, strict=True))
        local = {head: index for index, head in enumerate(_global_heads(component))}
        at_layer = np.array([place[layer] for layer in layers], dtype=np.int64)[:, None, None, None]
        at_token = (block * component.block_stride + slot * component.token_stride)[:, None, None]
        at_head = np.array([local[head] for head in names], dtype=np.int64)[:, None] * component.head_stride
        columns.append(base + at_layer + at_token + at_head + channels * component.channel_stride)
    length = np.broadcast_to(lengths[:, None, None], columns[0].shape)
    chunk = _Chunk(blocks.group, received.name, layers, tokens.first, tuple(names), len(channels))
    return chunk, columns[0].ravel(), columns[1].ravel(), length.ravel()


def _granularity(
    blocks: GroupBlocks, groups: tuple[CacheGroup, CacheGroup], components: tuple[Component, Component]
) -> tuple[_Tokens, Integers, Integers]:
    """Return the largest units contiguous on both sides: their tokens, first channels and lengths in bytes."""
    item, num_channels = components[1].itemsize, components[1].num_channels
    each_channel, first_channel = np.arange(num_channels, dtype=np.int64), np.zeros(1, dtype=np.int64)
    stretches = _tokens(blocks, *groups, single=False)
    content = num_channels * item
    dense_content = all(component.channel_stride == item for component in components)
    dense_tokens = all(component.token_stride == item for component in components)
    packed = components[1].atom is Atom.PAGE
    if packed or (dense_content and all(component.token_stride == content for component in components)):
        return stretches, first_channel, stretches.num_tokens * content
    if dense_content:
        tokens = _tokens(blocks, *groups, single=True)
        return tokens, first_channel, tokens.num_tokens * content
    if dense_tokens:
        return stretches, each_channel, stretches.num_tokens * item
    tokens = _tokens(blocks, *groups, single=True)
    return tokens, each_channel, tokens.num_tokens * item


def _tokens(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup, *, single: bool) -> _Tokens:
    """Locate every needed token on both sides."""
    token = np.arange(blocks.first_token, blocks.last_token, dtype=np.int64)
    sides: list[Integers] = []
    places = (
        (source, blocks.source_ids, blocks.source_first_token),
        (destination, blocks.destination_ids, blocks.destination_first_token),
    )
    for group, ids, begin in places:
        position = token - begin
        if len(token) and int(position[-1]) // group.block_size >= len(ids):
            what = f"group {group.name!r}: {len(ids)} blocks were named for {int(position[-1]) + 1} tokens."
            raise VerificationError(Reason.INVALID_REQUEST, what)
        sides += [ids[position // group.block_size], position % group.block_size]
    starts = np.ones(len(token), dtype=np.bool_) if single else (sides[1] == 0) | (sides[3] == 0)
    starts[:1] = True
    first = np.flatnonzero(starts)
    count = np.diff(first, append=len(token))
    return _Tokens(token[first], count, sides[0][first], sides[1][first], sides[2][first], sides[3][first])


def _global_heads(component: Component) -> list[int]:
    return [head for held in component.heads for head in range(held.start, held.end)]


def _group(destination: Shard, name: str) -> CacheGroup:
    group = destination.group(name)
    if group is None:
        raise VerificationError(Reason.INVALID_REQUEST, f"{destination.rank_name} has no cache group {name!r}.")
    return group


def _sorted_in_bounds(descriptors: Rows, source: Shard, destination: Shard) -> Integers:
    """Return the list as signed integers, sorted by destination, once every row lies in one region on each side."""
    for column, side, regions in ((0, "source", source.regions), (1, "destination", destination.regions)):
        inside = np.zeros(len(descriptors), dtype=np.bool_)
        for region in regions:
            inside |= _inside(descriptors[:, column], descriptors[:, 2], region)
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            address, length = int(descriptors[row, column]), int(descriptors[row, 2])
            raise VerificationError(
                Reason.OUT_OF_REGION,
                f"descriptor {row}: {length} bytes at {side} address {address:#x} lie in no region.",
            )
    rows = descriptors.astype(np.int64)
    return rows[np.argsort(rows[:, 1], kind="stable")]


def _inside(address: Rows, length: Rows, region: Region) -> npt.NDArray[np.bool_]:
    begin, end = np.uint64(region.base_address), np.uint64(region.base_address + region.length)
    # The last comparison may wrap around only where the one before it is false already.
    return (length > 0) & (address >= begin) & (address <= end) & (length <= end - address)


def _check_once(rows: Integers) -> None:
    twice = np.flatnonzero(rows[1:, 1] < (rows[:, 1] + rows[:, 2])[:-1])
    if twice.size:
        address = int(rows[twice[0] + 1, 1])
        raise VerificationError(Reason.BYTES_DOUBLED, f"destination byte {address:#x} is written more than once.")


class _Comparison(NamedTuple):
    """Every stretch of destination bytes between two neighbouring ends of rows or units."""

    start: Integers
    row: Integers
    unit: Integers
    written: npt.NDArray[np.bool_]
    needed: npt.NDArray[np.bool_]


def _compare(rows: Integers, units: _Units) -> _Comparison:
    ends = (rows[:, 1], rows[:, 1] + rows[:, 2], units.destination, units.destination + units.length)
    start = np.unique(np.concatenate(ends))[:-1]
    row, written = _covering(rows[:, 1], rows[:, 2], start)
    unit, needed = _covering(units.destination, units.length, start)
    return _Comparison(start, row, unit, written, needed)


def _covering(starts: Integers, lengths: Integers, points: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return for each point the last interval that begins at or before it, and whether it reaches the point."""
    if not len(starts):
        return np.zeros(len(points), dtype=np.int64), np.zeros(len(points), dtype=np.bool_)
    index = np.maximum(np.searchsorted(starts, points, side="right") - 1, 0)
    return index, (points >= starts[index]) & (points < starts[index] + lengths[index])


def _check_need(found: _Comparison, units: _Units) -> None:
    """Raise unless the rows write exactly the bytes that the units need."""
    foreign = np.flatnonzero(found.written & ~found.needed)
    if foreign.size:
        address = int(found.start[foreign[0]])
        raise VerificationError(Reason.BYTES_FOREIGN, f"destination byte {address:#x} is written but not needed.")
    missing = np.flatnonzero(found.needed & ~found.written)
    if missing.size:
        unit = units.name(int(found.unit[missing[0]]))
        raise VerificationError(Reason.BYTES_MISSING, f"{missing.size} stretches are not written, the first in {unit}.")


def _check_source(found: _Comparison, rows: Integers, units: _Units) -> None:
    """Raise unless every byte written comes from the source byte with the same coordinates."""
    unknown = np.flatnonzero(found.written & ~found.needed)
    if unknown.size:
        address = int(found.start[unknown[0]])
        raise VerificationError(Reason.WRONG_SOURCE, f"destination byte {address:#x} is not held by its sender.")
    both = found.written & found.needed
    row, unit = found.row[both], found.unit[both]
    sent_from = rows[row, 0] - rows[row, 1]
    wrong = np.flatnonzero(sent_from != units.source[unit] - units.destination[unit])
    if wrong.size:
        name, shift = units.name(int(unit[wrong[0]])), int(sent_from[wrong[0]])
        address = int(found.start[both][wrong[0]]) + shift
        raise VerificationError(Reason.WRONG_SOURCE, f"{name} is read from {address:#x}, where it does not lie.")
