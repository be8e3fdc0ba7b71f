"""Pages of Mamba1, Mamba2 and gated-delta states as components; vLLM gives each layer bytes, ``[B, 1, 1, C]``.

A page holds the convolution's last inputs, then the recurrent state, then padding up to the size of an attention page.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvferry.integrations.vllm.translate.specs import refuse
from kvferry.layout.component import Component, HeadRange
from kvferry.layout.shard import Region
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
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_cache_interface import MambaSpec

_SUPPORTED = ("MAMBA1", "MAMBA2", "GDN_ATTN")


def check_state(index: int, spec: "MambaSpec") -> None:
    """Refuse states that this version cannot move. Raises :class:`LayoutError` (unsupported)."""
    where = f"cache group {index} holds states"
    if spec.mamba_type.name not in _SUPPORTED or len(spec.shapes) != 2:
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
