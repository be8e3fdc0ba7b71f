"""vLLM's configuration and cache tensors in kvferry's terms."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.errors import HandoffError, LayoutError, Reason
from kvferry.handoff.protocol import Identity, RankEntry
from kvferry.integrations.vllm.settings import Settings
from kvferry.layout.cache_group import CacheGroup, CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.layout.strided import Atom, Component, HeadRange

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A model's files are sampled, not read whole: enough to tell two checkpoints apart, quick for any size.
SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 8
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


def check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse at start what this version cannot move. Raises :class:`LayoutError` (unsupported)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        _refuse(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}", "Run with pipeline parallel size 1.")
    context_parallel = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    if context_parallel > 1:
        _refuse("context parallelism is on", "Run with prefill and decode context parallel size 1.")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        _refuse(
            f"the model has {len(groups)} KV cache groups and this version moves one",
            "For sliding-window models, run both engines with --disable-hybrid-kv-cache-manager.",
        )
    spec = _spec_of(kv_cache_config)
    if not isinstance(spec, FullAttentionSpec) or spec.tokens_per_state != 1 or spec.page_size_padded is not None:
        _refuse(f"the KV cache is a {type(spec).__name__}", "Full attention and MLA caches are supported.")
    if spec.kv_quant_mode.value != 0:
        _refuse(f"the KV cache is quantised ({spec.kv_quant_mode.name})", "Run with --kv-cache-dtype auto.")


def identity_of(vllm_config: "VllmConfig", settings: Settings) -> Identity:
    """Return what a peer must agree on."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return Identity(
        model=settings.model_id or _config_digest(model.hf_config.to_dict()),
        weights=settings.model_id or _weights_digest(str(model.model), model.revision),
        architecture=(model.architectures or ["unknown"])[0],
        kv_dtype=_kv_dtype(vllm_config),
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
    )


def resolved_layout(vllm_config: "VllmConfig") -> NamedLayout:
    """Return the layout that the engine settled on."""
    return NamedLayout.parse(vllm_config.cache_config.get_resolved_kv_cache_layout().name)


def shard_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", kv_caches: Mapping[str, torch.Tensor], tp_rank: int
) -> Shard:
    """Return what this rank holds, from the engine's own ``[B, H, N, C]`` views.

    Raises :class:`LayoutError` when a view is not what the specification promises.
    """
    layer_names = tuple(kv_cache_config.kv_cache_groups[0].layer_names)
    views = [kv_caches[name] for name in layer_names]
    spec = _spec_of(kv_cache_config)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    storage = views[0].untyped_storage()
    region = Region(storage.data_ptr(), storage.nbytes())
    _check_views(layer_names, views, (kv_cache_config.num_blocks, spec.num_heads, spec.block_size))
    is_mla = vllm_config.model_config.use_mla
    num_kv_heads = 1 if is_mla else vllm_config.model_config.get_total_num_kv_heads()
    heads = _heads_of(num_kv_heads, tp_rank, tp_size, is_mla)
    group = CacheGroup(
        name="0",
        kind=CacheKind.MLA if is_mla else CacheKind.ATTENTION,
        block_size=spec.block_size,
        num_blocks=kv_cache_config.num_blocks,
        components=(_component(layer_names, views, region, heads, num_kv_heads, vllm_config),),
    )
    return Shard(regions=(region,), groups=(group,), tp_rank=tp_rank, tp_size=tp_size)


def decode_rank_entry(data: bytes) -> RankEntry:
    """Return the entry that a worker of this engine encoded."""
    try:
        return msgspec.msgpack.decode(data, type=RankEntry)
    except msgspec.MsgspecError as error:
        raise HandoffError(Reason.MALFORMED_MESSAGE, f"a worker's handshake metadata is malformed: {error}.") from error


def _component(
    layer_names: tuple[str, ...],
    views: Sequence[torch.Tensor],
    region: Region,
    heads: HeadRange,
    total_heads: int,
    vllm_config: "VllmConfig",
) -> Component:
    first = views[0]
    itemsize = first.element_size()
    block, head, token, channel = (stride * itemsize for stride in first.stride())
    packing = _packing(vllm_config, layer_names[0], first)
    return Component(
        name="kv",
        layers=layer_names,
        layer_offsets=tuple(view.data_ptr() - region.base_address for view in views),
        heads=(heads,),
        total_heads=total_heads,
        num_channels=first.shape[3],
        itemsize=itemsize,
        block_stride=block,
        head_stride=head,
        token_stride=token,
        channel_stride=channel,
        atom=Atom.PAGE if packing else Atom.CONTENT,
        packing=packing,
    )


def _packing(vllm_config: "VllmConfig", layer_name: str, view: torch.Tensor) -> str:
    """Name the inside of a ``(block, head)`` page that a kernel packs; empty where tokens lie apart.

    CPU attention keeps a key plane and a value plane in a page, arranged by instruction set,
    dtype and block size.
    """
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    backend = layer.get_attn_backend().get_name()
    if backend != "CPU_ATTN":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    block_size = view.shape[2]
    dtype: Any = vllm_config.model_config.dtype
    isa = _get_attn_isa(dtype, block_size, layer.head_size, vllm_config.cache_config.cache_dtype)
    return f"cpu_attn:{isa}:{str(view.dtype).removeprefix('torch.')}:{block_size}"


def _heads_of(num_kv_heads: int, tp_rank: int, tp_size: int, is_mla: bool) -> HeadRange:
    """Return the global heads of a rank: an equal share, or one head shared by several ranks."""
    if is_mla:
        return HeadRange(0, 1)
    if tp_size <= num_kv_heads:
        share = num_kv_heads // tp_size
        return HeadRange(tp_rank * share, (tp_rank + 1) * share)
    head = tp_rank // (tp_size // num_kv_heads)
    return HeadRange(head, head + 1)


def _check_views(layer_names: Sequence[str], views: Sequence[torch.Tensor], expected: tuple[int, int, int]) -> None:
    first = views[0]
    for name, view in zip(layer_names, views, strict=True):
        if tuple(view.shape[:3]) != expected:
            _refuse(
                f"the cache of {name} has shape {tuple(view.shape)}, expected [blocks, heads, tokens] of {expected}",
                "Choose a block size that the attention kernel takes whole.",
            )
        if view.stride() != first.stride() or view.dtype != first.dtype or view.shape != first.shape:
            _refuse(f"the cache of {name} differs in shape or strides from that of {layer_names[0]}", "")


def _spec_of(kv_cache_config: "KVCacheConfig") -> Any:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    group = kv_cache_config.kv_cache_groups[0]
    spec: Any = group.kv_cache_spec
    return spec.kv_cache_specs[group.layer_names[0]] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _refuse(what: str, remedy: str) -> None:
    raise LayoutError(Reason.UNSUPPORTED, f"{what}.", remedy)


def _kv_dtype(vllm_config: "VllmConfig") -> str:
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype if cache_dtype == "auto" else cache_dtype
    return str(dtype).removeprefix("torch.")


def _config_digest(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of sampled weight files of a local model; for a model of a hub, its name and revision."""
    digest = hashlib.blake2b(digest_size=16)
    directory = Path(model)
    if not directory.is_dir():
        digest.update(f"{model}@{revision or 'default'}".encode())
        return digest.hexdigest()
    files = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES_PER_FILE):
                file.seek(size * sample // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
