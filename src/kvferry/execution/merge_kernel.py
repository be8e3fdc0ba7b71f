# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
"""The Triton kernel behind :mod:`kvferry.execution.device_merge`, which alone imports it: triton is optional.

A program copies one tile of a job: ``rows`` runs by ``columns`` elements, powers of two with one product for all jobs,
so that many short runs and a few long ones both fill it. A job's row in the table says where it is and how it repeats.
"""

import triton
import triton.language as tl

# Columns of the table of jobs; the loops follow, innermost first, each a count, a stage stride and a cache stride.
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


@triton.jit(do_not_specialize=["num_jobs", "num_halvings"])
def copy_tiles(
    jobs,
    blocks,
    num_jobs,
    num_halvings,
    NUM_LOOPS: tl.constexpr,
    TILE_BITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copy one tile. ``WIDE`` counts runs and elements in 64 bits; offsets always have 64."""
    row_length = LOOPS + 3 * NUM_LOOPS
    tile = tl.program_id(0).to(tl.int64)
    # The last job that begins at or before this tile, by halving.
    low = tile * 0
    high = low + num_jobs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(jobs + middle * row_length + FIRST_TILE)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    job = jobs + low * row_length
    width = tl.load(job + WIDTH)
    tile -= tl.load(job + FIRST_TILE)
    if width == 16:
        copy_tile(job, blocks, tile, 16, tl.int64, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 8:
        copy_tile(job, blocks, tile, 8, tl.int64, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 4:
        copy_tile(job, blocks, tile, 4, tl.int32, NUM_LOOPS, TILE_BITS, WIDE)
    elif width == 2:
        copy_tile(job, blocks, tile, 2, tl.int16, NUM_LOOPS, TILE_BITS, WIDE)
    else:
        copy_tile(job, blocks, tile, 1, tl.int8, NUM_LOOPS, TILE_BITS, WIDE)


@triton.jit
def copy_tile(
    job,
    blocks,
    tile,
    BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    NUM_LOOPS: tl.constexpr,
    TILE_BITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copy one tile of a job in elements of ``BYTES``."""
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_runs = tl.load(job + NUM_RUNS)
    run_elements = tl.load(job + RUN_ELEMENTS)
    column_bits = tl.load(job + COLUMN_BITS)
    num_column_tiles = (run_elements + (1 << column_bits) - 1) >> column_bits
    lane = tl.arange(0, 1 << TILE_BITS).to(INDEX)
    bits = column_bits.to(INDEX)
    run = ((tile // num_column_tiles) << (TILE_BITS - column_bits)).to(INDEX) + (lane >> bits)
    column = ((tile % num_column_tiles) << column_bits).to(INDEX) + (lane & ((1 << bits) - 1))
    inside = (run < num_runs) & (column < run_elements)
    stage = column.to(tl.int64) * BYTES
    cache = stage
    for loop in tl.static_range(NUM_LOOPS):
        count = tl.load(job + LOOPS + 3 * loop).to(INDEX)
        index = (run % count).to(tl.int64)
        run = run // count
        stage += index * tl.load(job + LOOPS + 3 * loop + 1)
        cache += index * tl.load(job + LOOPS + 3 * loop + 2)
    place = run.to(tl.int64)
    block = tl.load(blocks + tl.load(job + FIRST_BLOCK) + place, mask=inside, other=0)
    stage += tl.load(job + STAGE_ADDRESS) + place * tl.load(job + STAGE_BLOCK_STRIDE)
    cache += tl.load(job + CACHE_ADDRESS) + block * tl.load(job + CACHE_BLOCK_STRIDE)
    stage_elements = stage.to(tl.pointer_type(ELEMENT))
    cache_elements = cache.to(tl.pointer_type(ELEMENT))
    if BYTES == 16:
        # There are no elements of 16 bytes: two of 8 side by side, which one thread moves at once. That they are
        # aligned the compiler cannot see in numbers from a table.
        half = tl.arange(0, 2)[None, :]
        stage_elements = tl.max_contiguous(tl.multiple_of(stage_elements[:, None] + half, [1, 16]), [1, 2])
        cache_elements = tl.max_contiguous(tl.multiple_of(cache_elements[:, None] + half, [1, 16]), [1, 2])
        inside = inside[:, None]
    tl.store(cache_elements, tl.load(stage_elements, mask=inside), mask=inside)
