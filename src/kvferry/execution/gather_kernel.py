# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
"""The Triton kernel behind :mod:`kvferry.execution.device_gather`, which alone imports it: triton is optional.

A program copies one tile of one pair of blocks: some runs by some elements of each, powers of two whose product is the
same for all copies, so that many short runs fill a tile, and a few long ones too. A copy's row in the table has its
addresses, strides and loops.
"""

import triton
import triton.language as tl

# Columns of the table of copies. The loops follow: a count, a stride in the image and a stride in the cache each.
FIRST_TILE = tl.constexpr(0)
WIDTH = tl.constexpr(1)
IMAGE_OFFSET = tl.constexpr(2)
CACHE_ADDRESS = tl.constexpr(3)
CACHE_BLOCK_STRIDE = tl.constexpr(4)
NUM_RUNS = tl.constexpr(5)
RUN_ELEMENTS = tl.constexpr(6)
COLUMN_BITS = tl.constexpr(7)
LOOPS = tl.constexpr(8)


@triton.jit(
    do_not_specialize=[
        "first_block",
        "buffer_address",
        "image_bytes",
        "num_tiles",
        "num_copies",
        "num_halvings",
        "num_loops",
    ]
)
def copy_tiles(
    table,
    first_block,
    buffer_address,
    image_bytes,
    num_tiles,
    num_copies,
    num_halvings,
    num_loops,
    TO_BUFFER: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    """Copy one of the ``num_tiles`` tiles of one block, between the cache and the block's image in the buffer.

    The ids of the blocks follow the rows in the table, those of this launch from ``first_block`` on.
    """
    program = tl.program_id(0).to(tl.int64)
    place = program // num_tiles
    tile = program % num_tiles
    row_length = LOOPS + 3 * num_loops
    # The last copy that begins at or before this tile, by halving.
    low = tile * 0
    high = low + num_copies
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(table + middle * row_length + FIRST_TILE)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    copy = table + low * row_length
    tile -= tl.load(copy + FIRST_TILE)
    image = buffer_address + place * image_bytes + tl.load(copy + IMAGE_OFFSET)
    cache = tl.load(table + first_block + place) * tl.load(copy + CACHE_BLOCK_STRIDE) + tl.load(copy + CACHE_ADDRESS)
    width = tl.load(copy + WIDTH)
    if width == 16:
        copy_tile(copy, image, cache, tile, num_loops, 16, tl.int64, TO_BUFFER, TILE_BITS)
    elif width == 8:
        copy_tile(copy, image, cache, tile, num_loops, 8, tl.int64, TO_BUFFER, TILE_BITS)
    elif width == 4:
        copy_tile(copy, image, cache, tile, num_loops, 4, tl.int32, TO_BUFFER, TILE_BITS)
    elif width == 2:
        copy_tile(copy, image, cache, tile, num_loops, 2, tl.int16, TO_BUFFER, TILE_BITS)
    else:
        copy_tile(copy, image, cache, tile, num_loops, 1, tl.int8, TO_BUFFER, TILE_BITS)


@triton.jit
def copy_tile(
    copy,
    image,
    cache,
    tile,
    num_loops,
    BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    TO_BUFFER: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    """Copy one tile in elements of ``BYTES``; ``image`` and ``cache`` are the addresses of the block's first run."""
    num_runs = tl.load(copy + NUM_RUNS).to(tl.int32)
    run_elements = tl.load(copy + RUN_ELEMENTS).to(tl.int32)
    bits = tl.load(copy + COLUMN_BITS).to(tl.int32)
    num_column_tiles = (run_elements + (1 << bits) - 1) >> bits
    lane = tl.arange(0, 1 << TILE_BITS)
    run = ((tile // num_column_tiles).to(tl.int32) << (TILE_BITS - bits)) + (lane >> bits)
    column = ((tile % num_column_tiles).to(tl.int32) << bits) + (lane & ((1 << bits) - 1))
    inside = (run < num_runs) & (column < run_elements)
    in_image = image + column.to(tl.int64) * BYTES
    in_cache = cache + column.to(tl.int64) * BYTES
    for loop in range(num_loops):
        count = tl.load(copy + LOOPS + 3 * loop).to(tl.int32)
        index = (run % count).to(tl.int64)
        run = run // count
        in_image += index * tl.load(copy + LOOPS + 3 * loop + 1)
        in_cache += index * tl.load(copy + LOOPS + 3 * loop + 2)
    image_elements = in_image.to(tl.pointer_type(ELEMENT))
    cache_elements = in_cache.to(tl.pointer_type(ELEMENT))
    if BYTES == 16:
        # Triton has no element of 16 bytes: one thread moves two of 8 side by side. The compiler cannot see their
        # alignment, since the addresses come from the table.
        half = tl.arange(0, 2)[None, :]
        image_elements = tl.max_contiguous(tl.multiple_of(image_elements[:, None] + half, [1, 16]), [1, 2])
        cache_elements = tl.max_contiguous(tl.multiple_of(cache_elements[:, None] + half, [1, 16]), [1, 2])
        inside = inside[:, None]
    if TO_BUFFER:
        tl.store(image_elements, tl.load(cache_elements, mask=inside), mask=inside)
    else:
        tl.store(cache_elements, tl.load(image_elements, mask=inside), mask=inside)
