"""The thirteen traps of keeping KV blocks behind vLLM 0.32's cache, by number, and vLLM's own issue 46951.

Each docstring begins with the trap. All tests run the connector: its scheduler's half in vLLM's own scheduler (see
``offload_engine``, whose model of ranks fails on a slot with another content than its tokens'), its worker's half in
vLLM's part of a step.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.errors import LayoutError, Reason, SettingsError
from kvferry.execution.local_copy import LocalCopy
from kvferry.integrations.vllm import offload_adapters
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, StoreOrder
from kvferry.integrations.vllm.scheduler import offload
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.worker.idle_steps import FIRST_WAIT_SECONDS
from kvferry.layout.component import Atom
from kvferry.layout.group import CacheKind, TensorScale
from kvferry.layout.shard import Shard
from kvferry.plan.wire import encode_shard

from . import test_offload_names as named
from . import test_offload_worker as rank_tests
from .offload_engine import BLOCK_SIZE, LATENT, Engine, contents_of, make_config, prompt_of, rank_shard
from .test_offload_hazards import connector_of, raises, ranks, run_step  # noqa: F401
from .test_offload_requests import (  # noqa: F401
    FULL,
    configs,
    crowd_out,
    engine_hashes,
    make_engine,
    make_engine_with_tier,
)

# ruff: noqa: F811

MakeEngine = Callable[..., Engine]
PROMPT = prompt_of(1, 2)
NUM_RANKS = 2


def seen_before(engine: Engine, prompt: Sequence[int] = PROMPT, **fields: Any) -> None:
    """Run a request until its blocks are stored and the engine's own cache has other blocks."""
    engine.add("first", prompt, **fields)
    engine.run(3000)
    crowd_out(engine)


# 1 to 3: what a block is called.


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


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter's folder."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(8) + b"weights")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    return folder


def train(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(bytes(8) + b"trained")


@pytest.mark.parametrize(("change", "num_loaded"), [("", 96), ("weights", 0), ("scale", 0), ("unreadable", 0)])
def test_trap_02_blocks_on_disk_are_of_an_adapters_weights_and_not_of_its_path(
    change: str, num_loaded: int, adapter: Path, make_engine: MakeEngine, tmp_path: Path, monkeypatch: Any
) -> None:
    """The block hash covers LoRA name and path, and not LoRA weights changed in place: between two processes."""
    arguments: dict[str, Any] = {"host_blocks": 60, "disk_path": str(tmp_path / "disk"), "disk_bytes": 1 << 20}
    request = LoRARequest("adapter", 1, str(adapter))
    engine = make_engine(**arguments)
    engine.add("first", PROMPT, lora_request=request)
    engine.run(3000)
    engine.check_at_rest()
    engine.role.shutdown()
    if change == "weights":
        train(adapter)
    if change == "scale":
        (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
    if change == "unreadable":
        (adapter / "adapter_config.json").unlink()
        monkeypatch.setattr(offload_adapters, "weights_of", raises(PermissionError("no access")))
    later = make_engine(**arguments)
    later.now = 2000.0
    later.add("second", PROMPT, lora_request=request)
    later.run(3000)
    assert later.loaded["second"] == num_loaded
    assert later.role.snapshot()["counts"].get("stores", 0) == 0 or change in ("weights", "scale")
    later.check_at_rest()


def test_trap_02_an_adapter_that_is_loaded_anew_while_the_engine_runs(adapter: Path, make_engine: MakeEngine) -> None:
    """LoRA weights changed in place: vLLM keeps the hash (``load_inplace``), and warns that its own cache is stale."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.step()
    num_stored = engine.role.snapshot()["counts"]["stores"]
    train(adapter)
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    while "running" not in engine.finished:
        engine.step()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] - num_stored <= 3, "those of the second request"
    engine.run()
    for number, is_replaced in enumerate((False, True)):
        crowd_out(engine)
        request = LoRARequest("adapter", 1, str(adapter), load_inplace=is_replaced)
        engine.add(f"again {number}", PROMPT[:-1], lora_request=request)
        engine.run()
        assert engine.loaded[f"again {number}"] == 80, "these are the weights of the second request"
    engine.check_at_rest()


def test_trap_02_a_running_request_stores_nothing_once_its_adapter_has_other_files(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """``add_lora`` in place is heard of by no scheduler: the next blocks may be of either weights."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    request = engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    for _ in range(20):
        engine.step()
    num_stored = engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"]
    assert num_stored >= 3
    train(adapter)
    engine.run()
    assert engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"] == num_stored
    tokens = list(request.all_token_ids)
    crowd_out(engine)
    engine.add("again", tokens, lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    engine.run()
    assert engine.loaded["again"] == 0
    engine.check_at_rest()


def test_trap_02_an_adapter_that_vllm_has_dropped_and_read_again_under_one_id(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """Nobody knows here whether its cache of adapters has dropped it since the files changed: until it reads them."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    train(adapter)
    num_stores = engine.role.snapshot()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] == num_stores
    for name, number in (("third", 0), ("fourth", 80)):
        crowd_out(engine)
        engine.add(name, PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
        engine.run()
        assert engine.loaded[name] == number
    engine.check_at_rest()


def test_trap_02_two_ids_of_one_path_have_the_weights_that_each_was_read_with(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """Under two names: the second was read after training, and the first is still loaded as it was."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("one", 1, str(adapter)))
    train(adapter)
    engine.add("other", PROMPT[:-1], lora_request=LoRARequest("other", 2, str(adapter)))
    engine.run()
    crowd_out(engine)
    num_stores = engine.role.snapshot()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("one", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] == num_stores
    engine.add("other again", PROMPT[:-1], lora_request=LoRARequest("other", 2, str(adapter)))
    engine.run()
    assert engine.loaded["other again"] == 80


def test_trap_02_the_files_of_an_adapter_are_read_once_while_they_stay_as_they_are(
    adapter: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine core's thread reads them, also for each request of an adapter that was loaded in place."""
    read, weights_of = [], offload_adapters._weights_of
    monkeypatch.setattr(offload_adapters, "_weights_of", lambda path: (read.append(path), weights_of(path))[1])
    engine = make_engine(num_blocks=40, host_blocks=400)
    for number in range(4):
        request = LoRARequest("adapter", 1, str(adapter), load_inplace=number > 0)
        engine.add(f"r{number}", prompt_of(number, 7), max_tokens=20, lora_request=request)
        engine.run()
    assert read == [str(adapter)]
    for file in adapter.iterdir():
        file.unlink()
    adapter.rmdir()
    engine.add("gone", prompt_of(0, 7), lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["gone"] == 96, "vLLM cannot have read other files"


@pytest.mark.parametrize(("is_trained", "num_loaded"), [(False, 80), (True, 0)])
def test_trap_02_an_adapter_that_is_unloaded_and_loaded_again_has_another_id(
    is_trained: bool, num_loaded: int, adapter: Path, make_engine: MakeEngine
) -> None:
    """VLLM reads the files again and keeps the hash, which has name and path and not the id."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.step()
    running = engine.role._requests["running"]
    if is_trained:
        train(adapter)
    for turn, expected in enumerate((num_loaded, 80)):
        engine.add(f"again {turn}", PROMPT[:-1], lora_request=LoRARequest("adapter", 2, str(adapter)))
        engine.run()
        crowd_out(engine)
        assert engine.loaded[f"again {turn}"] == expected
    assert running.may_store != is_trained
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


# 4 and 5: which blocks may be stored, and when.


def test_trap_04_the_slot_of_the_last_sampled_token_is_not_stored(make_engine: MakeEngine) -> None:
    """The slot of the last sampled token and rejected drafts must not be stored."""
    engine = make_engine(host_blocks=60)
    request = engine.add("first", prompt_of(1), max_tokens=17)
    engine.run()
    # 48 tokens and 17 sampled ones, of which the last was never computed: 4 whole blocks.
    assert request.num_tokens == 65
    num_others = crowd_out(engine)
    engine.add("second", list(request.all_token_ids))
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (64, 1)
    engine.add("third", prompt_of(2), max_tokens=16)
    engine.run()
    # 63 tokens were computed of the third, so 3 blocks are stored; the others have 6 each.
    assert engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"] == 4 + num_others * 6 + 3


@pytest.mark.parametrize("prompt_tokens", [48, 40])
def test_trap_04_rejected_drafts_are_not_stored(prompt_tokens: int, make_engine: MakeEngine) -> None:
    """The slot of the last sampled token and rejected drafts must not be stored."""
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = make_engine({"speculative_config": drafting}, num_blocks=40, host_blocks=400)
    request = engine.add("first", prompt_of(1, 2)[:prompt_tokens], max_tokens=80)
    while "first" not in engine.finished:
        engine.step(ends_copies=True)
        engine.check_slab()
    engine.run()
    assert request.spec_token_ids or engine.computed["first"] > prompt_tokens + 79, "some drafts were rejected"
    crowd_out(engine)
    engine.add("second", list(request.all_token_ids), max_tokens=3)
    engine.run()
    assert engine.loaded["second"] == (prompt_tokens + 79) // BLOCK_SIZE * BLOCK_SIZE
    engine.check_at_rest()


@pytest.mark.parametrize("num_steps", [1, 2, 4, 20, 40])
def test_trap_04_of_an_aborted_request_only_what_was_computed_is_stored(
    num_steps: int, make_engine: MakeEngine
) -> None:
    """``num_scheduled_tokens`` runs ahead of the block hashes under asynchronous scheduling.

    A step is planned and not yet computed when the abort comes, and its blocks go to others.
    """
    engine = make_engine(num_blocks=14, host_blocks=60, runs_ahead=True)
    engine.add("first", PROMPT, max_tokens=60)
    for _ in range(num_steps):
        engine.step(ends_copies=num_steps % 2 == 0)
    engine.abort("first")
    engine.add("other", prompt_of(7, 8), max_tokens=30)
    engine.run()
    engine.check_at_rest()
    crowd_out(engine)
    engine.add("second", PROMPT)
    engine.run()
    engine.check_at_rest()


def test_trap_05_a_preempted_request_comes_back_with_a_store_in_flight(make_engine: MakeEngine) -> None:
    """Its source block is not reused before the copy is done: stores keep their blocks by reference."""
    engine = make_engine(num_blocks=11, host_blocks=60)
    engine.add("one", prompt_of(1), max_tokens=80)
    engine.add("two", prompt_of(2), max_tokens=80)
    while not any(each.num_preemptions for each in engine.scheduler.requests.values()):
        engine.step(ends_copies=len(engine.scheduler.running) < 2)
        assert len(engine.finished) < 2
    assert engine.ranks.copies
    for _ in range(30):
        engine.step(ends_copies=False)
    engine.run()
    assert engine.finished.keys() == {"one", "two"}
    engine.check_at_rest()


def test_trap_05_a_request_may_be_aborted_that_was_never_scheduled(make_engine: MakeEngine) -> None:
    """And no block of an aborted request is kept: vLLM aborts all, resets its cache, and fails while one is in use."""
    engine = make_engine(host_blocks=60)
    engine.add("never scheduled", prompt_of(3))
    engine.abort("never scheduled")
    engine.add("first", prompt_of(1, 2), max_tokens=40)
    max_kept, engine.role._stores.max_kept = engine.role._stores.max_kept, 0  # so that blocks are left for the end
    for _ in range(30):
        engine.step()
    engine.role._stores.max_kept = max_kept
    engine.abort("first")
    assert engine.role.snapshot()["kept_blocks"] == 0
    engine.run()
    engine.check_at_rest()


def test_trap_05_no_copy_is_launched_before_the_step_has_written(
    ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is launched before the kernel has finished: a store begins behind the step that fills its block."""
    rank, began = ranks.workers[0], threading.Event()
    advance = LocalCopy.advance
    monkeypatch.setattr(LocalCopy, "advance", lambda *each: (began.set(), advance(*each))[1])

    def compute() -> None:
        began.wait(0.2)  # a store that does not wait for the step has copied by now
        for view in ranks.memory[0].views.values():
            view[1] = 77

    connector = connector_of(rank)
    orders = OffloadStep(stores=[StoreOrder(3, rank_tests.blocks([1], [1]))])
    monkeypatch.setattr(worker_steps := run_step.__globals__["vllm_mixin"], "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(worker_steps, "get_forward_context", lambda: None)
    output = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set())
    reported = RankReport()
    with worker_steps.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as found:
        compute()
    for _ in range(1000):
        reported = reported.aggregate(found.kv_connector_worker_meta or RankReport())
        if reported.stored:
            break
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
    block_bytes = ranks.memory[0].views["full", "kv", "0"][1].size
    assert int((ranks.bytes == 77).sum()) == block_bytes


# 6 to 8: which hits a model can use.


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("windows", [(0, 40), (40, 0), (40,)])
def test_trap_06_a_hits_end_needs_the_window_before_it(
    windows: tuple[int, ...], runs_ahead: bool, make_engine: MakeEngine
) -> None:
    """A hit's end needs ``window - 1`` tokens before it, and no more of a window."""
    engine = make_engine(num_blocks=40, windows=windows, host_blocks=80, runs_ahead=runs_ahead)
    prompt = prompt_of(1, 2, 3)
    engine.add("first", prompt, max_tokens=3)
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt, max_tokens=3)
    [order] = [load for _ in range(3) if (engine.step() or True) for load in engine.last_loads]
    # A whole hit would leave the last token without the first one of its window.
    assert engine.scheduler.requests["second"].num_computed_tokens >= 128
    for blocks in order.blocks:
        # Behind 128 tokens of which the window has 40: tokens from 89 on, so from the block at 80.
        assert (blocks.first_token, blocks.last_token) == ((80 if windows[int(blocks.group)] else 0), 128)
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (128, 16 + 2)
    engine.check_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_trap_06_a_block_that_has_left_its_window_is_not_stored(runs_ahead: bool, make_engine: MakeEngine) -> None:
    """Blocks leave a sliding window in mid-request: null ids, reallocated ids."""
    engine = make_engine(num_blocks=50, windows=(0, 24), host_blocks=80, runs_ahead=runs_ahead)
    engine.role._stores.max_kept = 2  # so blocks are stored some steps after they were filled
    engine.add("first", prompt_of(1, 2), max_tokens=60)
    engine.add("other", prompt_of(3, 4), max_tokens=60)
    while engine.scheduler.has_requests():
        engine.step()
        engine.check_slab()
    engine.run()
    assert engine.role.snapshot()["counts"]["deferred_blocks"] > 0
    engine.check_at_rest()


def test_trap_06_states_are_refused_by_name(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without its Mamba state is garbage."""
    monkeypatch.setattr(offload, "group_shapes", lambda _: (FULL, GroupShape(CacheKind.STATE, 1)))
    with pytest.raises(LayoutError, match="cache group 1 holds states"):
        make_engine()


def test_trap_07_groups_are_evicted_apart(make_engine: MakeEngine) -> None:
    """The hit is the intersection: host memory has all blocks of one group, and of the other one lacks the fourth."""
    engine = make_engine(windows=(0, 0), host_blocks=60)
    seen_before(engine)
    tiers = engine.role._start.opened
    assert tiers is not None
    keys = tiers.names.keys(1, engine_hashes(engine, PROMPT))
    number = 0
    while not all(tiers.stack.is_missing(keys[3:4])):
        for group in range(2):
            tiers.stack.touch([key for key in tiers.names.keys(group, engine.contents) if key != keys[3]])
        tiers.stack.land(tiers.stack.prepare_store("1", [number.to_bytes(48, "big")], num_parts=1), 0)
        number += 1
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == 3 * BLOCK_SIZE
    engine.check_at_rest()


def test_trap_07_the_intersection_is_taken_when_it_is_read(make_engine_with_tier: Any) -> None:
    """Not when it was looked up: all blocks of both groups are below then, and one turns out to be damaged."""
    engine, tier = make_engine_with_tier(windows=(0, 0), num_blocks=40)
    names = engine.role._start.opened.names
    [key] = names.keys(1, [engine_hashes(engine, PROMPT)[2]])
    content, expected = tier.blocks[key]
    tier.blocks[key] = bytes([content[0] ^ 1]) + content[1:], expected
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == 2 * BLOCK_SIZE
    engine.check_at_rest()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("length", "num_loaded"), [(96, 96), (97, 96), (98, 0)])
def test_trap_08_mla_on_a_cpu_takes_hits_that_leave_one_token(
    length: int, num_loaded: int, num_ranks: int, make_engine: MakeEngine
) -> None:
    """MLA on the CPU has prefix caching and chunked prefill forced off; a partial hit is a chunked prefill."""
    config = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    engine = make_engine(config, host_blocks=60, windows=(LATENT,), num_ranks=num_ranks)
    engine.add("first", prompt_of(1, 2, 3)[:100])
    engine.run()
    engine.add("second", prompt_of(1, 2, 3)[:length])
    engine.run()
    assert engine.loaded["second"] == num_loaded
    engine.check_at_rest()


# 9 and 10: questions and answers.


def test_trap_09_a_promise_that_is_not_taken_up_is_dropped(make_engine: MakeEngine) -> None:
    """The question for a hit repeats and its answer may be dropped: no pins there without an owner that ends them.

    VLLM has no room for the load: it asks again in each step, and between its questions nothing is pinned.
    """
    engine = make_engine(num_blocks=13, host_blocks=60)
    engine.add("first", PROMPT)
    engine.run()
    engine.add("long", prompt_of(3, 4), max_tokens=60)
    engine.step()
    engine.step()
    engine.add("second", PROMPT)
    for _ in range(20):
        engine.step()
        state = engine.role.snapshot()
        assert state["promised"] == 0
        if "second" not in state["loads"]:
            assert state["tiers"]["host_memory"]["num_pinned"] == 0
    engine.run()
    assert engine.loaded["second"] == 96
    engine.check_at_rest()


class LoadsFromElsewhere(KVConnectorBase_V1, SupportsHMA):
    """Loads the whole prompts of requests that come from a prefill engine, asynchronously; stores nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loads: dict[str, tuple[list[int], ...]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        is_asked = (request.kv_transfer_params or {}).get("do_remote_prefill") and request.request_id not in self.loads
        return (request.num_tokens - num_computed_tokens, True) if is_asked else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def beside_another(policy: str = "recompute") -> dict[str, Any]:
    """Return the configuration of an engine with both connectors under vLLM's ``MultiConnector``."""
    elsewhere = {"kv_connector": LoadsFromElsewhere.__name__, "kv_connector_module_path": __name__}
    children = [{**each, "kv_role": "kv_both"} for each in (elsewhere, {"kv_connector": "KVFerryOffloadConnector"})]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": children},
        }
    }


REMOTE = {"kv_transfer_params": {"do_remote_prefill": True}}


def write_from_elsewhere(engine: Engine, request_id: str, prompt: Sequence[int]) -> None:
    """Write a prompt into the blocks that the other connector was given."""
    for group, ids in enumerate(engine.others[0].loads[request_id]):
        for place, content in enumerate(contents_of(prompt)):
            for rank in range(engine.num_ranks):
                engine.ranks.engine[rank, str(group), ids[place // BLOCK_SIZE], place % BLOCK_SIZE] = content


def test_trap_09_none_stalls_all_children_of_a_multi_connector(make_engine_with_tier: Any) -> None:
    """Answer 0 for requests that come from a prefill engine. The disk has their prompt, and hangs."""
    engine, tier = make_engine_with_tier(config=beside_another(), num_blocks=40)
    tier.faults.is_silent = True
    engine.add("local", PROMPT)
    engine.add("remote", PROMPT, extra_args=REMOTE)
    engine.step(ends_copies=False)
    assert engine.role.snapshot()["counts"]["asked_again"] == 1, "the other request waits for the disk"
    assert engine.others[0].loads.keys() == {"remote"}
    write_from_elsewhere(engine, "remote", PROMPT)
    engine.ranks.received.add("remote")
    engine.now += 20.0
    engine.run()
    assert (engine.computed["remote"], engine.computed["local"]) == (1, 96)
    engine.check_at_rest()


def test_trap_09_the_tiers_are_not_asked_where_the_answer_is_dropped(make_engine_with_tier: Any) -> None:
    """Its answer may be dropped: vLLM asks for a request that must not read the cache too, and takes it for 0."""
    engine, _ = make_engine_with_tier(num_blocks=40)
    engine.add("logprobs", PROMPT, skips_cache=True)
    engine.run()
    assert engine.loaded["logprobs"] == 0
    assert "asked_again" not in engine.role.snapshot()["counts"]
    engine.check_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_trap_10_a_full_hit_leaves_one_token_to_compute(runs_ahead: bool, make_engine: MakeEngine) -> None:
    """The load is of the whole prompt; the last token is computed behind it for its logits, and stored by nobody."""
    engine = make_engine(host_blocks=60, runs_ahead=runs_ahead)
    seen_before(engine)
    num_stores = engine.role.snapshot()["counts"]["stores"]
    engine.add("second", PROMPT, max_tokens=4)
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (96, 1 + 3)
    assert engine.role.snapshot()["counts"]["stores"] == num_stores
    engine.check_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_trap_10_after_a_failed_load_the_miss_is_remembered(policy: str, make_engine: MakeEngine) -> None:
    """After a failed load with ``recompute`` the request starts at 0 and asks again: else it loops."""
    engine = make_engine({"failure_policy": policy}, num_ranks=2, host_blocks=60)
    seen_before(engine)
    engine.add("second", PROMPT, max_tokens=3)
    for _ in range(30):
        engine.step(ends_copies=False)
        engine.end_copies(fails=any(not copy.is_store for copy in engine.ranks.copies))
    engine.run()
    counts = engine.role.snapshot()["counts"]
    assert (counts["loads"], counts["failed_loads"]) == (1, 1)
    assert engine.computed["second"] == (0 if policy == "fail" else 98)
    engine.check_at_rest()


# 11 to 13: what ranks report, and what they wait for.


def failed_load(monkeypatch: pytest.MonkeyPatch, ranks: rank_tests.Engine) -> list[KVConnectorOutput]:
    """Return what vLLM has of two ranks' reports, step by step, of a load that the second one cannot copy."""
    connectors = [connector_of(rank) for rank in ranks.workers]
    aggregator, found, job_ids = KVOutputAggregator(NUM_RANKS), [], (1, 99)
    steps = [OffloadStep(computes=False, loads=[LoadOrder("second", 7, rank_tests.blocks([1], [n]))]) for n in job_ids]
    for _ in range(1000):
        outputs: list[ModelRunnerOutput | None] = []
        for connector, step in zip(connectors, steps, strict=True):
            one = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            one.kv_connector_output = run_step(monkeypatch, connector, step)
            outputs.append(one)
        together = aggregator.aggregate(outputs)
        assert together is not None
        assert together.kv_connector_output is not None
        found.append(together.kv_connector_output)
        if found[-1].finished_recving:
            break
        steps = [OffloadStep(computes=False)] * NUM_RANKS
    return found


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_trap_11_and_12_a_load_that_one_rank_could_not_copy(
    policy: str, ranks: rank_tests.Engine, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several groups report ``failed_recving``, not invalid blocks (those raise).

    A failed transfer counted as loaded has served another request's KV (dynamo #15079, LMCache #4385).
    """
    reports = failed_load(monkeypatch, ranks)
    assert not any(report.invalid_block_ids for report in reports)
    assert reports[-1].failed_recving == {"second"}
    engine = make_engine({"failure_policy": policy}, windows=(0, 0), num_ranks=NUM_RANKS, host_blocks=60)
    seen_before(engine)
    engine.add("second", PROMPT, max_tokens=3)
    while not engine.ranks.copies:
        engine.step(ends_copies=False)
    engine.ranks.copies.clear()
    engine.ranks.loads_left.clear()
    with monkeypatch.context() as patch:
        patch.setattr(engine.ranks, "take_output", lambda: reports.pop(0))
        while reports:
            engine.step()
    engine.run()
    assert (engine.finished["second"].name == "ERROR") == (policy == "fail")
    assert (engine.loaded["second"], engine.computed["second"]) == (0, 0 if policy == "fail" else 98)
    engine.check_at_rest()


def test_trap_12_a_store_that_one_rank_could_not_copy_is_not_visible(make_engine: MakeEngine) -> None:
    """A failed transfer counted as loaded has served another request's KV: nor is one counted as stored."""
    engine = make_engine(num_ranks=2, host_blocks=60)
    engine.add("first", PROMPT)
    for number in range(20):
        engine.step(ends_copies=False)
        while engine.ranks.copies:
            engine.ranks.end(0, fails=engine.ranks.copies[0].rank == 1)
        if number > 5 and not engine.scheduler.has_requests():
            break
    engine.check_at_rest()
    assert engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"] == 0


def test_trap_13_pending_work_is_what_ranks_copy_and_not_a_tier_that_hangs(make_engine_with_tier: Any) -> None:
    """``has_pending_push_work`` makes the engine spin."""
    engine, tier = make_engine_with_tier(num_blocks=40)
    connector = engine.scheduler.connector
    engine.add("last", prompt_of(7, 8))
    while "last" not in engine.finished:
        engine.step(ends_copies=False)
    tier.faults.hangs = True
    assert connector.has_pending_push_work()
    engine.step()
    engine.step()
    assert connector.has_pending_push_work(), "the tier has begun to write"
    engine.now += 20.0
    engine.step(is_forced=True)
    assert not connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()
    tier.faults.hangs = False
    engine.step(is_forced=True)
    engine.run()


def test_trap_13_idle_steps_wait(ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``has_pending_push_work`` makes the engine spin; wait in idle steps. A load ends the wait."""
    began, may_end = rank_tests.hold_copies(monkeypatch)
    connector = connector_of(ranks.workers[0])
    run_step(monkeypatch, connector, OffloadStep(loads=[LoadOrder("r", 7, rank_tests.blocks([1], [1]))]))
    assert began.wait(20)
    for turns in (1, 2, 4, 4):
        began_at = time.monotonic()
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
        assert time.monotonic() - began_at >= 0.9 * turns * FIRST_WAIT_SECONDS
        assert not found.finished_recving
    may_end.set()
    for _ in range(1000):
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
        if found.finished_recving:
            break
    assert found.finished_recving == {"r"}


# vLLM's own connector beside another.


@pytest.mark.parametrize("windows", [(0,), (0, 0)])
def test_vllm_46951_no_block_of_a_store_goes_to_a_load_of_another_connector(
    windows: tuple[int, ...], make_engine: MakeEngine
) -> None:
    """Beside another asynchronous connector stale KV is stored (vLLM #46951).

    The offloading connector does not hear of the blocks that the other one loads into, so these may be blocks that a
    store still reads. Here the cache has room for the other load only if the store's blocks are given away.
    """
    engine = make_engine(beside_another(), num_blocks=10 * len(windows) + 1, windows=windows, host_blocks=60)
    engine.role._stores.max_kept = 100
    engine.add("first", PROMPT)
    while "first" not in engine.finished:
        engine.step(ends_copies=False)
    engine.step(ends_copies=False)
    assert engine.ranks.copies, "the store is under way"
    other = prompt_of(5, 6)
    engine.add("remote", other, max_tokens=20, extra_args=REMOTE)
    for _ in range(3):
        engine.step(ends_copies=False)
        if "remote" in engine.others[0].loads:
            write_from_elsewhere(engine, "remote", other)
    engine.end_copies()
    while "remote" not in engine.others[0].loads:
        engine.step()
    write_from_elsewhere(engine, "remote", other)
    engine.ranks.received.add("remote")
    engine.run()
    engine.check_at_rest()
    assert engine.computed["remote"] == 1 + 19
    crowd_out(engine)
    for name, prompt in (("again", PROMPT), ("remote again", other)):
        engine.add(name, prompt)
        engine.run()
        assert engine.loaded[name] == 96, "both were stored, each with its own content"
    engine.check_at_rest()


@pytest.mark.parametrize("end", ["aborted", "fail", "recompute"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_vllm_46951_what_another_connector_did_not_load_is_not_stored(
    end: str, runs_ahead: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another asynchronous connector stale KV is stored: the request has blocks and counts as computed.

    Tails of failed requests are not stored either; they are here, so that only the count of written tokens protects.
    """
    monkeypatch.setattr(offload, "_WITHOUT_TAIL", ())
    policy = "recompute" if end == "aborted" else end
    engine = make_engine(beside_another(policy), num_blocks=40, host_blocks=60, runs_ahead=runs_ahead)
    engine.add("remote", PROMPT, max_tokens=3, extra_args=REMOTE)
    for _ in range(3):
        engine.step()
    assert engine.others[0].loads.keys() == {"remote"}
    if end == "aborted":
        engine.abort("remote")
    engine.ranks.received.add("remote")
    engine.ranks.failed.add("remote")
    engine.step(is_forced=True)
    if end != "recompute":
        engine.run()
        assert engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"] == 0
    engine.run()
    crowd_out(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == (96 if end == "recompute" else 0)
    engine.check_at_rest()
