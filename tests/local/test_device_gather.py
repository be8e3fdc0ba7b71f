"""Which copies pass the buffer, what their images are, and the kernel, in Triton's interpreter on host memory."""

import importlib.util
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Bytes, Descriptors
from kvferry.execution.device import HOST, Mark
from kvferry.execution.device_gather import (
    GATHER_BELOW,
    HALF_BYTES,
    GatherBuffer,
    choose,
    element_width,
    images_of,
    turned,
)
from kvferry.plan.block_copies import BlockCopies
from kvferry.plan.planner import StridedCopy

pytest.importorskip("triton")
pytest.importorskip("torch")

KERNEL = "kvferry.execution.gather_kernel"


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """A kernel is interpreted or compiled for as long as its module lives."""
    forget_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module(KERNEL)
        yield
    forget_kernel()


def forget_kernel() -> None:
    if sys.modules.pop(KERNEL, None) is not None:
        del sys.modules["kvferry.execution"].gather_kernel  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """Loads between a host's memory and a cache, whose addresses count from the beginning of each."""

    loads: tuple[BlockCopies, ...]
    host_bytes: int
    cache_bytes: int

    def at(self, host: Bytes, cache: Bytes) -> list[BlockCopies]:
        places = int(host.ctypes.data), int(cache.ctypes.data)
        return [
            replace(
                each,
                copy=replace(
                    each.copy,
                    source_offset=each.copy.source_offset + places[0],
                    destination_offset=each.copy.destination_offset + places[1],
                ),
            )
            for each in self.loads
        ]


def labelled(num_bytes: int, seed: int) -> Bytes:
    """Return random bytes whose address is that of a page, so that every alignment is the case's own."""
    memory = np.empty(num_bytes + 4096, dtype=np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][:num_bytes]
    aligned[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return aligned


def move(rows: Descriptors, _: int = 0) -> None:
    """Copy as the driver would."""
    import ctypes

    for source, destination, length in rows.tolist():
        ctypes.memmove(destination, source, length)


def through_buffer(copies: Sequence[BlockCopies], half_bytes: int, *, is_load: bool) -> int:
    """Copy as a job does; return how many chunks passed the buffer."""
    buffer = GatherBuffer(HOST, half_bytes)
    direct, images = choose(copies, half_bytes, is_load=is_load)
    for each in direct:
        move(each.descriptors())
    marks: deque[Mark] = deque()
    for chunk in (chunk for each in images for chunk in each.chunks(half_bytes)):
        assert chunk.count * chunk.images.image.num_bytes <= half_bytes
        buffer.launch(chunk, copy=move, under_way=marks, is_load=is_load)
    return len(marks)


@st.composite
def strides(draw: st.DrawFn, counts: Sequence[int], run_bytes: int, gap: int) -> tuple[list[int], int]:
    """Return a stride for each count, in any order of nesting and with gaps, and the bytes that all of it spans."""
    found, extent = [0] * len(counts), run_bytes
    for axis in draw(st.permutations(range(len(counts)))):
        found[axis] = extent + draw(st.integers(0, gap))
        extent = found[axis] * counts[axis]
    return found, extent


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return blocks of a few copies; a unit from 1 to 16 bytes makes every alignment likely.

    Copies are close together in a block of the host; in the cache each lies in a stretch of its own.
    """
    unit = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 48]))
    num_blocks = draw(st.integers(0, 4))
    blocks = [np.array(draw(st.permutations(range(num_blocks + 2)))[:num_blocks], dtype=np.int64) for _ in range(2)]
    loads, host_end, cache_end = [], 0, 0
    for _ in range(draw(st.integers(1, 3))):
        run = draw(st.integers(1, 30))
        counts = draw(st.lists(st.integers(1, 4), max_size=3))
        host_strides, host_extent = draw(strides(counts, run, draw(st.sampled_from([0, 0, 2]))))
        cache_strides, cache_extent = draw(strides([*counts, num_blocks + 2], run, 5))
        begins = host_end + draw(st.sampled_from([0, 0, 3])), cache_end + draw(st.integers(0, 5))
        loops = tuple(
            (count, host * unit, cache * unit)
            for count, host, cache in zip(counts, host_strides, cache_strides, strict=False)
        )
        copy = StridedCopy(begins[0] * unit, begins[1] * unit, run * unit, loops)
        loads.append(BlockCopies(copy, 0, cache_strides[-1] * unit, *blocks))
        host_end, cache_end = begins[0] + host_extent, begins[1] + cache_extent
    stride = (host_end + draw(st.sampled_from([0, 1]))) * unit
    return Case(
        tuple(replace(each, source_block_stride=stride) for each in loads), stride * (num_blocks + 2), cache_end * unit
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([64, 512, 1 << 14]), st.booleans())
def test_any_copies_move_exactly_their_bytes(case: Case, half_bytes: int, is_load: bool) -> None:
    host, cache = labelled(case.host_bytes, 0), labelled(case.cache_bytes, 1)
    wanted = host.copy(), cache.copy()
    for each in case.at(*wanted):
        move((each if is_load else turned(each)).descriptors())
    copies = case.at(host, cache)
    through_buffer(copies if is_load else list(map(turned, copies)), half_bytes, is_load=is_load)
    assert (host == wanted[0]).all()
    assert (cache == wanted[1]).all()


def block(*copies: StridedCopy, ids: Sequence[int] = (0,)) -> list[BlockCopies]:
    blocks = np.array(ids, dtype=np.int64)
    return [BlockCopies(copy, 1 << 40, 1 << 40, blocks, blocks) for copy in copies]


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize(("run_bytes", "passes"), [(GATHER_BELOW - 16, True), (GATHER_BELOW, False)])
def test_short_pieces_pass_the_buffer_and_long_ones_do_not(run_bytes: int, passes: bool, is_load: bool) -> None:
    copies = block(StridedCopy(0, 1 << 30, run_bytes, ((4, run_bytes, 1 << 20),)))
    copies = copies if is_load else list(map(turned, copies))
    direct, images = choose(copies, HALF_BYTES, is_load=is_load)
    assert (len(direct), len(images)) == ((0, 1) if passes else (1, 0))
    if passes:
        [chunk] = images[0].chunks(HALF_BYTES)
        [[source, destination, length]] = chunk.rows(1 << 35, is_load=is_load).tolist()
        assert (source, destination, length) == ((0, 1 << 35) if is_load else (1 << 35, 0)) + (4 * run_bytes,)


def test_pieces_that_adjoin_nothing_at_the_host_do_not_pass_the_buffer() -> None:
    apart = block(StridedCopy(0, 1 << 30, 4096, ((4, 8192, 4096),)))
    assert choose(apart, HALF_BYTES, is_load=True)[1] == []
    # Two kinds of pieces that fill each other's gaps do.
    both = block(*(StridedCopy(each * 4096, each << 30, 4096, ((4, 8192, 4096),)) for each in (0, 1)))
    direct, [images] = choose(both, HALF_BYTES, is_load=True)
    assert (direct, images.image.rows.tolist()) == ([], [[0, 8 * 4096]])


def test_layers_in_allocations_of_their_own_become_one_copy_of_a_block() -> None:
    """36 layers anywhere in the device's memory, 8 heads of 16 tokens, 512 bytes each: 4,608 pieces."""
    places = np.random.default_rng(0).permutation(36) << 32
    layers = [
        StridedCopy(layer * 8192, int(place), 512, ((16, 512, 4096), (8, 36 * 8192, 512)))
        for layer, place in enumerate(places)
    ]
    direct, [images] = choose(list(map(turned, block(*layers, ids=range(40)))), HALF_BYTES, is_load=False)
    assert not direct
    assert images.image.rows.tolist() == [[0, 36 * 8 * 8192]]
    assert {int(width) for width in images.image.table[:, 1]} == {16}
    assert [chunk.count for chunk in images.chunks(HALF_BYTES)] == [14, 14, 12]


def test_a_block_larger_than_half_of_the_buffer_is_cut_and_each_byte_passes_once() -> None:
    one = StridedCopy(0, 0, 1 << 16, ((16, 1 << 16, 1 << 22), (64, 1 << 20, 1 << 16)))
    (images, others) = images_of(((one, 1 << 30),), HALF_BYTES)
    assert not others
    rows = [[image.host_offset + begin, length] for image in images for begin, length in image.rows.tolist()]
    assert rows == [[each * HALF_BYTES, HALF_BYTES] for each in range(2)]


def test_a_long_run_is_cut_into_tiles() -> None:
    host, cache = labelled(80_032, 0), labelled(90_000, 1)
    case = Case(tuple(block(StridedCopy(0, 16, 40_016, ((2, 40_016, 45_008),)))), host.nbytes, cache.nbytes)
    rest = cache.copy()
    assert through_buffer(case.at(host, cache), 1 << 17, is_load=True) == 1
    (image,), _ = images_of(tuple((each.copy, 0) for each in case.loads), 1 << 17)
    assert image.num_tiles == 5
    rest[16:40_032], rest[45_024:85_040] = host[:40_016], host[40_016:80_032]
    assert (cache == rest).all()


@pytest.mark.parametrize("width", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("odd", ["host", "cache", "run", "host stride", "cache stride", "block stride"])
def test_the_least_aligned_number_decides_the_width(width: int, odd: str) -> None:
    numbers = dict.fromkeys(["host", "cache", "run", "host stride", "cache stride", "block stride"], 4096)
    numbers[odd] += width
    loops = ((2, numbers["host stride"], numbers["cache stride"]),)
    # The image begins at the first copy, which is aligned.
    copies = [StridedCopy(0, 0, 4096), StridedCopy(numbers["host"], numbers["cache"], numbers["run"], loops)]
    (image,), _ = images_of(tuple((copy, numbers["block stride"]) for copy in copies), HALF_BYTES)
    assert image.table[1, 1] == width == element_width(*numbers.values())


def test_no_block_is_no_launch() -> None:
    assert choose(block(StridedCopy(0, 1 << 30, 16, ((4, 16, 64),)), ids=()), HALF_BYTES, is_load=True) == ([], [])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.execution.gather_kernel import copy_tiles
numbers = "first_block", "image_bytes", "num_tiles", "num_copies", "num_halvings", "num_loops"
signature = {"table": "*i64"} | dict.fromkeys(numbers, "i32") | {"buffer_address": "i64"}
signature |= dict.fromkeys(("TO_BUFFER", "TILE_BITS"), "constexpr")
for to_buffer in (True, False):
    source = ASTSource(fn=copy_tiles, signature=signature, constexprs={"TO_BUFFER": to_buffer, "TILE_BITS": 10})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"], "=" * 9)
"""


def test_the_kernel_compiles_for_a_gpu_and_moves_16_bytes_at_once(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", COMPILE]
    program = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert program.returncode == 0, program.stderr
    for compiled in program.stdout.split("=========")[:2]:
        for instruction in ("ld.global.v2.b64", "st.global.v2.b64", "st.global.b8", "st.global.b16", "st.global.b32"):
            assert instruction in compiled
