"""vLLM's write into the cache, captured in a CUDA graph and replayed, writes every layout as a copy by torch does."""

import pytest
import torch

from kvferry.layout.named_layouts import Axis, NamedLayout

from ..support.dense import dense_strides

DEVICE = "cuda:0"
LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 2, 6, 4, 16, 64


def caches(layout: NamedLayout) -> torch.Tensor:
    """Return a cache ``[layer, block, head, token, K and V]`` in the memory order of a layout."""
    sizes = {Axis.L: LAYERS, Axis.B: BLOCKS, Axis.H: HEADS, Axis.N: TOKENS, Axis.C: 2 * HEAD_SIZE}
    strides = dense_strides(layout, sizes)
    axes = (Axis.L, Axis.B, Axis.H, Axis.N, Axis.C)
    memory = torch.zeros(LAYERS * BLOCKS * HEADS * TOKENS * 2 * HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
    return torch.as_strided(memory, tuple(sizes[axis] for axis in axes), tuple(strides[axis] for axis in axes))


def write(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write one layer's tokens by vLLM's kernel, which takes ``[block, token, head, channel]``."""
    import vllm._custom_ops as operations

    ones = torch.ones(1, dtype=torch.float32, device=DEVICE)
    key_cache, value_cache = torch.split(cache.transpose(1, 2), HEAD_SIZE, dim=-1)
    operations.reshape_and_cache_flash(keys, values, key_cache, value_cache, slots, "auto", ones, ones)


@pytest.mark.parametrize("layout", NamedLayout)
def test_a_captured_write_goes_where_the_layout_says(layout: NamedLayout) -> None:
    cache = caches(layout)
    slots = torch.tensor([5 * TOKENS + 3, 0, 2 * TOKENS + 15], device=DEVICE)
    keys, values = (torch.zeros(len(slots), HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    write(cache[0], keys, values, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            write(cache[layer], keys, values, slots)
    for seed in range(3):
        torch.manual_seed(seed)
        keys.normal_()
        values.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            for at, slot in enumerate(slots.tolist()):
                found = cache[layer, slot // TOKENS, :, slot % TOKENS]
                assert torch.equal(found, torch.cat([keys[at], values[at]], dim=-1))
    written = torch.zeros(BLOCKS, TOKENS, dtype=torch.bool, device=DEVICE)
    written.view(-1)[slots] = True
    assert not cache.permute(1, 3, 0, 2, 4)[~written].any(), "no other slot is touched"
