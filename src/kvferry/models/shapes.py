"""Cache shapes of a model: from its Hugging Face ``config.json``, or given by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import Reason, SettingsError
from kvferry.layout.group import CacheKind
from kvferry.models.config import ModelConfig, item_size, read_config
from kvferry.models.families import layer_caches
from kvferry.models.layer_caches import AttentionCache, LayerCache


@dataclass(frozen=True)
class ModelShapes:
    """The cache of a model with equal layers; ``head_size`` counts channels of K (and of V) per head."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kind: CacheKind

    def caches(self) -> list[LayerCache]:
        """Return the cache of each layer."""
        is_latent, itemsize = self.kind is CacheKind.MLA, item_size(self.dtype)
        heads, size = self.num_kv_heads, self.head_size
        cache = AttentionCache(num_kv_heads=heads, head_size=size, itemsize=itemsize, is_latent=is_latent)
        return [cache] * self.num_layers


def read_model_shapes(path: Path) -> ModelShapes:
    """Return the shapes of the model of a ``config.json``, or of a folder that holds one.

    Raises :class:`SettingsError` as :func:`kvferry.models.config.read_config` and
    :func:`kvferry.models.families.layer_caches` do, and ``unsupported`` for a model of several kinds of layers.
    """
    config = read_config(path)
    return uniform_shapes(layer_caches(config, item_size(config.dtype)), config.dtype)


def uniform_shapes(caches: Sequence[LayerCache], dtype: str) -> ModelShapes:
    """Return the shapes of equal layers that keep all tokens. Raises :class:`SettingsError` (``unsupported``).

    >>> uniform_shapes([AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)] * 2, "bfloat16")
    ModelShapes(num_layers=2, num_kv_heads=2, head_size=64, dtype='bfloat16', kind=<CacheKind.ATTENTION: 'attention'>)
    """
    cache = caches[0]
    if len(set(caches)) > 1 or not isinstance(cache, AttentionCache) or cache.window:
        raise SettingsError(
            Reason.UNSUPPORTED,
            "the model's layers differ from each other, or keep a window or a state.",
            "Leave out --layers, --kv-heads and --head-size, or leave out --model.",
        )
    return ModelShapes(len(caches), cache.num_kv_heads, cache.head_size, dtype, cache.kind)


def caches_of(
    model: Path | None, layers: int | None, kv_heads: int | None, head_size: int | None, dtype: str | None
) -> Sequence[LayerCache]:
    """Return the cache of each layer: from the model's configuration, where options given by hand take precedence.

    Raises :class:`SettingsError`, also where an option is missing or cannot apply because the model's layers differ.
    """
    by_hand = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
    if model is None:
        missing = [option for option, value in by_hand.items() if value is None]
        if missing:
            what = f"{', '.join(missing)} must be given."
            raise SettingsError(Reason.INVALID_SETTING, what, "Or name a model's config.json with --model.")
        shapes = ModelShapes(layers or 0, kv_heads or 0, head_size or 0, dtype or "bfloat16", CacheKind.ATTENTION)
        return shapes.caches()
    config: ModelConfig = read_config(model)
    named = dtype or config.dtype
    caches = layer_caches(config, item_size(named))
    if not any(by_hand.values()):
        return caches
    found = uniform_shapes(caches, named)
    sizes = layers or found.num_layers, kv_heads or found.num_kv_heads, head_size or found.head_size
    return ModelShapes(*sizes, named, found.kind).caches()
