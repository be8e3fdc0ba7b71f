"""Writes of prompts and GPU engines: what vLLM's second model runner and its CUDA graphs do with the calls.

vLLM's own objects and sources, without a GPU: each test names what kvferry relies on.
"""

import ast
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.kv_connector as second_runner
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.integrations.vllm.scheduler.source import tells_after_the_end, written_untold
from kvferry.integrations.vllm.worker.role import why_layers_are_silent

RUNNER = "vllm.v1.worker.gpu.model_runner"


def full(block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=8, dtype=dtype)


def window(block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64
    )


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


STATE = MambaSpec(block_size=16, shapes=((2, 3), (4, 5)), dtypes=(torch.float32, torch.float32))
CACHES: dict[str, tuple[KVCacheConfig, str]] = {
    "attention": (caches(full()), ""),
    "attention and windows": (caches(full(), window()), ""),
    "a state": (caches(full(), STATE), "clears new blocks"),
    "two precisions": (caches(full(), full(dtype=torch.float32)), "clears new blocks"),
    "two sizes of blocks": (caches(full(32), window(16)), "copies blocks"),
}


def engine(*, second: bool, caches_prefixes: bool = True, stages: int = 1, drafts: bool = False) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=stages, decode_context_parallel_size=1)
    cache = SimpleNamespace(
        enable_prefix_caching=caches_prefixes, prefix_match_unit=None, block_size=16, mamba_cache_mode="none"
    )
    return SimpleNamespace(
        parallel_config=parallel,
        cache_config=cache,
        use_v2_model_runner=second,
        speculative_config=object() if drafts else None,
        kv_transfer_config=object(),
    )


@pytest.mark.parametrize("name", CACHES)
def test_the_second_runner_tells_of_prompts_in_steps_where_it_writes_no_block_before_it_calls_the_connector(
    name: str,
) -> None:
    found, named = CACHES[name]
    assert written_untold(engine(second=False), found) == ""
    assert tells_after_the_end(engine(second=False), found) == ""
    why = tells_after_the_end(engine(second=True), found)
    assert bool(why) == bool(named)
    assert named in why
    if named:
        assert named in written_untold(engine(second=True), found)
        assert "update_requests" in why


def test_without_prefix_caching_no_prompt_has_a_part_of_a_block() -> None:
    found, _ = CACHES["two sizes of blocks"]
    assert tells_after_the_end(engine(second=True, caches_prefixes=False), found) == ""


@pytest.mark.parametrize(("stages", "drafts"), [(1, True), (2, False), (2, True)])
def test_stages_with_draft_tokens_tell_of_prompts_after_the_end(stages: int, drafts: bool) -> None:
    """VLLM tells only the last stage when a step has ended."""
    why = tells_after_the_end(engine(second=False, stages=stages, drafts=drafts), CACHES["attention"][0])
    assert ("pipeline stage" in why) == (stages > 1 and drafts)


def source_of(name: str) -> dict[str, ast.FunctionDef]:
    import importlib.util

    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        tree = ast.parse(file.read())
    [runner] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner"]
    return {node.name: node for node in runner.body if isinstance(node, ast.FunctionDef)}


def calls(function: ast.AST) -> list[str]:
    """Return what a function calls, in the order of its lines."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]


def test_the_second_runner_writes_blocks_early_only_where_it_clears_or_copies_them() -> None:
    """In front of ``pre_forward`` nothing else may have the caches: else a preempted prompt's blocks could change."""
    methods = source_of(RUNNER)
    order = calls(methods["execute_model"])
    assert order.index("self.update_requests") < order.index("self.kv_connector.pre_forward")
    before_the_model = [name for name in order if name in ("self.kv_connector.pre_forward", "self.model")]
    assert before_the_model[0] == "self.kv_connector.pre_forward"
    touching = {
        name for name, body in methods.items() if "self.kv_caches" in (code := ast.unparse(body)) or "zeroer" in code
    }
    assert touching <= {
        "__init__",
        "initialize_kv_cache",
        "init_kv_cache",
        "_init_kv_zero_meta",
        "update_requests",
        "shutdown",
    }, "another method of the runner has the caches: does it write before pre_forward?"
    update = methods["update_requests"]
    writes = {"self.kv_block_zeroer.zero_block_ids", "copy_kv_cache_blocks_inplace"}
    assert writes <= {*calls(update)}
    for guard in (node for node in ast.walk(update) if isinstance(node, ast.If)):
        if writes & {*calls(guard)}:
            assert ast.unparse(guard.test) in (
                "scheduler_output.new_block_ids_to_zero",
                "scheduler_output.kv_cache_block_copies",
            )
            writes -= {*calls(guard)}
    assert not writes, "these are not made under a condition that kvferry knows"


class Recording:
    """A connector that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_metadata = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            self.calls.append(name if name != "save_kv_layer" else f"{name} {arguments[0]}")
            if name == "get_transfer_results":
                return KVConnectorTransferResults()
            return self.has_metadata if name == "has_connector_metadata" else None

        return call


def test_the_second_runner_calls_a_connector_in_the_order_that_the_worker_role_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = Recording()
    monkeypatch.setattr(second_runner, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(second_runner, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(second_runner, "get_forward_context", lambda: None)
    runner: Any = second_runner.ActiveKVConnector(SimpleNamespace(), {})  # type: ignore[arg-type]
    connector.calls.clear()
    output: Any = SimpleNamespace(kv_connector_metadata=object(), has_sync_kv_loads=False)
    runner.pre_forward(output)
    assert connector.calls == ["handle_preemptions", "bind_connector_metadata"]
    connector.calls.append("the model")
    runner.finish_forward()
    runner.post_forward(set())
    wanted = ["the model", "start_load_kv", "wait_for_save", "get_transfer_results", "clear_connector_metadata"]
    assert [each for each in connector.calls if each in wanted] == wanted


# CUDA graphs.


def test_a_layer_reports_behind_its_own_kernels_and_never_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While vLLM captures, no metadata is bound."""
    connector = Recording()
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(attention, "get_attention_context", lambda _: (object(), None, None, None))

    @kv_transfer_utils.maybe_transfer_kv_layer
    def layer(layer_name: str) -> None:
        connector.calls.append("kernels")

    layer("model.layers.0")
    assert connector.calls[-2:] == ["kernels", "save_kv_layer model.layers.0"]
    connector.calls.clear()
    connector.has_metadata = False
    layer("model.layers.0")
    assert connector.calls == ["has_connector_metadata", "kernels"]


@pytest.mark.parametrize("operation", ["unified_attention_with_output", "unified_mla_attention_with_output"])
def test_attention_is_what_vllm_leaves_out_of_graphs_in_pieces(operation: str) -> None:
    assert f"vllm::{operation}" in CompilationConfig._attention_ops
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.PIECEWISE)
    compilation.set_splitting_ops_for_v1("naive")
    assert compilation.splitting_ops_contain_attention()
    assert "did not call save_kv_layer" in why_layers_are_silent(compilation)


def test_breakable_graphs_run_the_report_of_a_layer_outside_of_the_graph() -> None:
    """The break is the outer decorator, so the connector is called when a piece is replayed, too."""
    module = inspect.getsource(attention)
    break_at = module.index("@eager_break_during_capture\n@maybe_transfer_kv_layer\ndef unified_attention_with_output")
    assert break_at > 0


def test_vllm_may_go_back_to_whole_graphs() -> None:
    """So layers may be silent even where vLLM is to capture pieces: chunks are then written at the end of each step,
    and the log says why.
    """
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.PIECEWISE)
    compilation.pass_config.fuse_attn_quant = True
    compilation.set_splitting_ops_for_v1("naive")
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL
    assert why_layers_are_silent(compilation) == "a CUDA graph replays whole steps (cudagraph_mode FULL)"


def test_pieces_that_have_attention_inside_are_named() -> None:
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.PIECEWISE, splitting_ops=["vllm::short_conv"]
    )
    assert "splitting_ops does not name it" in why_layers_are_silent(compilation)
