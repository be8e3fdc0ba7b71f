"""Kernels on strided views: vLLM's own ones, and fakes that ignore strides, without an engine."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner

from kvferry.cli import kernel_report
from kvferry.cli.kernel_report import Measured
from kvferry.cli.main import app
from kvferry.errors import LayoutError, Reason
from kvferry.integrations.vllm.kernels.check import BLOCK_IDS, NUM_BLOCKS, Kernel, Step, compare_layouts, random_tensor
from kvferry.integrations.vllm.kernels.verdicts import (
    KernelCase,
    Outcome,
    Verdict,
    keep_verdicts,
    load_verdicts,
    machine_description,
    verdicts_path,
)
from kvferry.integrations.vllm.settings import Settings
from kvferry.layout.axes import Axis
from kvferry.layout.named_layouts import NamedLayout

LAYERS, HEADS, BLOCK_SIZE, CHANNELS = 3, 2, 8, 4
CASE = KernelCase("FAKE", "float32", CHANNELS, BLOCK_SIZE)
CROSS_LAYER = [layout for layout in NamedLayout if layout.is_cross_layer]
READ_BY_CPU_ATTENTION = {NamedLayout.LBHNC, NamedLayout.LHBNC, NamedLayout.BLHNC, NamedLayout.BHLNC}
START_SECONDS = 0.3


@pytest.fixture(autouse=True)
def one_thread_and_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", str(cache / "vllm")))  # saves it 10 s
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FakeKernel:
    """Writes random contents and answers with their sum; takes the cache for dense where it is told to."""

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
    strides = layout.strides(sizes)
    buffer = torch.zeros(LAYERS * NUM_BLOCKS * HEADS * BLOCK_SIZE * CHANNELS)
    axes = (Axis.B, Axis.H, Axis.N, Axis.C)
    shape = [sizes[axis] for axis in axes]
    return [
        buffer.as_strided(shape, [strides[axis] for axis in axes], layer * strides[Axis.L]) for layer in range(LAYERS)
    ]


def judge(kernel: Kernel, layouts: Sequence[NamedLayout] = tuple(NamedLayout)) -> dict[NamedLayout, Verdict]:
    return {verdict.layout: verdict for verdict in compare_layouts(kernel, CASE, allocate, layouts)}


def failure(layout: NamedLayout, found: str = "attention of a prompt: differs by 2.5") -> Verdict:
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
    from kvferry.integrations.vllm.kernels.samples import check_attention

    verdicts = {verdict.layout: verdict for verdict in check_attention(dtype, 64, 64)}
    assert {
        layout for layout, verdict in verdicts.items() if verdict.outcome is Outcome.PASSES
    } == READ_BY_CPU_ATTENTION
    assert {verdict.outcome for verdict in verdicts.values() if verdict.fails} == {Outcome.REFUSED}
    assert verdicts[NamedLayout.BHLNC].case == KernelCase("CPU_ATTN", dtype, 64, 64)


@pytest.mark.vllm
def test_cpu_mla_fails_on_cross_layer_layouts() -> None:
    """When this fails, vLLM has repaired its kernel, and the rule in ``check_layout`` may go."""
    from kvferry.integrations.vllm.kernels.samples import check_mla

    verdicts = {verdict.layout: verdict for verdict in check_mla("float32")}
    assert all(verdicts[layout].fails for layout in CROSS_LAYER)
    assert all(verdicts[layout].outcome is Outcome.PASSES for layout in NamedLayout if layout not in CROSS_LAYER)
    assert "cache write of a prompt" in verdicts[NamedLayout.BHLNC].found


@pytest.mark.vllm
def test_the_wish_falls_back_where_a_kernel_fails(caplog: pytest.LogCaptureFixture) -> None:
    from kvferry.integrations.vllm.layout_choice import asked_layout

    model = SimpleNamespace(use_mla=False, is_hybrid=False, dtype=torch.float32, get_head_size=lambda: 64)
    engine: Any = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=128, cache_dtype="auto"))
    machine = machine_description()
    assert asked_layout(engine, Settings()) is NamedLayout.BHLNC
    assert not caplog.records
    keep_verdicts(machine, [failure(NamedLayout.BHLNC)])
    assert asked_layout(engine, Settings()) is NamedLayout.BLHNC
    assert "does not ask for KV cache layout BHLNC" in caplog.text
    assert "attention of a prompt: differs by 2.5" in caplog.text
    keep_verdicts(machine, [failure(NamedLayout.BLHNC)])
    assert asked_layout(engine, Settings()) is None
    assert asked_layout(engine, Settings(layout="BHLNC")) is NamedLayout.BHLNC
    engine.cache_config.block_size = 64
    assert asked_layout(engine, Settings()) is NamedLayout.BHLNC
    quantised = failure(NamedLayout.BHLNC)
    keep_verdicts(machine, [replace(quantised, case=replace(quantised.case, dtype="int8", block_size=64))])
    assert asked_layout(engine, Settings()) is NamedLayout.BHLNC
    engine.cache_config.cache_dtype = "int8_per_token_head"
    assert asked_layout(engine, Settings()) is NamedLayout.BLHNC


def test_later_verdicts_replace_earlier_ones() -> None:
    keep_verdicts("machine", [failure(NamedLayout.BHLNC), failure(NamedLayout.BLHNC)])
    passed = Verdict(failure(NamedLayout.BHLNC).case, NamedLayout.BHLNC, Outcome.PASSES, 0.0)
    keep_verdicts("machine", [passed])
    assert set(load_verdicts("machine")) == {passed, failure(NamedLayout.BLHNC)}
    assert load_verdicts("another machine") == ()


def test_a_damaged_file_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    path = keep_verdicts("machine", [failure(NamedLayout.BHLNC)])
    path.write_bytes(path.read_bytes()[:-5])
    assert load_verdicts("machine") == ()
    assert str(verdicts_path("machine")) in caplog.text


def start_engine_parts(layout: NamedLayout) -> tuple[Any, Any, Any]:
    """Return what a worker has when its cache is registered: configuration, plan and views of the cache."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvferry.integrations.vllm.kernels import samples as samples

    recipe = {"num_key_value_heads": 2, "head_dim": 64}
    with samples._small_model("Qwen3ForCausalLM", "qwen3", recipe) as path:
        vllm_config = samples._engine_config(path, dtype="float32", block_size=128)
    vllm_config.cache_config.kv_cache_layout = layout.value
    spec = samples._make_layers(vllm_config)[0].get_kv_cache_spec(vllm_config)
    groups = [KVCacheGroupSpec(list(samples.LAYER_NAMES), spec)]
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
    assert not [record for record in caplog.records if record.name.startswith("kvferry")]
    assert all(not view.any() for view in parts[2].values()), "the engine's own cache was touched"


@pytest.mark.vllm
def test_an_engine_is_refused_a_layout_that_its_kernel_misreads(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvferry.integrations.vllm.kernels.engine import check_engine_kernels
    from kvferry.integrations.vllm.layout_choice import asked_layout

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
    assert asked_layout(parts[0], Settings()) is NamedLayout.BLHNC, "the next start must not ask for it again"


@pytest.mark.parametrize(
    ("measured", "exit_code"),
    [
        (Measured((failure(NamedLayout.BHLNC),)), 1),
        (Measured((failure(NamedLayout.BLNHC),)), 0),
        (Measured((Verdict(KernelCase("CPU_MLA", "float32", 576, 16), NamedLayout.BHLNC, Outcome.WRONG, 1.0),)), 0),
        (Measured((), "a kernel ended [its] process with SIGSEGV, after the last row"), 1),
    ],
    ids=["asked", "not-asked", "mla", "crash"],
)
def test_the_exit_code_is_about_what_the_connector_asks_for(
    measured: Measured, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_report, "measure_in_child", lambda _model: measured)
    table = CliRunner().invoke(app, ["doctor", "--kernels"])
    assert table.exit_code == exit_code
    assert all(verdict.layout in table.stdout for verdict in measured.verdicts)
    assert ("[its] process with SIGSEGV" in table.stdout) is bool(measured.complaint)
    assert CliRunner().invoke(app, ["doctor", "--kernels", "--json"]).exit_code == exit_code


@pytest.mark.vllm
def test_doctor_measures_and_keeps_every_verdict() -> None:
    result = CliRunner().invoke(app, ["doctor", "--kernels", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report["complaint"]
    assert report["healthy"]
    kept = {(verdict.case, verdict.layout) for verdict in load_verdicts(machine_description())}
    assert len(kept) == len(report["verdicts"]) == 60
    assert {case.block_size for case, _ in kept} == {16, 64, 128}
    assert {row["case"]["backend"] for row in report["verdicts"] if row["asked"]} == {"CPU_ATTN"}


def test_a_model_is_named_with_kernels_only() -> None:
    assert CliRunner().invoke(app, ["doctor", "--model", "somewhere"]).exit_code == 2
