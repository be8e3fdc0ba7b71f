"""One change of what a stored block means changes its name; what changes no byte of it does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvferry.errors import LayoutError, Reason
from kvferry.integrations.vllm import identity, offload_names, translate, versions
from kvferry.integrations.vllm.adapters import Adapters
from kvferry.integrations.vllm.identity import record_models, weights_of
from kvferry.integrations.vllm.names import checker
from kvferry.integrations.vllm.offload_names import BlockNames, engine_facts
from kvferry.layout.shard import Shard, TensorScale
from kvferry.layout.slab import slab_shard
from kvferry.plan.planner import Planner
from kvferry.tiers.protocol import KEY_BYTES

from .model_files import TENSORS, write_model, write_weights
from .test_vllm_states import KINDS as STATES
from .test_vllm_states import Rank as StateRank
from .test_vllm_translate import BLOCK_SIZE, attention_view, block_rows, groups
from .test_vllm_translate import engine as cpu_engine
from .vllm_caches import CacheRank

LAYERS = tuple(f"model.layers.{index}.self_attn.attn" for index in range(4))
NUM_HEADS = 4
Edit = Callable[["Engine"], None]


@dataclass
class Engine:
    """An engine that does not run: vLLM's own configuration, groups, layouts and views of it."""

    folder: Path
    patch: pytest.MonkeyPatch
    arguments: dict[str, Any] = field(default_factory=dict)
    edits: list[Callable[[Any], None]] = field(default_factory=list)
    slab: Shard | None = None
    stored: dict[str, Any] = field(default_factory=dict)  # as the arguments of :func:`ranks`
    tokens_per_hash: int = 16
    model_id: str = ""
    adapter: str = ""
    adapters: Adapters = field(default_factory=Adapters)

    def config(self) -> Any:
        """Return vLLM's configuration of this engine."""
        arguments = {"model": str(self.folder), "skip_tokenizer_init": True, "enforce_eager": True, **self.arguments}
        config = EngineArgs(**arguments).create_engine_config()
        for edit in self.edits:
            edit(config)
        record_models(config)
        return config

    def names(self) -> BlockNames:
        """Return the names of its blocks."""
        stored = self.slab or slab(**self.stored)
        names = engine_facts(self.config(), self.tokens_per_hash, self.model_id).names(stored)
        if not self.adapter:
            return names
        found = self.adapters.names(names, self.adapter)
        assert found is not None
        return found


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Engine]:
    """Return a function that makes an engine of the same model, each in a folder of its own."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine(write_model(tmp_path / f"host-{len(made)}" / "model"), monkeypatch))
        return made[-1]

    return make


def attention(tp_size: int = 1, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**page(tp_size), **changes})


def window(size: int = 40) -> SlidingWindowSpec:
    return SlidingWindowSpec(**page(), sliding_window=size)


def page(tp_size: int = 1) -> dict[str, Any]:
    return {"block_size": 16, "num_kv_heads": NUM_HEADS // tp_size, "head_size": 8, "dtype": torch.float32}


def ranks(
    specs: dict[str, Any] | None = None,
    *,
    tp_size: int = 1,
    layout: str = "BHLNC",
    stages: tuple[tuple[str, ...], ...] = (),
) -> list[CacheRank]:
    specs = specs or dict.fromkeys(LAYERS, attention(tp_size))
    return [
        CacheRank(specs, layout, (rank, tp_size), stages=stages, pp_rank=stage)
        for stage in range(max(len(stages), 1))
        for rank in range(tp_size)
    ]


def slab(specs: dict[str, Any] | None = None, *, num_blocks: int = 20, engine_blocks: int = 1, **placed: Any) -> Shard:
    shards = [rank.shard for rank in ranks(specs, **placed)]
    counts = {group.name: num_blocks for shard in shards for group in shard.groups}
    return slab_shard(shards, counts, engine_blocks=engine_blocks)


def cpu_shards(patch: pytest.MonkeyPatch, isa: str, tp_size: int = 2, block_size: int = BLOCK_SIZE) -> list[Shard]:
    """Return the ranks of an engine whose attention runs on a CPU with this instruction set."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=4 // tp_size, head_size=8, dtype=torch.float32)
    views = {"0": attention_view(block_rows(tp_size), 0)[:, : 4 // tp_size, :block_size]}
    if tp_size == 1:
        views = {"0": torch.zeros(6, 4, block_size, 16)}
    config = cpu_engine(patch, isa, tp_size)
    return [translate.shard_of(config, groups((["0"], spec)), views, rank) for rank in range(tp_size)]


def differing(one: BlockNames, other: BlockNames) -> set[str]:
    """Return the facts in which two namespaces differ, such as ``model.weights``."""
    found = set()
    for topic in one.facts.keys() | other.facts.keys():
        ours, theirs = one.facts.get(topic), other.facts.get(topic)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= {f"{topic}.{name}" for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        elif ours != theirs:
            found.add(topic)
    return found


# Each change is of one thing, by the fact that it changes.


def set_argument(name: str, value: Any) -> Edit:
    return lambda engine: engine.arguments.update({name: value})


def set_config(value: Any, *path: str) -> Edit:
    """Set a field of the engine's configuration."""

    def edit(config: Any) -> None:
        *owners, name = path
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return lambda engine: engine.edits.append(edit)


def together(*edits: Edit) -> Edit:
    def edit(engine: Engine) -> None:
        for each in edits:
            each(engine)

    return edit


def write(name: str, text: str) -> Edit:
    def edit(engine: Engine) -> None:
        (engine.folder / name).write_text(text)

    return edit


def store(**changes: Any) -> Edit:
    return lambda engine: setattr(engine, "stored", changes)


def store_cpu(isa: str, **changes: Any) -> Edit:
    def edit(engine: Engine) -> None:
        engine.slab = slab_shard(cpu_shards(engine.patch, isa, **changes), {"0": 20})
        engine.stored = {"specs": {"0": attention(block_size=changes.get("block_size", BLOCK_SIZE))}}

    return edit


def reweigh(lengths: dict[str, int] = TENSORS, changed: str = "", name: str = "model.safetensors") -> Edit:
    return lambda engine: write_weights(engine.folder / name, lengths, changed)


def draft(changed: str = "", dtype: str = "float32") -> Edit:
    def edit(engine: Engine) -> None:
        folder = engine.folder.parent / "drafter"
        write_model(folder)
        write_weights(folder / "model.safetensors", TENSORS, changed)
        speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
        engine.arguments["speculative_config"] = speculative
        set_config(getattr(torch, dtype), "speculative_config", "draft_model_config", "dtype")(engine)

    return edit


def see(**fields: Any) -> Edit:
    return set_config(MultiModalConfig(**fields), "model_config", "multimodal_config")


def scale_images(value: float) -> Edit:
    """Let the encoder of images compute in fp8, with scales from a file that has the same path on each host."""

    def edit(engine: Engine) -> None:
        path = engine.folder.parents[1] / "scales.json"
        path.write_text(json.dumps({"0": value}))
        see(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(path))(engine)

    return edit


def hub(commit: str) -> Edit:
    """Let the engine serve a model of a hub whose cache has this commit."""

    def edit(engine: Engine) -> None:
        cache = engine.folder.parent / "hub"
        snapshot = cache / "models--some--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        refs = cache / "models--some--model" / "refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
        for path, value in {
            ("model_config", "model"): "some/model",
            ("load_config", "download_dir"): str(cache),
        }.items():
            set_config(value, *path)(engine)

    return edit


def quantise_online(ignored: str) -> Edit:
    return set_config(SimpleNamespace(ignore=[ignored]), "model_config", "quantization_config")


def store_own(engine: Engine) -> None:
    """Let the second of two ranks store what it holds, as where no slab for all ranks exists."""
    engine.slab = msgspec.structs.replace(slab(), tp_rank=1, tp_size=2)


def adapt(scale: int = 8, changed: str = "") -> Edit:
    """Let the requests have an adapter, always in the same folder."""

    def edit(engine: Engine) -> None:
        folder = engine.folder.parents[1] / "adapter"
        folder.mkdir(exist_ok=True)
        write_weights(folder / "adapter_model.safetensors", {"lora_A": 400, "lora_B": 400}, changed)
        (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": scale}))
        engine.adapters = Adapters()  # another process
        engine.arguments["enable_lora"] = True
        engine.adapter = str(folder)

    return edit


def set_variable(name: str, value: str) -> Edit:
    return lambda engine: engine.patch.setenv(name, value)


def scaled(value: float) -> Edit:
    def edit(engine: Engine) -> None:
        held = slab()
        scales = tuple(TensorScale(layer, tensor, value) for layer in LAYERS for tensor in ("v", "k"))
        group = msgspec.structs.replace(held.groups[0], scales=scales)
        engine.slab = msgspec.structs.replace(held, groups=(group,))

    return edit


def rope(**changes: Any) -> Edit:
    return set_argument("hf_overrides", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | changes})


def fnuz(engine: Engine) -> None:
    """Let the machine's fp8 be that of some AMD GPUs."""
    from vllm.platforms import current_platform

    engine.patch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda _: torch.float8_e4m3fnuz))


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
FP8, LORA = set_argument("kv_cache_dtype", "fp8"), set_argument("enable_lora", True)
TWO_KINDS = {name: window() if index % 2 else attention() for index, name in enumerate(LAYERS)}
# Name: the facts that differ; the change; how the other engine differs from a plain one.
CHANGES: dict[str, tuple[set[str], Edit, Edit | None]] = {
    "weights of one layer": ({"model.weights"}, reweigh(changed="layers.2.qkv"), None),
    "weights of a small tensor": ({"model.weights"}, reweigh(changed="norm"), None),
    "a tensor more": ({"model.weights"}, reweigh({**TENSORS, "bias": 4}), None),
    "a tensor of another name": ({"model.weights"}, reweigh({"embedding": 70_000, **TENSORS}), None),
    "a file of weights more": ({"model.weights"}, reweigh({"more": 8}, name="model-2.safetensors"), None),
    "commit of a hub's model": ({"model.weights"}, hub("b" * 40), hub("a" * 40)),
    "RoPE base": ({"model.config"}, rope(rope_theta=1e6), rope()),
    "RoPE scaling": ({"model.config"}, rope(**YARN), rope()),
    "RoPE scaling's factor": ({"model.config"}, rope(**{**YARN, "factor": 4.0}), rope(**YARN)),
    "norm epsilon": ({"model.config"}, set_argument("hf_overrides", {"rms_norm_eps": 1e-5}), None),
    "window in the configuration": ({"model.config"}, set_argument("hf_overrides", {"sliding_window": 64}), None),
    "architecture": (
        {"model.architectures", "model.config"},
        set_argument("hf_overrides", {"architectures": ["Qwen2ForCausalLM"]}),
        None,
    ),
    "class of an architecture": (
        {"model.class_overrides"},
        set_config({"Qwen3ForCausalLM": "own:Model"}, "model_config", "model_class_overrides"),
        None,
    ),
    "revision of the code": ({"model.code_revision"}, set_argument("code_revision", "v2"), None),
    "own code": ({"model.files"}, write("modeling_own.py", "SCALE = 2\n"), None),
    "image processor": ({"model.files"}, write("preprocessor_config.json", '{"size": 448}'), None),
    "quantisation's parameters": ({"model.files"}, write("quant_config.json", '{"group_size": 64}'), None),
    "implementation": ({"model.implementation"}, set_argument("model_impl", "transformers"), None),
    "scales of an image encoder": ({"model.multimodal"}, scale_images(0.5), scale_images(2.0)),
    "missing image embeddings": ({"model.multimodal"}, see(allow_missing_mm_embeddings=True), see()),
    "image size": (
        {"model.multimodal"},
        see(mm_processor_kwargs={"size": 448}),
        see(mm_processor_kwargs={"size": 224}),
    ),
    "frames of a video": ({"model.multimodal"}, see(media_io_kwargs={"video": {"num_frames": 8}}), see()),
    "tokens of a video": ({"model.multimodal"}, see(video_pruning_rate=0.5), see()),
    "quantisation while loading": ({"model.quantization"}, set_argument("quantization", "fp8"), None),
    "layers not quantised": ({"model.quantization"}, quantise_online("a"), quantise_online("b")),
    "compute dtype": (
        {"model.dtype", "cache.dtype"},
        set_argument("dtype", "bfloat16"),
        set_argument("dtype", "float32"),
    ),
    "context length": ({"model.max_model_len"}, set_argument("max_model_len", 4096), None),
    "windows disabled": ({"model.disable_sliding_window"}, set_argument("disable_sliding_window", True), None),
    "format of the files": ({"model.load"}, set_argument("load_format", "safetensors"), None),
    "loader's options": (
        {"model.load"},
        set_argument("model_loader_extra_config", {"enable_multithread_load": True}),
        None,
    ),
    "a drafter": ({"drafter"}, draft(), None),
    "weights of the drafter": ({"drafter.weights"}, draft("norm"), draft()),
    "dtype of the drafter": ({"drafter.dtype"}, draft(dtype="float16"), draft()),
    "adapters": ({"adapters"}, LORA, None),
    "dtype of adapters": (
        {"adapters.lora_dtype"},
        together(LORA, set_argument("lora_dtype", "float16")),
        together(LORA, set_argument("lora_dtype", "bfloat16")),
    ),
    "an adapter": ({"adapter", "adapters"}, adapt(), None),
    "weights of an adapter, in its place": ({"adapter"}, adapt(changed="lora_B"), adapt()),
    "scale of an adapter, in its place": ({"adapter"}, adapt(scale=16), adapt()),
    "adapters of the image encoder": (
        {"adapters.enable_tower_connector_lora"},
        together(LORA, set_argument("enable_tower_connector_lora", True)),
        LORA,
    ),
    "attention to later tokens": (
        {"attention.use_non_causal"},
        set_config(True, "attention_config", "use_non_causal"),
        None,
    ),
    "dtype of an indexer": (
        {"attention.indexer_kv_dtype"},
        set_config("bf16", "attention_config", "indexer_kv_dtype"),
        set_config("fp8", "attention_config", "indexer_kv_dtype"),
    ),
    "quantised queries": (
        {"attention.use_prefill_query_quantization"},
        set_config(True, "attention_config", "use_prefill_query_quantization"),
        None,
    ),
    "made-up routes": (
        {"variables.VLLM_MOE_ROUTING_SIMULATION_STRATEGY"},
        set_variable("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        None,
    ),
    "precision of products": (
        {"variables.VLLM_FLOAT32_MATMUL_PRECISION"},
        set_variable("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        None,
    ),
    "options of a platform": ({"platform_options.nz"}, set_config({"nz": True}, "additional_config"), None),
    "cache dtype": ({"cache.dtype"}, set_argument("kv_cache_dtype", "fp8_e5m2"), FP8),
    "kind of fp8": ({"cache.fp8"}, together(FP8, fnuz), FP8),
    "layers with an unquantised cache": (
        {"cache.unquantised_layers"},
        set_config(["1"], "cache_config", "kv_cache_dtype_skip_layers"),
        None,
    ),
    "hash algorithm": ({"hashes.algorithm"}, set_argument("prefix_caching_hash_algo", "sha256_cbor"), None),
    "hash seed": ({"hashes.seed"}, lambda engine: engine.patch.setenv("PYTHONHASHSEED", "7"), None),
    "tokens of a hash": ({"hashes.tokens"}, lambda engine: setattr(engine, "tokens_per_hash", 32), None),
    "format of stored blocks": (
        {"format"},
        lambda engine: engine.patch.setattr(offload_names, "FORMAT", offload_names.FORMAT + 1),
        None,
    ),
    "version of vLLM": (
        {"vllm"},
        lambda engine: engine.patch.setattr(offload_names, "installed_version", lambda: "0.99.1"),
        None,
    ),
    "tokens of a block": ({"slab.groups"}, store(specs=dict.fromkeys(LAYERS, attention(block_size=32))), None),
    "blocks of the engine in one": ({"slab.groups"}, store(engine_blocks=2), None),
    "head size": ({"slab.groups"}, store(specs=dict.fromkeys(LAYERS, attention(head_size=16))), None),
    "number of heads": ({"slab.groups"}, store(specs=dict.fromkeys(LAYERS, attention(num_kv_heads=2))), None),
    "bytes of a number": ({"slab.groups"}, store(specs=dict.fromkeys(LAYERS, attention(dtype=torch.bfloat16))), None),
    "name of a layer": ({"slab.groups"}, store(specs=dict.fromkeys((*LAYERS[:3], "other"), attention())), None),
    "order of the layers": ({"slab.groups"}, store(specs=dict.fromkeys(LAYERS[::-1], attention())), None),
    "a layer more": ({"slab.groups"}, store(specs=dict.fromkeys((*LAYERS, "mtp"), attention())), None),
    "kind of half of the layers": ({"slab.groups"}, store(specs=TWO_KINDS), None),
    "size of the window": (
        {"slab.groups"},
        store(specs={**TWO_KINDS, **dict.fromkeys(LAYERS[1::2], window(56))}),
        store(specs=TWO_KINDS),
    ),
    "groups in another order": (
        {"slab.groups"},
        store(specs=dict(reversed(TWO_KINDS.items()))),
        store(specs=TWO_KINDS),
    ),
    "scales of the cache": ({"slab.groups"}, scaled(0.5), scaled(2.0)),
    "planes or packed pages": ({"slab.groups"}, store_cpu("amx"), store_cpu("vec")),
    "packing of a page": ({"slab.groups"}, store_cpu("amx"), store_cpu("neon")),
    "tokens of a packed page": ({"slab.groups"}, store_cpu("amx", block_size=16), store_cpu("amx")),
    "one rank's own blocks": ({"slab.rank"}, store_own, None),
    "the model's name": (
        {"model.weights"},
        lambda engine: setattr(engine, "model_id", "mine-2"),
        lambda engine: setattr(engine, "model_id", "mine-1"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_changes_the_name(name: str, make_engine: Callable[[], Engine]) -> None:
    expected, change, prepare = CHANGES[name]
    one, other = make_engine(), make_engine()
    if prepare is not None:
        prepare(one)
    before = one.names()
    change(other)
    after = other.names()
    assert differing(before, after) == expected
    assert before.namespace != after.namespace
    assert before.keys(0, [b"hash"]) != after.keys(0, [b"hash"])


def test_there_are_enough_changes() -> None:
    assert len(CHANGES) >= 24


def move_folder(engine: Engine) -> None:
    """Let the folder have another name, as on another host."""
    elsewhere = engine.folder.parent / "mounted" / "release-7"
    shutil.copytree(engine.folder, elsewhere)
    engine.folder = elsewhere


KEEPS: dict[str, Edit] = {
    "nothing": lambda _: None,
    "the model's folder": move_folder,
    "its documents": write("README.md", "Another text.\n"),
    "its sampling": write("generation_config.json", '{"temperature": 0.5}'),
    "its tokenizer, whose tokens are in the hash": write("tokenizer_config.json", "{}"),
    "tensor-parallel ranks": set_argument("tensor_parallel_size", 2),
    "tensor-parallel ranks' caches": store(tp_size=2),
    "more ranks than heads": store(specs=dict.fromkeys(LAYERS, attention(num_kv_heads=1)), tp_size=8),
    "pipeline stages": set_argument("pipeline_parallel_size", 2),
    "pipeline stages' caches": store(stages=(LAYERS[:3], LAYERS[3:])),
    "stages of several ranks": store(stages=(LAYERS[:1], LAYERS[1:]), tp_size=2),
    "the engine's layout": store(layout="LBNHC"),
    "number of stored blocks": store(num_blocks=99),
    "number of the engine's blocks": set_argument("num_gpu_blocks_override", 77),
    "memory": set_argument("gpu_memory_utilization", 0.5),
    "requests at a time": set_argument("max_num_seqs", 3),
    "tokens of a step": set_argument("max_num_batched_tokens", 9000),
    "name for clients": set_argument("served_model_name", "a-name"),
    "seed of sampling": set_argument("seed", 7),
    "prefix caching off": set_argument("enable_prefix_caching", False),
    "connector's end point": set_argument(
        "kv_transfer_config",
        {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "engine_id": "e-7",
            "kv_connector_extra_config": {"host": "127.0.0.2", "port": 5600},
        },
    ),
}


def test_a_name_for_the_weights_hides_nothing_else(make_engine: Callable[[], Engine]) -> None:
    one, other = make_engine(), make_engine()
    one.model_id = other.model_id = "mine"
    rope(rope_theta=1e6)(other)
    assert "model.config" in differing(one.names(), other.names())


def test_the_listed_variables_exist() -> None:
    from vllm import envs

    known = {each.full_name for each in checker.used_in(checker.number_of(versions.installed_version()))}
    assert {
        name for name in offload_names.VARIABLES if f"vllm.envs.{name}" in known
    } <= envs.environment_variables.keys()


def test_a_group_has_one_name_wherever_its_blocks_begin(make_engine: Callable[[], Engine]) -> None:
    """The blocks of the second group lie behind those of the first, however many these are."""
    one, other = make_engine(), make_engine()
    one.slab, other.slab = (slab(TWO_KINDS, num_blocks=number) for number in (20, 99))
    assert one.names() == other.names()


@pytest.mark.parametrize("name", KEEPS)
def test_what_changes_no_byte_keeps_the_name(name: str, make_engine: Callable[[], Engine]) -> None:
    one, other = make_engine(), make_engine()
    KEEPS[name](other)
    before, after = one.names(), other.names()
    assert differing(before, after) == set()
    assert before == after
    assert before.private is None


def test_a_dtype_has_one_name(make_engine: Callable[[], Engine]) -> None:
    one, other = make_engine(), make_engine()
    for each in (one, other):
        each.arguments["dtype"] = "float16"
    other.arguments["kv_cache_dtype"] = "float16"
    assert one.names() == other.names()


def test_names_depend_on_facts_alone() -> None:
    """A changed digest or encoding would make every stored block unreachable without a word."""
    assert offload_names.namespace_of('{"a": 1}').hex() == "1a351f4b7a9201761fc547855244"


def test_groups_have_keys_of_their_own(make_engine: Callable[[], Engine]) -> None:
    names = make_engine().names()
    keys = [key for group in (0, 1, 300) for key in names.keys(group, [bytes([number]) * 32 for number in range(3)])]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert [int.from_bytes(key[14:16], "big") for key in keys] == [0, 0, 0, 1, 1, 1, 300, 300, 300]


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_pages_of_any_packing_have_one_name_for_all_numbers_of_ranks(
    isa: str, make_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed page is of one head: ranks take theirs, so the name has no number of ranks, and a plan exists."""
    one, other = make_engine(), make_engine()
    alone, pair = (cpu_shards(monkeypatch, isa, tp_size=size) for size in (1, 2))
    one.slab, other.slab = (slab_shard(ranks, {"0": 20}) for ranks in (alone, pair))
    assert one.names() == other.names()
    for rank in (*alone, *pair):
        assert Planner([one.slab], rank).plans(0)


@pytest.mark.parametrize("kind", STATES)
def test_states_have_one_name_for_all_numbers_of_ranks(
    kind: str, make_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each order of a convolution's channels and taps has its own, since a slab keeps the engine's order."""
    found = []
    for order in ("SD", "DS"):
        monkeypatch.setattr(
            "vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda order=order: order
        )
        monkeypatch.setattr(
            "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first", lambda order=order: order == "DS"
        )
        for size in (1, 2):
            engine = make_engine()
            engine.slab = slab_shard([StateRank(STATES[kind], rank, size).shard for rank in range(size)], {"0": 20})
            found.append(engine.names())
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert differing(found[1], found[2]) == {"slab.groups"}


def test_packed_pages_are_stored_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError) as refused:
        slab_shard(cpu_shards(monkeypatch, "amx"), {"0": 20}, engine_blocks=2)
    assert refused.value.reason is Reason.SPLIT_ATOM


# Which names other processes may use.


def private(engine: Engine) -> Reason | None:
    """Return why only one process can use the names; None where others can."""
    error = engine.names().private
    return None if error is None else error.reason


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_hashes_that_differ_between_processes_are_not_shared(
    algorithm: str, make_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.arguments["prefix_caching_hash_algo"] = algorithm
    differs = algorithm.startswith("xxhash")
    assert private(engine) is (Reason.UNREPEATABLE_HASHES if differs else None)
    assert (engine.names().namespace != engine.names().namespace) is differs, "not even by chance"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert private(engine) is None
    assert engine.names() == engine.names()


@pytest.mark.parametrize(
    "edit",
    [
        set_argument("load_format", "dummy"),
        set_argument("load_format", "tensorizer"),
        set_config("s3://bucket/model", "model_config", "model_weights"),
        set_config("some/model", "model_config", "model"),
        lambda engine: (engine.folder / "model.safetensors").unlink(),
    ],
    ids=["made up", "of another loader", "of an object store", "of a hub without a commit", "without a file"],
)
def test_weights_that_nothing_names_are_not_shared(edit: Edit, make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    edit(engine)
    assert private(engine) is Reason.UNKNOWN_WEIGHTS
    engine.model_id = "mine"
    assert private(engine) is None


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "expected"),
    [(0, False, Reason.UNREPEATABLE_HASHES), (4, False, None), (0, True, None)],
)
def test_images_that_are_numbered_are_not_shared(
    cache_gb: float, prefix_caching: bool, expected: Reason | None, make_engine: Callable[[], Engine]
) -> None:
    """VLLM counts images from 1 in each process where neither of its caches needs a hash of the content."""
    engine = make_engine()
    see(mm_processor_cache_gb=cache_gb)(engine)
    engine.arguments["enable_prefix_caching"] = prefix_caching
    assert private(engine) is expected


def test_the_names_of_an_adapter_are_renewed_with_the_others(make_engine: Callable[[], Engine]) -> None:
    """After a reset nothing of before is found, and another process finds nothing of what comes after."""
    engine = make_engine()
    adapt()(engine)
    path, engine.adapter = engine.adapter, ""
    names = engine.names()
    each = [engine.adapters.names(one, path) for one in (names, names, names.renewed(), names.renewed())]
    found = [one.namespace for one in each if one is not None]
    assert found[0] == found[1]
    assert len({names.namespace, *found}) == 4


def test_an_adapter_of_a_hub_without_a_commit_is_not_shared(make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    engine.arguments["enable_lora"] = True
    assert private(engine) is None
    engine.adapter = "some/adapter"
    assert private(engine) is Reason.UNKNOWN_WEIGHTS
    first = engine.names()
    assert first.namespace == engine.names().namespace
    engine.adapters = Adapters()  # another process
    assert first.namespace != engine.names().namespace


def test_a_hub_that_is_not_hugging_faces_is_not_shared(
    make_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit in the cache of one hub says nothing of the weights that come from another."""
    engine = make_engine()
    hub("a" * 40)(engine)
    assert private(engine) is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    config: Any = SimpleNamespace(load_config=engine.config().load_config)
    of_model: Any = SimpleNamespace(model="some/model", revision=None, model_weights="")
    assert not offload_names._are_known(config, of_model)


def test_unknown_weights_of_a_drafter_are_not_shared(make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    draft()(engine)
    assert private(engine) is None
    (engine.folder.parent / "drafter" / "model.safetensors").unlink()
    assert private(engine) is Reason.UNKNOWN_WEIGHTS


# Weights.


@pytest.mark.parametrize("changed", TENSORS)
def test_a_change_of_any_one_tensor_is_seen(changed: str, tmp_path: Path) -> None:
    plain = weights_of(str(write_model(tmp_path / "a")))
    assert plain == weights_of(str(write_model(tmp_path / "b")))
    reweigh_at(tmp_path / "b", changed)
    assert weights_of(str(tmp_path / "b")) != plain


def test_a_change_is_seen_however_many_tensors_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples are left for each tensor, but one at least."""
    monkeypatch.setattr(identity, "MAX_SAMPLES", 1)
    test_a_change_of_any_one_tensor_is_seen("layers.3.qkv", tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "cut.safetensors"])
def test_files_of_other_formats_are_sampled_throughout(name: str, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, 9_000_000, np.uint8)
    numbers[:8] = 255  # no header of safetensors is as long
    digests = set()
    for changed in (0, *range(1_000_000, 9_000_000, 1_000_000)):
        held = numbers.copy()
        held[changed : changed + 16_384] ^= 1
        (tmp_path / name).write_bytes(held.tobytes())
        digests.add(weights_of(str(tmp_path / name)).digest)
    assert len(digests) == 9


def test_few_bytes_are_read_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    samples = identity._samples

    def watched(*given: Any) -> list[tuple[int, int]]:
        found = list(samples(*given))
        read.extend(found)
        return found

    monkeypatch.setattr(identity, "_samples", watched)
    write_weights(tmp_path / "model.safetensors", {"a": 3_000_000, "b": 5})
    assert weights_of(str(tmp_path)).are_known
    assert sum(length for _, length in read) == 8 * identity.SAMPLE_BYTES + 20
    begins, ends = zip(*((begin, begin + length) for begin, length in read[:8]), strict=True)
    assert ends[-1] - begins[0] == 12_000_000


def reweigh_at(folder: Path, changed: str) -> None:
    write_weights(folder / "model.safetensors", TENSORS, changed)


# vLLM's hash, by vLLM's own function.

PROMPT = list(range(100, 164))


def block_hashes(**parts: Any) -> list[bytes]:
    algorithm = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(algorithm)
    hasher = get_request_block_hasher(16, algorithm)
    return list(Request("r", PROMPT, SamplingParams(), None, **parts, block_hasher=hasher).block_hashes)


def image(identifier: str = "a", offset: int = 20) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 8))]


def embeddings(value: float) -> torch.Tensor:
    return torch.full((len(PROMPT), 4), value)


REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, {}),
    "adapter": (0, {"lora_request": LoRARequest("a", 1, "/adapters/a")}),
    "adapter of another name": (0, {"lora_request": LoRARequest("b", 1, "/adapters/a")}),
    "adapter of another path": (0, {"lora_request": LoRARequest("a", 1, "/adapters/b")}),
    "image": (1, {"mm_features": image()}),
    "another image": (1, {"mm_features": image("b")}),
    "image elsewhere": (1, {"mm_features": image(offset=21)}),
    "salt": (0, {"cache_salt": "one"}),
    "another salt": (0, {"cache_salt": "two"}),
    "embeddings": (0, {"prompt_embeds": embeddings(1.0)}),
    "other embeddings": (0, {"prompt_embeds": embeddings(2.0)}),
}


@pytest.mark.xfail(
    versions.installed_version().startswith("0.30."), strict=True, reason="so kvferry refuses to offload with vLLM 0.30"
)
def test_vllms_hash_covers_the_rest_of_a_request() -> None:
    """From the block on that has it, no block of a request is that of another request."""
    plain = block_hashes()
    found = {name: block_hashes(**parts) for name, (_, parts) in REQUESTS.items()}
    assert found == {name: block_hashes(**parts) for name, (_, parts) in REQUESTS.items()}
    own = {name: found[name][first:] for name, (first, _) in REQUESTS.items()}
    assert all(found[name] == plain[:first] + own[name] for name, (first, _) in REQUESTS.items())
    every = [block_hash for listed in own.values() for block_hash in listed]
    assert len(set(every)) == len(every) == 8 * 4 + 3 * 3


def test_an_adapter_replaced_in_its_place_keeps_its_hash() -> None:
    """The names of an adapter tell its weights apart from process to process, but not while an engine runs."""
    adapters = [LoRARequest("a", 1, "/adapters/a", load_inplace=replaced) for replaced in (False, True)]
    one, other = (block_hashes(lora_request=adapter) for adapter in adapters)
    assert one == other
