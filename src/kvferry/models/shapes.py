"""The caches of each layer of a model: from its Hugging Face ``config.json``, or given by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.errors import Reason
from kvferry.models.config import ModelConfig, config_of, item_size, read_fields, refuse
from kvferry.models.families import ItemSizes, layer_caches, refuse_family
from kvferry.models.layer_caches import AttentionCache, LayerCache

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
    """Return the caches of the model of a ``config.json``, or of a folder that holds one.

    Raises :class:`SettingsError` as :func:`kvferry.models.config.config_of` and
    :func:`kvferry.models.families.layer_caches` do.
    """
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
