"""Caches with a scale for each token and head, kept in the slots: labels through the views of vLLM's own kernel."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm.kernels.engine import AttentionKernel
from kvferry.integrations.vllm.translate import fill_scales_in_slots, forget_scales
from kvferry.plan.match import GroupBlocks
from tests.adapter.vllm_caches import HEAD_SIZE, TOTAL_HEADS, CacheRank, move

TOKENS, LAYERS = 64, ("0", "1")
DTYPES = {
    KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8,
    KVQuantMode.FP8_PER_TOKEN_HEAD: torch.uint8,
    KVQuantMode.INT4_PER_TOKEN_HEAD: torch.uint8,
}


class Kernel:
    """A layer's kernel, of which only the methods that view its cache are called."""

    _k_scale_cache: Any = None
    _v_scale_cache: Any = None
    _is_per_token_head_quant = True
    _kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD  # data are viewed as they are
    _ensure_scale_caches = TritonAttentionImpl._ensure_scale_caches
    _pth_key_value_caches = TritonAttentionImpl._pth_key_value_caches

    def parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views ``[blocks, tokens, heads, ...]``: the data of keys and of values, and the scales of both."""
        keys, values = self._pth_key_value_caches(cache)  # type: ignore[arg-type]
        return keys[..., :-4], values[..., :-4], self._k_scale_cache, self._v_scale_cache


class Rank:
    """One rank, and the parts of its layers' caches, with all scales 1 as before a kernel's first step."""

    def __init__(
        self, mode: KVQuantMode, layout: str, rank: tuple[int, int], block_size: int, backend: str = "TRITON_ATTN"
    ) -> None:
        attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
        spec = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=TOTAL_HEADS // rank[1],
            head_size=HEAD_SIZE,
            dtype=DTYPES[mode],
            kv_quant_mode=mode,
        )
        specs = dict.fromkeys(LAYERS, TritonAttentionBackend.customize_spec(spec))
        self.held = CacheRank(specs, layout, rank, dict.fromkeys(LAYERS, attention))
        self.parts = {name: Kernel().parts(self.held.caches[name]) for name in LAYERS}

    def write(self, block_ids: list[int]) -> None:
        """Write other numbers for each layer and rank, none of them the 0 and the 1 that are there at first."""
        for number, name in enumerate(LAYERS):
            generator = torch.Generator().manual_seed(10 * self.held.tp_rank + number)
            for part in self.parts[name]:
                drawn = torch.randint(2, 127, part[block_ids].shape, generator=generator)
                part[block_ids] = (drawn / (2 if part.dtype is torch.float32 else 1)).to(part.dtype)

    def read(self, layer: str, block_ids: list[int]) -> list[torch.Tensor]:
        """Return the tokens' parts in order, each ``[tokens, heads, ...]``."""
        return [part[block_ids].flatten(0, 1) for part in self.parts[layer]]


def ranks(mode: KVQuantMode, layout: str, tp_size: int, block_size: int) -> list[Rank]:
    return [Rank(mode, layout, (rank, tp_size), block_size) for rank in range(tp_size)]


@pytest.mark.parametrize("mode", DTYPES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(("source_size", "destination_size"), [(16, 16), (16, 32), (32, 16)])
@pytest.mark.parametrize("layouts", [("BHLNC", "LBHNC"), ("LBHNC", "BLHNC"), ("BLHNC", "LBNHC")])
def test_scales_travel_in_the_slots_of_their_tokens(
    mode: KVQuantMode,
    source_tp: int,
    destination_tp: int,
    source_size: int,
    destination_size: int,
    layouts: tuple[str, str],
) -> None:
    sources = ranks(mode, layouts[0], source_tp, source_size)
    destinations = ranks(mode, layouts[1], destination_tp, destination_size)
    source_ids, destination_ids = ([*range(10, 10 - TOKENS // size, -1)] for size in (source_size, destination_size))
    request = GroupBlocks(
        group="0",
        first_token=0,
        last_token=TOKENS,
        source_block_ids=source_ids,
        destination_block_ids=destination_ids,
    )
    for rank in sources:
        rank.write(source_ids)
    for rank in destinations:
        move([source.held for source in sources], rank.held, [request])
    for name in LAYERS:
        sent = zip(*(rank.read(name, source_ids) for rank in sources), strict=True)
        found = zip(*(rank.read(name, destination_ids) for rank in destinations), strict=True)
        for ours, theirs in zip(sent, found, strict=True):
            assert torch.equal(torch.cat(ours, dim=1), torch.cat(theirs, dim=1))
            assert bool((torch.cat(theirs, dim=1) > 0.5).all())


def test_kernels_that_keep_scales_elsewhere_are_refused() -> None:
    with pytest.raises(KVFerryError, match="kept where FLASH_ATTN wants them") as found:
        Rank(KVQuantMode.INT8_PER_TOKEN_HEAD, "LBHNC", (0, 1), 16, backend="FLASH_ATTN")
    assert found.value.reason is Reason.UNSUPPORTED
    assert "--attention-backend TRITON_ATTN" in found.value.remedy


def test_a_check_of_the_kernel_leaves_it_to_meet_the_engines_cache_first() -> None:
    """Its views of scales would be those of the few blocks of the check."""
    ranks_of = [ranks(KVQuantMode.INT8_PER_TOKEN_HEAD, layout, 1, 16)[0] for layout in ("LBHNC", "BHLNC")]
    caches, kernel = [rank.held.caches["0"] for rank in ranks_of], Kernel()
    checked = AttentionKernel([SimpleNamespace(impl=kernel, get_attn_backend=Mock())], None, torch.empty(0))
    for cache in caches:
        checked._renew_scales(0, cache)
        assert kernel._k_scale_cache is None
        kernel.parts(cache)
        checked._renew_scales(0, cache)
        assert kernel._k_scale_cache.data_ptr() == kernel.parts(cache)[2].data_ptr()
    forget_scales(SimpleNamespace(impl=kernel))
    assert (kernel._k_scale_cache, kernel._v_scale_cache) == (None, None)


def test_scales_that_were_received_outlive_the_first_step() -> None:
    """A kernel sets all its scales to 1 at its first step, and a decode engine's is the one after its first load."""
    [rank] = ranks(KVQuantMode.INT8_PER_TOKEN_HEAD, "BHLNC", 1, 16)
    layers = {name: SimpleNamespace(impl=Kernel(), kv_cache=rank.held.caches[name]) for name in LAYERS}
    layers["a state's"] = SimpleNamespace()
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    fill_scales_in_slots(config, layers)
    rank.write([3, 2])
    received = {name: rank.read(name, [3, 2]) for name in LAYERS}
    for name in LAYERS:
        layers[name].impl.parts(rank.held.caches[name])
        assert all(map(torch.equal, received[name], rank.read(name, [3, 2])))
