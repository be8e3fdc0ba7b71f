"""Moves states of vLLM's layers between tensor-parallel sizes; vLLM's own loaders say which channel lies where."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _make_fused_conv1d_weight_loader
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm import translate
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import Planner

NUM_BLOCKS, TAPS, LAYERS = 5, 3, ("first", "second")
SOURCE_BLOCK, DESTINATION_BLOCK = 4, 1
KEY_HEADS, KEY_SIZE, VALUE_HEADS, VALUE_SIZE = 2, 4, 4, 6
INNER, STATE_SIZE, HEAD_SIZE = 24, 5, 6


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its module, its shapes, and the global channels of a rank in the order of vLLM's loader."""

    backend: Backend
    layer: Callable[[int], Any]
    shapes: Callable[[int], Any]
    channels: Callable[[int, int], torch.Tensor]


def loaded(total: int, local: int, load: Callable[..., None], *shard_id: int) -> torch.Tensor:
    """Return which global channels vLLM's loader puts into a rank's convolution."""
    parameter = torch.nn.Parameter(torch.full((local, 1, 1), -1.0), requires_grad=False)
    load(parameter, torch.arange(total, dtype=torch.float32).view(-1, 1, 1), *shard_id)
    return parameter.data.flatten().to(torch.int64)


def mamba2(num_groups: int) -> Kind:
    def layer(tp_size: int) -> Any:
        merged: Any = MergedColumnParallelLinear if num_groups % tp_size == 0 else ColumnParallelLinear
        extra = Shapes.extra_groups_for_head_shards(num_groups, tp_size)
        return SimpleNamespace(
            intermediate_size=INNER,
            n_groups=num_groups + extra,
            ssm_state_size=STATE_SIZE,
            num_heads=INNER // HEAD_SIZE,
            head_dim=HEAD_SIZE,
            conv1d=merged.__new__(merged),
        )

    def channels(tp_rank: int, tp_size: int) -> torch.Tensor:
        extra = Shapes.extra_groups_for_head_shards(num_groups, tp_size)
        grouped = num_groups * STATE_SIZE
        shared = (grouped + extra * STATE_SIZE, extra * STATE_SIZE, num_groups == 1)
        loader = mamba_v2_sharded_weight_loader([(INNER, 0, False), shared, shared], tp_size, tp_rank)
        local = (INNER + 2 * (grouped + extra * STATE_SIZE)) // tp_size
        return loaded(INNER + 2 * grouped, local, loader)

    def shapes(tp_size: int) -> Any:
        return Shapes.mamba2_state_shape(
            tp_size, INNER, num_groups, INNER // HEAD_SIZE, HEAD_SIZE, STATE_SIZE, TAPS + 1
        )

    return Kind(Backend.MAMBA2, layer, shapes, channels)


def gated_delta(tp_size: int) -> Any:
    return SimpleNamespace(num_k_heads=KEY_HEADS, head_k_dim=KEY_SIZE, num_v_heads=VALUE_HEADS, head_v_dim=VALUE_SIZE)


def gated_delta_channels(tp_rank: int, tp_size: int) -> torch.Tensor:
    key, value = (KEY_HEADS * KEY_SIZE, 0, False), (VALUE_HEADS * VALUE_SIZE, 0, False)
    total = 2 * key[0] + value[0]
    return loaded(total, total // tp_size, mamba_v2_sharded_weight_loader([key, key, value], tp_size, tp_rank))


def kimi_channels(tp_rank: int, tp_size: int) -> torch.Tensor:
    width = VALUE_HEADS * VALUE_SIZE
    loader = _make_fused_conv1d_weight_loader([width] * 3, tp_size, tp_rank)
    parameter = torch.nn.Parameter(torch.zeros(3 * width // tp_size, 1, 1), requires_grad=False)
    for index in range(3):
        loader(parameter, torch.arange(index * width, (index + 1) * width).float().view(-1, 1), index)
    return parameter.data.flatten().to(torch.int64)


KINDS = {
    "mamba1": Kind(
        Backend.MAMBA1,
        lambda _: SimpleNamespace(intermediate_size=INNER, ssm_state_size=STATE_SIZE),
        lambda tp_size: Shapes.mamba1_state_shape(tp_size, INNER, STATE_SIZE, TAPS + 1),
        lambda tp_rank, tp_size: torch.arange(INNER).chunk(tp_size)[tp_rank],
    ),
    "mamba2": mamba2(num_groups=4),
    "mamba2-one-group": mamba2(num_groups=1),
    "gated-delta": Kind(
        Backend.GDN_ATTN,
        gated_delta,
        lambda tp_size: Shapes.gated_delta_net_state_shape(
            tp_size, KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, TAPS + 1
        ),
        gated_delta_channels,
    ),
    "kimi": Kind(
        Backend.GDN_ATTN,
        lambda _: SimpleNamespace(num_heads=VALUE_HEADS, head_dim=VALUE_SIZE),
        lambda tp_size: Shapes.kda_state_shape(tp_size, VALUE_HEADS, VALUE_SIZE, conv_kernel_size=TAPS + 1),
        kimi_channels,
    ),
}


class Rank:
    """One rank's cache, as vLLM makes it: padded pages of bytes, and the views with which its layers work."""

    def __init__(self, kind: Kind, tp_rank: int, tp_size: int) -> None:
        self.kind, self.tp_rank, self.tp_size = kind, tp_rank, tp_size
        shapes, dtypes = kind.shapes(tp_size), (torch.bfloat16, torch.float32)
        spec = MambaSpec(shapes=shapes, dtypes=dtypes, block_size=64, mamba_type=kind.backend)
        self.page_bytes, self.row_bytes = spec.page_size_bytes, len(LAYERS) * (spec.page_size_bytes + 64)
        self.rows = torch.zeros(NUM_BLOCKS * self.row_bytes, dtype=torch.int8)
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context={LAYERS[0]: kind.layer(tp_size)}),
        )
        groups = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        strides = (self.row_bytes, self.page_bytes, self.page_bytes, 1)
        views = {
            name: self.rows.as_strided((NUM_BLOCKS, 1, 1, self.page_bytes), strides, self._page(0, index))
            for index, name in enumerate(LAYERS)
        }
        self.shard = translate.shard_of(config, groups, views, tp_rank)

    def states(self, block: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's convolution and recurrent state in one block, as integers of the elements' widths."""
        conv_shape, recurrent_shape = self.kind.shapes(self.tp_size)
        begin = self._page(block, layer)
        middle = begin + 2 * torch.Size(conv_shape).numel()
        conv = self.rows[begin:middle].view(torch.int16).view(conv_shape)
        recurrent = self.rows[middle : begin + self.page_bytes].view(torch.int32).view(recurrent_shape)
        return conv, recurrent

    def expected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both states' labels: taps and global channels, global heads and what each of them keeps."""
        conv, recurrent = self.states(0, layer)
        channels = self.kind.channels(self.tp_rank, self.tp_size)
        labels = 1 + layer * 1000 + torch.arange(TAPS).view(-1, 1) * 200 + channels
        num_heads, per_head = recurrent.shape[0], recurrent[0].numel()
        heads = self.tp_rank * num_heads + torch.arange(num_heads)
        numbers = 1 + layer + (heads.view(-1, 1) * per_head + torch.arange(per_head)) * 2
        oriented = labels if conv.shape[0] == TAPS and conv.shape[1] == len(channels) else labels.T
        return oriented.to(torch.int16), numbers.to(torch.int32).view(recurrent.shape)

    def label(self, block: int) -> None:
        """Write every layer's labels into one block."""
        for layer in range(len(LAYERS)):
            for state, labels in zip(self.states(block, layer), self.expected(layer), strict=True):
                state.copy_(labels)

    def check(self, block: int) -> None:
        """Compare every layer's states of one block, and see that nothing else was written."""
        num_written = 0
        for layer in range(len(LAYERS)):
            for state, labels in zip(self.states(block, layer), self.expected(layer), strict=True):
                assert torch.equal(state, labels)
                num_written += int(torch.count_nonzero(state.view(torch.int8)))
        assert int(torch.count_nonzero(self.rows)) == num_written, "bytes elsewhere were written"

    def _page(self, block: int, layer: int) -> int:
        return block * self.row_bytes + layer * (self.page_bytes + 64)


def carry_out(sources: Sequence[Rank], destination: Rank) -> None:
    """Move the states of one request."""
    blocks = GroupBlocks(
        group="0",
        first_token=0,
        last_token=1,
        source_block_ids=[SOURCE_BLOCK],
        destination_block_ids=[DESTINATION_BLOCK],
    )
    for plan in Planner([rank.shard for rank in sources], destination.shard).plans(0):
        for source, address, length in plan.lower([blocks]).tolist():
            ctypes.memmove(address, source, length)


@pytest.mark.parametrize("order", ["SD", "DS"])
@pytest.mark.parametrize(("source_size", "destination_size"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_states_arrive_where_vllm_reads_them(
    kind: Kind, source_size: int, destination_size: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda: order)
    sources = [Rank(kind, rank, source_size) for rank in range(source_size)]
    for rank in sources:
        rank.label(SOURCE_BLOCK)
    for tp_rank in range(destination_size):
        destination = Rank(kind, tp_rank, destination_size)
        carry_out(sources, destination)
        destination.check(DESTINATION_BLOCK)


def test_a_layer_of_other_shapes_is_refused() -> None:
    kind = KINDS["gated-delta"]
    other = Kind(kind.backend, KINDS["kimi"].layer, kind.shapes, kind.channels)
    with pytest.raises(KVFerryError, match="are not those of a SimpleNamespace") as found:
        Rank(other, 0, 1)
    assert found.value.reason is Reason.UNSUPPORTED
