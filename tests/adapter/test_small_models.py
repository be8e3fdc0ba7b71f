"""Published configurations made small: only sizes change, and what is written is what the configuration says."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from tests.small_models import shrink, write_small_model
from tests.small_models.shrink import FIRST_SPECIAL_TOKEN, VOCABULARY_SIZE, language_part, num_layers
from tests.small_models.trial import load_table
from tests.small_models.weights import make_network, names, published, spread_weights

NAMES = names()
SIZES = {
    *("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "intermediate_size", "intermediate_size_mlp"),
    *("shared_intermediate_size", "block_dim", "block_ff_dim", "conv_dim", "conv_dim_out"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "num_global_key_value_heads", "num_attention_groups"),
    *(f"attention_other_setting.{name}" for name in ("num_attention_heads", "num_attention_groups")),
    *("num_attention_heads_per_layer", "linear_num_key_heads", "linear_num_value_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_group", "topk_group"),
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    "top_k_experts",
    *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("share_expert_dim", "share_q_dim", "q_lora_rank", "index_topk", "laurel_rank", "hidden_size_per_layer_input"),
    *("mamba_d_state", "mamba_d_ssm", "mamba_dt_rank", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups"),
    *("n_groups", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"),
    *("vocab_size", "vocab_size_per_layer_input", "sliding_window", "sliding_window_size", "attention_chunk_size"),
    "max_position_embeddings",
    # Lists with an element for each layer, lists of layers, and numbers that count layers.
    *("layer_types", "mlp_layer_types", "hybrid_override_pattern", "attn_type_list", "num_shared_expert"),
    *("activation_sparsity_pattern", "attn_layer_indices", "full_attn_idxs", "moe_layers_enum", "no_rope_layers"),
    *("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"),
    *("max_window_layers", "moe_layer_end_index", "num_kv_shared_layers"),
    *(f"linear_attn_config.{name}" for name in ("num_heads", "head_dim", "full_attn_layers", "kda_layers")),
}
"""What may change in the part of the language model."""
TOWER_SIZES = {
    *("depth", "num_hidden_layers", "conf_num_hidden_layers", "hidden_size", "intermediate_size", "out_hidden_size"),
    *(
        "num_heads",
        "num_key_value_heads",
        "num_attention_heads",
        "conf_num_attention_heads",
        "vision_output_dim",
        "projector_input_dim",
    ),
    *("projector_output_dim", "output_proj_dims", "vocab_offset"),
}
COPIES = {"hidden_size", "vocab_size"}
"""What a multimodal configuration repeats outside of its language model's part."""
WITHOUT_CLASS = {"Ling-lite-1.5", "step3", "Kimi-K2-Instruct", "EXAONE-4.5-33B-FP8"}
"""Models without a class in transformers, and EXAONE 4.5 FP8, which its class refuses as it is published: it has one
type of layer more than layers."""


@pytest.mark.parametrize("name", NAMES)
def test_only_sizes_change(name: str) -> None:
    """Every field is kept, in its place, and the only new one is the vocabulary's size."""
    before = published(name)
    after = shrink(before)
    part = _part_name(before)
    for path, old, new in _differences(before, after):
        assert path != "rope_theta" or isinstance(old, list)
        head, _, tail = path.partition(".")
        field = path.rpartition(".")[2]
        if field.endswith(("_token_id", "_token_index")):
            assert _all_below(new, VOCABULARY_SIZE), f"{path}: {old} -> {new}"
        elif part in ("", head):
            assert (tail if part else path) in SIZES, f"{path}: {old} -> {new}"
        elif tail:
            assert head.endswith("_config"), path
            assert tail in TOWER_SIZES, f"{path}: {old} -> {new}"
        else:
            assert path in COPIES, f"{path}: {old} -> {new}"
    new_paths = set(_paths(after)) - set(_paths(before))
    assert new_paths <= {f"{part}.vocab_size".lstrip(".")}
    assert [path for path in _paths(after) if path not in new_paths] == list(_paths(before))


@pytest.mark.parametrize("name", NAMES)
def test_the_published_configuration_is_not_changed(name: str) -> None:
    before = published(name)
    kept = copy.deepcopy(before)
    shrink(before)
    assert before == kept


@pytest.mark.parametrize("name", NAMES)
def test_layers_agree(name: str) -> None:
    """Lists with an element for each layer have one for each layer that is left, and layers that are named exist."""
    before, after = language_part(published(name)), language_part(shrink(published(name)))
    old, new = num_layers(before), num_layers(after)
    assert min(4, old) <= new <= min(24, old)
    for field, value in before.items():
        if field in ("layer_types", "mlp_layer_types", "hybrid_override_pattern", "attn_type_list", "moe_topk"):
            assert len(after[field]) - new == len(value) - old, field
            assert after[field][:new] == value[:new] or field == "moe_topk", field
        elif field in ("attn_layer_indices", "full_attn_idxs") and value:
            assert after[field] == [layer for layer in value if layer < new], field
            assert len(after[field]) >= 2, field


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_CLASS])
def test_each_kind_of_layer_occurs_twice(name: str) -> None:
    """What transformers' class says of the layers of both configurations."""
    before, after = published(name), shrink(published(name))
    old, new = _class_of(before), _class_of(after)
    total, shared = num_layers(language_part(after)), getattr(new, "num_kv_shared_layers", 0) or 0
    for field in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers"):
        of_old, of_new = getattr(old, field, None), getattr(new, field, None)
        if not isinstance(of_old, list) or not of_old:
            continue
        old_shared = getattr(old, "num_kv_shared_layers", 0) or 0
        for own in (slice(0, total - shared), slice(total - shared, total)):
            old_own = slice(0, len(of_old) - old_shared) if own.start == 0 else slice(len(of_old) - old_shared, None)
            least = {kind: min(2, count) for kind, count in Counter(of_old[old_own]).items()}
            assert Counter(of_new[own]) >= Counter(least), (field, of_new)


@pytest.mark.parametrize("name", NAMES)
def test_the_class_accepts_it(name: str) -> None:
    """Transformers' class takes the small configuration where it takes the published one."""
    before, after = published(name), shrink(published(name))
    assert (_class_of(after) is None) == (_class_of(before) is None) == (name in WITHOUT_CLASS)


@pytest.mark.parametrize("name", NAMES)
def test_heads_keep_what_two_ranks_can_share(name: str) -> None:
    before, after = language_part(published(name)), language_part(shrink(published(name)))
    heads = "n_head" if "n_head" in before else "num_attention_heads"
    assert after[heads] % 2 == 0 or before[heads] % 2
    for field in ("num_key_value_heads", "num_global_key_value_heads", "num_attention_groups"):
        if before.get(field) is None:
            continue
        assert after[field] % 2 == 0 or before[field] % 2, field
        ratio = before[heads] // before[field]
        assert after[heads] // after[field] == min(ratio, 16), field
    if "head_dim" not in before and (old := _class_of(published(name))) is not None:
        new = _class_of(shrink(published(name)))
        old_dim, new_dim = (getattr(each, "head_dim", None) for each in (old, new))
        derived = before.get("hidden_size", 0) // before[heads]
        assert new_dim in ({32, 64, 80, 96, 128} if old_dim in (None, derived) else {old_dim}) or new_dim is None


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_towers_divide(name: str) -> None:
    """VLLM builds some towers even where a prompt has no images."""
    for field, tower in shrink(published(name)).items():
        if field in ("vision_config", "audio_config") and tower is not None:
            heads = next((tower[each] for each in ("num_attention_heads", "num_heads") if each in tower), 1)
            assert heads % tower.get("num_key_value_heads", heads) == 0, field
            assert tower.get("hidden_size", heads) % heads == 0, field


def test_windows_matter_in_short_prompts() -> None:
    """A window that no prompt of the model exceeds stays as it is; an odd one stays odd."""
    llama = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    context = {"max_position_embeddings": 131072, "vocab_size": 2048, **llama}
    windows = {window: shrink({**context, "sliding_window": window})["sliding_window"] for window in WINDOWS}
    assert windows == WINDOWS


WINDOWS = {None: None, 100: 100, 128: 128, 512: 128, 2047: 127, 4096: 128, 131072: 131072, 262144: 262144}


def test_special_tokens_are_none_of_a_prompt() -> None:
    tokens = shrink(published("Llama-3.1-8B-Instruct"))["eos_token_id"]
    assert len(set(tokens)) == 3
    assert all(FIRST_SPECIAL_TOKEN <= token < VOCABULARY_SIZE for token in tokens)


def test_weights_are_written_once_and_alike(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = write_small_model("Qwen3-8B", tmp_path / "one")
    torch.manual_seed(2)
    other = write_small_model("Qwen3-8B", tmp_path / "other")
    assert one.name == other.name
    assert {path.name for path in one.iterdir()} == {"config.json", "model.safetensors"}
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()
    changed_at = (one / "config.json").stat().st_mtime_ns
    assert write_small_model("Qwen3-8B", tmp_path / "one") == one
    assert (one / "config.json").stat().st_mtime_ns == changed_at
    assert write_small_model("Qwen3-8B", tmp_path / "one", dtype="bfloat16") != one


def test_the_configuration_is_written_as_it_was_published(tmp_path: Path) -> None:
    """With its fields in their order, none from transformers, and the type of the weights that were written."""
    written = json.loads((write_small_model("gemma-3-1b-it", tmp_path) / "config.json").read_text())
    expected = {**shrink(published("gemma-3-1b-it")), "torch_dtype": "float32"}
    assert list(written.items()) == list(expected.items())


@pytest.mark.parametrize("name", ["granite-4.0-h-1b", "granite-3.3-8b-instruct", "gemma-3-1b-it", "Qwen3-8B"])
def test_logits_depend_on_the_context(name: str) -> None:
    """Two prompts that differ in their first tokens only have other logits, by as much as tokens have."""
    config = shrink(published(name))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = make_network(copy.deepcopy(config), "float32")
        spread_weights(network.named_parameters(), config)
        prompts = torch.randint(2, 2000, (2, 200))
        prompts[1, 40:] = prompts[0, 40:]
        logits = network(prompts).logits[:, -1]
    assert (logits[0] - logits[1]).std() > 0.1 * logits[0].std()
    assert logits[0].argmax() != prompts[0, -1]


def test_each_model_was_tried() -> None:
    """The table has each model, and where vLLM's CPU build does not run it, its reason for each type of element."""
    table = load_table()
    assert set(table) == set(NAMES)
    for name, outcome in table.items():
        assert outcome["runs"] == ("dtype" in outcome), name
        assert outcome["runs"] or outcome["reasons"], name
        assert not outcome["runs"] or outcome["first_tokens_matter"], name


@pytest.mark.parametrize(("name", "prefix"), [("gemma-3n-E4B-it", "model.language_model."), ("step3", "model.")])
def test_models_written_without_their_towers(name: str, prefix: str, tmp_path: Path) -> None:
    """They have each layer of the language model under its published name, and nothing of another part."""
    path = write_small_model(name, tmp_path)
    config = language_part(json.loads((path / "config.json").read_text()))
    tensors = load_file(path / "model.safetensors")
    assert {key for key in tensors if not key.startswith(prefix)} <= {"lm_head.weight"}
    layers = {key.removeprefix(f"{prefix}layers.").partition(".")[0] for key in tensors if "layers." in key}
    assert layers == {str(layer) for layer in range(config["num_hidden_layers"])}
    assert tensors[f"{prefix}embed_tokens.weight"].shape == (VOCABULARY_SIZE, config["hidden_size"])


# What configurations have


def _part_name(config: Mapping[str, Any]) -> str:
    return "text_config" if "text_config" in config else ""


def _class_of(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of transformers' configuration, or None where it has no class or refuses."""
    given = {name: value for name, value in copy.deepcopy(dict(config)).items() if name != "quantization_config"}
    model_type = given.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    known: Callable[..., Any] = CONFIG_MAPPING[model_type]
    try:
        return known(**given).get_text_config()
    except Exception as error:
        if "validat" not in str(error):
            raise
        return None


def _paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{name}.")


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        new = after[name]
        if isinstance(old, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def _all_below(tokens: Any, most: int) -> bool:
    return all(token < most for token in (tokens if isinstance(tokens, list) else [tokens]))
