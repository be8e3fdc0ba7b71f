"""Pages of attention and MLA caches as components, from vLLM's ``[B, H, N, C]`` views."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvferry.integrations.vllm.translate.specs import refuse
from kvferry.layout.component import Atom, Component, HeadRange, heads_of_rank
from kvferry.layout.group import CacheKind
from kvferry.layout.shard import Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Instruction sets with which CPU attention keeps a plane of keys, channel by channel, and then a plane of values, token
# by token. Their arrangement of a quantised cache is not known: its pages move whole.
PLAIN_INSTRUCTION_SETS = ("vec", "vec16")

# Back ends that keep the scale of each token and head in the slot, behind the keys and the values.
_SCALES_IN_SLOTS = ("TRITON_ATTN",)


def attention_components(
    vllm_config: "VllmConfig",
    kind: CacheKind,
    views: Mapping[str, torch.Tensor],
    expected: tuple[int, int, int],
    region: Region,
    rank: tuple[int, int],
) -> tuple[Component, ...]:
    """Return the components of one group's layers; ``expected`` are blocks, heads and tokens, ``rank`` is (rank, size).

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
