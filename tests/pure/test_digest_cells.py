"""Cells: where they lie in a rank's memory, and their digests, whose sums no change escapes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import PlanError, Reason
from kvferry.execution import digests
from kvferry.execution.digests import (
    CellGrid,
    CellMemory,
    CellSums,
    DeviceCells,
    Integrity,
    check_computes,
    comparable,
    weights,
)
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Atom, TokenShare
from kvferry.plan.match import GroupBlocks

from ..support.dense import Content, shard_for
from ..support.oracle import Arena, RankMemory, strided_memory
from .strategies import Move


def fill(ranks: Sequence[RankMemory], seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for rank in ranks:
        for region in rank.regions:
            region[:] = generator.integers(0, 256, len(region), dtype=np.uint8)


def flip(rank: RankMemory, blocks: GroupBlocks, seed: int) -> bool:
    """Change one bit of what a request brought to a rank; False where it brought nothing."""
    generator = np.random.default_rng(seed)
    group = rank.shard.group(blocks.group)
    if group is None or not blocks.num_tokens:
        return False
    token = int(generator.integers(blocks.first_token, blocks.last_token))
    position, slot = divmod(token - blocks.destination_first_token, group.block_size)
    parts = [component for component in group.components if not component.is_padding]
    component = parts[generator.integers(len(parts))]
    view = rank.views[group.name, component.name, component.layers[generator.integers(len(component.layers))]]
    block = int(blocks.destination_ids[position])
    head, channel, byte = (int(generator.integers(view.shape[axis])) for axis in (1, 3, 4))
    view[block, head, slot, channel, byte] ^= np.uint8(1 << int(generator.integers(8)))
    return True


def has_shares(move: Move) -> bool:
    ranks = (*move.sources, *move.destinations)
    return any(not group.token_share.is_whole for rank in ranks for group in rank.groups)


class Two:
    """Two engines of one group, and a request of 100 tokens that a destination has none of."""

    def __init__(
        self,
        arena: Arena,
        source: dict[str, object],
        destination: dict[str, object],
        tokens: tuple[int, int] = (0, 100),
    ) -> None:
        shape = {"layers": ["0", "1"], "num_kv_heads": 4, "head_size": 16, "itemsize": 2, "num_blocks": 12}
        self.sizes = [{"tp_size": 1, "block_size": 32, **side} for side in (source, destination)]
        self.ranks = [
            [
                strided_memory(arena, shard_for(**{**shape, **side}, tp_rank=rank))  # type: ignore[arg-type]
                for rank in range(int(str(side["tp_size"])))
            ]
            for side in self.sizes
        ]
        self.arena = arena
        self.sources, self.destinations = self.ranks
        fill([*self.sources, *self.destinations])
        blocks = [int(str(side["block_size"])) for side in self.sizes]
        begins = [tokens[0] // size * size for size in blocks]
        ids = [
            np.random.default_rng(size).permutation(np.arange(1, 12))[: -(-(tokens[1] - begin) // size)]
            for size, begin in zip(blocks, begins, strict=True)
        ]
        self.request = GroupBlocks(
            group="full",
            first_token=tokens[0],
            last_token=tokens[1],
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
            source_first_token=begins[0],
            destination_first_token=begins[1],
        )
        self.move = Move(
            tuple(rank.shard for rank in self.sources), tuple(rank.shard for rank in self.destinations), (self.request,)
        )


LAYOUTS = {
    "LBHNC": {"layout": NamedLayout.LBHNC},
    "LBNHC": {"layout": NamedLayout.LBNHC},
    "BHLNC": {"layout": NamedLayout.BHLNC},
    "transposed keys": {"layout": NamedLayout.LBHNC, "content": Content.TRANSPOSED_KEYS},
    "planes": {"layout": NamedLayout.BHLNC, "content": Content.PLANES},
}


def two(**sides: object) -> Two:
    fused = {"content": Content.INTERLEAVED}
    source, destination = (
        {**fused, **LAYOUTS[str(sides[f"{side}_layout"])], **dict(sides.get(side, {}))}  # type: ignore[call-overload]
        for side in ("source", "destination")
    )
    tokens = sides.get("tokens", (0, 100))
    return Two(Arena(1 << 22), source, destination, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"atom": Atom.PAGE, "packing": "amx"}], ids=["plain", "packed"])
@pytest.mark.parametrize(("itemsize", "head_size", "num_slices"), [(2, 128, 8), (1, 96, 3), (4, 12, 1), (2, 2, 1)])
def test_the_slices_of_a_cell_have_each_of_its_bytes_once(
    layout: str, changes: dict[str, Any], itemsize: int, head_size: int, num_slices: int
) -> None:
    shape = {"itemsize": itemsize, "head_size": head_size}
    pair = two(source_layout=layout, destination_layout=layout, source=shape, destination=shape)
    shard = pair.sources[0].shard
    [group] = shard.groups
    page = {"token_stride": itemsize, "channel_stride": 32 * itemsize} if changes else {}
    components = [msgspec.structs.replace(each, **changes, **page) for each in group.components]
    group = msgspec.structs.replace(group, components=tuple(components))
    whole, sliced = (CellGrid(group, is_sliced=is_sliced) for is_sliced in (False, True))
    if not changes:
        assert sliced.num_cells == num_slices * whole.num_cells
    for part, slices in zip(whole.parts, sliced.parts, strict=True):
        assert sliced.cell_bytes(slices) >= min(digests.SLICE_BYTES, whole.cell_bytes(part))
        places, sliced_places = (
            np.sort((cells.cells[:, None] + cells.offsets).ravel()[:, None] + np.arange(cells.run_bytes), axis=None)
            for cells in (
                CellMemory(shard, part.component, whole, part),
                CellMemory(shard, part.component, sliced, slices),
            )
        )
        np.testing.assert_array_equal(places, sliced_places)
        names = [part.layer_and_heads(cell) for cell in range(part.num_cells)]
        assert [slices.layer_and_heads(cell) for cell in range(slices.num_cells)] == [
            name for name in names for _ in range(slices.num_slices)
        ]


def test_a_share_of_the_tokens_is_refused_where_it_must_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", source={"token_share": TokenShare(0, 2, 1)})
    shard = pair.sources[0].shard
    with pytest.raises(PlanError) as caught:
        CellGrid(shard.groups[0])
    assert caught.value.reason is Reason.UNSUPPORTED
    with pytest.raises(PlanError):
        comparable(shard, Integrity.SAMPLE, is_required=True)
    assert comparable(shard, Integrity.SAMPLE, is_required=False) is Integrity.OFF
    assert "nothing is compared" in caplog.text
    whole = two(source_layout="LBHNC", destination_layout="LBHNC").sources[0].shard
    assert comparable(whole, Integrity.FULL, is_required=True) is Integrity.FULL


@pytest.mark.parametrize("wanted", Integrity)
@pytest.mark.parametrize("computed", Integrity)
def test_digests_are_refused_where_the_source_computes_fewer(computed: Integrity, wanted: Integrity) -> None:
    order = [Integrity.OFF, Integrity.SAMPLE, Integrity.FULL]
    if order.index(computed) >= order.index(wanted):
        check_computes(computed, wanted)
        return
    with pytest.raises(PlanError) as caught:
        check_computes(computed, wanted)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert f'"integrity": "{wanted}"' in caught.value.message
    assert f'"{computed}"' in caught.value.message


def test_every_word_has_an_odd_weight_of_its_own() -> None:
    """Then no change of one word of 4 bytes escapes: an odd weight has an inverse modulo 2**64."""
    for itemsize in (1, 2, 4):
        found = weights((2, 3, 24), itemsize).reshape(-1, 4 // itemsize)
        assert (found[:, 0] % 2 == 1).all()
        shifts = np.arange(4 // itemsize, dtype=np.uint64) * np.uint64(8 * itemsize)
        assert (found == found[:, :1] << shifts).all()
        assert len(np.unique(found[:, 0])) == len(found), "no two words have one weight"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_torch_computes_the_sums_of_numpy(layout: str, itemsize: int) -> None:
    """A GPU's cache is summed by torch; its memory is a tensor of this host's here."""
    torch = pytest.importorskip("torch")
    pair = two(source_layout=layout, destination_layout=layout, source={"itemsize": itemsize, "head_size": 12})
    (rank,), generator = pair.sources, np.random.default_rng(1)
    group = rank.shard.groups[0]
    grid = CellGrid(group)
    for part in grid.parts:
        memory = CellMemory(rank.shard, part.component, grid, part)
        cell, block, slot = (generator.integers(0, most, 50) for most in (part.num_cells, 12, 2))
        places, num_tokens = memory.cells[cell] + memory.behind(block, slot * 16), generator.integers(1, 17, 50)
        expected = CellSums(memory).sums(places, num_tokens)
        on_device = DeviceCells(memory, torch.from_numpy(rank.regions[0]))
        np.testing.assert_array_equal(on_device.sums(places, num_tokens), expected)


@pytest.mark.parametrize("num_tokens", range(1, 17))
def test_a_sum_counts_each_of_its_tokens_and_no_other(num_tokens: int) -> None:
    """Also where one token of the cell is left out, and where none is."""
    memory = np.random.default_rng(num_tokens).integers(0, 256, 16 * 8, np.uint8)
    shard = shard_for(
        layers=["0"],
        num_kv_heads=1,
        head_size=4,
        itemsize=1,
        block_size=16,
        num_blocks=1,
        layout=NamedLayout.LBHNC,
        base_address=int(memory.ctypes.data),
    )
    grid = CellGrid(shard.groups[0])
    sums = CellSums(CellMemory(shard, shard.groups[0].components[0], grid, grid.parts[0]))
    before = sums.sums(np.array([0]), np.array([num_tokens]))[0]
    for token in range(16):
        memory[8 * token + 3] ^= 1
        assert (sums.sums(np.array([0]), np.array([num_tokens]))[0] != before) == (token < num_tokens), token
        memory[8 * token + 3] ^= 1
