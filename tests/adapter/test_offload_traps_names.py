"""Traps 1 to 3 of keeping KV blocks behind vLLM 0.32's cache: what a block is called. See ``test_offload_traps``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from kvferry.errors import Reason, SettingsError
from kvferry.layout.shard import Atom, Shard, TensorScale, encode_shard

from . import test_offload_names as named
from .offload_engine import Engine, make_config, rank_shard
from .test_offload_hazards import raises, ranks  # noqa: F401
from .test_offload_requests import (  # noqa: F401
    PROMPT,
    configs,
    crowd_out,
    make_engine,
    seen_before,
)

# ruff: noqa: F811
MakeEngine = Callable[..., Engine]


class Later:
    """Two engines, one after the other, on one disk."""

    def __init__(self, folder: Path) -> None:
        self._disk = {"host_blocks": 60, "disk_path": str(folder), "disk_bytes": 1 << 20}
        self._engines: list[Engine] = []

    def stores(self, config: Any, shards: Callable[[], dict[Any, Shard]] | None = None, **given: Any) -> Engine:
        """Start an engine that stores the prompt, and end it."""
        engine = self._start(config, shards, given)
        engine.add("first", PROMPT)
        engine.run(3000)
        engine.check_at_rest()
        engine.role.shutdown()
        return engine

    def finds(
        self, config: Any, shards: Callable[[], dict[Any, Shard]] | None = None, hasher: Any = None, **given: Any
    ) -> int:
        """Start an engine, and return how many tokens of the same prompt it loads.

        With the hasher of the last engine its blocks have that engine's hashes, whatever the configuration says.
        """
        first_hash = kv_cache_utils.NONE_HASH
        engine = self._start(config, shards, given)
        engine.now = 2000.0
        if hasher is not None:
            engine.hasher = hasher
            kv_cache_utils.NONE_HASH = first_hash
        engine.add("second", PROMPT)
        engine.run(3000)
        engine.check_at_rest()
        return engine.loaded["second"]

    def _start(self, config: Any, shards: Callable[[], dict[Any, Shard]] | None, given: dict[str, Any]) -> Engine:
        engine = Engine(config, starts=False, **{**self._disk, **given})
        self._engines.append(engine)
        if shards is not None:
            engine.ranks.report.shards = {rank: encode_shard(shard) for rank, shard in shards().items()}
        while engine.role.has_pending_work():
            engine.step()
        assert engine.role._start.error == ""
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.role.shutdown()


@pytest.fixture
def later(tmp_path: Path) -> Iterator[Later]:
    pair = Later(tmp_path / "disk")
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("algorithm", "seed", "num_loaded"), [("sha256_cbor", "1", 96), ("sha256", "1", 0), ("sha256_cbor", "2", 0)]
)
def test_trap_01_hashes_of_another_algorithm_or_seed_name_other_blocks(
    algorithm: str, seed: str, num_loaded: int, later: Later, configs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sha256`` hashes are over pickle bytes, ``sha256_cbor`` is the portable one; the seed belongs into the name.

    The second engine is given the first one's hashes: nothing but the names tells their blocks apart.
    """
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = later.stores(configs(prefix_caching_hash_algo="sha256_cbor"))
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert later.finds(configs(prefix_caching_hash_algo=algorithm), hasher=first.hasher) == num_loaded


def test_trap_01_xxhash_seeds_at_random_per_process(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its names are of no use to another process: refused for a disk, and fine for host memory."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    pytest.importorskip("xxhash")
    with pytest.raises(SettingsError) as refused:
        make_engine({"prefix_caching_hash_algo": "xxhash"}, disk_path=str(tmp_path), disk_bytes=1 << 20)
    assert refused.value.reason is Reason.UNREPEATABLE_HASHES
    engine = make_engine({"prefix_caching_hash_algo": "xxhash"}, host_blocks=60)
    seen_before(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == 96, "short hashes have keys too"


def config_with(change: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_changed: bool) -> Any:
    """Return the configuration of a model of its own folder, with or without one of the changes of names."""
    _, edit, plain = named.CHANGES[change] if change else (set(), None, None)
    model = named.Engine(named.write_model(folder), monkeypatch)
    for each in (edit,) if is_changed else (plain,):
        if each is not None:
            each(model)
    config = make_config(model.folder, **model.arguments)
    for edit_config in model.edits:
        edit_config(config)
    return config


MODELS = {
    "": 96,
    **dict.fromkeys(["weights of one layer", "compute dtype", "RoPE base"], 0),
    **dict.fromkeys(["commit of a hub's model", "RoPE scaling", "RoPE scaling's factor"], 0),
}


@pytest.mark.parametrize("change", MODELS)
def test_trap_02_and_03_the_model_is_no_part_of_vllms_hash(
    change: str, later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block hash covers neither model, weights, dtype nor RoPE; another revision or RoPE scaling must miss."""
    later.stores(config_with(change, tmp_path / "one" / "model", monkeypatch, is_changed=False), model_id="")
    config = config_with(change, tmp_path / "other" / "model", monkeypatch, is_changed=True)
    assert later.finds(config, model_id="") == MODELS[change]


def test_trap_02_what_vllm_hashes_beside_tokens_tells_requests_apart(make_engine: MakeEngine) -> None:
    """The block hash covers LoRA name, the first block's salt, prompt embeddings."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    adapters = [LoRARequest(f"adapter {number}", number, f"/adapters/{number}") for number in (1, 2)]
    embeddings = [torch.full((96, 4), float(number)) for number in (1, 2)]
    variants: list[dict[str, Any]] = [
        {},
        *({"cache_salt": salt} for salt in ("a", "b")),
        *({"lora_request": adapter} for adapter in adapters),
        *({"prompt_embeds": embedding} for embedding in embeddings),
    ]
    for turn in range(2):
        for number, variant in enumerate(variants):
            prompt = None if "prompt_embeds" in variant else PROMPT
            engine.add(f"{turn} {number}", prompt, **variant)
            engine.run()
            crowd_out(engine)
            assert engine.loaded[f"{turn} {number}"] == 96 * turn
    engine.check_at_rest()


def shards_with(**parts: Any) -> Callable[[], dict[Any, Shard]]:
    """Return what makes the shard of an engine's one rank, whose group or component has other fields."""

    def make() -> dict[Any, Shard]:
        shard = rank_shard((0,), 24, 0, 1)
        [group] = shard.groups
        in_group = {name: value for name, value in parts.items() if name == "scales"}
        in_component = {name: value for name, value in parts.items() if name != "scales"}
        component = msgspec.structs.replace(group.components[0], **in_component)
        group = msgspec.structs.replace(group, components=(component,), **in_group)
        return {(0, 0): msgspec.structs.replace(shard, groups=(group,))}

    return make


def scales(value: float) -> tuple[TensorScale, ...]:
    return tuple(TensorScale("layer 0", tensor, value) for tensor in ("k", "v"))


@pytest.mark.parametrize(
    ("one", "other", "num_loaded"),
    [
        ({}, {}, 96),
        ({"scales": scales(0.5)}, {"scales": scales(2.0)}, 0),
        ({}, {"atom": Atom.PAGE, "packing": "cpu_attn:amx:float32"}, 0),
        (
            {"atom": Atom.PAGE, "packing": "cpu_attn:vec:float32"},
            {"atom": Atom.PAGE, "packing": "cpu_attn:amx:float32"},
            0,
        ),
    ],
)
def test_trap_03_bytes_that_mean_something_else_are_not_found(
    one: dict[str, Any], other: dict[str, Any], num_loaded: int, later: Later, configs: Any
) -> None:
    """FP8 scales and page packing (``vec``, ``amx`` on another host) must miss, never hit.

    Layouts and TP sizes need not: a stored block depends on neither (``test_offload_names``, ``tests/host/vllm``).
    """
    later.stores(configs(), shards_with(**one))
    assert later.finds(configs(), shards_with(**other)) == num_loaded
