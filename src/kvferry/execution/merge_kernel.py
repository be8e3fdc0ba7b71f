# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
"""The Triton kernel behind :mod:`kvferry.execution.device_merge`, which alone imports it: triton is optional.

A program copies one tile of a merge: some runs by some elements of each, powers of two whose product is the same for
all merges, so that many short runs fill a tile, and a few long ones too. A merge's row in the table has its addresses,
strides and loops.
"""

import triton
import triton.language as tl

# Columns of the table of merges. The loops follow, innermost first: a count, a stage stride and a cache stride each.
FIRST_TILE = tl.constexpr(0)
WIDTH = tl.constexpr(1)
STAGE_ADDRESS = tl.constexpr(2)
STAGE_BLOCK_STRIDE = tl.constexpr(3)
CACHE_ADDRESS = tl.constexpr(4)
CACHE_BLOCK_STRIDE = tl.constexpr(5)
FIRST_BLOCK = tl.constexpr(6)
NUM_RUNS = tl.constexpr(7)
RUN_ELEMENTS = tl.constexpr(8)
COLUMN_BITS = tl.constexpr(9)
LOOPS = tl.constexpr(10)


@triton.jit(do_not_specialize=["num_merges", "num_halvings"])
def copy_tiles(
    merges,
    blocks,
    num_merges,
    num_halvings,
    NUM_LOOPS: tl.constexpr,
    TILE_BITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copy one tile. ``WIDE`` counts runs and elements in 64 bits; offsets always have 64."""
    row_length = LOOPS + 3 * NUM_LOOPS
    tile = tl.program_id(0).to(tl.int64)
    # The last merge that begins at or before this tile, by halving.
    low = tile * 0
    high = low + num_merges
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(merges + middle * row_length + FIRST_TILE)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    merge = merges + low * row_length
    width = tl.load(merge + WIDTH)
    tile -= tl.load(merge + FIRST_TILE)
    if width == 16:
        copy_tile(merge, blocks, tile, 16, tl.int64, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 8:
        copy_tile(merge, blocks, tile, 8, tl.int64, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 4:
        copy_tile(merge, blocks, tile, 4, tl.int32, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 2:
        copy_tile(merge, blocks, tile, 2, tl.int16, NUM_LOOPS, TILE_BITS, WIDE)
    else:
        copy_tile(merge, blocks, tile, 1, tl.int8, NUM_LOOPS, TILE_BITS, WIDE)


@triton.jit
def copy_tile(
    merge,
    blocks,
    tile,
    BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    NUM_LOOPS: tl.constexpr,
    TILE_BITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copy one tile of a merge in elements of ``BYTES``."""
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_runs = tl.load(merge + NUM_RUNS)
    run_elements = tl.load(merge + RUN_ELEMENTS)
    column_bits = tl.load(merge + COLUMN_BITS)
    num_column_tiles = (run_elements + (1 << column_bits) - 1) >> column_bits
    lane = tl.arange(0, 1 << TILE_BITS).to(INDEX)
    bits = column_bits.to(INDEX)
    run = ((tile // num_column_tiles) << (TILE_BITS - column_bits)).to(INDEX) + (lane >> bits)
    column = ((tile % num_column_tiles) << column_bits).to(INDEX) + (lane & ((1 << bits) - 1))
    inside = (run < num_runs) & (column < run_elements)
    stage = column.to(tl.int64) * BYTES
    cache = stage
    for loop in tl.static_range(NUM_LOOPS):
        count = tl.load(merge + LOOPS + 3 * loop).to(INDEX)
        index = (run % count).to(tl.int64)
        run = run // count
        stage += index * tl.load(merge + LOOPS + 3 * loop + 1)
        cache += index * tl.load(merge + LOOPS + 3 * loop + 2)
    place = run.to(tl.int64)
    block = tl.load(blocks + tl.load(merge + FIRST_BLOCK) + place, mask=inside, other=0)
    stage += tl.load(merge + STAGE_ADDRESS) + place * tl.load(merge + STAGE_BLOCK_STRIDE)
    cache += tl.load(merge + CACHE_ADDRESS) + block * tl.load(merge + CACHE_BLOCK_STRIDE)
    stage_elements = stage.to(tl.pointer_type(ELEMENT))
    cache_elements = cache.to(tl.pointer_type(ELEMENT))
    if BYTES == 16:
        # Triton has no element of 16 bytes: one thread moves two of 8 side by side. The compiler cannot see their
        # alignment, since the addresses come from the table.
        half = tl.arange(0, 2)[None, :]
        stage_elements = tl.max_contiguous(tl.multiple_of(stage_elements[:, None] + half, [1, 16]), [1, 2])
        cache_elements = tl.max_contiguous(tl.multiple_of(cache_elements[:, None] + half, [1, 16]), [1, 2])
        inside = inside[:, None]
    tl.store(cache_elements, tl.load(stage_elements, mask=inside), mask=inside)
