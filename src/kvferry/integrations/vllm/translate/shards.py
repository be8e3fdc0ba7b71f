"""vLLM's configuration and cache tensors in kvferry's terms."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import RankEntry
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, group_name
from kvferry.integrations.vllm.translate.attention import attention_components, check_scales_in_slots
from kvferry.integrations.vllm.translate.specs import refuse, spec_of
from kvferry.integrations.vllm.translate.states import check_state, state_components
from kvferry.integrations.vllm.versions import num_prefill_lookahead_tokens
from kvferry.layout.group import CacheGroup, CacheKind, TensorScale
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_QUANTISATIONS = ("NONE", "FP8_PER_TENSOR")  # besides the modes with scales in the slots


def check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse an engine whose caches this version cannot move. Raises :class:`LayoutError` (unsupported)."""
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            refuse(f"{name} is {size}", f"Run with --{name.replace('_', '-')} 1.")
    if (lookahead := num_prefill_lookahead_tokens(vllm_config)) > 1:
        refuse(f"the drafter embeds {lookahead} tokens ahead of the prompt", "Run without multi-module drafting.")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_group(index, group)


def resolved_layout(vllm_config: "VllmConfig") -> NamedLayout:
    """Return the layout that the engine uses."""
    return NamedLayout.parse(vllm_config.cache_config.get_resolved_kv_cache_layout().name)


def group_shapes(kv_cache_config: "KVCacheConfig") -> tuple[GroupShape, ...]:
    """Return the shape of each cache group, in vLLM's order."""
    return tuple(_group_shape(spec_of(group)) for group in kv_cache_config.kv_cache_groups)


def shard_of(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    kv_caches: Mapping[str, torch.Tensor],
    tp_rank: int,
    pp_rank: int = 0,
) -> Shard:
    """Return this rank's shard, from the engine's own views of its one buffer: a group for each of vLLM's.

    Groups overlay each other in the buffer and own disjoint block ids. The name of a group is its index, the same in
    every pipeline stage; a group without a layer in this stage is left out. ``kv_caches`` may have more layers than the
    groups: layers that read another layer's cache.

    Raises :class:`LayoutError` where a view differs from its specification, or the stage has no cache.
    """
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    held = {index: group for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.layer_names}
    if not held:
        refuse(f"no layer of pipeline stage {pp_rank} of {pp_size} has a cache", "Run with fewer pipeline stages.")
    storage = kv_caches[next(iter(held.values())).layer_names[0]].untyped_storage()
    region = Region(storage.data_ptr(), storage.nbytes(), str(storage.device))
    groups = []
    for index, group in held.items():
        views = {name: kv_caches[name] for name in group.layer_names}
        _check_views(views, region)
        groups.append(_cache_group(vllm_config, kv_cache_config, index, views, region, (tp_rank, tp_size)))
    ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
    return Shard(regions=(region,), groups=tuple(groups), **ranks)


def decode_rank_entry(data: bytes) -> RankEntry:
    """Return the entry that a worker of this engine encoded."""
    try:
        return msgspec.msgpack.decode(data, type=RankEntry)
    except msgspec.MsgspecError as error:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"a worker's handshake metadata is malformed: {error}.",
            "Run the same kvferry version on all of the engine's hosts.",
        ) from error


def _check_group(index: int, group: "KVCacheGroupSpec") -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    spec = spec_of(group)
    where = f"cache group {index} is a {type(spec).__name__}"
    if len(kinds := _page_sizes(group)) > 1:
        pages = ", ".join(f"{size} bytes ({name})" for size, name in kinds.items())
        refuse(f"{where} of layers whose pages differ in size: {pages}", "Caches of equal layers are supported.")
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec):
        refuse(where, "Full attention, sliding windows, MLA and states are supported.")
    if not group.enable_kv_transfer or group.host_resident:
        refuse(f"{where} whose blocks are not to be moved", "Run without a cache kept in host memory.")
    if isinstance(spec, MambaSpec):
        check_state(index, spec)
        return
    if spec.tokens_per_state != 1:
        refuse(f"{where} with {spec.tokens_per_state} tokens a slot", "Caches of one slot a token are supported.")
    quantisation = spec.kv_quant_mode
    if not quantisation.is_per_token_head and quantisation.name not in _QUANTISATIONS:
        refuse(f"{where}, quantised ({quantisation.name})", "Run with --kv-cache-dtype auto or fp8.")


def _page_sizes(group: "KVCacheGroupSpec") -> dict[int, str]:
    """Return the sizes of the pages of a group's layers, each with a layer that has such pages."""
    return {spec_of(group, name).page_size_bytes: name for name in reversed(group.layer_names)}


def _group_shape(spec: Any) -> GroupShape:
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    if isinstance(spec, MambaSpec):
        return GroupShape(CacheKind.STATE, block_size=1)
    if isinstance(spec, SlidingWindowSpec):
        # vLLM keeps extra tokens, which attention does not read, in real blocks as well.
        window = spec.sliding_window + spec.extra_retained_tokens
        return GroupShape(CacheKind.SLIDING_WINDOW, spec.block_size, window)
    kind = CacheKind.MLA if isinstance(spec, MLAAttentionSpec) else CacheKind.ATTENTION
    return GroupShape(kind, spec.block_size)


def _cache_group(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    index: int,
    views: Mapping[str, torch.Tensor],
    region: Region,
    rank: tuple[int, int],
) -> CacheGroup:
    spec = spec_of(kv_cache_config.kv_cache_groups[index])
    shape = _group_shape(spec)
    if shape.kind is CacheKind.STATE:
        layer = vllm_config.compilation_config.static_forward_context[next(iter(views))]
        components = state_components(spec, layer, views, region, rank)
    else:
        expected = (kv_cache_config.num_blocks, spec.num_heads, spec.block_size)
        if spec.kv_quant_mode.is_per_token_head:
            check_scales_in_slots(vllm_config, views)
        components = attention_components(vllm_config, shape.kind, views, expected, region, rank)
    return CacheGroup(
        name=group_name(index),
        kind=shape.kind,
        block_size=shape.block_size,
        num_blocks=kv_cache_config.num_blocks,
        components=components,
        window=shape.window,
        scales=_scales(vllm_config, spec, views),
    )


def _scales(vllm_config: "VllmConfig", spec: Any, layers: Collection[str]) -> tuple[TensorScale, ...]:
    """Return the scales loaded with the weights, for caches with one for a layer's keys and one for its values."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    if not isinstance(spec, AttentionSpec) or spec.kv_quant_mode.name != "FP8_PER_TENSOR":
        return ()
    loaded = vllm_config.compilation_config.static_forward_context
    for layer in layers:
        scale = getattr(loaded[layer], "_k_scale", None)
        if scale is not None and scale.numel() > 1:
            refuse(f"{layer} has an FP8 scale for each of {scale.numel()} heads", "Use a checkpoint with one a tensor.")
    return tuple(
        TensorScale(layer, tensor, getattr(loaded[layer], f"_{tensor}_scale_float"))
        for layer in layers
        for tensor in ("k", "v")
    )


def _check_views(views: Mapping[str, torch.Tensor], region: Region) -> None:
    (first_name, first), *others = views.items()
    for name, view in views.items():
        if view.untyped_storage().data_ptr() != region.base_address:
            refuse(f"the cache of {name} lies in a buffer of its own")
    for name, view in others:
        if view.stride() != first.stride() or view.dtype != first.dtype or view.shape != first.shape:
            refuse(f"the cache of {name} differs in shape or strides from that of {first_name}")
