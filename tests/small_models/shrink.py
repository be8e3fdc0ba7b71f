"""Makes a published configuration small: the numbers that make a model large change, and nothing else does."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

VOCABULARY_SIZE = 2048
FIRST_SPECIAL_TOKEN = 2000
"""Published ids that the small vocabulary does not have become ids from here on; the tests' prompts have none."""
WINDOW = 128
MIN_LAYERS = 4
HIDDEN_SIZE = 256
MAX_POSITIONS = 131072
LANGUAGE_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where a multimodal configuration has its language model; other nested configurations are towers."""

Part = dict[str, Any]

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd")
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads", "num_attention_groups")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)
EXPERT_GROUPS = ("n_group", "num_expert_group")
EXPERT_SIZES = (
    *("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size", "expert_intermediate_size"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("share_expert_dim", "share_expert_dims", "shared_expert_dim"),
)
MLP_SIZES = (
    *("intermediate_size", "intermediate_size_mlp", "shared_intermediate_size", "dense_intermediate_size"),
    *("ffn_hidden_size", "block_ff_dim"),
)
AT_MOST: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCABULARY_SIZE),
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(EXPERTS_OF_A_TOKEN, 2),
    **dict.fromkeys(EXPERT_GROUPS, 2),
    "topk_group": 1,
    # Blocks of 128 x 128 with one scale, groups of 128 weights: two ranks each have whole ones.
    **dict.fromkeys(EXPERT_SIZES, 256),
    **dict.fromkeys(MLP_SIZES, 512),
    **dict.fromkeys(("q_lora_rank", "share_q_dim"), 256),
    "moe_latent_size": 128,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 64),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    "mamba_num_heads": 8,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    # Kernels want a multiple of 128, and heads of the published number and size.
    "index_topk": 512,
}
"""The most that a size may be; a list's elements each."""
OF_THE_MLP = ("activation_sparsity_pattern", "swiglu_limits", "swiglu_limits_shared")
"""Lists with an element for each layer that say nothing of its cache. They make no kind of layer: they would keep ten
layers more, or the last ones."""
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
AS_WIDE_AS_HIDDEN = ("block_dim", "conv_dim", "conv_dim_out")
INDICES = ("moe_layers", "attn_layer_indices", "full_attn_idxs", "mlp_only_layers")
"""Lists of layers."""
PERIODS = (
    *("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval", "global_attn_every_n_layers"),
    *("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
)
"""Every so many layers one is of another kind."""
PERIODS_WITH_OFFSET = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))
FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""So many first layers are of another kind."""
# Sizes of towers, which read images and sounds; the tests' prompts have none.
TOWER_LAYERS = (*LAYERS, "depth", "encoder_layers", "conf_num_hidden_layers", "vt_num_hidden_layers")
TOWER_HEADS = (
    *("num_attention_heads", "num_heads", "conf_num_attention_heads", "vt_num_attention_heads"),
    "num_key_value_heads",
)
TOWER_SIZES = ("hidden_size", "intermediate_size", "embed_dim", "vt_hidden_size", "vt_intermediate_size")
TOWER_OUTPUTS = (
    *("out_hidden_size", "projection_dim", "text_hidden_size", "output_proj_dims", "mm_hidden_size"),
    *("vision_output_dim", "projector_input_dim", "projector_output_dim"),
)


def shrink(config: Mapping[str, Any]) -> Part:
    """Return the configuration of a model like ``config`` that is small.

    What becomes small: the number of layers, hidden and intermediate sizes, heads, experts and how many a token has,
    ranks of queries, states, the vocabulary, and the towers of multimodal models. The numbers of query and KV heads
    keep their ratio up to 16, and two ranks can share the KV heads where they can share the published ones.
    ``head_dim`` stays as it is, or is absent as it was; where it follows from ``hidden_size``, it becomes 64, or stays
    where it is smaller than 100, where lists of rope factors have its length, or where weights are quantised by groups
    of 128.

    The layers are the first of the published ones, as many as have two of each kind, and at least four; with layers
    that read the caches of earlier ones, two of each kind on both sides. Lists with an element for each layer are cut
    and lists of layers lose those that are gone. A configuration of blocks of many shapes (``block_configs``) keeps two
    layers of each shape, wherever they stand.

    Windows and chunks of attention of more than 128 tokens that are shorter than the model's context become 128 or a
    little less, so that they matter in short prompts: a window of 2047 tokens, which is no multiple of a block, becomes
    127. ``max_position_embeddings`` stays, unless a table of rotations for as many positions would need a gigabyte.
    ``index_topk`` becomes 512. A configuration that leaves the size of the vocabulary to its class (Gemma 3) gets the
    small one; no other field is new. Token ids stay inside the vocabulary: those that are too large become ids from
    ``FIRST_SPECIAL_TOKEN`` on.

    >>> small = shrink({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256,
    ...                 "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0})
    >>> small["num_hidden_layers"], small["hidden_size"], small["num_attention_heads"], small["num_key_value_heads"]
    (4, 512, 8, 2)
    """
    small = copy.deepcopy(dict(config))
    path = _language_path(small)
    text = _at(small, path)
    old = copy.deepcopy(text)
    _shrink_language(text, _as_its_class(old), _in_groups(config))
    for depth in range(len(path) + 1):
        part = _at(small, path[:depth])
        for name, value in part.items():
            if _is_tower(name, value):
                _shrink_tower(value, old, text)
            elif part is not text and name in old and value == old[name] and not isinstance(value, dict):
                part[name] = copy.deepcopy(text[name])
    _bound_tokens(small, text.get("vocab_size", VOCABULARY_SIZE))
    return small


def language_part(config: Mapping[str, Any]) -> Part:
    """Return the part of a configuration that describes the language model: itself, no copy.

    >>> language_part({"text_config": {"num_hidden_layers": 2}, "vision_config": {}})
    {'num_hidden_layers': 2}
    """
    return _at(config, _language_path(config))


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a configuration says of its quantised weights."""
    found = config.get("quantization_config") or language_part(config).get("quantization_config")
    return found if isinstance(found, Mapping) else None


def _in_groups(config: Mapping[str, Any]) -> bool:
    """Return whether weights share scales by groups or blocks, which no rank may have a part of."""
    found = quantisation(config) or {}
    weights = [group["weights"] for group in found.get("config_groups", {}).values()]
    return any(scheme.get(name) for scheme in (found, *weights) for name in ("group_size", "weight_block_size"))


def num_layers(part: Mapping[str, Any]) -> int:
    """Return the number of layers of a language model; some configurations only have a list of them."""
    for name in LAYERS:
        if isinstance(part.get(name), int):
            return int(part[name])
    return len(part["layers_block_type"])


def _language_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    for name in LANGUAGE_PARTS:
        if isinstance(config.get(name), Mapping):
            return (name, *_language_path(config[name]))
    return ()


def _at(config: Any, path: Sequence[str]) -> Part:
    for name in path:
        config = config[name]
    return config


def _is_tower(name: str, value: Any) -> bool:
    is_part = isinstance(value, dict) and name.endswith(("_config", "_tower"))
    return is_part and name not in (*LANGUAGE_PARTS, "quantization_config", "linear_attn_config")


def _as_its_class(part: Part) -> Part:
    """Return the fields with those that transformers' class adds, such as the layers' types, where it has a class."""
    from transformers import CONFIG_MAPPING

    if part.get("model_type") not in CONFIG_MAPPING:
        return part
    known: Callable[..., Any] = CONFIG_MAPPING[part["model_type"]]
    given = {name: value for name, value in part.items() if name not in ("model_type", "quantization_config")}
    return {**known(**copy.deepcopy(given)).to_dict(), **{name: value for name, value in part.items() if value}}


def _shrink_language(part: Part, filled: Part, in_groups: bool) -> None:
    layers = _kept_layers(filled)
    hidden, heads = (next(name for name in names if name in part) for names in (HIDDEN, HEADS))
    old_hidden, dim = part[hidden], part[hidden] // part[heads]
    has_own_dim = _has_own_head_dim(part, filled, dim)
    scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
    if dim >= 100 and not in_groups and not any(isinstance(value, list) for value in scaling.values()):
        dim = 64
    _shrink_heads(part, heads)
    part[hidden] = HIDDEN_SIZE if has_own_dim else part[heads] * dim
    for name in AS_WIDE_AS_HIDDEN:
        if part.get(name) == old_hidden:
            part[name] = part[hidden]
    _cut_layers(part, num_layers(filled), layers)
    for name, most in AT_MOST.items():
        if part.get(name) is not None:
            part[name] = _at_most(part[name], most)
    if any(part.get(name) for name in EXPERTS) and not any(part.get(name) for name in EXPERT_SIZES):
        part["intermediate_size"] = _at_most(part["intermediate_size"], AT_MOST["moe_intermediate_size"])
    if "vocab_size" not in part and filled.get("vocab_size", 0) > VOCABULARY_SIZE:
        part["vocab_size"] = VOCABULARY_SIZE
    _shrink_states(part, old_hidden)
    _shrink_positions(part, filled, scaling)


def _shrink_positions(part: Part, filled: Part, scaling: Mapping[str, Any]) -> None:
    positions = part.get("max_position_embeddings") or filled.get("max_position_embeddings")
    for name in WINDOWS:
        window = part.get(name)
        if isinstance(window, int) and window > WINDOW and (positions is None or window < positions):
            part[name] = (window - 1) % WINDOW + 1
    is_scaled = scaling.get("rope_type", scaling.get("type")) not in (None, "default", "llama3")
    if (positions or 0) > 2 * MAX_POSITIONS and not is_scaled:
        part["max_position_embeddings"] = MAX_POSITIONS


def _at_most(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_at_most(element, most) for element in value]
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) else value


# Heads


def _has_own_head_dim(part: Part, filled: Part, derived: int) -> bool:
    """Return whether the size of a head is a field of its own, if only one that the class adds."""
    if any(part.get(name) is not None for name in ("head_dim", "attention_head_dim", "kv_channels", "kv_lora_rank")):
        return True
    return filled.get("head_dim") not in (None, derived)


def _shrink_heads(part: Part, query: str) -> None:
    old = part[query]
    _shrink_head_set(part, query, KV_HEADS)
    if isinstance(part.get("num_attention_heads_per_layer"), list):
        per_layer = part["num_attention_heads_per_layer"]
        part["num_attention_heads_per_layer"] = [heads * part[query] // old for heads in per_layer]
    if "swa_num_attention_heads" in part:
        _shrink_head_set(part, "swa_num_attention_heads", ("swa_num_key_value_heads",))
    if isinstance(part.get("attention_other_setting"), dict):
        _shrink_head_set(part["attention_other_setting"], HEADS[0], KV_HEADS)
    if "linear_num_value_heads" in part:
        _shrink_head_set(part, "linear_num_value_heads", ("linear_num_key_heads",))
    linear = part.get("linear_attn_config")
    if isinstance(linear, dict):
        linear.update(num_heads=min(linear["num_heads"], 4), head_dim=min(linear["head_dim"], 64))


def _shrink_head_set(part: Part, query: str, key_value: Sequence[str]) -> None:
    """Make a number of query heads small, and numbers of KV heads that divide it."""
    present = [name for name in key_value if isinstance(part.get(name), int)]
    heads = part[query]
    fewest = min((part[name] for name in present), default=heads)
    if fewest == heads:
        small = min(heads, 4 if heads % 2 == 0 else 3)
    else:
        small = min(fewest, 2 if fewest % 2 == 0 else 3) * min(heads // fewest, 16)
    for name in present:
        part[name] = max(1, small * part[name] // heads)
    part[query] = small


# States


def _shrink_states(part: Part, old_hidden: int) -> None:
    hidden = part.get("hidden_size", 0)
    if "mamba_n_heads" in part:
        inner = part["mamba_expand"] * hidden
        if part.get("mamba_d_ssm") is not None:
            part["mamba_d_ssm"] = inner = 8 * part["mamba_d_head"]
        dim = part["mamba_d_head"]
        part["mamba_n_heads"] = inner // (dim if isinstance(dim, int) else 64)
    if part.get("mamba_dt_rank") == ceil(old_hidden / 16):
        part["mamba_dt_rank"] = ceil(hidden / 16)


# Layers


def _kept_layers(filled: Part) -> list[int]:
    """Return the layers that stay, by their published index."""
    total = num_layers(filled)
    shared = filled.get("num_kv_shared_layers") or 0
    kinds = [_kind_of_layer(filled, total, layer) for layer in range(total)]
    if "block_configs" in filled:
        seen: Counter[Any] = Counter()
        return [layer for layer in range(total) if (seen.update([kinds[layer]]) or seen[kinds[layer]]) <= 2]
    own = _num_with_two_of_each(kinds[: total - shared])
    following = kinds[own:][: total - own] if shared else []
    return list(range(max(own + _num_with_two_of_each(following), min(MIN_LAYERS, total))))


def _num_with_two_of_each(kinds: Sequence[Any]) -> int:
    """Return how many first elements have two of each kind, or one of a kind that occurs once.

    >>> _num_with_two_of_each(["a", "b", "b", "c", "a", "b", "a"])
    5
    """
    missing = Counter({kind: min(count, 2) for kind, count in Counter(kinds).items()})
    for number, kind in enumerate(kinds):
        if missing.total() == 0:
            return number
        missing[kind] = max(0, missing[kind] - 1)
    return len(kinds)


def _kind_of_layer(filled: Part, total: int, layer: int) -> tuple[Any, ...]:
    """Return all that the configuration says of one layer alone."""
    facts: list[Any] = []
    for name, value in sorted(filled.items()):
        if name in OF_THE_MLP:
            continue
        if isinstance(value, list | str) and len(value) >= total and _is_per_layer(name, value, total):
            facts.append(repr(value[layer]))
        if name in INDICES and value:
            facts.append(layer in value)
    if isinstance(filled.get("moe_layers_enum"), str):
        facts.append(str(layer) in filled["moe_layers_enum"].split(","))
    linear = filled.get("linear_attn_config")
    if isinstance(linear, dict):
        facts.append(layer + 1 in linear["full_attn_layers"])
    facts += [(layer + 1) % filled[name] == 0 for name in PERIODS if isinstance(filled.get(name), int) and filled[name]]
    facts += [layer % filled[period] == filled[offset] for period, offset in PERIODS_WITH_OFFSET if filled.get(period)]
    facts += [layer >= filled[name] for name in FIRST_LAYERS if isinstance(filled.get(name), int)]
    return tuple(facts)


def _is_per_layer(name: str, value: Any, total: int) -> bool:
    """Return whether a field has an element for each layer; those of layers that predict more tokens may follow."""
    if isinstance(value, str):
        return name == "hybrid_override_pattern" and len(value) == total
    return name not in INDICES and not name.endswith("_token_id") and total <= len(value) <= total + 3


def _cut_layers(part: Part, total: int, kept: Sequence[int]) -> None:
    shared = part.get("num_kv_shared_layers") or 0
    for name, value in part.items():
        if name in LAYERS and value == total:
            part[name] = len(kept)
        elif name == "hybrid_override_pattern" and len(value) == total:
            part[name] = "".join(value[layer] for layer in kept)
        elif name in INDICES and isinstance(value, list):
            part[name] = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, list) and total > 1 and _is_per_layer(name, value, total):
            part[name] = [value[layer] for layer in kept] + value[total:]
        elif name in ("max_window_layers", "moe_layer_end_index") and isinstance(value, int):
            part[name] = min(value, value - total + len(kept)) if value >= total - 1 else min(value, len(kept))
    if isinstance(part.get("moe_layers_enum"), str):
        layers = part["moe_layers_enum"].split(",")
        part["moe_layers_enum"] = ",".join(layer for layer in layers if int(layer) < len(kept))
    linear = part.get("linear_attn_config")
    if isinstance(linear, dict):
        for name in ("full_attn_layers", "kda_layers"):
            linear[name] = [layer for layer in linear[name] if layer <= len(kept)]
    if shared:
        part["num_kv_shared_layers"] = len(kept) - _num_own_layers(part, total, shared, len(kept))


def _num_own_layers(part: Part, total: int, shared: int, kept: int) -> int:
    filled = _as_its_class({**part, "num_kv_shared_layers": 0})
    kinds = [_kind_of_layer(filled, kept, layer) for layer in range(kept)]
    return min(_num_with_two_of_each(kinds), total - shared)


# Towers and tokens


def _shrink_tower(tower: Part, old_text: Part, text: Part) -> None:
    heads = next((tower[name] for name in TOWER_HEADS if isinstance(tower.get(name), int)), None)
    vocabulary = old_text.get("vocab_size")
    for name, value in tower.items():
        if name in TOWER_LAYERS and isinstance(value, int):
            tower[name] = min(value, 2)
        elif name in TOWER_OUTPUTS and isinstance(value, int):
            tower[name] = text.get("hidden_size", value)
        elif name in TOWER_HEADS and isinstance(value, int):
            tower[name] = min(value, 2)
        elif name in TOWER_SIZES and isinstance(value, int) and heads is not None and heads > 2:
            tower[name] = value * 2 // heads
        elif name == "vocab_offset" and isinstance(vocabulary, int):
            tower[name] = text["vocab_size"] - (vocabulary - value)
        elif name == "deepstack_visual_indexes" and isinstance(value, list):
            tower[name] = value and [0]


def _bound_tokens(part: Part, vocabulary: int) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _bound_tokens(value, vocabulary)
        elif name.endswith(("_token_id", "_token_ids", "_token_index")):
            part[name] = _bounded(value, vocabulary)


def _bounded(token: Any, vocabulary: int) -> Any:
    if isinstance(token, list):
        return [_bounded(one, vocabulary) for one in token]
    if not isinstance(token, int) or token < vocabulary:
        return token
    return FIRST_SPECIAL_TOKEN + token % (vocabulary - FIRST_SPECIAL_TOKEN)
