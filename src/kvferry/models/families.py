"""The caches of each layer of a model, by the model's family.

A family is a ``model_type`` whose caches were compared with those that vLLM 0.32 itself makes of a published
configuration (``tests/adapter/test_models_against_vllm.py``). Any other model type is refused by its name, and so is a
field that hints at a cache which the family's rule does not account for: the user can give the shapes by hand, whereas
a wrong plan would go unnoticed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.errors import Reason
from kvferry.layout.shard import MAX_LAYERS
from kvferry.layout.states import gated_delta_segments, mamba1_segments, mamba2_segments
from kvferry.models.config import ModelConfig, config_of, item_size, published_config, read_fields, refuse
from kvferry.models.groups import AttentionCache, LayerCache, StateCache

HINTS = re.compile(
    "window|sliding|swa_|layer_types|layers?_block|block_(types?|configs)|attention_(interval|chunk)|attn_type|global_head"
    "|mamba|ssm|state_size|d_state|(^|_)conv|linear_(num|key|value|att)|recurrent|(^|_)lru|rwkv|time_mix|hybrid"
    "|lora_rank|latent|qk_(rope|nope)_head|v_head_dim|value_head_dim|index_(topk|n_heads|head_dim)|compress"
    "|kv_shared|share_kv|is_encoder_decoder|cross_attention|num_kv_heads|head_kv|kv_head|query_group"
    "|multi_query_group|new_decoder_architecture|attention_groups"
)
"""Names of fields that hint at a cache other than plain keys and values of all tokens."""
UNDERSTOOD = "num_key_value_heads|sliding_window|max_window_layers|use_sliding_window|layer_types|mlp_layer_types"
"""The hinting fields that every family's rule accounts for."""
FULL, SLIDING, STATE = ("full_attention", "attention"), ("sliding_attention",), ("mamba", "linear_attention")
WITHOUT_CACHE = ("mlp", "moe", "-", "E")
REMEDY = (
    "Give --layers, --kv-heads and --head-size of the full-attention layers instead of --model; the plan is then of "
    "those layers alone."
)
NO_REMEDY = "No option of this command describes such a cache; docs/models.md says what the engines of each model do."
PLAIN_REMEDY = (
    "Where all its layers keep plain keys and values, give --layers, --kv-heads and --head-size instead of --model."
)

LayerCaches = Sequence[tuple[LayerCache, ...]]
"""The caches of each layer, in layer order: one, none (its layer shares another's, or attends to nothing), or two."""


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes of one number of the attention caches, and of states: the quantisation of a cache is that of attention."""

    cache: int
    state: int


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a family's configuration.

    ``architectures`` are the vLLM classes that ``read`` speaks of. ``understood`` matches the hinting fields that it
    accounts for. ``derived`` are fields which the family's class leaves out where the file does, so that vLLM derives
    them: ``head_dim`` from ``hidden_size``, ``num_key_value_heads`` from ``num_attention_heads``, no window, no types.
    """

    read: Callable[[ModelConfig, "Family", ItemSizes], LayerCaches]
    architectures: tuple[str, ...]
    understood: str = "(?!)"
    derived: frozenset[str] = field(default_factory=frozenset)
    extra_window: int = 0

    def optional(self, config: ModelConfig, name: str) -> Any:
        """Return a field's value, or None where vLLM derives it. Raises for a field that only a class could fill in."""
        found = config.fields.get(name)
        if found is None and config.missing_class and name not in self.derived and name not in config.fields:
            config.refuse_missing(name)
        return found


def layer_caches(config: ModelConfig, sizes: ItemSizes) -> LayerCaches:
    """Return the caches of each layer, in layer order, with numbers of these sizes.

    Raises :class:`SettingsError`: ``invalid-setting`` for a field that is missing or out of range, ``unsupported`` for
    a family without a rule, or a field that hints at a cache which cannot be planned.

    >>> config = ModelConfig({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 8,
    ...     "hidden_size": 512})
    >>> layer_caches(config, ItemSizes(cache=2, state=2))
    [(AttentionCache(num_kv_heads=8, head_size=64, itemsize=2, window=0, is_latent=False),)]
    """
    refuse_family(config.fields)
    family = FAMILIES.get(config.family)
    if family is None:
        own_code = ", and never runs a model's own code ('auto_map')" if "auto_map" in config.written else ""
        refuse(f"kvferry has no rule for family {config.family!r}{own_code}.", PLAIN_REMEDY, Reason.UNSUPPORTED)
    unknown = [name for name in config.architectures if name not in family.architectures]
    if unknown:
        what = f"kvferry has no rule for architecture {unknown[0]!r} of family {config.family!r}."
        refuse(what, PLAIN_REMEDY, Reason.UNSUPPORTED)
    _refuse_hints(config, family.understood)
    return family.read(config, family, sizes)


def refuse_family(fields: Mapping[str, Any]) -> None:
    """Raise :class:`SettingsError` (``unsupported``) for a family that is known not to be planned."""
    nested = fields.get("text_config")
    for each in (fields, nested if isinstance(nested, dict) else {}):
        family = str(each.get("model_type") or "")
        if refused := REFUSED.get(family):
            remedy = NO_REMEDY if refused in _WITHOUT_PLAIN_CACHES else REMEDY
            refuse(f"family {family!r} {refused}, which kvferry cannot plan.", remedy, Reason.UNSUPPORTED)


def _refuse_hints(config: ModelConfig, understood: str) -> None:
    for name in sorted(config.written or config.fields):
        known = re.fullmatch(UNDERSTOOD, name) or re.fullmatch(understood, name)
        if HINTS.search(name) and not known and config.fields.get(name):
            what = f"{name!r} of family {config.family!r} hints at a cache that cannot be planned."
            refuse(what, REMEDY, Reason.UNSUPPORTED)


def _num_layers(config: ModelConfig) -> int:
    found = config.number("num_hidden_layers", "n_layer")
    if found > MAX_LAYERS:
        refuse(f"the configuration has {found} layers; the limit is {MAX_LAYERS}.", reason=Reason.UNSUPPORTED)
    return found


def _attention(config: ModelConfig, family: Family, sizes: ItemSizes, window: int = 0) -> AttentionCache:
    heads = config.number("num_attention_heads", "n_head")
    head_size = _head_size(config, family, heads)
    return AttentionCache(
        num_kv_heads=_kv_heads(config, family, heads), head_size=head_size, itemsize=sizes.cache, window=window
    )


def _kv_heads(config: ModelConfig, family: Family, heads: int) -> int:
    """Count heads as vLLM's ``get_total_num_kv_heads`` does."""
    if config.fields.get("multi_query") and not config.fields.get("new_decoder_architecture"):
        return 1
    for name in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"):
        if config.fields.get(name) is not None:
            return config.number(name)
    return heads if family.optional(config, "num_key_value_heads") is None else config.number("num_key_value_heads")


def _head_size(config: ModelConfig, family: Family, heads: int) -> int:
    if family.optional(config, "head_dim"):
        return config.number("head_dim")
    hidden = config.number("hidden_size", "n_embd")
    if hidden % heads:
        refuse(f"'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}; 'head_dim' is missing.")
    return hidden // heads


def _window(config: ModelConfig, family: Family) -> int:
    """Return the size of the sliding window; 0 for none. The classes of Qwen take it away where it is not used."""
    if config.missing_class and "use_sliding_window" in config.fields and not config.fields["use_sliding_window"]:
        return 0
    found = family.optional(config, "sliding_window")
    return config.number("sliding_window") + family.extra_window if found else 0


def _plain(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return equal layers. Where no layer has another type, vLLM gives all of them the configuration's window."""
    num_layers, window = _num_layers(config), _window(config, family)
    types = set(config.layer_types(num_layers) or SLIDING) if family.optional(config, "layer_types") else set(SLIDING)
    if len({_is_full(kind, SLIDING) for kind in types}) > 1:
        what = f"layers of family {config.family!r} with 'layer_types' of several kinds"
        refuse(f"{what} cannot be planned.", REMEDY, Reason.UNSUPPORTED)
    slides = not _is_full(types.pop(), SLIDING)
    return [(_attention(config, family, sizes, window if slides else 0),)] * num_layers


def _sliding(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return layers of which ``layer_types`` says how each attends."""
    num_layers, window = _num_layers(config), _window(config, family)
    types = _types(config, family, num_layers, "sliding_attention")
    full, slides = (_attention(config, family, sizes, size) for size in (0, window))
    return [(full if _is_full(kind, SLIDING) else slides,) for kind in types]


def _types(config: ModelConfig, family: Family, num_layers: int, otherwise: str) -> list[str]:
    """Return the type of each layer: from the list, or every so many-th layer is full."""
    types = config.layer_types(num_layers)
    if types is not None:
        return types
    names = ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval")
    pattern = next((name for name in names if isinstance(config.fields.get(name), int)), "")
    if not pattern:
        config.refuse_missing("layer_types")
    every = config.number(pattern)
    return ["full_attention" if (layer + 1) % every == 0 else otherwise for layer in range(num_layers)]


def _given_types(config: ModelConfig, num_layers: int) -> list[str]:
    types = config.layer_types(num_layers)
    return config.refuse_missing("layer_types") if types is None else types


def _gpt_oss(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return layers of which vLLM lets every other one slide, whatever ``layer_types`` says."""
    num_layers = _num_layers(config)
    alternate = [SLIDING[0] if layer % 2 == 0 else FULL[0] for layer in range(num_layers)]
    if _types(config, family, num_layers, SLIDING[0]) != alternate:
        what = "'layer_types' of family 'gpt_oss' do not alternate, as vLLM's class assumes."
        refuse(what, REMEDY, Reason.UNSUPPORTED)
    return _sliding(config, family, sizes)


def _shared(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return layers of which the last ones read the cache of an earlier one."""
    caches = _sliding(config, family, sizes)
    shared = config.fields.get("num_kv_shared_layers")
    if shared is None:
        config.refuse_missing("num_kv_shared_layers")
    first = len(caches) - (config.number("num_kv_shared_layers") if shared else 0)
    if first < 1:
        refuse(f"'num_kv_shared_layers' is {shared}, of {len(caches)} layers.")
    return [cache if layer < first else () for layer, cache in enumerate(caches)]


def _latent(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    width = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    latent = AttentionCache(num_kv_heads=1, head_size=width, itemsize=sizes.cache, is_latent=True)
    return [(latent,)] * _num_layers(config)


def _granite_hybrid(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    num_layers = _num_layers(config)
    types = _given_types(config, num_layers)
    attention = (_attention(config, family, sizes),)
    if all(_is_full(kind, STATE) for kind in types):
        return [attention] * num_layers
    intermediate, heads = config.number("mamba_expand") * config.number("hidden_size"), config.number("mamba_n_heads")
    given = config.fields.get("mamba_d_head", "auto")
    head_size = intermediate // heads if given == "auto" else config.number("mamba_d_head")
    if head_size * heads != intermediate:
        refuse(
            f"'mamba_n_heads' {heads} times head size {head_size} is not 'mamba_expand' times 'hidden_size', "
            f"{intermediate}."
        )
    state = (_mamba2(config, sizes, intermediate, heads, head_size),)
    return [attention if _is_full(kind, STATE) else state for kind in types]


def _falcon_h1(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return layers that each have attention beside a Mamba2 state."""
    heads, head_size = config.number("mamba_n_heads"), config.number("mamba_d_head")
    intermediate = config.number("mamba_d_ssm")
    if heads * head_size != intermediate:
        refuse(f"'mamba_n_heads' {heads} times 'mamba_d_head' {head_size} is not 'mamba_d_ssm', {intermediate}.")
    state = _mamba2(config, sizes, intermediate, heads, head_size)
    return [(_attention(config, family, sizes), state)] * _num_layers(config)


def _mamba2(config: ModelConfig, sizes: ItemSizes, intermediate: int, heads: int, head_size: int) -> StateCache:
    state_size = config.number("mamba_d_state")
    return StateCache(
        split=mamba2_segments,
        sizes=(intermediate, config.number("mamba_n_groups"), state_size),
        num_heads=heads,
        num_channels=head_size * state_size,
        kernel_size=_kernel_size(config, "mamba_d_conv"),
        itemsize=sizes.state,
    )


def _nemotron_h(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    """Return layers of which some are no attention at all, and so have no cache."""
    types = config.fields.get("layer_types") or config.fields.get("layers_block_type")
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        config.refuse_missing("layer_types")
    heads, head_size = config.number("mamba_num_heads"), config.number("mamba_head_dim")
    recurrent = config.fields.get("mamba_ssm_cache_dtype") or "float32"  # vLLM's choice for this family
    state_size = config.number("ssm_state_size")
    state = StateCache(
        split=mamba2_segments,
        sizes=(heads * head_size, config.number("n_groups"), state_size),
        num_heads=heads,
        num_channels=head_size * state_size,
        kernel_size=_kernel_size(config, "conv_kernel"),
        itemsize=sizes.state,
        recurrent_itemsize=item_size(str(recurrent)),
    )
    attention = (_attention(config, family, sizes, _window(config, family)),)
    kinds = [() if kind in WITHOUT_CACHE else attention if _is_full(kind, STATE) else (state,) for kind in types]
    if len(kinds) > MAX_LAYERS:
        refuse(f"the configuration has {len(kinds)} layers; the limit is {MAX_LAYERS}.", reason=Reason.UNSUPPORTED)
    return kinds


def _jamba(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    num_layers = _num_layers(config)
    types = _given_types(config, num_layers)
    intermediate = config.number("mamba_expand") * config.number("hidden_size")
    state = StateCache(
        split=mamba1_segments,
        sizes=(intermediate,),
        num_heads=intermediate,
        num_channels=config.number("mamba_d_state"),
        kernel_size=_kernel_size(config, "mamba_d_conv"),
        itemsize=sizes.state,
    )
    attention = (_attention(config, family, sizes),)
    return [attention if _is_full(kind, STATE) else (state,) for kind in types]


def _gated_delta(config: ModelConfig, family: Family, sizes: ItemSizes) -> LayerCaches:
    types = _types(config, family, _num_layers(config), "linear_attention")
    recurrent = config.fields.get("mamba_ssm_dtype")
    num_keys, key_size = config.number("linear_num_key_heads"), config.number("linear_key_head_dim")
    num_values, value_size = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    state = StateCache(
        split=gated_delta_segments,
        sizes=(num_keys, key_size, num_values, value_size),
        num_heads=num_values,
        num_channels=value_size * key_size,
        kernel_size=_kernel_size(config, "linear_conv_kernel_dim"),
        itemsize=sizes.state,
        recurrent_itemsize=item_size(str(recurrent)) if recurrent else None,
    )
    attention = (_attention(config, family, sizes),)
    return [attention if _is_full(kind, STATE) else (state,) for kind in types]


def _kernel_size(config: ModelConfig, name: str) -> int:
    found = config.number(name)
    if not 2 <= found <= 256:
        refuse(f"{name!r} is {found}; a convolution takes 2 to 256 inputs.")
    return found


def _is_full(kind: str, others: tuple[str, ...]) -> bool:
    """Return whether a layer attends to all tokens. Raises for a type that is neither that nor one of ``others``."""
    if kind not in FULL and kind not in others:
        known = ", ".join((*FULL, *others))
        refuse(f"'layer_types' has a layer of type {kind!r}; kvferry can plan {known}.", reason=Reason.UNSUPPORTED)
    return kind in FULL


_HEADS, _HEAD_SIZE, _NO_WINDOW = "num_key_value_heads", "head_dim", ("sliding_window", "layer_types")
_WINDOWED = "_?sliding_window(_pattern)?"
_MLA = "kv_lora_rank|q_lora_rank|qk_(rope|nope)_head_dim|v_head_dim|qk_head_dim"
_MINIMAX = "attn_type_list|layernorm_linear_attention_.*"
_DELTA = "linear_.*|full_attention_interval|mamba_ssm_dtype"


def _of(read: Callable[..., LayerCaches], architectures: str, *derived: str, **more: Any) -> Family:
    return Family(read, tuple(architectures.split()), derived=frozenset(derived), **more)


FAMILIES = {
    "cohere": _of(_plain, "CohereForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "cohere2": _of(_sliding, "Cohere2ForCausalLM", understood=_WINDOWED, extra_window=1),
    "deepseek_v2": _of(_latent, "DeepseekV2ForCausalLM", understood=_MLA),
    "deepseek_v3": _of(_latent, "DeepseekV3ForCausalLM", understood=_MLA),
    "ernie4_5": _of(_plain, "Ernie4_5ForCausalLM", *_NO_WINDOW),
    "ernie4_5_moe": _of(_plain, "Ernie4_5_MoeForCausalLM", _HEAD_SIZE, *_NO_WINDOW),
    "exaone4": _of(_sliding, "Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration", _HEAD_SIZE, understood=_WINDOWED),
    "falcon": _of(_plain, "FalconForCausalLM", *_NO_WINDOW, understood="new_decoder_architecture|num_kv_heads"),
    "falcon_h1": _of(_falcon_h1, "FalconH1ForCausalLM", _HEAD_SIZE, understood="mamba_.*|ssm_.*|attn_layer_.*"),
    "gemma2": _of(_sliding, "Gemma2ForCausalLM", understood=f"{_WINDOWED}|sliding_window_size"),
    "gemma3_text": _of(_sliding, "Gemma3ForCausalLM Gemma3ForConditionalGeneration", understood=_WINDOWED),
    "gemma3n_text": _of(
        _shared, "Gemma3nForCausalLM Gemma3nForConditionalGeneration", understood=f"{_WINDOWED}|num_kv_shared_layers"
    ),
    "glm": _of(_plain, "GlmForCausalLM", *_NO_WINDOW),
    "glm4": _of(_plain, "Glm4ForCausalLM", *_NO_WINDOW),
    "glm4_moe": _of(_plain, "Glm4MoeForCausalLM", _HEAD_SIZE, *_NO_WINDOW),
    "glm4_moe_lite": _of(_latent, "Glm4MoeLiteForCausalLM", understood=_MLA),
    "gpt2": _of(_plain, "GPT2LMHeadModel", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "gpt_bigcode": _of(_plain, "GPTBigCodeForCausalLM", *_NO_WINDOW),
    "gpt_oss": _of(_gpt_oss, "GptOssForCausalLM", understood=_WINDOWED),
    "granite": _of(_plain, "GraniteForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "granitemoehybrid": _of(
        _granite_hybrid, "GraniteMoeHybridForCausalLM", _HEADS, _HEAD_SIZE, understood="mamba_.*|layers_block_type"
    ),
    "hunyuan_v1_dense": _of(_plain, "HunYuanDenseV1ForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "jamba": _of(_jamba, "JambaForCausalLM", _HEAD_SIZE, understood="(use_)?mamba_.*|.*_layer_(period|offset)"),
    "kimi_k2": _of(_latent, "DeepseekV3ForCausalLM", understood=_MLA),
    "laguna": _of(_sliding, "LagunaForCausalLM", understood=_WINDOWED),
    "llama": _of(_plain, "LlamaForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "minimax_m2": _of(_plain, "MiniMaxM2ForCausalLM", *_NO_WINDOW, understood=_MINIMAX),
    "mistral": _of(_plain, "MistralForCausalLM Mistral3ForConditionalGeneration", _HEAD_SIZE, "layer_types"),
    "mixtral": _of(_plain, "MixtralForCausalLM MiniMaxM2ForCausalLM", _HEAD_SIZE, *_NO_WINDOW, understood=_MINIMAX),
    "nemotron_h": _of(
        _nemotron_h,
        "NemotronHForCausalLM",
        understood="(use_)?mamba_.*|ssm_.*|conv_kernel|use_conv_bias|hybrid_override_pattern|layers_block_type|mtp_.*",
    ),
    "olmo2": _of(_plain, "Olmo2ForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "olmo3": _of(_sliding, "Olmo3ForCausalLM", _HEADS, _HEAD_SIZE),
    "phi3": _of(_plain, "Phi3ForCausalLM", _HEADS, _HEAD_SIZE, *_NO_WINDOW),
    "qwen2": _of(_plain, "Qwen2ForCausalLM", _HEAD_SIZE, *_NO_WINDOW),
    "qwen3": _of(_plain, "Qwen3ForCausalLM", *_NO_WINDOW),
    "qwen3_5_moe_text": _of(
        _gated_delta, "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration", understood=_DELTA
    ),
    "qwen3_5_text": _of(_gated_delta, "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration", understood=_DELTA),
    "qwen3_moe": _of(_plain, "Qwen3MoeForCausalLM", _HEAD_SIZE, *_NO_WINDOW),
    "qwen3_next": _of(_gated_delta, "Qwen3NextForCausalLM", understood=_DELTA),
    "seed_oss": _of(_plain, "SeedOssForCausalLM", *_NO_WINDOW),
    "starcoder2": _of(_plain, "Starcoder2ForCausalLM", _HEAD_SIZE, *_NO_WINDOW),
    "step3_text": _of(
        _plain, "Step3TextForCausalLM Step3VLForConditionalGeneration", *_NO_WINDOW, understood="num_attention_groups"
    ),
}
"""The families, by the ``model_type`` of the text model."""
_INDEXER = "keeps an indexer's keys beside its latent vectors"
_LATENT_AND_STATES = "keeps latent vectors beside states"
_WITHOUT_PLAIN_CACHES = (_INDEXER, _LATENT_AND_STATES)
REFUSED = {
    "bamba": "has no class in vLLM 0.32",
    "deepseek_v32": _INDEXER,
    "gemma4": "has full-attention layers with wider heads",
    "gemma4_text": "has full-attention layers with wider heads",
    "glm_moe_dsa": _INDEXER,
    "hunyuan_v1_moe": "has no class of its own in vLLM 0.32",
    "kimi_linear": _LATENT_AND_STATES,
    "lfm2": "keeps the inputs of a short convolution",
    "lfm2_moe": "keeps the inputs of a short convolution",
    "llama4": "attends by chunks",
    "llama4_text": "attends by chunks",
    "minimax": "keeps the states of lightning attention",
    "step3p5": "has attention of two shapes",
}
"""Why the planner refuses these families, by ``model_type``."""


BY_HAND = "given by hand"


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """The caches of each layer, in layer order, and what their shapes come from."""

    layers: tuple[tuple[LayerCache, ...], ...]
    origin: str

    def named(self) -> dict[str, LayerCache]:
        """Return the caches by name: the layer's number, and for a second cache of a layer ``NUMBER.1``.

        >>> attention = AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)
        >>> list(ModelCaches(((attention,), (), (attention, attention)), BY_HAND).named())
        ['0', '2', '2.1']
        """
        return {
            f"{layer}.{index}" if index else str(layer): cache
            for layer, caches in enumerate(self.layers)
            for index, cache in enumerate(caches)
        }


def layer_of(name: str) -> int:
    """Return the layer's number of a cache's name.

    >>> layer_of("2.1")
    2
    """
    return int(name.partition(".")[0])


def model_caches(path: Path, dtype: str | None = None) -> ModelCaches:
    """Return the caches of the model of a ``config.json``, of a folder that holds one, or of a public model's name.

    Raises :class:`SettingsError` as :func:`kvferry.models.config.config_of` and
    :func:`kvferry.models.families.layer_caches` do.
    """
    config = published_config(path.as_posix())
    if config is None or path.exists():
        fields = read_fields(path)
        refuse_family(fields)
        config = config_of(fields)
    return ModelCaches(tuple(layer_caches(config, _item_sizes(config, dtype))), config.origin)


def _item_sizes(config: ModelConfig, dtype: str | None) -> ItemSizes:
    """Return the sizes that vLLM gives the caches of a model with this ``--dtype``: one of a byte is no model's."""
    if dtype is None:
        state = item_size(config.dtype)
        return ItemSizes(cache=item_size(config.cache_dtype) if config.cache_dtype else state, state=state)
    size = item_size(dtype)
    return ItemSizes(cache=size, state=size if size > 1 else item_size(config.dtype))


def uniform_cache(caches: ModelCaches) -> AttentionCache:
    """Return the cache of one of a model's equal layers, which keep all tokens.

    Raises :class:`SettingsError` (``unsupported``) for other layers.

    >>> attention = AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)
    >>> uniform_cache(ModelCaches(((attention,),) * 2, BY_HAND))
    AttentionCache(num_kv_heads=2, head_size=64, itemsize=2, window=0, is_latent=False)
    """
    found = set(caches.layers)
    (cache, *others) = next(iter(found)) or [None]
    if len(found) > 1 or others or not isinstance(cache, AttentionCache) or cache.window:
        what = "the model's layers differ from each other, or keep a window or a state."
        refuse(what, "Leave out --layers, --kv-heads and --head-size, or leave out --model.", Reason.UNSUPPORTED)
    return cache


def alike(cache: LayerCache, num_layers: int, origin: str = BY_HAND) -> ModelCaches:
    """Return the caches of a model of equal layers."""
    return ModelCaches(((cache,),) * num_layers, origin)


def caches_of(
    model: Path | None, layers: int | None, kv_heads: int | None, head_size: int | None, dtype: str | None
) -> ModelCaches:
    """Return the caches of each layer: from the model's configuration, where options given by hand take precedence.

    Raises :class:`SettingsError`, also where an option is missing or cannot apply because the model's layers differ.
    """
    if model is not None:
        caches = model_caches(model, dtype)
        if not (layers or kv_heads or head_size):
            return caches
        cache = uniform_cache(caches)
        heads, size = kv_heads or cache.num_kv_heads, head_size or cache.head_size
        origin = f"{caches.origin}, and {BY_HAND}"
        return alike(replace(cache, num_kv_heads=heads, head_size=size), layers or len(caches.layers), origin)
    if not (layers and kv_heads and head_size):
        by_hand = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
        missing = ", ".join(option for option, value in by_hand.items() if not value)
        refuse(f"{missing} must be given.", "Or name a model's config.json with --model.")
    itemsize = item_size(dtype or "bfloat16")
    return alike(AttentionCache(num_kv_heads=kv_heads, head_size=head_size, itemsize=itemsize), layers)
