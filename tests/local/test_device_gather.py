"""The GPU kernel for merges, in Triton's interpreter on host memory: its bytes are those of numpy's copies."""

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvferry.execution.device_merge import TILE_BITS, Merge, element_width, merge_table, prepare

from kvferry.arrays import Bytes, memory_at
from kvferry.errors import Reason, TransportError
from kvferry.execution import device_merge

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

KERNEL = "kvferry.execution.merge_kernel"
HOST = torch.device("cpu")


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
        del sys.modules["kvferry.execution"].merge_kernel  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """Copies whose addresses count from the beginning of a stage and of a cache, and what these must hold."""

    merges: tuple[Merge, ...]
    stage_bytes: int
    cache_bytes: int

    def at(self, cache: Bytes) -> list[Merge]:
        address = int(cache.ctypes.data)
        return [replace(merge, destination_address=merge.destination_address + address) for merge in self.merges]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield stage offset, cache offset and length of every run, one after the other."""
        for merge in self.merges:
            for place, block in enumerate(merge.destination_blocks.tolist()):
                for index in itertools.product(*(range(count) for count, _, _ in merge.loops)):
                    steps = list(zip(index, merge.loops, strict=True))
                    stage = merge.stage_offset + place * merge.stage_block_stride
                    cache = merge.destination_address + block * merge.destination_block_stride
                    stage += sum(step * loop[1] for step, loop in steps)
                    yield stage, cache + sum(step * loop[2] for step, loop in steps), merge.run_bytes


def labelled(num_bytes: int, seed: int) -> Bytes:
    """Return random bytes whose address is that of a page, so that every alignment is the case's own."""
    memory = np.empty(num_bytes + 4096, dtype=np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][:num_bytes]
    aligned[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return aligned


def launch(merges: Sequence[Merge], stage: Bytes, tile_bits: int = TILE_BITS) -> None:
    copies = prepare(merges, int(stage.ctypes.data), HOST, tile_bits)
    if copies is not None:
        copies.merge()


def put_in_place(merge: Merge, stage_address: int) -> None:
    """Copy one merge from the stage into the cache by numpy, all blocks by one assignment."""
    counts, stage_strides, cache_strides = zip(*merge.loops[::-1], strict=True) if merge.loops else ((), (), ())
    blocks = merge.destination_blocks
    in_stage = (merge.stage_block_stride, *stage_strides)
    stage = memory_at(stage_address + merge.stage_offset, (len(blocks), *counts), in_stage, merge.run_bytes)
    shape = (int(blocks.max()) + 1, *counts)
    in_cache = (merge.destination_block_stride, *cache_strides)
    memory_at(merge.destination_address, shape, in_cache, merge.run_bytes)[blocks] = stage


@st.composite
def strides(draw: st.DrawFn, counts: Sequence[int], run_bytes: int) -> tuple[list[int], int]:
    """Return a stride for each count, in any order of nesting and with any gaps, and the bytes that all of it spans."""
    found, extent = [0] * len(counts), run_bytes
    for axis in draw(st.permutations(range(len(counts)))):
        found[axis] = extent + draw(st.integers(0, 5))
        extent = found[axis] * counts[axis]
    return found, extent


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a few copies side by side; a unit from 1 to 16 bytes makes every alignment likely."""
    merges, stage_end, cache_end = [], 0, 0
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 48]))
        run, num_blocks = draw(st.integers(1, 40)), draw(st.integers(0, 4))
        counts = draw(st.lists(st.integers(1, 4), max_size=3))
        stage_strides, stage_extent = draw(strides([*counts, num_blocks + 1], run))
        cache_strides, cache_extent = draw(strides([*counts, num_blocks + 2], run))
        begins = [-(-end // unit) + draw(st.integers(0, 5)) for end in (stage_end, cache_end)]
        merges.append(
            Merge(
                stage_offset=begins[0] * unit,
                stage_block_stride=stage_strides[-1] * unit,
                destination_address=begins[1] * unit,
                destination_block_stride=cache_strides[-1] * unit,
                destination_blocks=np.array(draw(st.permutations(range(num_blocks + 2)))[:num_blocks], dtype=np.int64),
                run_bytes=run * unit,
                loops=tuple(
                    (count, stage * unit, cache * unit)
                    for count, stage, cache in zip(counts, stage_strides, cache_strides, strict=False)
                ),
            )
        )
        stage_end, cache_end = (begins[0] + stage_extent) * unit, (begins[1] + cache_extent) * unit
    return Case(tuple(merges), stage_end, cache_end)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([7, 10]))
def test_any_copies_move_exactly_their_bytes(case: Case, tile_bits: int) -> None:
    stage, cache = labelled(case.stage_bytes, 0), labelled(case.cache_bytes, 1)
    wanted_stage, wanted_cache = stage.copy(), cache.copy()
    for at_stage, at_cache, length in case.runs():
        wanted_cache[at_cache : at_cache + length] = stage[at_stage : at_stage + length]
    launch(case.at(cache), stage, tile_bits)
    assert (stage == wanted_stage).all()
    assert (cache == wanted_cache).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_kernel_and_numpy_do_the_same(case: Case) -> None:
    stage, cache = labelled(case.stage_bytes, 0), labelled(case.cache_bytes, 1)
    by_numpy = labelled(case.cache_bytes, 1)
    for merge in case.at(by_numpy):
        if merge.num_runs:
            put_in_place(merge, int(stage.ctypes.data))
    launch(case.at(cache), stage)
    assert (cache == by_numpy).all()


def head_merge(num_blocks: int, cache_address: int) -> list[Merge]:
    """Two ranks' halves of [block][token][head] pages of 1 KiB tokens, 16 tokens a block."""
    blocks = np.arange(num_blocks)[::-1]
    half = num_blocks * 8192
    return [
        Merge(rank * half, 8192, cache_address + rank * 512, 16384, blocks, 512, ((16, 512, 1024),))
        for rank in range(2)
    ]


def test_one_call_merges_heads_of_all_blocks() -> None:
    stage, cache = labelled(4 * 16384, 0), labelled(4 * 16384, 1)
    device_merge.merge(head_merge(4, int(cache.ctypes.data)), int(stage.ctypes.data), "cpu")
    halves = stage.reshape(2, 4, 16, 512)
    assert (cache.reshape(4, 16, 2, 512)[::-1] == halves.transpose(1, 2, 0, 3)).all()


@pytest.mark.parametrize("loops", [(), ((1, 0, 0),)])
def test_a_long_run_is_cut_into_tiles(loops: tuple[tuple[int, int, int], ...]) -> None:
    stage, cache = labelled(40_032, 0), labelled(40_032, 1)
    merge = Merge(0, 40_032, int(cache.ctypes.data), 40_032, np.array([0]), 40_016, loops)
    table = merge_table([merge], int(stage.ctypes.data))
    assert table is not None
    assert table.num_tiles == 3
    rest = cache[40_016:].copy()
    launch([merge], stage)
    assert (cache[:40_016] == stage[:40_016]).all()
    assert (cache[40_016:] == rest).all()


def test_counts_beyond_32_bits_are_counted_in_64() -> None:
    short = Merge(0, 1, 0, 1, np.array([0]), 1, ((1 << 16, 1, 1), ((1 << 15) - 1, 1 << 16, 1 << 16)))
    table, wider = (
        merge_table([merge], 0)
        for merge in (short, replace(short, loops=((1 << 16, 1, 1), (1 << 15, 1 << 16, 1 << 16))))
    )
    assert table is not None
    assert wider is not None
    assert (table.is_wide, wider.is_wide) == (False, True)
    stage, cache = labelled(4096, 0), labelled(4096, 1)
    copies = prepare([Merge(0, 4096, int(cache.ctypes.data), 4096, np.array([0]), 4096, ())], stage.ctypes.data, HOST)
    assert copies is not None
    replace(copies, is_wide=True).merge()
    assert (cache == stage).all()


@pytest.mark.parametrize("width", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("odd", ["stage", "cache", "run", "stride", "block stride"])
def test_the_least_aligned_number_decides_the_width(width: int, odd: str) -> None:
    numbers = dict.fromkeys(["stage", "cache", "run", "stride", "block stride"], 4096) | {odd: 4096 + width}
    merge = Merge(
        stage_offset=numbers["stage"],
        stage_block_stride=8192,
        destination_address=numbers["cache"],
        destination_block_stride=numbers["block stride"],
        destination_blocks=np.array([0]),
        run_bytes=numbers["run"],
        loops=((2, 1 << 16, numbers["stride"]),),
    )
    table = merge_table([merge], 1 << 30)
    assert table is not None
    assert table.merges[0, 1] == width == element_width(*numbers.values())


def test_nothing_to_copy_is_no_launch() -> None:
    none = Merge(0, 16, 0, 16, np.empty(0, dtype=np.int64), 16, ())
    assert prepare([], 0, HOST) is None
    assert prepare([none], 0, HOST) is None


def test_without_triton_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernel()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TransportError) as caught:
        prepare([], 0, HOST)
    assert caught.value.reason is Reason.MISSING_DEPENDENCY
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module(KERNEL)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.execution.merge_kernel import copy_tiles
constants = {"NUM_LOOPS": 2, "TILE_BITS": 10, "WIDE": False}
signature = {"merges": "*i64", "blocks": "*i64", "num_merges": "i32", "num_halvings": "i32"}
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(fn=copy_tiles, signature=signature, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_the_kernel_compiles_for_a_gpu_and_moves_16_bytes_at_once(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", COMPILE]
    program = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert program.returncode == 0, program.stderr
    for instruction in ("ld.global.v2.b64", "st.global.v2.b64", "st.global.b8", "st.global.b16", "st.global.b32"):
        assert instruction in program.stdout
