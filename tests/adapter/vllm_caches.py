"""Caches of made-up models as vLLM itself groups, places and views them, and the shards that the adapter makes of them.

No engine runs, and no layout code of kvferry's is used: labels are written and looked for through vLLM's views.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:  # since 0.33
    from vllm.v1.core.kv_cache_planning import (  # type: ignore[import-not-found]
        _project_kv_cache_groups_to_worker,
        get_global_kv_cache_groups,
        get_kv_cache_config_from_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_utils import (
        _project_kv_cache_groups_to_worker,
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )

    def get_global_kv_cache_groups(vllm_config: Any, specs: Sequence[dict[str, KVCacheSpec]]) -> Any:
        return get_kv_cache_groups(vllm_config, *specs)


from kvferry.integrations.vllm import translate
from kvferry.plan.match import GroupBlocks, of_rank
from kvferry.plan.planner import Planner

TOTAL_HEADS, HEAD_SIZE, NUM_BLOCKS = 4, 8, 12


def full(tp_size: int, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(**_attention(tp_size, block_size))


def window(tp_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_attention(tp_size, 16), sliding_window=40)


def _attention(tp_size: int, block_size: int) -> dict[str, Any]:
    heads = TOTAL_HEADS // tp_size
    return {"block_size": block_size, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}


class CompilationConfig(SimpleNamespace):
    """Weak references tell engines apart by this object, and the class itself has none."""


class CacheRank:
    """One rank: vLLM's groups of these layers, one buffer, a view a layer. ``shared`` layers read another's cache.

    ``stages`` are the layers of each stage of a pipeline, of which this rank belongs to number ``pp_rank``. The layers
    of a ``drafter`` are the last, as vLLM registers those of MTP; since 0.33 it marks them besides.
    """

    def __init__(
        self,
        specs: Mapping[str, KVCacheSpec],
        layout: str,
        rank: tuple[int, int] = (0, 1),
        modules: Mapping[str, Any] | None = None,
        shared: Mapping[str, str] | None = None,
        stages: Sequence[Sequence[str]] = (),
        pp_rank: int = 0,
        drafter: Sequence[str] = (),
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.tp_rank, self.specs = rank[0], dict(specs)
        attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
        modules = {**dict.fromkeys(specs, attention), **(modules or {})}
        vllm_config = _config(rank[1], max(len(stages), 1), KVCacheLayout[layout], modules, num_blocks)
        self.vllm_config = vllm_config
        if drafter:
            drafting = {"use_eagle": lambda: True, "use_eagle_block_drop": lambda: True, "method": "mtp"}
            vllm_config.speculative_config = SimpleNamespace(**drafting)
            vllm_config.num_prefill_lookahead_tokens = 1
        if hasattr(KVCacheSpec, "is_draft"):
            marked: dict[str, Any] = {"is_draft": True}
            self.specs |= {name: replace(self.specs[name], **marked) for name in drafter}
        groups = get_global_kv_cache_groups(vllm_config, [self.specs])
        if stages:
            groups = _project_kv_cache_groups_to_worker(groups, {name: specs[name] for name in stages[pp_rank]})
        self.is_drafters = [group.is_eagle_group for group in groups]
        self.config = get_kv_cache_config_from_groups(vllm_config, groups, available_memory=1 << 30)
        translate.check_supported(self.config)
        self.caches = allocate_kv_cache(self.config, torch.device("cpu"), KVCacheLayout[layout])
        self.caches |= {name: self.caches[owner] for name, owner in (shared or {}).items()}
        self.shard = translate.shard_of(vllm_config, self.config, self.caches, rank[0], pp_rank)

    def groups(self) -> list[list[str]]:
        return [list(group.layer_names) for group in self.config.kv_cache_groups]

    def expected(self, layer: str, position: int) -> torch.Tensor:
        """Return the labels of the tokens of a layer's block at this place in the prompt, none of which is 0."""
        _, heads, tokens, channels = self.caches[layer].shape
        index = [torch.arange(count) for count in (heads, tokens, channels)]
        head, token = self.tp_rank * heads + index[0], position * tokens + index[1]
        label = (list(self.specs).index(layer) * TOTAL_HEADS + head)[:, None, None] * 512 + token[:, None]
        return (label * 2 * HEAD_SIZE + index[2] + 1).to(torch.float32)

    def label(self, requests: Iterable[GroupBlocks]) -> None:
        """Write the labels over the attention blocks of a request."""
        for layer, position, block in self._blocks(requests, "source"):
            self.caches[layer][block] = self.expected(layer, position)

    def check(self, requests: Sequence[GroupBlocks], num_tokens: int) -> None:
        """Compare every attention block of a request, and check that no other byte was written."""
        storage = next(iter(self.caches.values())).untyped_storage()
        found = torch.tensor([], dtype=torch.float32).set_(storage)
        seen = 0
        for layer, position, block in self._blocks(requests, "destination"):
            held = max(0, min(self.specs[layer].block_size, num_tokens - position * self.specs[layer].block_size))
            assert torch.equal(self.caches[layer][block][:, :held], self.expected(layer, position)[:, :held]), layer
            seen += int(torch.count_nonzero(self.caches[layer][block]))
        assert int(torch.count_nonzero(found)) == seen, "bytes elsewhere were written"

    def _blocks(self, requests: Iterable[GroupBlocks], side: str) -> Iterable[tuple[str, int, int]]:
        for blocks in requests:
            for layer in self.groups()[int(blocks.group)]:
                if not isinstance(self.specs[layer], MambaSpec):
                    ids = blocks.source_ids if side == "source" else blocks.destination_ids
                    yield from ((layer, position, block) for position, block in enumerate(ids.tolist()))


def _config(
    tp_size: int, pp_size: int, layout: KVCacheLayout, modules: Mapping[str, Any], num_blocks: int = NUM_BLOCKS
) -> Any:
    parallel = {
        "pipeline_parallel_size": pp_size,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    cache = {"get_resolved_kv_cache_layout": lambda: layout, "num_gpu_blocks_override": num_blocks}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, **parallel),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: TOTAL_HEADS,
            dtype=torch.float32,
            supports_kv_cache_grouping=False,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_cache_retention_interval=None, **cache),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        compilation_config=CompilationConfig(static_forward_context=dict(modules)),
        num_prefill_lookahead_tokens=0,
    )


def move(sources: Sequence[CacheRank], destination: CacheRank, requests: Sequence[GroupBlocks]) -> None:
    """Plan and copy what one destination rank needs."""
    for plan in Planner([rank.shard for rank in sources], destination.shard).plans(0):
        for source, address, length in plan.lower(of_rank(requests, destination.shard)).astype(np.int64).tolist():
            ctypes.memmove(address, source, length)
