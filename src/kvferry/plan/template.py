"""Templates: everything about a copy between two ranks' blocks that does not depend on the block ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.component import Atom, Component, HeadRange
from kvferry.layout.group import CacheGroup
from kvferry.layout.shard import Shard
from kvferry.plan.block_pairs import Phase, TokenRun
from kvferry.plan.head_ranges import match_heads
from kvferry.plan.match import match_layers
from kvferry.plan.strided_copy import Loop, StridedCopy, coalesce, merge_rows, place

MAX_PIECES = 1 << 18
"""Pieces of one block. More come only of layouts that should be transposed by a kernel instead."""


@dataclass(frozen=True, eq=False)
class Template:
    """What one pair of blocks moves within one phase and one pair of regions.

    The copies' offsets are addresses for block 0 on both sides; block b lies ``b * *_block_stride`` further on.
    """

    source_region: int
    destination_region: int
    source_block_stride: int
    destination_block_stride: int
    copies: tuple[StridedCopy, ...]

    @cached_property
    def pieces(self) -> Offsets:
        """Rows of source address, destination address and length for block 0, sorted, adjacent ones joined."""
        return merge_rows(np.concatenate([copy.expand() for copy in self.copies]))

    @cached_property
    def _prolongs(self) -> npt.NDArray[np.bool_]:
        """Which pieces continue in the next block where both sides advance by one block."""
        if self.source_block_stride != self.destination_block_stride:
            return np.zeros(len(self.pieces), dtype=np.bool_)
        return np.equal(self.pieces[:, 2], self.source_block_stride)

    @cached_property
    def _is_block_major(self) -> bool:
        """Whether a destination block's pieces lie before those of the next block, as in the cross-layer layouts."""
        return int(self.pieces[-1, 1] - self.pieces[0, 1]) < self.destination_block_stride

    @cached_property
    def may_join(self) -> bool:
        """Whether rows of different pieces can be adjacent: runs over blocks that meet, or a block's end and the next
        block's begin.
        """
        if self._prolongs.any():
            return True
        strides = np.array([self.source_block_stride, self.destination_block_stride])
        shorter = self.pieces[~self._prolongs]
        starts = set(map(tuple, (shorter[:, :2] + strides).tolist()))
        return any(tuple(end) in starts for end in (shorter[:, :2] + shorter[:, 2:]).tolist())

    def lower(self, source_blocks: Integers, destination_blocks: Integers) -> Offsets:
        """Return rows of source address, destination address and length for pairs of blocks in any order."""
        order = np.lexsort((source_blocks, destination_blocks))
        blocks = np.stack((source_blocks[order], destination_blocks[order]), axis=1)
        prolongs = self._prolongs
        if not prolongs.any():
            return self._product(blocks, self.pieces)
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(blocks, axis=0) != 1).any(axis=1))))
        runs = self._product(blocks[starts], self.pieces[prolongs], np.diff(starts, append=len(blocks)))
        if prolongs.all():
            return runs
        return np.concatenate((runs, self._product(blocks, self.pieces[~prolongs])))

    def _product(self, blocks: Integers, pieces: Offsets, num_blocks: Integers | None = None) -> Offsets:
        """Place every piece in every block, in an order that is close to ascending by destination.

        ``num_blocks`` prolongs the pieces of each block by so many blocks.
        """
        if self._is_block_major:
            memory = np.empty((len(blocks), len(pieces), 3), dtype=np.int64)
            rows = memory
        else:
            memory = np.empty((len(pieces), len(blocks), 3), dtype=np.int64)
            rows = memory.swapaxes(0, 1)
        np.add((blocks[:, 0] * self.source_block_stride)[:, None], pieces[:, 0], out=rows[:, :, 0])
        np.add((blocks[:, 1] * self.destination_block_stride)[:, None], pieces[:, 1], out=rows[:, :, 1])
        if num_blocks is None:
            rows[:, :, 2] = pieces[:, 2]
        else:
            np.multiply(num_blocks[:, None], pieces[:, 2], out=rows[:, :, 2])
        return memory.reshape(-1, 3)


def build_templates(
    source: Shard,
    destination: Shard,
    groups: tuple[CacheGroup, CacheGroup],
    heads: Mapping[str, Sequence[HeadRange]],
    phase: Phase,
) -> tuple[Template, ...]:
    """Build the templates of one group (its source and destination form) and phase: one for each pair of regions.

    ``heads`` are those that move, by component. Raises :class:`PlanError` (``invalid-request``) for a phase that
    splits a packed page, ``unsupported`` for blocks in too many pieces.
    """
    patterns: dict[tuple[Component, Component], list[tuple[StridedCopy, Offsets]]] = {}
    for component in groups[1].components:
        if component.name in heads:
            pair = groups[0].component(component.name), component
            for run in phase:
                found = _patterns(source, destination, pair, heads[component.name], run, groups[0].block_size)
                patterns.setdefault(pair, []).extend(found)
    return tuple(_template(key, members) for key, members in _by_memory(patterns).items())


Memory = tuple[int, int, int, int]
Pattern = tuple[int, tuple[Loop, ...]]


def _by_memory(
    patterns: dict[tuple[Component, Component], list[tuple[StridedCopy, Offsets]]],
) -> dict[Memory, dict[Pattern, list[Offsets]]]:
    """Collect the places of equal patterns in equal memory: K and V planes meet here and become one run again."""
    memories: dict[Memory, dict[Pattern, list[Offsets]]] = {}
    for (source, destination), members in patterns.items():
        memory = (source.region, destination.region, source.block_stride, destination.block_stride)
        for copy, places in members:
            collected = memories.setdefault(memory, {})
            collected.setdefault((copy.run_bytes, copy.loops), []).append(places)
    return memories


def _template(memory: Memory, patterns: dict[Pattern, list[Offsets]]) -> Template:
    copies: list[StridedCopy] = []
    for (run_bytes, loops), places in patterns.items():
        copies += place(run_bytes, loops, np.concatenate(places))
    num_pieces = sum(copy.num_runs for copy in copies)
    if num_pieces > MAX_PIECES:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"one block would move in {num_pieces} pieces of {min(copy.run_bytes for copy in copies)} bytes or more, "
            f"at most {MAX_PIECES} are planned.",
            "Use layouts that order tokens and channels alike on both sides.",
        )
    return Template(*memory, copies=tuple(copies))


def _patterns(
    source: Shard,
    destination: Shard,
    components: tuple[Component, Component],
    heads: Sequence[HeadRange],
    run: TokenRun,
    block_size: int,
) -> list[tuple[StridedCopy, Offsets]]:
    """Return for each stretch of heads the copy within one layer and block, and the addresses where layers begin."""
    sent, received = components
    bases = [source.regions[sent.region].base_address, destination.regions[received.region].base_address]
    places = match_layers(sent, received) + np.array(bases, dtype=np.int64)
    patterns = []
    for source_head, destination_head, count in match_heads(sent.heads, received.heads, heads):
        start = np.array(
            [
                source_head * sent.head_stride + run.source_slot * sent.token_stride,
                destination_head * received.head_stride + run.destination_slot * received.token_stride,
            ],
            dtype=np.int64,
        )
        head_loop = (count, sent.head_stride, received.head_stride)
        patterns.append((_page_copy(sent, received, run, block_size, head_loop), places + start))
    return patterns


def _page_copy(sent: Component, received: Component, run: TokenRun, block_size: int, head_loop: Loop) -> StridedCopy:
    """Return the copy of one run of tokens over some heads of one layer, from offset zero to offset zero."""
    if sent.atom is Atom.PAGE:
        if run != TokenRun(0, 0, block_size):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"component {sent.name!r}: tokens {run.source_slot} to {run.source_slot + run.num_tokens} of a "
                "page that is packed as a whole were asked for.",
                "Ask for whole blocks.",
            )
        return coalesce(StridedCopy(0, 0, block_size * sent.num_channels * sent.itemsize, (head_loop,)))
    channels = (sent.num_channels, sent.channel_stride, received.channel_stride)
    tokens = (run.num_tokens, sent.token_stride, received.token_stride)
    return coalesce(StridedCopy(0, 0, sent.itemsize, (channels, tokens, head_loop)))
