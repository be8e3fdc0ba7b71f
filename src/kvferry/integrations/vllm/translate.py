"""vLLM's configuration and cache tensors in kvferry's terms."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from kvferry.errors import HandoffError, LayoutError, Reason
from kvferry.handoff.messages import RankEntry
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, group_name
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import (
    Atom,
    CacheGroup,
    CacheKind,
    Component,
    HeadRange,
    Region,
    Shard,
    TensorScale,
    heads_of_rank,
)
from kvferry.layout.states import (
    ConvOrder,
    ConvSegment,
    StatePages,
    conv_components,
    gated_delta_segments,
    mamba1_segments,
    mamba2_segments,
    padding_components,
    recurrent_component,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

_QUANTISATIONS = ("NONE", "FP8_PER_TENSOR")  # besides the modes with scales in the slots
_STATES = ("MAMBA1", "MAMBA2", "GDN_ATTN")

# Instruction sets with which CPU attention keeps a plane of keys, channel by channel, and then a plane of values, token
# by token. Their arrangement of a quantised cache is not known: its pages move whole.
PLAIN_INSTRUCTION_SETS = ("vec", "vec16")
# Back ends that keep the scale of each token and head in the slot, behind the keys and the values.
_SCALES_IN_SLOTS = ("TRITON_ATTN",)
UNEXPECTED = "kvferry does not expect this of this vLLM: please report it, with the engine's log."
"""The remedy where no setting helps."""


def refuse(problem: str, remedy: str = UNEXPECTED) -> NoReturn:
    """Raise :class:`LayoutError` (unsupported)."""
    raise LayoutError(Reason.UNSUPPORTED, f"{problem}.", remedy)


def check_supported(kv_cache_config: "KVCacheConfig") -> None:
    """Refuse an engine whose caches this version cannot move. Raises :class:`LayoutError` (unsupported).

    Flags of vLLM are checked earlier: :mod:`~kvferry.integrations.vllm.refused_flags`.
    """
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
    # Each size with a layer that has such pages.
    sizes = {spec_of(group, name).page_size_bytes: name for name in reversed(group.layer_names)}
    if len(sizes) > 1:
        pages = ", ".join(f"{size} bytes ({name})" for size, name in sizes.items())
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


def spec_of(group: "KVCacheGroupSpec", layer_name: str | None = None) -> Any:
    """Return the specification of a layer of the group, without a name that of any layer.

    A pipeline stage may hold none of the group's layers, and vLLM tells the scheduler only the first stage's names.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec: Any = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return next(iter(spec.kv_cache_specs.values())) if layer_name is None else spec.kv_cache_specs[layer_name]


def attention_components(
    vllm_config: "VllmConfig",
    kind: CacheKind,
    views: Mapping[str, torch.Tensor],
    expected: tuple[int, int, int],
    region: Region,
    rank: tuple[int, int],
) -> tuple[Component, ...]:
    """Return the components of one group's layers, from vLLM's ``[B, H, N, C]`` views.

    ``expected`` are blocks, heads and tokens, ``rank`` is (rank, size).
    Raises :class:`LayoutError` (unsupported) for views of another shape.
    """
    name, first = next(iter(views.items()))
    if tuple(first.shape[:3]) != expected:
        refuse(
            f"the cache of {name} has shape {tuple(first.shape)}, expected [blocks, heads, tokens] of {expected}",
            "Choose a block size that the attention kernel takes whole.",
        )
    total_heads, heads = _heads(vllm_config, kind, name, expected[1], rank)
    offsets = [view.data_ptr() - region.base_address for view in views.values()]
    place = {"layers": tuple(views), "heads": (heads,), "total_heads": total_heads}
    packing = _packing(vllm_config, name, first)
    if packing is not None:
        if packing.split(":")[1] in PLAIN_INSTRUCTION_SETS and first.element_size() > 1:
            return _planes(name, first, offsets, place)
        place |= {"atom": Atom.PAGE, "packing": packing}
    return (_component("kv", first, offsets, (first.shape[3], first.stride(2), first.stride(3)), place),)


def check_scales_in_slots(vllm_config: "VllmConfig", layer_names: Iterable[str]) -> None:
    """Raise :class:`LayoutError` (unsupported) unless slots have their tokens' scales, which then move too."""
    for name in layer_names:
        backend = vllm_config.compilation_config.static_forward_context[name].get_attn_backend().get_name()
        if backend not in _SCALES_IN_SLOTS:
            refuse(
                f"{name} has a scale for each token and head, kept where {backend} wants them",
                f"Run with --attention-backend {_SCALES_IN_SLOTS[0]}, or --kv-cache-dtype auto.",
            )


def fill_scales_in_slots(vllm_config: "VllmConfig", layer_names: Iterable[str]) -> None:
    """Make kernels with scales in the slots set all scales to 1 now, which each would do before its first step.

    That step may follow the first load and would overwrite the loaded scales. A layer that reads another layer's cache
    has its own kernel: name it too.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        if (kernel := _kernel_with_scales(layers[name])) is not None:
            kernel._ensure_scale_caches(layers[name].kv_cache)


def forget_scales(layer: Any) -> None:
    """Make a kernel with scales in the slots renew its views of them for the cache of its next call."""
    if (kernel := _kernel_with_scales(layer)) is not None:
        kernel._k_scale_cache = kernel._v_scale_cache = None


def _kernel_with_scales(layer: Any) -> Any | None:
    """Return the kernel of a layer with scales in the slots; other layers, such as those of states, have none."""
    kernel = getattr(layer, "impl", None)
    return kernel if getattr(kernel, "_is_per_token_head_quant", False) else None


def _planes(name: str, view: torch.Tensor, offsets: Sequence[int], place: Mapping[str, Any]) -> tuple[Component, ...]:
    """Return keys and values of pages that hold a ``[channel][token]`` plane of K and a ``[token][channel]`` one of V.

    The kernel assumes a dense page and cuts it in halves, so K and V have the same number of channels.
    """
    itemsize, num_tokens, num_channels = view.element_size(), view.shape[2], view.shape[3]
    if view.stride()[2:] != (num_channels, 1):
        refuse(f"a page of {name} has strides {view.stride()[2:]}", "Use a layout that ends in NC.")
    head_size = num_channels // 2
    values = [offset + num_tokens * head_size * itemsize for offset in offsets]
    return (
        _component("k", view, offsets, (head_size, 1, num_tokens), place),
        _component("v", view, values, (head_size, head_size, 1), place),
    )


def _component(
    name: str, view: torch.Tensor, offsets: Sequence[int], page: tuple[int, int, int], more: Mapping[str, Any]
) -> Component:
    """Return a component of a view's layers; ``page`` is its channels, token stride and channel stride, in numbers."""
    itemsize, (num_channels, token, channel) = view.element_size(), page
    return Component(
        name=name,
        layer_offsets=tuple(offsets),
        num_channels=num_channels,
        itemsize=itemsize,
        block_stride=view.stride(0) * itemsize,
        head_stride=view.stride(1) * itemsize,
        token_stride=token * itemsize,
        channel_stride=channel * itemsize,
        **more,
    )


def _packing(vllm_config: "VllmConfig", layer_name: str, view: torch.Tensor) -> str | None:
    """Return a name of a kernel's arrangement inside a ``(block, head)`` page; None where each token's bytes are apart.

    CPU attention keeps keys and values apart, arranged by instruction set, dtype and block size.
    """
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    if layer.get_attn_backend().get_name() != "CPU_ATTN":
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    block_size = view.shape[2]
    dtype: Any = vllm_config.model_config.dtype
    isa = _get_attn_isa(dtype, block_size, layer.head_size, vllm_config.cache_config.cache_dtype)
    return f"cpu_attn:{isa}:{str(view.dtype).removeprefix('torch.')}:{block_size}"


def _heads(
    vllm_config: "VllmConfig", kind: CacheKind, layer_name: str, num_held: int, rank: tuple[int, int]
) -> tuple[int, HeadRange]:
    """Return the group's global number of heads and those of this rank.

    Groups may differ in heads; of most models, vLLM names only one number. A rank that holds several heads shares none
    with another rank. Where a rank holds one head, the number decides whether other ranks hold the same one, so no
    group may have more heads than the model.
    """
    tp_rank, tp_size = rank
    if kind is CacheKind.MLA:
        return 1, HeadRange(0, 1)
    total = vllm_config.model_config.get_total_num_kv_heads()
    if of_layer := _head_count_of(vllm_config, layer_name):
        if num_held != max(1, of_layer // tp_size):
            refuse(f"a rank of {tp_size} holds {num_held} KV heads of {layer_name}, which has {of_layer}")
        total = of_layer
    elif num_held > 1 or tp_size == 1:
        total = num_held * tp_size
    elif total > tp_size:
        refuse(f"a rank of {tp_size} holds one KV head where the model has {total}")
    elif more := {name: count for name, count in _other_head_counts(vllm_config).items() if count > total}:
        refuse(
            f"a rank of {tp_size} holds one KV head, of {total} or, in some layers, of others ({more})",
            f"Run with --tensor-parallel-size {total // 2 or 1} or less, where every rank holds several.",
        )
    return total, heads_of_rank(total, tp_rank, tp_size)


def _head_count_of(vllm_config: "VllmConfig", layer_name: str) -> int:
    """Return the number of a layer's KV heads on all ranks, where vLLM has a number for each layer; else 0.

    A drafter's layers are numbered as the target's are, and vLLM has no such numbers of them.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    model = vllm_config.model_config
    layers = model.model_arch_config.per_layer_overrides
    if not layers or getattr(vllm_config, "speculative_config", None) is not None:
        return 0
    return int(layers[extract_layer_index(layer_name)].get("total_num_kv_heads", model.get_total_num_kv_heads()))


def _other_head_counts(vllm_config: "VllmConfig") -> dict[str, int]:
    """Return all numbers of KV heads that the model's configuration names, and the drafter's."""
    found: dict[str, int] = {}
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    for name, value in vars(text).items() if text is not None else ():
        counts = value if isinstance(value, list | tuple) else [value]
        if name.endswith(("key_value_heads", "kv_heads")) and all(isinstance(count, int) for count in counts):
            found[name] = max(counts, default=0)
    drafter = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if drafter is not None:
        found["the drafter's"] = drafter.get_total_num_kv_heads()
    return found


def check_state(index: int, spec: "MambaSpec") -> None:
    """Refuse states that this version cannot move. Raises :class:`LayoutError` (unsupported)."""
    where = f"cache group {index} holds states"
    if spec.mamba_type.name not in _STATES or len(spec.shapes) != 2:
        kinds = "States of Mamba1, Mamba2 and gated delta nets, in two parts, are supported."
        refuse(f"{where} of {spec.mamba_type.name} in {len(spec.shapes)} parts", kinds)
    if spec.tp_replicated:
        refuse(f"{where} of which every rank has the whole", "Run without such layers.")
    if spec.mamba_cache_mode != "none":
        refuse(f"{where} that are cached by prefix ({spec.mamba_cache_mode})", "Run with --no-enable-prefix-caching.")
    if spec.num_speculative_blocks:
        refuse(f"{where} of draft tokens", "Run without speculative decoding.")


def state_components(
    spec: "MambaSpec",
    layer: Any,
    views: Mapping[str, torch.Tensor],
    region: Region,
    rank: tuple[int, int],
) -> tuple[Component, ...]:
    """Return the components of one group's layers, of which ``layer`` is the first; ``rank`` is (rank, size).

    vLLM gives each layer bytes, ``[B, 1, 1, C]``. A page holds the convolution's last inputs, then the recurrent state,
    then padding up to the size of an attention page.
    Raises :class:`LayoutError` (unsupported) where the specification does not fit the layer.
    """
    first = next(iter(views.values()))
    conv_shape, recurrent_shape = spec.shapes
    conv_itemsize, recurrent_itemsize = (dtype.itemsize for dtype in spec.dtypes)
    conv_bytes = math.prod(conv_shape) * conv_itemsize
    page_bytes = conv_bytes + math.prod(recurrent_shape) * recurrent_itemsize
    (segments, recurrent_of_all), order = _parts(spec, layer, rank), _conv_order()
    state_len, num_channels = conv_shape if order is ConvOrder.SD else conv_shape[::-1]
    heads, *per_head = recurrent_of_all
    expected = (sum(len(segment.held) for segment in segments), heads // rank[1], *per_head)
    if (num_channels, *recurrent_shape) != expected:
        refuse(f"states of shapes {spec.shapes} are not those of a {type(layer).__name__} with {expected}")
    if first.element_size() != 1 or tuple(first.shape[1:]) != (1, 1, page_bytes):
        refuse(f"a view of states has shape {tuple(first.shape)}, expected pages of {page_bytes} bytes")
    pages = StatePages(
        layers=tuple(views),
        layer_offsets=tuple(view.data_ptr() - region.base_address for view in views.values()),
        block_stride=first.stride(0),
    )
    num_held = recurrent_shape[0]
    recurrent = recurrent_component(
        pages,
        HeadRange(rank[0] * num_held, (rank[0] + 1) * num_held),
        num_held * rank[1],
        num_channels=math.prod(recurrent_shape[1:]),
        itemsize=recurrent_itemsize,
        page_offset=conv_bytes,
    )
    conv = conv_components(pages, segments, state_len=state_len, order=order, itemsize=conv_itemsize)
    return (*conv, recurrent, *padding_components(pages, page_bytes, spec.page_size_bytes, *rank))


def _parts(spec: "MambaSpec", layer: Any, rank: tuple[int, int]) -> tuple[tuple[ConvSegment, ...], tuple[int, ...]]:
    """Return this rank's segments of the convolution, and the shape of the recurrent states of all ranks together.

    The shape is the number of heads, which are channels in Mamba1, and the shape of one head's state.
    """
    if spec.mamba_type.name == "MAMBA1":
        return mamba1_segments(layer.intermediate_size, *rank), (layer.intermediate_size, layer.ssm_state_size)
    if spec.mamba_type.name == "MAMBA2":
        return _mamba2_segments(layer, rank), (layer.num_heads, layer.head_dim, layer.ssm_state_size)
    heads = _delta_heads(layer)
    _, key_size, num_value_heads, value_size = heads
    return gated_delta_segments(*heads, *rank), (num_value_heads, value_size, key_size)


def _mamba2_segments(layer: "MambaMixer2", rank: tuple[int, int]) -> tuple[ConvSegment, ...]:
    """Return the segments of Mamba2's convolution.

    Where every rank has the one group, ``layer.n_groups`` counts it once for each rank and ``conv1d`` is not merged.
    """
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    num_groups = layer.n_groups if isinstance(layer.conv1d, MergedColumnParallelLinear) else 1
    return mamba2_segments(layer.intermediate_size, num_groups, layer.ssm_state_size, *rank)


def _delta_heads(layer: Any) -> tuple[int, int, int, int]:
    """Return the number and size of key heads, then of value heads. Kimi's layers have equal ones."""
    if hasattr(layer, "num_k_heads"):
        return layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim
    return layer.num_heads, layer.head_dim, layer.num_heads, layer.head_dim


def _conv_order() -> ConvOrder:
    """Return vLLM's order: DS for connectors whose names begin with Nixl, else SD; its environment can name one."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return ConvOrder(get_conv_state_layout())
