"""The cache of each layer of a model: from its Hugging Face ``config.json``, or given by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.errors import Reason
from kvferry.models.config import item_size, read_config, refuse
from kvferry.models.families import layer_caches
from kvferry.models.layer_caches import AttentionCache, LayerCache


def model_caches(path: Path, dtype: str | None = None) -> Sequence[LayerCache]:
    """Return the cache of each layer of the model of a ``config.json``, or of a folder that holds one.

    Raises :class:`SettingsError` as :func:`kvferry.models.config.read_config` and
    :func:`kvferry.models.families.layer_caches` do.
    """
    config = read_config(path)
    return layer_caches(config, item_size(dtype or config.dtype))


def uniform_cache(caches: Sequence[LayerCache]) -> AttentionCache:
    """Return the cache of one of a model's equal layers, which keep all tokens.

    Raises :class:`SettingsError` (``unsupported``) for other layers.

    >>> uniform_cache([AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)] * 2)
    AttentionCache(num_kv_heads=2, head_size=64, itemsize=2, window=0, is_latent=False)
    """
    cache = caches[0]
    if len(set(caches)) > 1 or not isinstance(cache, AttentionCache) or cache.window:
        what = "the model's layers differ from each other, or keep a window or a state."
        refuse(what, "Leave out --layers, --kv-heads and --head-size, or leave out --model.", Reason.UNSUPPORTED)
    return cache


def caches_of(
    model: Path | None, layers: int | None, kv_heads: int | None, head_size: int | None, dtype: str | None
) -> Sequence[LayerCache]:
    """Return the cache of each layer: from the model's configuration, where options given by hand take precedence.

    Raises :class:`SettingsError`, also where an option is missing or cannot apply because the model's layers differ.
    """
    if model is not None:
        caches = model_caches(model, dtype)
        if not (layers or kv_heads or head_size):
            return caches
        cache = uniform_cache(caches)
        heads, size = kv_heads or cache.num_kv_heads, head_size or cache.head_size
        return [replace(cache, num_kv_heads=heads, head_size=size)] * (layers or len(caches))
    if not (layers and kv_heads and head_size):
        by_hand = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
        missing = ", ".join(option for option, value in by_hand.items() if not value)
        refuse(f"{missing} must be given.", "Or name a model's config.json with --model.")
    itemsize = item_size(dtype or "bfloat16")
    return [AttentionCache(num_kv_heads=kv_heads, head_size=head_size, itemsize=itemsize)] * layers
