"""vLLM's configuration and cache tensors in kvferry's terms."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Identity, RankEntry
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.translate.attention import attention_components, check_scales_in_slots
from kvferry.integrations.vllm.translate.specs import refuse, spec_of
from kvferry.integrations.vllm.translate.states import check_state, state_components
from kvferry.layout.group import CacheGroup, CacheKind, TensorScale
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

# A model's files are sampled, not read whole: quick for any size, and enough to tell two checkpoints apart.
SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 8
_QUANTISATIONS = ("NONE", "FP8_PER_TENSOR")  # besides the modes with scales in the slots
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


def check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse an engine whose caches this version cannot move. Raises :class:`LayoutError` (unsupported)."""
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            refuse(f"{name} is {size}", f"Run with --{name.replace('_', '-')} 1.")
    if vllm_config.num_prefill_lookahead_tokens > 1:
        lookahead = vllm_config.num_prefill_lookahead_tokens
        refuse(f"the drafter embeds {lookahead} tokens ahead of the prompt", "Run without multi-module drafting.")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_group(index, group)


def identity_of(vllm_config: "VllmConfig", settings: Settings) -> Identity:
    """Return the identity on which a peer must agree."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return Identity(
        model=settings.model_id or _config_digest(model.hf_config.to_dict()),
        weights=settings.model_id or _weights_digest(str(model.model), model.revision),
        quantization=settings.model_id or _quantization(model),
        compute_dtype=_dtype_name(model.dtype),
        architecture=(model.architectures or ["unknown"])[0],
        kv_dtype=_kv_dtype(vllm_config),
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
    )


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
        name=str(index),
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


def _kv_dtype(vllm_config: "VllmConfig") -> str:
    """Return the element types of the caches: keys and values, and states where the model has any."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    names: list[str] = [cache.cache_dtype]
    if model.is_hybrid or model.is_attention_free:
        names += [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    dtypes = (model.dtype if name == "auto" else name for name in names)
    return "/".join(map(_dtype_name, dtypes))


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _quantization(model: Any) -> str:
    """Return how the weights are quantised: in the checkpoint, or while they are loaded, which no file records.

    A checkpoint's method is left out: the kernel that runs it, such as ``gptq`` or ``gptq_marlin``, depends on the
    machine.
    """
    is_in_checkpoint = model.model_arch_config.quantization_config is not None
    method = "checkpoint" if is_in_checkpoint else model.quantization or "none"
    details = model.quantization_config
    return method if details is None else f"{method}/{_digest(repr(details))}"


def _config_digest(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return _digest(json.dumps(kept, sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _commit_of(model: str, revision: str | None) -> str | None:
    """Return the commit of a hub's model at this revision in this machine's cache; None where the cache has none."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:
        return None  # not a name of a model on the hub
    return Path(path).parent.name if isinstance(path, str) else None


def _weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of sampled weight files of a local model; for a model of a hub, of its name and commit.

    The digest misses changes between the samples, and the commit where the hub's cache does not have the model.
    """
    directory = Path(model)
    if not directory.is_dir():
        return _digest(f"{model}@{_commit_of(model, revision) or revision or 'default'}")
    digest = hashlib.blake2b(digest_size=16)
    files = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES_PER_FILE):
                file.seek(size * sample // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
