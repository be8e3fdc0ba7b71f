"""An oracle of moves: labels real memory, moves it, and compares every byte.

Each element of the source gets a label of its logical coordinates (group, component, layer, token or state, head,
channel). After the move every requested element of the destination must have the label of its own coordinates, and
every other byte must be unchanged. The oracle accesses elements through numpy views of real arrays and uses no code of
the planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.arrays import Bytes, Descriptors, Integers
from kvferry.layout.shard import CacheGroup, Component, HeadRange, Region, Shard
from kvferry.plan.match import GroupBlocks

Views = Mapping[tuple[str, str, str], Bytes]
"""By group, component and layer name: an array of shape (block, local head, slot, channel, itemsize)."""


class OracleMismatch(AssertionError):
    """The destination holds wrong bytes."""


class Arena:
    """One buffer for the memory of all ranks of a test, so that one call carries out a list of real addresses.

    >>> arena = Arena(64)
    >>> source, destination = arena.allocate(8), arena.allocate(8)
    >>> source[:] = 7
    >>> arena.move(np.array([[source.ctypes.data, destination.ctypes.data + 4, 4]], dtype=np.uint64))
    >>> destination.tolist()
    [0, 0, 0, 0, 7, 7, 7, 7]
    """

    def __init__(self, num_bytes: int) -> None:
        self.buffer: Bytes = np.zeros(num_bytes, dtype=np.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Bytes:
        """Return the next bytes of the buffer."""
        begin, self._used = self._used, self._used + num_bytes
        if self._used > len(self.buffer):
            raise MemoryError(f"{self._used} bytes of an arena of {len(self.buffer)}")
        return self.buffer[begin : self._used]

    def move(self, rows: Descriptors) -> None:
        """Copy every row, length bytes from source to destination address. All reads come before all writes."""
        base = self.buffer.ctypes.data
        source, destination, length = rows.astype(np.int64).T
        for side, start in (("source", source - base), ("destination", destination - base)):
            outside = np.flatnonzero((start < 0) | (length < 0) | (start + length > len(self.buffer)))
            if outside.size:
                raise OracleMismatch(f"row {rows[outside[0]].tolist()}: the {side} lies outside all memory")
        begins = np.cumsum(length) - length
        within = np.arange(int(length.sum()), dtype=np.int64) - np.repeat(begins, length)
        moved = self.buffer[np.repeat(source - base, length) + within]
        self.buffer[np.repeat(destination - base, length) + within] = moved


@dataclass(frozen=True)
class RankMemory:
    """Real memory of one rank: its shard, its bytes, and the oracle's views of the elements."""

    shard: Shard
    regions: tuple[Bytes, ...]
    views: Views

    def snapshot(self) -> list[Bytes]:
        """Return a copy of all bytes."""
        return [region.copy() for region in self.regions]

    def restore(self, snapshot: Sequence[Bytes]) -> None:
        """Write a snapshot back."""
        for region, content in zip(self.regions, snapshot, strict=True):
            region[:] = content


def strided_memory(arena: Arena, shard: Shard) -> RankMemory:
    """Allocate the regions of a shard; return the shard with real base addresses and views by its strides."""
    regions = tuple(arena.allocate(region.length) for region in shard.regions)
    placed = tuple(
        Region(memory.ctypes.data, region.length, region.device)
        for memory, region in zip(regions, shard.regions, strict=True)
    )
    views: dict[tuple[str, str, str], Bytes] = {}
    for group in shard.groups:
        for component in group.components:
            heads = sum(held.end - held.start for held in component.heads)
            shape = (group.num_blocks, heads, group.block_size, component.num_channels, component.itemsize)
            strides = (
                component.block_stride,
                component.head_stride,
                component.token_stride,
                component.channel_stride,
                1,
            )
            for layer, offset in zip(component.layers, component.layer_offsets, strict=True):
                memory = regions[component.region][offset:]
                views[group.name, component.name, layer] = np.lib.stride_tricks.as_strided(memory, shape, strides)
    return RankMemory(msgspec.structs.replace(shard, regions=placed), regions, views)


@dataclass(frozen=True)
class Labels:
    """A number for every coordinate, equal at source and destination.

    An element too narrow for the number holds one *digit* of it; all digits together identify the coordinate.
    """

    groups: tuple[str, ...]
    components: tuple[str, ...]
    layers: tuple[str, ...]
    num_tokens: int
    num_heads: int
    num_channels: int
    itemsize: int
    padding: frozenset[tuple[str, str, int, int, tuple[HeadRange, ...]]]
    """The padding that moves, which is the sources': group, layer, size, number of ranks, and rank."""

    @classmethod
    def of(cls, sources: Sequence[RankMemory], destinations: Sequence[RankMemory], num_tokens: int) -> "Labels":
        """Return the labels for the coordinates of these ranks and tokens 0 up to ``num_tokens``."""
        groups = [group for rank in (*sources, *destinations) for group in rank.shard.groups]
        components = [component for group in groups for component in group.components]
        return cls(
            groups=tuple(sorted({group.name for group in groups})),
            components=tuple(sorted({component.name for component in components})),
            layers=tuple(sorted({layer for component in components for layer in component.layers})),
            num_tokens=num_tokens,
            num_heads=max(component.total_heads for component in components),
            num_channels=max(component.num_channels for component in components),
            itemsize=min(component.itemsize for component in components),
            padding=frozenset(
                _padding(group, component, layer)
                for rank in sources
                for group in rank.shard.groups
                for component in group.components
                if component.is_padding
                for layer in component.layers
            ),
        )

    @property
    def num_digits(self) -> int:
        """The digits of the largest number."""
        count = len(self.groups) * len(self.components) * len(self.layers)
        count *= self.num_tokens * self.num_heads * self.num_channels
        return -(-max(1, count.bit_length()) // (8 * self.itemsize))

    def write(self, rank: RankMemory, blocks: GroupBlocks, side: str, last_token: int, digit: int = 0) -> None:
        """Label the request's tokens up to ``last_token`` in one rank; ``side`` is ``source`` or ``destination``."""
        group = rank.shard.group(blocks.group)
        if group is None:
            return
        ids = blocks.source_ids if side == "source" else blocks.destination_ids
        begin = blocks.source_first_token if side == "source" else blocks.destination_first_token
        token = np.arange(begin if side == "source" else blocks.first_token, last_token, dtype=np.int64)
        token, slot = _held(group, token, begin)
        block, slot = ids[slot // group.block_size], slot % group.block_size
        for component in group.components:
            heads = np.concatenate([np.arange(held.start, held.end, dtype=np.int64) for held in component.heads])
            channel = np.arange(component.num_channels, dtype=np.int64)
            for layer in component.layers:
                if component.is_padding and _padding(group, component, layer) not in self.padding:
                    continue
                place = (self.groups.index(group.name), self.components.index(component.name), self.layers.index(layer))
                number = self._number(place, token[:, None, None], heads[None, :, None], channel[None, None, :])
                view = rank.views[group.name, component.name, layer]
                view[block, :, slot] = self._digit_bytes(number, digit, component.itemsize)

    def _number(self, place: tuple[int, int, int], token: Integers, head: Integers, channel: Integers) -> Integers:
        group, component, layer = place
        prefix = (group * len(self.components) + component) * len(self.layers) + layer
        return ((prefix * self.num_tokens + token) * self.num_heads + head) * self.num_channels + channel + 1

    def _digit_bytes(self, number: Integers, digit: int, itemsize: int) -> Bytes:
        shift = 8 * (digit * self.itemsize + np.arange(itemsize, dtype=np.int64))
        digits: Integers = (number[..., None] >> np.minimum(shift, 62)) & 0xFF
        return digits.astype(np.uint8)


def _padding(group: CacheGroup, component: Component, layer: str) -> tuple[str, str, int, int, tuple[HeadRange, ...]]:
    return group.name, layer, component.num_channels, component.total_heads, component.heads


def check_moved(
    arena: Arena,
    sources: Sequence[RankMemory],
    destinations: Sequence[RankMemory],
    requests: Sequence[GroupBlocks],
    rows: Descriptors,
) -> None:
    """Label the sources, carry out the rows, and compare every byte of the destinations.

    Where block sizes and slots of source and destination agree, a partly filled last block must move whole.
    Raises :class:`OracleMismatch`.
    """
    ends = [_end(blocks, sources, destinations) for blocks in requests]
    labels = Labels.of(sources, destinations, max([1, *ends]))
    generator = np.random.default_rng(0)
    for digit in range(labels.num_digits):
        for rank in [*sources, *destinations]:
            rank.restore([generator.integers(0, 256, len(region), dtype=np.uint8) for region in rank.regions])
        for rank in sources:
            for blocks, end in zip(requests, ends, strict=True):
                labels.write(rank, blocks, "source", end, digit)
        before = [rank.snapshot() for rank in destinations]
        expected = []
        for rank, untouched in zip(destinations, before, strict=True):
            for blocks, end in zip(requests, ends, strict=True):
                labels.write(rank, blocks, "destination", end, digit)
            expected.append(rank.snapshot())
            rank.restore(untouched)
        arena.move(rows)
        for rank, wanted in zip(destinations, expected, strict=True):
            compare(rank, wanted)


def _end(blocks: GroupBlocks, sources: Sequence[RankMemory], destinations: Sequence[RankMemory]) -> int:
    """Return the end of the tokens that move, from a source rank and a destination rank that hold the group."""
    sent, received = (
        next((rank.shard for rank in ranks if rank.shard.group(blocks.group)), ranks[0].shard)
        for ranks in (sources, destinations)
    )
    return expected_end(blocks, sent, received)


def _held(group: CacheGroup, token: Integers, begin: int) -> tuple[Integers, Integers]:
    """Return the tokens of a rank's share and their slots, counted one by one from the start of the block list."""
    share = group.token_share
    listed = np.arange(begin, int(token[-1]) + 1 if len(token) else begin, dtype=np.int64)
    mine = listed[(listed // share.interleave) % share.size == share.rank]
    slot = np.flatnonzero(np.isin(mine, token))
    return mine[slot], slot


def expected_end(blocks: GroupBlocks, source: Shard, destination: Shard) -> int:
    """Return the end of the tokens that move for a request."""
    sent, received = source.group(blocks.group), destination.group(blocks.group)
    if sent is None or received is None or blocks.first_token == blocks.last_token:
        return blocks.last_token
    covered = received.block_size * received.token_share.size
    same_slots = (blocks.source_first_token - blocks.destination_first_token) % covered == 0
    splits = [(group.block_size, group.token_share.size, group.token_share.interleave) for group in (sent, received)]
    if splits[0] != splits[1] or not same_slots:
        return blocks.last_token
    filled = blocks.last_token - blocks.destination_first_token
    return blocks.destination_first_token + -(-filled // covered) * covered


def compare(rank: RankMemory, expected: Sequence[Bytes]) -> None:
    """Raise :class:`OracleMismatch` with the first wrong byte unless a rank holds exactly these bytes."""
    for index, (found, wanted) in enumerate(zip(rank.regions, expected, strict=True)):
        wrong = np.flatnonzero(found != wanted)
        if wrong.size:
            first = int(wrong[0])
            raise OracleMismatch(
                f"{rank.shard.rank_name}: {wrong.size} bytes of region {index} are wrong, the first at {first}: "
                f"{found[first]} in place of {wanted[first]}"
            )
