"""The cache of each layer of a model, by the model's family.

An unknown family counts as plain attention only if no field hints at another cache: a window, a state, a latent,
shared or unequal layers. A hint refuses the model even where the field has no effect on the cache: the user can give
the shapes by hand, whereas a wrong plan would go unnoticed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.errors import Reason
from kvferry.layout.component import MAX_LAYERS
from kvferry.models.config import ModelConfig, refuse
from kvferry.models.layer_caches import AttentionCache, GatedDeltaCache, LayerCache, Mamba2Cache

HINTS = re.compile(
    "window|sliding|swa_|layer_types|layers?_block|block_(types?|configs)|attention_(interval|chunk)|attn_type|global_head"
    "|mamba|ssm|state_size|d_state|(^|_)conv|linear_(num|key|value|att)|recurrent|(^|_)lru|rwkv|time_mix|hybrid"
    "|lora_rank|latent|qk_(rope|nope)_head|v_head_dim|value_head_dim|index_(topk|n_heads|head_dim)|compress"
    "|kv_shared|share_kv|is_encoder_decoder|cross_attention|num_kv_heads|head_kv|kv_head|query_group"
    "|multi_query_group|new_decoder_architecture"
)
"""Names of fields that hint at a cache other than plain keys and values of all tokens."""
PLAIN_NAMES = ("num_key_value_heads",)
WINDOWS_SWITCHED_OFF = ("sliding_window", "max_window_layers", "use_sliding_window", "sliding_window_pattern")
FULL, SLIDING, STATE = ("full_attention", "attention"), ("sliding_attention",), ("mamba", "linear_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a family's configuration. ``understood`` matches the hinting fields that ``read`` accounts for."""

    read: Callable[[ModelConfig, int], Sequence[LayerCache]]
    understood: str = "(?!)"


def layer_caches(config: ModelConfig, itemsize: int) -> Sequence[LayerCache]:
    """Return the cache of each layer, in layer order, with numbers of ``itemsize`` bytes.

    Raises :class:`SettingsError`: ``invalid-setting`` for a field that is missing or out of range, ``unsupported`` for
    one that hints at a cache which cannot be planned.

    >>> config = ModelConfig({"num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 512})
    >>> layer_caches(config, 2)
    [AttentionCache(num_kv_heads=8, head_size=64, itemsize=2, window=0, is_latent=False)]
    """
    family = FAMILIES.get(config.family, Family(_plain))
    _refuse_hints(config, family.understood)
    return family.read(config, itemsize)


def _refuse_hints(config: ModelConfig, understood: str) -> None:
    for name in sorted(config.fields):
        if name in PLAIN_NAMES or not HINTS.search(name) or re.fullmatch(understood, name):
            continue
        if not _is_inert(name, config):
            family = f"family {config.family!r}" if config.family else "a family without a name"
            remedy = "Give --layers, --kv-heads and --head-size of the full-attention layers instead of --model."
            refuse(f"{name!r} of {family} hints at a cache that cannot be planned.", remedy, Reason.UNSUPPORTED)


def _is_inert(name: str, config: ModelConfig) -> bool:
    value: Any = config.fields[name]
    if not value:
        return True
    if name in WINDOWS_SWITCHED_OFF:
        fields = config.fields
        return fields.get("use_sliding_window") is False or (
            "sliding_window" in fields and not fields["sliding_window"]
        )
    return name == "layer_types" and isinstance(value, list) and all(kind in FULL for kind in value)


def _num_layers(config: ModelConfig) -> int:
    found = config.number("num_hidden_layers", "n_layer")
    if found > MAX_LAYERS:
        refuse(f"the configuration has {found} layers; the limit is {MAX_LAYERS}.", reason=Reason.UNSUPPORTED)
    return found


def _attention(config: ModelConfig, itemsize: int, window: int = 0) -> AttentionCache:
    heads = config.number("num_attention_heads", "n_head")
    kv_heads = 1 if config.fields.get("multi_query") else heads
    if config.fields.get("num_key_value_heads") is not None:
        kv_heads = config.number("num_key_value_heads")
    if config.fields.get("head_dim") is not None:
        head_size = config.number("head_dim")
    else:
        hidden = config.number("hidden_size", "n_embd")
        if hidden % heads:
            refuse(f"'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}; 'head_dim' is missing.")
        head_size = hidden // heads
    return AttentionCache(num_kv_heads=kv_heads, head_size=head_size, itemsize=itemsize, window=window)


def _plain(config: ModelConfig, itemsize: int) -> list[LayerCache]:
    return [_attention(config, itemsize)] * _num_layers(config)


def _latent(config: ModelConfig, itemsize: int) -> list[LayerCache]:
    width = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    latent = AttentionCache(num_kv_heads=1, head_size=width, itemsize=itemsize, is_latent=True)
    return [latent] * _num_layers(config)


def _sliding(config: ModelConfig, itemsize: int, every: int) -> list[LayerCache]:
    """Return layers of which each ``every``-th attends to all tokens, unless ``layer_types`` lists them."""
    num_layers = _num_layers(config)
    types = config.layer_types(num_layers) or _every(num_layers, every, "sliding_attention")
    full, slides = _attention(config, itemsize), _attention(config, itemsize, config.number("sliding_window"))
    return [full if _is_full(kind, SLIDING) else slides for kind in types]


def _gemma3(config: ModelConfig, itemsize: int) -> list[LayerCache]:
    pattern = next(
        (name for name in ("sliding_window_pattern", "_sliding_window_pattern") if name in config.fields), ""
    )
    return _sliding(config, itemsize, config.number(pattern) if pattern else 6)


def _granite_hybrid(config: ModelConfig, itemsize: int) -> list[LayerCache]:
    num_layers = _num_layers(config)
    types = config.layer_types(num_layers)
    if types is None:
        refuse("the configuration has no 'layer_types'.")
    attention = _attention(config, itemsize)
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
    state = Mamba2Cache(
        intermediate_size=intermediate,
        num_groups=config.number("mamba_n_groups"),
        state_size=config.number("mamba_d_state"),
        num_heads=heads,
        head_size=head_size,
        kernel_size=_kernel_size(config, "mamba_d_conv"),
        itemsize=itemsize,
    )
    return [attention if _is_full(kind, STATE) else state for kind in types]


def _qwen3_next(config: ModelConfig, itemsize: int) -> list[LayerCache]:
    num_layers = _num_layers(config)
    types = config.layer_types(num_layers)
    types = types or _every(num_layers, config.number("full_attention_interval"), "linear_attention")
    state = GatedDeltaCache(
        num_key_heads=config.number("linear_num_key_heads"),
        key_head_size=config.number("linear_key_head_dim"),
        num_value_heads=config.number("linear_num_value_heads"),
        value_head_size=config.number("linear_value_head_dim"),
        kernel_size=_kernel_size(config, "linear_conv_kernel_dim"),
        itemsize=itemsize,
    )
    attention = _attention(config, itemsize)
    return [attention if _is_full(kind, STATE) else state for kind in types]


def _kernel_size(config: ModelConfig, name: str) -> int:
    found = config.number(name)
    if not 2 <= found <= 256:
        refuse(f"{name!r} is {found}; a convolution takes 2 to 256 inputs.")
    return found


def _every(num_layers: int, every: int, otherwise: str) -> list[str]:
    return ["full_attention" if (layer + 1) % every == 0 else otherwise for layer in range(num_layers)]


def _is_full(kind: str, others: tuple[str, ...]) -> bool:
    """Return whether a layer attends to all tokens. Raises for a type that is neither that nor one of ``others``."""
    if kind not in FULL and kind not in others:
        known = ", ".join((*FULL, *others))
        refuse(f"'layer_types' has a layer of type {kind!r}; kvferry can plan {known}.", reason=Reason.UNSUPPORTED)
    return kind in FULL


_WINDOWED = "_?sliding_window(_pattern)?|layer_types"
_MLA = "kv_lora_rank|q_lora_rank|qk_(rope|nope)_head_dim|v_head_dim"
FAMILIES = {
    "deepseek_v2": Family(_latent, _MLA),
    "deepseek_v3": Family(_latent, _MLA),
    "kimi_k2": Family(_latent, _MLA),
    "gemma3": Family(_gemma3, _WINDOWED),
    "gemma3_text": Family(_gemma3, _WINDOWED),
    "gpt_oss": Family(partial(_sliding, every=2), _WINDOWED),
    "granitemoehybrid": Family(_granite_hybrid, "mamba_.*|layer_types|layers_block_type"),
    "qwen3_next": Family(_qwen3_next, "linear_.*|full_attention_interval|layer_types"),
}
"""Families whose caches are more than plain attention, by ``model_type``."""
