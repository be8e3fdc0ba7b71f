"""An engine's caches as vLLM itself groups, places and views them, on a device: how a worker registers them.

Each view's storage is the mapping that no processor may touch. So a look at the bytes of a cache by the modules that
translate, prepare and register it ends the test's process.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, MLAAttentionSpec

from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.worker import caches as worker_caches
from kvferry.integrations.vllm.worker import offload as worker_offload
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard

from ..adapter.test_vllm_scales_in_slots import Kernel
from ..adapter.test_vllm_scales_in_slots import Rank as ScaledRank
from ..adapter.test_vllm_states import KINDS
from ..adapter.vllm_caches import HEAD_SIZE, CacheRank, full, window
from ..adapter.worker_roles import make_worker_role
from . import standin_driver, standin_kernel, standin_nixl
from .device import ImmediateOrder
from .device_tensor import DeviceTensor, like
from .untouchable import DeviceMemory

NUM_BLOCKS = 24  # the trial at start needs nine for two groups


def scaled(layout: str) -> CacheRank:
    """Return caches with a scale for each token and head behind its keys and values."""
    held = ScaledRank(KVQuantMode.INT8_PER_TOKEN_HEAD, layout, (0, 1), block_size=16).held
    return CacheRank(held.specs, layout, (0, 1), held.vllm_config.compilation_config.static_forward_context)


def with_states(layout: str) -> CacheRank:
    kind, attention = KINDS["mamba2"], full(1, 64)
    spec = MambaSpec(
        shapes=kind.shapes(1),
        dtypes=(torch.float32, torch.float32),
        block_size=64,
        mamba_type=kind.backend,
        page_size_padded=attention.page_size_bytes,
    )
    return CacheRank({"m": spec, "a": attention}, layout, modules={"m": kind.layer(1)}, num_blocks=NUM_BLOCKS)


def latent(layout: str) -> CacheRank:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)
    return CacheRank({"0": spec, "1": spec}, layout, num_blocks=NUM_BLOCKS)


MODELS: dict[str, Callable[[str], CacheRank]] = {
    "full attention and windows": lambda layout: CacheRank(
        {"0": full(1), "1": window(1), "2": full(1)}, layout, num_blocks=NUM_BLOCKS
    ),
    "one rank of two": lambda layout: CacheRank({"0": full(2), "1": full(2)}, layout, (1, 2), num_blocks=NUM_BLOCKS),
    "latent attention": latent,
    "states": with_states,
    "scales in the slots": scaled,
}


class DeviceRank:
    """A rank whose caches lie on the device: the views are vLLM's, of another storage."""

    def __init__(self, held: CacheRank) -> None:
        self.held = held
        self.memory = DeviceMemory(next(iter(held.caches.values())).untyped_storage().nbytes())
        self.memory.content[:] = np.random.default_rng(3).integers(0, 256, self.memory.nbytes, np.uint8)
        self.views: dict[str, DeviceTensor] = {name: like(view, self.memory) for name, view in held.caches.items()}
        self.before = self.memory.content.copy()

    @property
    def configs(self) -> tuple[Any, Any]:
        return self.held.vllm_config, self.held.config

    def register(self) -> Shard:
        return worker_caches.register_caches(*self.configs, self.views, self.held.tp_rank, 0)


@pytest.mark.parametrize("layout", [each.name for each in NamedLayout])
@pytest.mark.parametrize("model", MODELS)
def test_a_shard_is_made_of_the_engines_own_views(
    model: str, layout: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(MODELS[model](layout))
    filled: list[Any] = []
    for name, layer in rank.held.vllm_config.compilation_config.static_forward_context.items():
        if model == "scales in the slots":
            layer.impl, layer.kv_cache = Kernel(), rank.views[name]
            monkeypatch.setattr(Kernel, "_ensure_scale_caches", lambda _, cache: filled.append(cache))
    with caplog.at_level(logging.WARNING):
        shard = rank.register()
    expected = rank.held.shard
    assert [str(region) for region in shard.regions] == [str(rank.memory.region)]
    assert (shard.groups, shard.tp_rank, shard.tp_size) == (expected.groups, expected.tp_rank, expected.tp_size)
    assert np.array_equal(rank.memory.content, rank.before)
    assert bool(filled) is (model == "scales in the slots")
    # A kernel of a GPU cannot be run here, which the check before the first step says.
    assert ("could not be checked" in caplog.text) is NamedLayout[layout].is_cross_layer


@pytest.mark.parametrize("model", ["full attention and windows", "states"])
def test_a_worker_starts_on_the_engines_own_views(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the trial at start, which moves labelled blocks by all that the worker has made of the views."""
    rank = DeviceRank(MODELS[model]("BLHNC"))
    standin_nixl.submissions.clear()
    settings = Settings(transport="nixl")
    role = make_worker_role(
        monkeypatch, settings, views=rank.views, configs=rank.configs, device_order=ImmediateOrder()
    )
    assert role.get_handshake_metadata() is not None
    assert ("WRITE", "VRAM", "VRAM") in standin_nixl.submissions
    assert np.array_equal(rank.memory.content, rank.before)
    role.shutdown()


@pytest.mark.parametrize("model", ["full attention and windows", "states"])
def test_an_offload_worker_starts_on_the_engines_own_views(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = DeviceRank(MODELS[model]("BLHNC" if model == "states" else "LBNHC"))
    monkeypatch.setattr(worker_offload, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker_offload, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(worker_offload, "device_order", lambda devices: (list(devices), ImmediateOrder())[1])
    worker = worker_offload.OffloadWorker(*rank.configs, OffloadSettings(host_bytes=1))
    worker.register_kv_caches(rank.views)
    assert standin_driver.batches
    # Behind those with which the kernel was compiled.
    assert {*standin_kernel.launches[2:]} == {True, False}, "short pieces pass the buffer"
    assert np.array_equal(rank.memory.content, rank.before)
    worker.shutdown()
