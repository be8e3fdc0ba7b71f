"""What an engine serves is read once, before vLLM's model classes change the configuration that says it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm import offload_names
from kvferry.integrations.vllm.identity import identity_of
from kvferry.integrations.vllm.offload_names import engine_facts
from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.settings import Settings

from ..small_models.weights import published

SERVED = Settings()
TEXT_ALONE = {"Llama-4-Scout-17B-16E-Instruct": "Llama4ForCausalLM"}
"""Models of images too, and vLLM's class of their text model, which imports nothing for images."""


@pytest.fixture(autouse=True)
def plugin() -> None:
    register()


def engine(
    folder: Path, name: str, connector: str | None = "KVFerryConnector", fields: Any = None, **arguments: Any
) -> Any:
    """Return vLLM's configuration of an engine that serves a public model, some ``fields`` of which are others."""
    folder.mkdir(exist_ok=True)
    config = published(name)
    if name in TEXT_ALONE:
        config = {**config["text_config"], "architectures": [TEXT_ALONE[name]]}
    (folder / "config.json").write_text(json.dumps({**config, **(fields or {})}))
    transfer = None if connector is None else KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    arguments = {"max_model_len": 2048, **arguments}
    given = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, kv_transfer_config=transfer, **arguments
    )
    return given.create_engine_config()


def build(config: Any) -> None:
    """Change the configuration as ``deepseek_v2.py``, ``falcon_h1.py`` and layers of attention do when built."""
    model = config.model_config
    model.hf_text_config.rope_parameters["rope_type"] = "deepseek_yarn"
    model.hf_config.partial_rotary_factor = 0.5
    model.hf_config.architectures = ["LlamaForCausalLM"]
    model.model_arch_config.head_size = 7
    config.cache_config.cache_dtype = "fp8_ds_mla"


def found(config: Any) -> tuple[Identity, Any]:
    """Return what peers compare, and what names stored blocks."""
    facts = engine_facts(config, 16, "").facts
    return identity_of(config, SERVED), (facts["model"], facts["cache"]["dtype"])


def test_what_a_model_class_changes_changes_no_identity(tmp_path: Path) -> None:
    """In the worker, in a scheduler that shares its process, and in a scheduler of a process of its own."""
    config = engine(tmp_path, "DeepSeek-V2-Lite", trust_remote_code=False)
    apart = pickle.dumps(config)
    before = found(config)
    build(config)
    assert found(config) == before
    assert found(pickle.loads(apart)) == before
    worker = pickle.loads(apart)
    build(worker)
    worker.__post_init__()  # as dataclasses.replace does in a worker, after the model
    assert found(worker) == before


@pytest.mark.parametrize("name", ["KVFerryOffloadConnector", "MultiConnector"])
def test_every_way_to_name_kvferry_records(tmp_path: Path, name: str) -> None:
    config = engine(tmp_path, "Qwen3-8B", connector=None)
    with pytest.raises(SettingsError, match="was not recorded") as refusal:
        identity_of(config, SERVED)
    assert (refusal.value.reason, "VLLM_PLUGINS" in refusal.value.remedy) == (Reason.UNSUPPORTED, True)
    several = {"connectors": [{"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}]}
    settings = {"KVFerryOffloadConnector": {"host_bytes": "1 GiB"}, "MultiConnector": several}[name]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=settings
    )
    config._verify_kv_transfer_compat()
    assert identity_of(config, SERVED).num_layers == 36


@pytest.mark.parametrize(
    ("name", "limit", "said"),
    [
        ("Phi-3-mini-128k-instruct", 4096, ", max-model-len up to 4096"),
        ("Llama-4-Scout-17B-16E-Instruct", 32768, ", attn-temperature-tuning off"),
    ],
)
def test_the_longest_prompt_chooses_positions(
    tmp_path: Path, name: str, limit: int, said: str, monkeypatch: Any
) -> None:
    """LongRoPE takes other factors, Llama 4 other queries, where ``--max-model-len`` is above a limit."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    lengths = (limit // 2, limit, limit + 1, 2 * limit)
    models = [identity_of(engine(tmp_path, name, max_model_len=each), SERVED).model for each in lengths]
    assert models[0] == models[1] != models[2] == models[3]
    assert models[0].endswith(said)
    named = identity_of(engine(tmp_path, name, max_model_len=limit), Settings(model_id="mine"))
    assert named.model == f"mine{said}"


@pytest.mark.parametrize("is_in_file", [False, True])
def test_llama_4_may_be_told_how_to_scale_its_queries(tmp_path: Path, is_in_file: bool, monkeypatch: Any) -> None:
    """By a flag, or ``generation_config.json``: the caches differ behind 8192 tokens, whatever the length."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setattr(offload_names, "_digest_of_files", lambda folder: "")  # they say it of a file, not of a flag
    name, engines = "Llama-4-Scout-17B-16E-Instruct", []
    for is_on, length in ((None, 16384), (True, 16384), (True, 65536), (None, 65536)):
        told = {} if is_on is None else {"attn_temperature_tuning": is_on}
        (tmp_path / "generation_config.json").write_text(json.dumps(told if is_in_file else {}))
        flags = {} if is_in_file else {"override_generation_config": told}
        engines.append(found(engine(tmp_path, name, max_model_len=length, **flags)))
    (short, short_names), (tuned, tuned_names), (long, _), (plain_long, _) = engines
    assert short.model != tuned.model == long.model == plain_long.model
    assert short_names != tuned_names


def test_a_flag_of_llama_4_goes_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
    flag = {"attn_temperature_tuning": False}
    config = engine(tmp_path, "Llama-4-Scout-17B-16E-Instruct", override_generation_config=flag)
    assert identity_of(config, SERVED).model.endswith(", attn-temperature-tuning off")


def test_the_longest_prompt_chooses_positions_of_one_kind_of_layer(tmp_path: Path) -> None:
    """A model whose kinds of layers have positions of their own, of which one is LongRoPE."""
    factors = {"short_factor": [1.0] * 128, "long_factor": [2.0] * 128, "original_max_position_embeddings": 1024}
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 32.0, **factors},
    }
    models = [
        identity_of(engine(tmp_path, "gemma-3-1b-it", fields={"rope_parameters": rope}, max_model_len=each), SERVED)
        for each in (1024, 1025)
    ]
    assert models[0].model != models[1].model
    assert models[0].model.endswith(", max-model-len up to 1024")


def test_weights_in_an_object_store_are_named_by_their_place(tmp_path: Path) -> None:
    """VLLM gives such a model a folder of its own on each host, in which no weights are."""
    places = ("s3://models/one", "s3://models/one/", "s3://models/other")
    configs = [engine(tmp_path / str(index), "Qwen3-8B") for index in range(len(places))]
    for config, place in zip(configs, places, strict=True):
        config.model_config.model_weights = place
    one, same, other = (identity_of(config, SERVED) for config in configs)
    assert one == same
    assert one.weights != other.weights


def test_the_longest_prompt_is_no_matter_to_other_models(tmp_path: Path) -> None:
    models = [identity_of(engine(tmp_path, "Qwen3-8B", max_model_len=each), SERVED).model for each in (1024, 4096)]
    assert models[0] == models[1]
