"""Every refused combination that needs no running engine: its code, and that the error says what to do about it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.errors import KVFerryError, raise_all
from kvferry.handoff.handshake import decode_shards, fetch_directory
from kvferry.handoff.messages import PROTOCOL_VERSION, Directory, EndPoint, Identity, RankEntry
from kvferry.handoff.wire.server import Server
from kvferry.integrations.vllm import translate
from kvferry.layout.shard import Shard, encode_shard
from kvferry.plan.planner import Planner

from ..matrix_refusals import REFUSALS, Refusal, Where
from .engine_flags import flag_errors
from .test_vllm_translate import ATTENTION, BLOCK_SIZE, FULL, STATE, WINDOW, attention_view, block_rows, engine, groups

IDENTITY = Identity("model", "weights", "Qwen3ForCausalLM", "float32", 2, 4, 8, "none", "float32")
HOST, EPOCH, ONE = "127.0.0.1", 7, ["0"]
Patch = pytest.MonkeyPatch


def start(spec: Any = FULL, **changes: Any) -> None:
    """Let an engine with these flags be configured, and let the adapter look at its caches as it starts."""
    raise_all(flag_errors(**changes))
    translate.check_supported(groups((["0"], FULL), (["1"], spec)))


def shard(patch: Patch, *named: tuple[list[str], Any], isa: str = "vec") -> Shard:
    """Return what the first of two ranks of an engine holds whose attention runs on this instruction set."""
    config = groups(*named)
    sizes = {name: spec.block_size for names, spec in named for name in names}
    rows = block_rows(len(sizes))
    views = {name: attention_view(rows, page)[:, :, :size] for page, (name, size) in enumerate(sizes.items())}
    return translate.shard_of(engine(patch, isa), config, views, tp_rank=0)


def meet(source: Shard, destination: Shard) -> None:
    """Plan as a decode rank does at the handshake."""
    Planner([source], destination)


def ask(identity: Identity = IDENTITY, version: int = PROTOCOL_VERSION, epoch: int = EPOCH) -> None:
    """Shake hands with a prefill engine that answers so."""
    entry = RankEntry(0, 0, b"", {}, EndPoint(HOST, 1, 1))
    listener = Server(HOST, 0, lambda _: Directory(version, "prefill", epoch, identity, (entry,)))
    try:
        fetch_directory(HOST, listener.port, "decode", EPOCH, IDENTITY, timeout_seconds=10.0)
    finally:
        listener.close()


def split_blocks(patch: Patch) -> None:
    """Let the kernel take half a block."""
    views = {"0": attention_view(block_rows(1), 0)[:, :, : BLOCK_SIZE // 2]}
    translate.shard_of(engine(patch), groups((ONE, FULL)), views, tp_rank=0)


def one_of_two_ranks(patch: Patch) -> None:
    entry = RankEntry(0, 0, encode_shard(shard(patch, (ONE, FULL))), {}, EndPoint(HOST, 1, 1))
    decode_shards(Directory(PROTOCOL_VERSION, "prefill", EPOCH, IDENTITY, (entry,)))


def quantised(patch: Patch, scale: float) -> Shard:
    """Return what a rank holds of a cache that was quantised to FP8 by this scale."""
    config, spec = engine(patch), FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    layers = config.compilation_config.static_forward_context
    layers["0"] = SimpleNamespace(**vars(layers["0"]), _k_scale_float=scale, _v_scale_float=1.0)
    return translate.shard_of(config, groups((ONE, spec)), {"0": attention_view(block_rows(1), 0)}, tp_rank=0)


def kept_in_host_memory(_: Patch) -> None:
    config = groups((ONE, FULL))
    config.kv_cache_groups[0].host_resident = True
    translate.check_supported(config)


SHAPES = {"shapes": STATE.shapes, "dtypes": STATE.dtypes, "block_size": 64}
HALF_BLOCKS = FullAttentionSpec(**{**ATTENTION, "block_size": BLOCK_SIZE // 2})
WIDER = SlidingWindowSpec(**ATTENTION, sliding_window=64)
ATTEMPTS: dict[str, Callable[[Patch], None]] = {
    "context-parallel": lambda _: start(decode_context_parallel_size=2),
    "prefill-context-parallel": lambda _: start(prefill_context_parallel_size=2),
    "quantised-cache": lambda _: start(FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.NVFP4)),
    "chunked-attention": lambda _: start(ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)),
    "cached-states": lambda _: start(MambaSpec(**SHAPES, mamba_cache_mode="align")),
    "draft-states": lambda _: start(MambaSpec(**SHAPES, num_speculative_blocks=1)),
    "other-states": lambda _: start(MambaSpec(**SHAPES, mamba_type=MambaAttentionBackendEnum.LINEAR)),
    "drafter-ahead": lambda _: start(num_prefill_lookahead_tokens=2),
    "host-resident": kept_in_host_memory,
    "kernel-splits-blocks": split_blocks,
    "empty-stage": lambda patch: translate.shard_of(engine(patch, pp_size=2), groups(([], FULL)), {}, 0, 1),
    "other-weights": lambda _: ask(msgspec.structs.replace(IDENTITY, weights="of another revision")),
    "other-quantisation": lambda _: ask(msgspec.structs.replace(IDENTITY, quantization="fp8")),
    "other-compute-dtype": lambda _: ask(msgspec.structs.replace(IDENTITY, compute_dtype="bfloat16")),
    "protocol-version": lambda _: ask(version=PROTOCOL_VERSION + 1),
    "restarted": lambda _: ask(epoch=EPOCH + 1),
    "packed-and-plain": lambda patch: meet(shard(patch, (ONE, FULL), isa="amx"), shard(patch, (ONE, FULL))),
    "packed-blocks": lambda patch: meet(
        shard(patch, (ONE, FULL), isa="amx"), shard(patch, (ONE, HALF_BLOCKS), isa="amx")
    ),
    "layer-missing": lambda patch: meet(shard(patch, (ONE, FULL)), shard(patch, (["0", "1"], FULL))),
    "layer-more": lambda patch: meet(shard(patch, (["0", "1"], FULL)), shard(patch, (ONE, FULL))),
    "group-missing": lambda patch: meet(shard(patch, (ONE, FULL)), shard(patch, (ONE, FULL), (["1"], WINDOW))),
    "other-kind": lambda patch: meet(shard(patch, (ONE, FULL)), shard(patch, (ONE, WINDOW))),
    "other-window": lambda patch: meet(shard(patch, (ONE, WIDER)), shard(patch, (ONE, WINDOW))),
    "other-scales": lambda patch: meet(quantised(patch, 0.5), quantised(patch, 2.0)),
    "rank-missing": one_of_two_ranks,
}
WITHOUT_ENGINES = [refusal for refusal in REFUSALS if refusal.where in (Where.ADAPTER, Where.HANDSHAKE)]


def test_the_list_is_whole() -> None:
    assert sorted(ATTEMPTS) == sorted(refusal.name for refusal in WITHOUT_ENGINES)


@pytest.mark.parametrize("refusal", WITHOUT_ENGINES, ids=lambda refusal: refusal.name)
def test_refused(refusal: Refusal, monkeypatch: Patch, record_property: Callable[[str, object], None]) -> None:
    record_property("refused", {"name": refusal.name, "found": "nothing refused it", "message": ""})
    with pytest.raises(KVFerryError) as error:
        ATTEMPTS[refusal.name](monkeypatch)
    found = error.value
    record_property("refused", {"name": refusal.name, "found": found.reason.value, "message": str(found)})
    assert found.reason is refusal.reason
    assert found.message
    assert found.remedy


def test_equal_peers_are_not_refused(monkeypatch: Patch) -> None:
    start(MambaSpec(**SHAPES))
    ask()
    for isa in ("vec", "amx"):
        meet(shard(monkeypatch, (ONE, FULL), isa=isa), shard(monkeypatch, (ONE, FULL), isa=isa))
    meet(quantised(monkeypatch, 0.5), quantised(monkeypatch, 0.5))
