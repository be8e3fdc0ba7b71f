"""The proof of a plan: a lowered list is compared with the destination bytes that a request needs.

The proof shares no code with the planner. It enumerates the needed bytes plainly: tokens are listed one by one and
located in the blocks of source and destination, layers are found by name, heads by global index. A *unit* is some of
these bytes, contiguous at source and destination, with its source address. A list is right if it writes exactly the
units' bytes, each once, from its source address.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Descriptors, Flags, Integers
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Atom, CacheGroup, CacheKind, Component, HeadRange, Region, Shard
from kvferry.plan.match import GroupBlocks

Heads = Mapping[tuple[str, str], Sequence[HeadRange]]
"""Global heads by group and component."""


@dataclass(frozen=True)
class Units:
    """Needed intervals, sorted by destination. A unit is contiguous at source and destination."""

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


def needed_from(source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads) -> Units:
    """Return the units of these heads that the destination needs and the source holds.

    Raises :class:`VerificationError` (``invalid-request``) for a request that leaves out a group or a state or does
    not fit its blocks, and for two units with a common byte.
    """
    _check_complete(requests, destination)
    whole = []
    for blocks in requests:
        held, wanted = source.group(blocks.group), _group(destination, blocks.group)
        if held is not None:
            whole.append(replace(blocks, last_token=_end_of_need(blocks, held, wanted)))
    return _units(source, destination, whole, heads, sources=[source])


def needed_in(destination: Shard, sources: Sequence[Shard], requests: Sequence[GroupBlocks]) -> Units:
    """Return all units that the destination needs, from any source; the units' source addresses have no meaning.

    Raises as :func:`needed_from`.
    """
    _check_complete(requests, destination)
    needs = []
    for blocks in requests:
        wanted = _group(destination, blocks.group)
        ends = {_end_of_need(blocks, held, wanted) for source in sources if (held := source.group(blocks.group))}
        if len(ends) > 1:
            _invalid(f"group {blocks.group!r}: the sources differ in block size.")
        needs.append(
            replace(
                blocks,
                last_token=ends.pop() if ends else blocks.last_token,
                source_block_ids=blocks.destination_ids,
                source_first_token=blocks.destination_first_token,
            )
        )
    return _units(destination, destination, needs, all_heads(destination), sources=sources)


def all_heads(shard: Shard) -> Heads:
    """Return every head that a shard holds."""
    return {(group.name, component.name): component.heads for group in shard.groups for component in group.components}


def _layers(component: Component, group_name: str, sources: Sequence[Shard]) -> set[str]:
    """Return the layers that move. Padding moves only from a source with equal padding of the same rank."""
    if not component.is_padding:
        return set(component.layers)
    mine = (component.name, component.num_channels, component.total_heads, component.heads)
    groups = [held for source in sources if (held := source.group(group_name))]
    return {
        layer
        for held in groups
        for other in held.components
        if other.is_padding and (other.name, other.num_channels, other.total_heads, other.heads) == mine
        for layer in other.layers
    }


def _check_complete(requests: Sequence[GroupBlocks], destination: Shard) -> None:
    for group in destination.groups:
        asked = [blocks for blocks in requests if blocks.group == group.name]
        if requests and not asked:
            _invalid(f"cache group {group.name!r} of {destination.rank_name} is left out.")
        tokens = any(blocks.last_token > blocks.first_token for blocks in requests)
        stateless = all(blocks.last_token == blocks.first_token for blocks in asked)
        if group.kind is CacheKind.STATE and tokens and stateless:
            _invalid(f"the request has tokens, but not the state of group {group.name!r}.")


def _end_of_need(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> int:
    """Return where the needed tokens end: a partly filled last block is needed whole where both blocks are equal."""
    sizes = {
        (group.block_size, group.token_share.size, group.token_share.interleave) for group in (source, destination)
    }
    covered = destination.block_size * destination.token_share.size
    apart = (blocks.source_first_token - blocks.destination_first_token) % covered
    if blocks.last_token == blocks.first_token or len(sizes) > 1 or apart:
        return blocks.last_token
    in_last_block = (blocks.last_token - blocks.destination_first_token) % covered
    return blocks.last_token + (covered - in_last_block if in_last_block else 0)


@dataclass(frozen=True)
class _Chunk:
    """Units of one request and component, in the order layer, token, head, channel."""

    group: str
    component: str
    layers: tuple[str, ...]
    tokens: Integers
    heads: Integers
    num_inner: int

    @property
    def size(self) -> int:
        return len(self.layers) * len(self.tokens) * len(self.heads) * self.num_inner

    def name(self, position: int) -> str:
        shape = (len(self.layers), len(self.tokens), len(self.heads), self.num_inner)
        layer, token, head, _ = np.unravel_index(position, shape)
        where = f"layer {self.layers[layer]!r}, token {self.tokens[token]}, head {self.heads[head]}"
        return f"group {self.group!r}, component {self.component!r}, {where}"


class _Stretches(NamedTuple):
    """Stretches of an axis: the first global index, the length, and the first's index at source and destination."""

    first: Integers
    length: Integers
    source: Integers
    destination: Integers


def _units(
    source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads, sources: Sequence[Shard]
) -> Units:
    arrays: list[tuple[Integers, Integers, Integers]] = []
    chunks: list[_Chunk] = []
    for blocks in requests:
        wanted, held = _group(destination, blocks.group), source.group(blocks.group)
        if held is None:
            continue
        # Most components of a group have the same tokens.
        tokens = cache(partial(_tokens, blocks, held, wanted))
        for component in wanted.components:
            if (blocks.group, component.name) not in heads:
                continue
            named = _layers(component, blocks.group, sources) & held.layers
            layers = tuple(layer for layer in component.layers if layer in named)
            if not layers:
                continue
            sent = next(other for other in held.components if other.name == component.name)
            bases = (source.regions[sent.region].base_address, destination.regions[component.region].base_address)
            carried = heads[blocks.group, component.name]
            chunk, *columns = _component_units(
                blocks, (held, wanted), (sent, component), bases, layers, carried, tokens
            )
            chunks.append(chunk)
            arrays.append((columns[0], columns[1], columns[2]))
    empty = np.empty(0, dtype=np.int64)
    joined = [np.concatenate([empty, *(array[column] for array in arrays)]) for column in range(3)]
    order = np.argsort(joined[1], kind="stable")
    units = Units(joined[0][order], joined[1][order], joined[2][order], tuple(chunks), order)
    twice = np.flatnonzero(units.destination[1:] < (units.destination + units.length)[:-1])
    if twice.size:
        _invalid(
            f"two units share a destination byte: {units.name(int(twice[0]))} and {units.name(int(twice[0]) + 1)}."
        )
    return units


def _component_units(
    blocks: GroupBlocks,
    groups: tuple[CacheGroup, CacheGroup],
    components: tuple[Component, Component],
    bases: tuple[int, int],
    layers: tuple[str, ...],
    heads: Sequence[HeadRange],
    tokens_of: Callable[[bool], _Stretches],
) -> tuple[_Chunk, Integers, Integers, Integers]:
    """Return the units of one component: coordinates, then source, destination and length in bytes."""
    sent, received = components
    shape = _unit_shape(groups[1].kind is CacheKind.STATE, components)
    tokens = tokens_of(not shape.whole_tokens)
    located = _heads(sent, received, heads, single=not shape.whole_heads)
    columns = []
    sides = (
        (blocks.source_ids, tokens.source, located.source),
        (blocks.destination_ids, tokens.destination, located.destination),
    )
    for component, group, base, (ids, token, head) in zip(components, groups, bases, sides, strict=True):
        place = dict(zip(component.layers, component.layer_offsets, strict=True))
        at_layer = np.array([place[layer] for layer in layers], dtype=np.int64)[:, None, None, None]
        at_token = ids[token // group.block_size] * component.block_stride
        at_token = at_token + token % group.block_size * component.token_stride
        at_head = head * component.head_stride
        columns.append(
            base + at_layer + at_token[:, None, None] + at_head[:, None] + shape.channels * component.channel_stride
        )
    length = np.broadcast_to(tokens.length[:, None, None] * located.length[:, None] * shape.num_bytes, columns[0].shape)
    chunk = _Chunk(blocks.group, received.name, layers, tokens.first, located.first, len(shape.channels))
    return chunk, columns[0].ravel(), columns[1].ravel(), length.ravel()


class _UnitShape(NamedTuple):
    """The bytes that are contiguous at source and destination, and so one unit: ``num_bytes`` per token and head."""

    whole_tokens: bool
    whole_heads: bool
    channels: Integers
    num_bytes: int


def _unit_shape(is_state: bool, components: tuple[Component, Component]) -> _UnitShape:
    item, num_channels = components[1].itemsize, components[1].num_channels
    content = num_channels * item
    channels_dense = all(component.channel_stride == item for component in components)
    # A unit of attention extends over tokens; a state has one token, and its units extend over heads.
    strides = {component.head_stride if is_state else component.token_stride for component in components}
    packed = components[1].atom is Atom.PAGE
    together = packed or channels_dense
    long = (packed and not is_state) or strides == {content if together else item}
    one, each = np.zeros(1, dtype=np.int64), np.arange(num_channels, dtype=np.int64)
    channels, num_bytes = (one, content) if together else (each, item)
    return _UnitShape(long and not is_state, long and is_state, channels, num_bytes)


def _heads(sent: Component, received: Component, wanted: Sequence[HeadRange], *, single: bool) -> _Stretches:
    """Locate every wanted head that source and destination hold."""
    named = _listed(sent.heads), _listed(received.heads)
    both, at_source, at_destination = np.intersect1d(named[0], named[1], assume_unique=True, return_indices=True)
    carried = np.isin(both, _listed(wanted))
    return _stretches(both[carried], at_source[carried], at_destination[carried], single)


def _listed(heads: Sequence[HeadRange]) -> Integers:
    return np.concatenate([np.arange(held.start, held.end, dtype=np.int64) for held in heads])


def _tokens(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup, single: bool) -> _Stretches:
    """Locate every needed token that source and destination hold, by its slot counted over all blocks of the list."""
    token = np.arange(blocks.first_token, blocks.last_token, dtype=np.int64)
    for group in (source, destination):
        share = group.token_share
        token = token[(token // share.interleave) % share.size == share.rank]
    sides: list[Integers] = []
    for group, ids, begin in (
        (source, blocks.source_ids, blocks.source_first_token),
        (destination, blocks.destination_ids, blocks.destination_first_token),
    ):
        if begin % (group.block_size * group.token_share.size) and group.token_share.size > 1:
            _invalid(f"group {group.name!r}: the blocks begin at token {begin}, inside a position of the list.")
        slot = _index_on_rank(token, group) - _index_on_rank(np.array([begin]), group)
        if len(slot) and int(slot[-1]) // group.block_size >= len(ids):
            _invalid(f"group {group.name!r}: the request names {len(ids)} blocks for {int(slot[-1]) + 1} tokens.")
        sides.append(slot)
    breaks = sides[0] % source.block_size == 0, sides[1] % destination.block_size == 0
    return _stretches(token, sides[0], sides[1], single, breaks[0] | breaks[1])


def _index_on_rank(token: Integers, group: CacheGroup) -> Integers:
    """Return the number of earlier tokens that the token's rank holds."""
    share = group.token_share
    rounds = token // (share.interleave * share.size)
    index: Integers = rounds * share.interleave + token % share.interleave
    return index


def _stretches(
    index: Integers,
    source: Integers,
    destination: Integers,
    single: bool,
    breaks: Flags | None = None,
) -> _Stretches:
    """Cut an axis where ``source`` or ``destination`` does not advance by one, at ``breaks``, or everywhere."""
    starts = np.full(len(index), single)
    if not single:
        starts[1:] = (np.diff(source) != 1) | (np.diff(destination) != 1)
        starts |= False if breaks is None else breaks
        starts[:1] = True
    first = np.flatnonzero(starts)
    return _Stretches(index[first], np.diff(first, append=len(index)), source[first], destination[first])


def _group(destination: Shard, name: str) -> CacheGroup:
    group = destination.group(name)
    if group is None:
        raise VerificationError(Reason.INVALID_REQUEST, f"{destination.rank_name} has no cache group {name!r}.")
    return group


def _invalid(what: str) -> None:
    raise VerificationError(Reason.INVALID_REQUEST, what)


def verify_pair(
    descriptors: Descriptors, source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads
) -> None:
    """Check the list with which one source rank sends these heads (global, by group and component).

    The list must write the layers and tokens that source and destination have in common. Raises
    :class:`VerificationError`: ``out-of-region``, ``bytes-doubled``, ``bytes-foreign`` (written but not needed),
    ``bytes-missing`` (needed but not written), ``wrong-source`` (from a source byte with other coordinates), or
    ``invalid-request`` for a request that leaves out a group or does not fit its blocks.
    """
    units = needed_from(source, destination, requests, heads)
    rows = _sorted_in_bounds(descriptors, source, destination)
    _check_once(rows)
    found = _compare(rows, units)
    _check_need(found, units)
    _check_source(found, rows, units)


def verify_destination(
    lists: Sequence[tuple[Shard, Descriptors]], destination: Shard, requests: Sequence[GroupBlocks]
) -> None:
    """Check that the lists of all source ranks together write exactly the bytes that the destination needs.

    Raises as :func:`verify_pair`; a rank that sends bytes it does not hold is a ``wrong-source``.
    """
    sorted_lists = [(source, _sorted_in_bounds(rows, source, destination)) for source, rows in lists]
    together = np.concatenate([np.empty((0, 3), dtype=np.int64), *(rows for _, rows in sorted_lists)])
    together = together[np.argsort(together[:, 1], kind="stable")]
    _check_once(together)
    need = needed_in(destination, [source for source, _ in lists], requests)
    _check_need(_compare(together, need), need)
    for source, rows in sorted_lists:
        units = needed_from(source, destination, requests, all_heads(destination))
        _check_source(_compare(rows, units), rows, units)


def _sorted_in_bounds(descriptors: Descriptors, source: Shard, destination: Shard) -> Integers:
    """Return the list as signed integers, sorted by destination. Raises for a row that lies in no region."""
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


def _inside(address: Descriptors, length: Descriptors, region: Region) -> Flags:
    begin, end = np.uint64(region.base_address), np.uint64(region.base_address + region.length)
    # The last comparison wraps around only where the comparison before it is false.
    return (length > 0) & (address >= begin) & (address <= end) & (length <= end - address)


def _check_once(rows: Integers) -> None:
    twice = np.flatnonzero(rows[1:, 1] < (rows[:, 1] + rows[:, 2])[:-1])
    if twice.size:
        address = int(rows[twice[0] + 1, 1])
        raise VerificationError(Reason.BYTES_DOUBLED, f"destination byte {address:#x} is written more than once.")


class _Comparison(NamedTuple):
    """The stretches of destination bytes between all starts and ends of rows and units."""

    start: Integers
    row: Integers
    unit: Integers
    written: Flags
    needed: Flags


def _compare(rows: Integers, units: Units) -> _Comparison:
    ends = (rows[:, 1], rows[:, 1] + rows[:, 2], units.destination, units.destination + units.length)
    # Not np.unique, which hashes integers: that takes ten times as long.
    bounds = np.sort(np.concatenate(ends))
    start = bounds[:-1][np.diff(bounds) > 0]
    row, written = _covering(rows[:, 1], rows[:, 2], start)
    unit, needed = _covering(units.destination, units.length, start)
    return _Comparison(start, row, unit, written, needed)


def _covering(starts: Integers, lengths: Integers, points: Integers) -> tuple[Integers, Flags]:
    """Return for each point the last interval that begins at or before the point, and whether it covers the point."""
    if not len(starts):
        return np.zeros(len(points), dtype=np.int64), np.zeros(len(points), dtype=np.bool_)
    index = np.maximum(np.searchsorted(starts, points, side="right") - 1, 0)
    return index, (points >= starts[index]) & (points < starts[index] + lengths[index])


def _check_need(found: _Comparison, units: Units) -> None:
    """Raise unless the rows write exactly the bytes that the units need."""
    foreign = np.flatnonzero(found.written & ~found.needed)
    if foreign.size:
        address = int(found.start[foreign[0]])
        raise VerificationError(Reason.BYTES_FOREIGN, f"destination byte {address:#x} is written but not needed.")
    missing = np.flatnonzero(found.needed & ~found.written)
    if missing.size:
        unit = units.name(int(found.unit[missing[0]]))
        raise VerificationError(Reason.BYTES_MISSING, f"{missing.size} stretches are not written, the first in {unit}.")


def _check_source(found: _Comparison, rows: Integers, units: Units) -> None:
    """Raise unless every byte written comes from the source byte with the same coordinates."""
    unknown = np.flatnonzero(found.written & ~found.needed)
    if unknown.size:
        address = int(found.start[unknown[0]])
        raise VerificationError(Reason.WRONG_SOURCE, f"destination byte {address:#x} comes from a rank without it.")
    both = found.written & found.needed
    row, unit = found.row[both], found.unit[both]
    sent_from = rows[row, 0] - rows[row, 1]
    wrong = np.flatnonzero(sent_from != units.source[unit] - units.destination[unit])
    if wrong.size:
        name, shift = units.name(int(unit[wrong[0]])), int(sent_from[wrong[0]])
        address = int(found.start[both][wrong[0]]) + shift
        raise VerificationError(Reason.WRONG_SOURCE, f"{name} is read from {address:#x}, which holds other bytes.")
