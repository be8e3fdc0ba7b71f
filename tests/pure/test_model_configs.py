"""What reads a model's configuration: its class in transformers, or the file alone where every field is there."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.layout.shard import CacheKind
from kvferry.models.config import PUBLISHED, TRAINING, published_config
from kvferry.models.families import BY_HAND, FAMILIES, ModelCaches, caches_of, model_caches
from kvferry.models.groups import AttentionCache

from .refusals import refused

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "model_configs"
PUBLIC = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "sources")
FULL = {
    "dtype": "bfloat16",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 512,
}
SMALL = {"hidden_size": 1152, "num_attention_heads": 6, "num_hidden_layers": 4}
"""Sizes that are no class's default: a head of 192, and 6 of them."""


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


def written(folder: Path, **fields: Any) -> Path:
    (path := folder / "config.json").write_text(json.dumps(fields))
    return path


def attention(caches: ModelCaches) -> AttentionCache:
    """Return the cache of a model's equal attention layers."""
    (cache,) = {each for each in caches.named().values() if isinstance(each, AttentionCache)}
    return cache


def test_a_class_fills_in_what_the_file_leaves_out() -> None:
    caches = model_caches(CONFIGS / "gemma-3-12b-it.json")
    assert {cache.head_size for cache in caches.named().values()} == {256}  # type: ignore[union-attr]
    assert caches.origin == f"Gemma3TextConfig of transformers {transformers.__version__}"


@pytest.mark.usefixtures("without_transformers")
def test_a_field_that_only_a_class_fills_in_is_refused_by_its_name(tmp_path: Path) -> None:
    path = CONFIGS / "gemma-3-12b-it.json"
    text = refused(Reason.INVALID_SETTING, lambda: model_caches(path))
    assert "no 'layer_types'" in text
    fields = json.loads(path.read_text())
    fields["text_config"]["layer_types"] = ["sliding_attention"] * fields["text_config"]["num_hidden_layers"]
    path = written(tmp_path, **fields)
    text = refused(Reason.INVALID_SETTING, lambda: model_caches(path))
    assert "no 'head_dim'" in text
    assert "transformers is not installed" in text
    assert "Install transformers" in text
    assert "--head-size" in text


@pytest.mark.usefixtures("without_transformers")
def test_a_file_with_every_field_needs_no_class() -> None:
    caches = model_caches(CONFIGS / "Llama-3.1-8B-Instruct.json")
    assert attention(caches) == AttentionCache(num_kv_heads=8, head_size=128, itemsize=2)
    assert caches.origin == "the configuration alone"


def test_a_file_read_alone_is_read_as_its_class_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All public files: the same caches, or a refusal that names a field or the family."""
    by_class: dict[str, ModelCaches] = {}
    for name in PUBLIC:
        try:
            by_class[name] = model_caches(CONFIGS / f"{name}.json", "bfloat16")
        except KVFerryError:
            continue
    monkeypatch.setitem(sys.modules, "transformers", None)
    alone, refusals = set(), {}
    for name, caches in by_class.items():
        try:
            assert model_caches(CONFIGS / f"{name}.json", "bfloat16").layers == caches.layers, name
            alone.add(name)
        except SettingsError as error:
            refusals[name] = error.message
    assert all("which its class may fill in" in message for message in refusals.values()), refusals
    assert {"Qwen3-8B", "DeepSeek-V3", "gpt-oss-20b", "step3", "granite-4.0-h-small"} <= alone
    assert len(by_class) > 50


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.derived))
def test_fields_that_are_left_to_vllm_are_left_out_by_the_class(family: str) -> None:
    """Else a file that is read alone would be read otherwise than by its class."""
    if family not in transformers.CONFIG_MAPPING:
        assert family == "step3_text", "a family without a class"
        return
    names = {"gpt2": {"n_embd": 1152, "n_head": 6, "n_layer": 4}, "granitemoehybrid": {**SMALL, "mamba_n_heads": 12}}
    config = transformers.CONFIG_MAPPING[family](**names.get(family, SMALL))
    types = getattr(config, "layer_types", None)
    left_to_vllm = {
        "head_dim": getattr(config, "head_dim", None) in (None, 0, 192),
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) in (None, 6),
        "sliding_window": not getattr(config, "sliding_window", None),
        "layer_types": types is None or set(types) == {"full_attention"},
    }
    assert {name for name, is_left in left_to_vllm.items() if is_left} >= FAMILIES[family].derived


def test_a_window_of_a_plain_family_is_every_layers(tmp_path: Path) -> None:
    """Where no layer has a type of its own, vLLM gives the window to all layers."""
    caches = model_caches(written(tmp_path, model_type="llama", sliding_window=4096, **FULL))
    assert attention(caches).window == 4096
    fields = {**FULL, "sliding_window": 4096, "max_window_layers": 12}
    caches = model_caches(written(tmp_path, model_type="qwen2", use_sliding_window=False, **fields))
    assert attention(caches).kind is CacheKind.ATTENTION


@pytest.mark.parametrize(("name", "kv_heads", "head_size"), [("step3", 1, 256), ("gpt2", 12, 64), ("phi-4", 10, 128)])
def test_heads_are_counted_as_vllm_counts_them(name: str, kv_heads: int, head_size: int) -> None:
    cache = attention(model_caches(CONFIGS / f"{name}.json", "bfloat16"))
    assert (cache.num_kv_heads, cache.head_size) == (kv_heads, head_size)


def test_a_quantised_cache_has_the_dtype_of_its_scheme() -> None:
    assert attention(model_caches(CONFIGS / "Meta-Llama-3-8B-Instruct-FP8-KV.json")).itemsize == 1
    assert attention(model_caches(CONFIGS / "MiniMax-M2.5-NVFP4.json")).itemsize == 1
    assert attention(model_caches(CONFIGS / "Meta-Llama-3-8B-Instruct-FP8-KV.json", "bfloat16")).itemsize == 2


def test_a_dtype_of_one_byte_is_not_that_of_states() -> None:
    caches = model_caches(CONFIGS / "granite-4.0-h-small.json", "fp8").named().values()
    assert {(cache.kind, cache.itemsize) for cache in caches} == {(CacheKind.ATTENTION, 1), (CacheKind.STATE, 2)}


def test_a_models_own_code_never_runs(tmp_path: Path) -> None:
    """Neither where a class is known, which is taken, nor where none is."""
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it ran')")
    own = {"AutoConfig": "configuration_own.OwnConfig"}
    assert model_caches(written(tmp_path, model_type="llama", auto_map=own, **FULL)).origin.startswith("LlamaConfig")
    path = written(tmp_path, model_type="unheard_of", auto_map=own, **FULL)
    assert "'auto_map'" in refused(Reason.UNSUPPORTED, lambda: model_caches(path))


def test_layers_without_a_cache_of_their_own_keep_their_numbers() -> None:
    """Nemotron-H has layers without attention or state; those of Gemma 3n that share a cache are the last."""
    nemotron = model_caches(CONFIGS / "Nemotron-H-8B-Base-8K.json")
    full = [name for name, cache in nemotron.named().items() if cache.kind is CacheKind.ATTENTION]
    assert full == ["7", "18", "29", "40"]
    assert len(nemotron.layers) == 52
    gemma = model_caches(CONFIGS / "gemma-3n-E4B-it.json")
    assert [len(caches) for caches in gemma.layers] == [1] * 20 + [0] * 15


def test_two_caches_of_one_layer() -> None:
    caches = model_caches(CONFIGS / "Falcon-H1-7B-Instruct.json").named()
    assert [caches[name].kind for name in ("0", "0.1", "43.1")] == [
        CacheKind.ATTENTION,
        CacheKind.STATE,
        CacheKind.STATE,
    ]


def test_shapes_given_by_hand_say_so() -> None:
    assert caches_of(None, 2, 4, 8, None).origin == BY_HAND
    path = CONFIGS / "Llama-3.1-8B-Instruct.json"
    assert caches_of(path, None, 4, None, None).origin.endswith(f"and {BY_HAND}")


def test_a_plan_by_hand_imports_neither_transformers_nor_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; import typer; from kvferry.cli.plan import plan; "
        "app = typer.Typer(); app.command()(plan); "
        "found = CliRunner().invoke(app, '--layers 2 --kv-heads 2 --head-size 64 --tokens 64'.split()); "
        "print(found.exit_code, *(name for name in ('transformers', 'torch', 'vllm') if name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 30_000_000},
        {"num_labels": 3_000_000},
        {"num_hidden_layers": 1e300},
        {"text_config": {"model_type": "llama", "num_hidden_layers": 10**1000}},
    ],
)
def test_no_class_makes_a_list_of_millions(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Such a list takes minutes, and all memory where the number is greater still."""
    path = written(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"], **FULL | fields)
    began = time.monotonic()
    text = refused(Reason.UNSUPPORTED, lambda: model_caches(path))
    assert "above 4096" in text
    assert time.monotonic() - began < 1


def caches_or_refusal(path: Path) -> object:
    """Return the caches in bfloat16, or the text of the refusal of a family."""
    try:
        return model_caches(path, "bfloat16").layers
    except SettingsError as error:
        return str(error) if error.reason is Reason.UNSUPPORTED else error.reason


def test_a_public_model_has_the_caches_of_its_configuration() -> None:
    models = {name: each["model"] for name, each in json.loads((CONFIGS / "sources.json").read_text()).items()}
    known = {name: model for name, model in models.items() if published_config(model)}
    for name, model in known.items():
        assert caches_or_refusal(Path(model)) == caches_or_refusal(CONFIGS / f"{name}.json"), model
    assert len(known) > 45


@pytest.mark.usefixtures("without_transformers")
def test_public_models_are_read_without_transformers() -> None:
    models = json.loads(PUBLISHED.read_text())
    assert Reason.INVALID_SETTING not in map(caches_or_refusal, map(Path, models))
    names = [TRAINING.sub("", model.lower()).partition("/")[2] for model in models]
    assert len(set(names)) == len(names), "a name without its owner is that of two models"
