"""Kernels on strided views: vLLM's own ones, and fakes that ignore strides, without an engine."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from kvferry.cli import doctor
from kvferry.cli.doctor import Measured
from kvferry.cli.main import app
from kvferry.errors import LayoutError, Reason
from kvferry.integrations.vllm.kernels.check import (
    BLOCK_IDS,
    NUM_BLOCKS,
    Kernel,
    KernelCase,
    Outcome,
    Step,
    Verdict,
    compare_layouts,
    random_tensor,
)
from kvferry.layout.named_layouts import Axis, NamedLayout

from ..support.dense import dense_strides

LAYERS, HEADS, BLOCK_SIZE, CHANNELS = 3, 2, 8, 4
CASE = KernelCase("FAKE", "float32", CHANNELS, BLOCK_SIZE)
CROSS_LAYER = [layout for layout in NamedLayout if layout.is_cross_layer]
READ_BY_CPU_ATTENTION = {NamedLayout.LBHNC, NamedLayout.LHBNC, NamedLayout.BLHNC, NamedLayout.BHLNC}
START_SECONDS = 0.3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FakeKernel:
    """Writes random contents and answers with their sum; with an option, takes the cache for dense."""

    def __init__(self, dense_write: bool = False, dense_read: bool = False) -> None:
        self.dense_write = dense_write
        self.dense_read = dense_read

    def write(self, layer: int, cache: torch.Tensor, step: Step) -> None:
        content = random_tensor(100 * layer + step.first, (step.num_tokens, HEADS, CHANNELS), cache)
        cache = as_if_dense(cache) if self.dense_write else cache
        for slot, row in zip(step.slots(), content, strict=True):
            cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = row

    def attend(self, layer: int, cache: torch.Tensor, step: Step) -> torch.Tensor:
        cache = as_if_dense(cache) if self.dense_read else cache
        tokens = torch.cat([cache[block_id] for block_id in BLOCK_IDS], dim=1)[:, : step.end]
        return tokens.sum(dim=1)


class BrokenKernel(FakeKernel):
    def write(self, layer: int, cache: torch.Tensor, step: Step) -> None:
        raise NotImplementedError("no such kernel (here). And more")


def as_if_dense(cache: torch.Tensor) -> torch.Tensor:
    """Return what a kernel sees that takes only the address and the shape of a cache."""
    return torch.as_strided(cache, cache.shape, torch.empty(cache.shape, device="meta").stride())


def allocate(layout: NamedLayout) -> list[torch.Tensor]:
    sizes = {Axis.L: LAYERS, Axis.B: NUM_BLOCKS, Axis.H: HEADS, Axis.N: BLOCK_SIZE, Axis.C: CHANNELS}
    strides = dense_strides(layout, sizes)
    buffer = torch.zeros(LAYERS * NUM_BLOCKS * HEADS * BLOCK_SIZE * CHANNELS)
    axes = (Axis.B, Axis.H, Axis.N, Axis.C)
    shape = [sizes[axis] for axis in axes]
    return [
        buffer.as_strided(shape, [strides[axis] for axis in axes], layer * strides[Axis.L]) for layer in range(LAYERS)
    ]


def judge(kernel: Kernel, layouts: Sequence[NamedLayout] = tuple(NamedLayout)) -> dict[NamedLayout, Verdict]:
    return {verdict.layout: verdict for verdict in compare_layouts(kernel, CASE, allocate, layouts)}


def failure(layout: NamedLayout) -> Verdict:
    found = "attention of a prompt: differs by 2.5"
    return Verdict(KernelCase("CPU_ATTN", "float32", 64, 128), layout, Outcome.WRONG, 2.5, found)


def test_a_kernel_that_follows_strides_passes_on_every_layout() -> None:
    verdicts = judge(FakeKernel())
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASSES}
    assert {verdict.difference for verdict in verdicts.values()} == {0.0}


@pytest.mark.parametrize(
    ("dense", "where"),
    [({"dense_write": True}, "cache write"), ({"dense_read": True}, "attention")],
    ids=["write", "read"],
)
def test_a_kernel_that_ignores_strides_is_caught(dense: dict[str, bool], where: str) -> None:
    verdicts = judge(FakeKernel(**dense))
    assert verdicts[NamedLayout.LBHNC].outcome is Outcome.PASSES
    for layout in CROSS_LAYER:
        assert verdicts[layout].outcome is Outcome.WRONG
        assert verdicts[layout].fails
        assert verdicts[layout].difference > 0.5
        places = verdicts[layout].found.split("; ")
        assert all(place.startswith(where) for place in places), verdicts[layout].found


def test_a_kernel_that_ignores_strides_on_both_ways_is_caught() -> None:
    verdicts = judge(FakeKernel(dense_write=True, dense_read=True), CROSS_LAYER)
    assert all(verdict.outcome is Outcome.WRONG for verdict in verdicts.values())


def test_a_kernel_that_cannot_run_at_all_is_not_judged() -> None:
    for verdict in judge(BrokenKernel()).values():
        assert verdict.outcome is Outcome.NOT_CHECKED
        assert not verdict.fails
        assert verdict.found == "fails on LBHNC already: NotImplementedError: no such kernel"


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_attention_reads_what_the_connector_asks_for(dtype: str) -> None:
    from kvferry.integrations.vllm.kernels.engine import check_attention

    verdicts = {verdict.layout: verdict for verdict in check_attention(dtype, 64, 64)}
    assert {
        layout for layout, verdict in verdicts.items() if verdict.outcome is Outcome.PASSES
    } == READ_BY_CPU_ATTENTION
    assert {verdict.outcome for verdict in verdicts.values() if verdict.fails} == {Outcome.REFUSED}
    assert verdicts[NamedLayout.BHLNC].case == KernelCase("CPU_ATTN", dtype, 64, 64)


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mla_on_a_cpu_fails_on_cross_layer_layouts(dtype: str) -> None:
    """When this fails, vLLM has repaired its kernel, and the rule in ``check_layout`` may go.

    bfloat16 is computed by AMX_MLA where the processor has AMX.
    """
    from kvferry.integrations.vllm.kernels.engine import check_mla

    verdicts = {verdict.layout: verdict for verdict in check_mla(dtype)}
    assert all(verdicts[layout].fails for layout in CROSS_LAYER)
    assert all(verdicts[layout].outcome is Outcome.PASSES for layout in NamedLayout if layout not in CROSS_LAYER)
    assert "cache write of a prompt" in verdicts[NamedLayout.BHLNC].found


def start_engine_parts(layout: NamedLayout) -> tuple[Any, Any, Any]:
    """Return what a worker has when its cache is registered: configuration, plan and views of the cache."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvferry.integrations.vllm.kernels import engine

    from .vllm_caches import get_kv_cache_config_from_groups

    recipe = {"num_key_value_heads": 2, "head_dim": 64}
    with engine._small_model("Qwen3ForCausalLM", "qwen3", recipe) as path:
        vllm_config = engine._engine_config(path, dtype="float32", block_size=128)
    vllm_config.cache_config.kv_cache_layout = layout.value
    spec = engine._make_layers(vllm_config)[0].get_kv_cache_spec(vllm_config)
    groups = [KVCacheGroupSpec(list(engine.LAYER_NAMES), spec)]
    kv_cache_config = get_kv_cache_config_from_groups(vllm_config, groups, 64 << 20)
    views = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout[layout.name])
    return vllm_config, kv_cache_config, views


@pytest.mark.vllm
@pytest.mark.parametrize("layout", [NamedLayout.BHLNC, NamedLayout.BLHNC])
def test_an_engine_starts_on_a_layout_that_its_kernel_reads(
    layout: NamedLayout, caplog: pytest.LogCaptureFixture
) -> None:
    from kvferry.integrations.vllm.kernels.engine import check_engine_kernels

    parts = start_engine_parts(layout)
    began_at = time.thread_time()
    check_engine_kernels(*parts, layout)
    assert time.thread_time() - began_at < START_SECONDS
    ours = [record for record in caplog.records if record.name.startswith("kvferry")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]
    assert all(not view.any() for view in parts[2].values()), "the engine's own cache was touched"


@pytest.mark.vllm
def test_an_engine_is_refused_a_layout_that_its_kernel_misreads(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvferry.integrations.vllm.kernels.engine import check_engine_kernels

    update = CPUAttentionBackendImpl.do_kv_cache_update

    def dense_update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        update(self, layer, key, value, as_if_dense(kv_cache), slot_mapping)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", dense_update)
    parts = start_engine_parts(NamedLayout.BHLNC)
    with pytest.raises(
        LayoutError, match=r"CPU_ATTN .* on BHLNC: wrong, cache write .* largest difference is \d"
    ) as no:
        check_engine_kernels(*parts, NamedLayout.BHLNC)
    assert no.value.reason is Reason.KERNEL_CANNOT_READ_LAYOUT
    assert "VLLM_KV_CACHE_LAYOUT to LBHNC" in no.value.remedy


@pytest.mark.parametrize(
    ("measured", "exit_code"),
    [
        (Measured((failure(NamedLayout.BHLNC),)), 1),
        (Measured((failure(NamedLayout.BLNHC),)), 0),
        (Measured((Verdict(KernelCase("CPU_MLA", "float32", 576, 16), NamedLayout.BHLNC, Outcome.WRONG, 1.0),)), 0),
        (Measured((), "ended by [this] SIGSEGV"), 1),
    ],
    ids=["requested", "not-requested", "mla", "crash"],
)
def test_the_exit_code_depends_on_the_layouts_that_the_connector_requests(
    measured: Measured, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "measure_in_child", lambda _model: measured)
    table = CliRunner().invoke(app, ["doctor", "--kernels"])
    assert table.exit_code == exit_code
    assert all(verdict.layout in table.stdout for verdict in measured.verdicts)
    assert ("ended by [this] SIGSEGV" in table.stdout) is bool(measured.error)
    assert CliRunner().invoke(app, ["doctor", "--kernels", "--json"]).exit_code == exit_code


@pytest.mark.vllm
def test_doctor_tries_every_layout() -> None:
    result = CliRunner().invoke(app, ["doctor", "--kernels", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report["error"]
    assert report["healthy"]
    verdicts = msgspec.convert(report["verdicts"], tuple[Verdict, ...])
    assert len({(verdict.case, verdict.layout) for verdict in verdicts}) == len(verdicts) == 60
    assert {verdict.case.block_size for verdict in verdicts} == {16, 64, 128}
    assert {row["case"]["backend"] for row in report["verdicts"] if row["requested"]} == {"CPU_ATTN"}


def test_a_model_is_named_with_kernels_only() -> None:
    assert CliRunner().invoke(app, ["doctor", "--model", "somewhere"]).exit_code == 2
