"""What ``kvferry plan --model`` says of public configurations, beside what vLLM's own classes make of them.

vLLM builds its model class of each file at full size, without weights and without an engine (planner_oracle_process).
The plan has the same groups, layers, windows, heads, sizes and bytes, or is refused with the field or the kind named.
All files are compared in ``make test-matrix``, some of them otherwise.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan_report import RANK_SPACING, EngineShape, engine_of
from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.integrations.vllm.versions import installed_version
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind
from kvferry.models.config import read_fields
from kvferry.models.families import layer_of, model_caches

from ..matrix_results import Results, results_folder
from ..small_models import shrink
from ..small_models.weights import CONFIGS, names

pytest.importorskip("vllm")
if not (release := installed_version()).startswith("0.32."):
    pytest.skip(f"the planner has the rules of vLLM 0.32, not {release}", allow_module_level=True)

from .planner_oracle import Oracle

KINDS = {
    CacheKind.ATTENTION: "full_attention",
    CacheKind.SLIDING_WINDOW: "sliding_window",
    CacheKind.MLA: "mla_attention",
    CacheKind.STATE: "mamba",
}
SOME = {
    "AI21-Jamba-1.5-Mini": 2,
    "DeepSeek-V3": 2,
    "Falcon-H1-7B-Instruct": 1,
    "MiniMax-M2-AWQ": 16,
    "Meta-Llama-3-8B-Instruct-FP8-KV": 2,
    "NVIDIA-Nemotron-Nano-12B-v2": 2,
    "Qwen3-Next-80B-A3B-Instruct": 4,
    "Qwen3.5-27B": 2,
    "c4ai-command-r7b-12-2024": 1,
    "gemma-3-12b-it": 2,
    "gemma-3n-E4B-it": 1,
    "gpt-oss-20b": 2,
    "granite-4.0-h-small": 2,
    "step3": 2,
}
"""Models of every kind, and the tensor-parallel size at which they are compared in each run of the tests."""
REFUSED = {
    "Bamba-9B-v2": "bamba",
    "DeepSeek-V3.2": "indexer",
    "EXAONE-4.5-33B-FP8": "layer_types",
    "GLM-5": "indexer",
    "Kimi-Linear-48B-A3B-Instruct": "latent",
    "LFM2-1.2B": "short convolution",
    "Ling-lite-1.5": "auto_map",
    "Llama-4-Scout-17B-16E-Instruct": "chunks",
    "Step-3.5-Flash": "step3p5",
    "gemma-4-26B-A4B": "wider heads",
    "gpt2": "'dtype'",
}
"""Configurations that the planner refuses, and what its text names."""


def planned(path: Path, tp: int, dtype: str | None) -> dict[str, Any]:
    """Return kvferry's groups of rank 0, as the oracle describes vLLM's."""
    engine = engine_of("prefill", EngineShape(tp, NamedLayout.BHLNC, 16), model_caches(path, dtype))
    shard = engine.shards(num_blocks=4, base_address=RANK_SPACING)[0]
    groups = []
    for group in engine.groups:
        held = next(each for each in shard.groups if each.name == group.name)
        parts = [part for part in held.components if part.name != "padding"]
        sizes = [sum(map(len, part.heads)) * part.num_channels * part.itemsize for part in parts]
        found: dict[str, Any] = {
            "layers": [layer_of(name) for name in group.layers],
            "kind": KINDS[group.kind],
            "window": group.cache.window,
            "page_bytes": engine.page_bytes,
            "content_bytes": sum(sizes) * held.block_size,
        }
        if group.kind is CacheKind.STATE:
            conv, recurrent = parts[:-1], parts[-1]
            found["taps"] = [conv[0].num_channels, sum(len(heads) for part in conv for heads in part.heads)]
            found["recurrent"] = [sum(map(len, recurrent.heads)), recurrent.num_channels]
            found["itemsizes"] = [conv[0].itemsize, recurrent.itemsize]
        else:
            per_head = parts[0].num_channels // (1 if group.kind is CacheKind.MLA else 2)
            found |= {"block_size": engine.block_size, "kv_heads": sum(map(len, parts[0].heads))}
            found |= {"head_size": per_head, "itemsize": parts[0].itemsize}
        groups.append(found)
    return {"groups": groups, "block_bytes": engine.as_json()["block_bytes"], "layout": engine.layout.value}


def as_planned(answer: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's groups in the words of :func:`planned`."""
    groups = []
    for group in answer["groups"]:
        found = dict(group)
        if "shapes" in found:
            conv, recurrent = found.pop("shapes")
            found |= {"taps": conv, "recurrent": [recurrent[0], math.prod(recurrent[1:])]}
            del found["block_size"]  # tokens after which vLLM would start another state; one block is one state
        groups.append(found)
    return {"groups": groups, "block_bytes": answer["block_bytes"]}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a line for each value that differs."""
    if len(ours["groups"]) != len(theirs["groups"]):
        return [f"{len(ours['groups'])} groups, vLLM has {len(theirs['groups'])}: {theirs['groups']}"]
    found = []
    for index, (one, other) in enumerate(zip(ours["groups"], theirs["groups"], strict=True)):
        names = sorted({*one, *other})
        found += [
            f"group {index}: {name} is {one.get(name)}, vLLM has {other.get(name)}"
            for name in names
            if one.get(name) != other.get(name)
        ]
    if ours["block_bytes"] != theirs["block_bytes"]:
        found.append(f"block_bytes is {ours['block_bytes']}, vLLM has {theirs['block_bytes']}")
    return found


def compare(oracle: Oracle, path: Path, tp: int, dtype: str | None = None) -> tuple[str, str]:
    """Return ``equal``, ``refused`` or ``not compared`` (vLLM has no such engine), and why; fail where they differ."""
    try:
        ours = planned(path, tp, dtype)
    except KVFerryError as error:
        return "refused", error.message
    answer = oracle.groups(path, tp, dtype=dtype, layout=ours.pop("layout"))
    if "refused" in answer:
        return "not compared", f"vLLM refuses TP {tp}: {answer['refused']}"
    found = differences(ours, as_planned(answer))
    assert not found, f"{path.stem} at TP {tp}:\n" + "\n".join(found)
    return "equal", f"TP {tp}"


def dtype_for(path: Path) -> str | None:
    """Return bfloat16 for a configuration that names no dtype, as its user must."""
    fields = read_fields(path)
    fields |= fields.get("text_config") or {}
    return None if fields.get("torch_dtype") or fields.get("dtype") else "bfloat16"


@pytest.mark.parametrize("name", names() if results_folder() else SOME)
def test_a_plan_has_the_groups_and_bytes_of_vllm(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """Of all files, and at three tensor-parallel sizes, where the results are for docs/matrix.md."""
    path = CONFIGS / f"{name}.json"
    if folder := results_folder():
        record(name, oracle, Results(folder), tmp_path)
    else:
        found, why = compare(oracle, path, SOME[name], dtype_for(path))
        assert found == "equal", why


def record(name: str, oracle: Oracle, results: Results, folder: Path) -> None:
    """Compare a model at all sizes, and made small as the tests' engines run it, and write how that ended."""
    path = CONFIGS / f"{name}.json"
    try:
        dtype = dtype_for(path)
        found = [compare(oracle, path, tp, dtype) for tp in sizes_of(path, dtype)]
        (small := folder / f"{name}.json").write_text(json.dumps(shrink(json.loads(path.read_text()))))
        found += [
            (outcome, f"{why}, made small") for outcome, why in (compare(oracle, small, tp, dtype) for tp in (1, 2))
        ]
    except KVFerryError as error:
        results.add_model(name, "planner", f"refused: {error.message}")
    except AssertionError as error:
        results.add_model(name, "planner", f"**failed**: {error}")
        raise
    else:
        given = ", with --dtype bfloat16" if dtype else ""
        results.add_model(name, "planner", f"{found[0][0]}: {'; '.join(why for _, why in found)}{given}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_planned_is_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        model_caches(CONFIGS / f"{name}.json")
    assert REFUSED[name] in error.value.message
    assert error.value.remedy
    assert error.value.reason in (Reason.UNSUPPORTED, Reason.INVALID_SETTING)


OLDER = {"torch_dtype": "bfloat16", "vocab_size": 65024}
FALCON = {**OLDER, "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False, "bias": False}


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"hidden_size": 4544, "num_attention_heads": 71, "multi_query": True, **FALCON}, 1),
        (
            {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True}
            | {"multi_query": True, **FALCON},
            8,
        ),
        (
            {"n_embd": 6144, "n_head": 48, "n_layer": 4, "multi_query": True, "model_type": "gpt_bigcode"}
            | {**OLDER, "architectures": ["GPTBigCodeForCausalLM"]},
            1,
        ),
    ],
    ids=["falcon-7b", "falcon-40b", "starcoder"],
)
def test_queries_of_many_heads(fields: dict[str, Any], kv_heads: int, oracle: Oracle, tmp_path: Path) -> None:
    """Families that say in a flag how many heads the keys have; the values are those of the named models."""
    (path := tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, **fields}))
    assert planned(path, 1, None)["groups"][0]["kv_heads"] == kv_heads
    found, why = compare(oracle, path, 1)
    assert found == "equal", why


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama-3.1-8B-Instruct", {"sliding_window": 4096}),
        ("Llama-3.1-8B-Instruct", {"num_key_value_heads": None, "torch_dtype": "float32"}),
        ("Qwen3-8B", {"head_dim": ..., "num_key_value_heads": ...}),
        ("Qwen3-8B", {"sliding_window": 4096, "use_sliding_window": False}),
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": ..., "num_key_value_heads": ...}),
        ("granite-4.0-h-small", {"num_key_value_heads": ..., "mamba_d_head": "auto"}),
        ("gemma-3-1b-it", {"head_dim": ..., "layer_types": ..., "sliding_window_pattern": 4}),
    ],
)
def test_fields_that_are_left_out(name: str, changes: dict[str, Any], oracle: Oracle, tmp_path: Path) -> None:
    """What the class and vLLM make of a missing field, or of one that other models of the family lack."""
    fields = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    (path := tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    found, why = compare(oracle, path, 1)
    assert found == "equal", why


def test_a_difference_is_told(oracle: Oracle, tmp_path: Path) -> None:
    """The comparison itself: one number of the configuration that only the planner reads is another."""
    fields = json.loads((CONFIGS / "gemma-3-12b-it.json").read_text())
    theirs = as_planned(oracle.groups(CONFIGS / "gemma-3-12b-it.json", 1))
    fields["text_config"]["head_dim"] = 240
    (path := tmp_path / "config.json").write_text(json.dumps(fields))
    found = differences(planned(path, 1, None), theirs)
    assert "group 0: head_size is 240, vLLM has 256" in found
    assert len(found) > 2 * len(theirs["groups"])


def sizes_of(path: Path, dtype: str | None) -> Sequence[int]:
    """Return 1, 2, and a tensor-parallel size greater than the KV heads, so that ranks hold copies."""
    caches = model_caches(path, dtype).named().values()
    heads = next((getattr(cache, "num_kv_heads", 0) for cache in caches if cache.kind is not CacheKind.STATE), 1)
    return 1, 2, 2 * heads
