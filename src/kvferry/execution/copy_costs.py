"""What the copies out of a stage cost, measured on memory that no cache of the processor holds, as a KV cache is."""

import mmap
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.execution.stage import Stage
from kvferry.plan.staging.scatter import Merge

SHORT_BYTES, LONG_BYTES = 512, 4 << 10
"""Lengths of the runs that are copied: what a run costs besides its bytes follows from both."""
RUNS_PER_BLOCK = 4
MIN_BYTES = RUNS_PER_BLOCK * LONG_BYTES
MAX_BYTES = 8 << 20
PROBE_BYTES, MIN_PROBE_BYTES = 4 * MAX_BYTES, 8 * MIN_BYTES
"""Of a stage that is used to measure, at most and at least."""
TINY_BYTES, TINY_COPIES = 64, 64
LEAST_SHARE_OF_BYTES = 0.5
REPEAT = 2
MAX_CACHE_BYTES = 64 << 20
USUAL_CACHE_BYTES = 32 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20}


def cold_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return touched memory that the processor's caches have forgotten, along with all that was touched before.

    As much again as the largest cache holds, up to a bound, is touched after it and lives as long. That takes some tens
    of milliseconds.
    """
    mapping = mmap.mmap(-1, num_bytes + largest_cache_bytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    whole[:: mmap.PAGESIZE] = 1
    return whole[:num_bytes]


def largest_cache_bytes() -> int:
    """Return the size of the processor's largest cache, at most ``MAX_CACHE_BYTES``; a usual one where nobody says."""
    try:
        sizes = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
        found = max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes), default=USUAL_CACHE_BYTES)
    except (OSError, KeyError, ValueError, IndexError):
        found = USUAL_CACHE_BYTES
    return min(found, MAX_CACHE_BYTES)


def measure_stage(stage: Stage) -> tuple[float, float, float] | None:
    """Return the same as :func:`measure_copies`, of a stage that nobody uses yet.

    None where its copies are not measured: on a GPU, and where it is small.
    """
    num_bytes = 1 << min(PROBE_BYTES, stage.region.length).bit_length() - 1
    if stage.region.device != "cpu" or num_bytes < MIN_PROBE_BYTES:
        return None
    return measure_copies(stage, 0, num_bytes)


def measure_copies(stage: Stage, begin: int, num_bytes: int) -> tuple[float, float, float]:
    """Return bytes a second, seconds for each run and for each copy, out of these bytes of a stage, a power of two.

    On a CPU the copies go to memory that is cold, and so is everything else afterwards; on a GPU they stay in the
    stage.

    >>> all(figure > 0 for figure in measure_copies(Stage(1 << 20, huge_pages=False), 0, 1 << 20))
    True
    """
    moved = min(MAX_BYTES, num_bytes // 4)
    # Every copy goes to memory of its own: what one has written is in a cache. All come out of the same, as a round
    # of a load has just been written when it is copied.
    num_areas = 2 * REPEAT if stage.region.device == "cpu" else 0
    cold = cold_memory(2 * moved * num_areas)
    areas = [int(cold.ctypes.data) + 2 * moved * index for index in range(num_areas)]
    areas = areas or [stage.region.base_address + begin + num_bytes // 2] * 2 * REPEAT
    tiny = Merge(begin, TINY_BYTES, areas[0], TINY_BYTES, np.zeros(1, dtype=np.int64), TINY_BYTES, ())
    per_copy = min(_copy(stage, *[tiny] * TINY_COPIES) for _ in range(REPEAT)) / TINY_COPIES
    seconds = [
        min(_copy(stage, _pages(begin, area, moved, run)) for area in areas[first::2])
        for first, run in enumerate((SHORT_BYTES, LONG_BYTES))
    ]
    short, long = (
        max(each - per_copy, LEAST_SHARE_OF_BYTES * each) * run / moved
        for each, run in zip(seconds, (SHORT_BYTES, LONG_BYTES), strict=True)
    )
    per_byte = per_byte_of(short, long)
    return 1 / per_byte, max(short - SHORT_BYTES * per_byte, 1e-10), per_copy


def per_byte_of(short: float, long: float) -> float:
    """Return the seconds of a byte, from those of a short and of a long run.

    Of a long run most is its bytes, so that no disturbance of either measurement makes them next to nothing, or more
    than all of it:

    >>> [round(1e12 * per_byte_of(short, 1e-6)) for short in (200e-9, 2e-6, 0.0)]
    [223, 122, 244]
    """
    of_long = long / LONG_BYTES
    return min(max((long - short) / (LONG_BYTES - SHORT_BYTES), of_long * LEAST_SHARE_OF_BYTES), of_long)


def _pages(stage_offset: int, address: int, num_bytes: int, run: int) -> Merge:
    """Return the copy of runs into every other place of blocks in no order, as in a cache of twice as many heads."""
    block = RUNS_PER_BLOCK * run
    blocks = np.random.default_rng(0).permutation(num_bytes // block)
    return Merge(stage_offset, block, address, 2 * block, blocks, run, ((RUNS_PER_BLOCK, run, 2 * run),))


def _copy(stage: Stage, *merges: Merge) -> float:
    started_at = time.perf_counter()
    stage.put_in_place(merges).wait()
    return time.perf_counter() - started_at
