"""The cache of one layer of a model, as integers."""

from dataclasses import dataclass
from typing import ClassVar

from kvferry.layout.shard import CacheKind, HeadRange, heads_of_rank, require
from kvferry.layout.states import ConvSegment, gated_delta_segments, mamba1_segments, mamba2_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCache:
    """Keys and values of one layer, or its latent vectors. ``head_size`` is the width of K, of V, or of the latent.

    >>> AttentionCache(num_kv_heads=8, head_size=128, itemsize=2).page_bytes(16, tp_size=2)
    32768
    """

    num_kv_heads: int
    head_size: int
    itemsize: int
    window: int = 0
    is_latent: bool = False

    @property
    def kind(self) -> CacheKind:
        """The kind of group that such layers form."""
        if self.is_latent:
            return CacheKind.MLA
        return CacheKind.SLIDING_WINDOW if self.window else CacheKind.ATTENTION

    @property
    def num_channels(self) -> int:
        """Numbers per head and token."""
        return self.head_size * (1 if self.is_latent else 2)

    def heads(self, tp_rank: int, tp_size: int) -> HeadRange:
        """Return the global heads of a rank; every rank holds the latent."""
        return HeadRange(0, 1) if self.is_latent else heads_of_rank(self.num_kv_heads, tp_rank, tp_size)

    def page_bytes(self, block_size: int, tp_size: int) -> int:
        """Return the bytes of one block of this layer on one rank."""
        return len(self.heads(0, tp_size)) * block_size * self.num_channels * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Cache:
    """The state of one Mamba1 layer: each of its channels is a head of ``state_size`` numbers."""

    kind: ClassVar = CacheKind.STATE
    window: ClassVar = 0
    intermediate_size: int
    state_size: int
    kernel_size: int
    itemsize: int
    recurrent_itemsize: int | None = None

    @property
    def num_heads(self) -> int:
        """Heads of the recurrent state: the channels."""
        return self.intermediate_size

    @property
    def state_channels(self) -> int:
        """Numbers of the recurrent state of one head."""
        return self.state_size

    def segments(self, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
        """Return the one segment of the convolution's channels that a rank holds."""
        return mamba1_segments(self.intermediate_size, tp_rank, tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Cache:
    """The state of one Mamba2 layer. The convolution keeps ``kernel_size - 1`` inputs.

    ``recurrent_itemsize`` is given where the recurrent state has another dtype than the convolution's inputs.
    """

    kind: ClassVar = CacheKind.STATE
    window: ClassVar = 0
    intermediate_size: int
    num_groups: int
    state_size: int
    num_heads: int
    head_size: int
    kernel_size: int
    itemsize: int
    recurrent_itemsize: int | None = None

    @property
    def state_channels(self) -> int:
        """Numbers of the recurrent state of one head."""
        return self.head_size * self.state_size

    def segments(self, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
        """Return the segments of the convolution's channels that a rank holds."""
        return mamba2_segments(self.intermediate_size, self.num_groups, self.state_size, tp_rank, tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaCache:
    """The state of one layer of a gated delta net."""

    kind: ClassVar = CacheKind.STATE
    window: ClassVar = 0
    num_key_heads: int
    key_head_size: int
    num_value_heads: int
    value_head_size: int
    kernel_size: int
    itemsize: int
    recurrent_itemsize: int | None = None

    @property
    def num_heads(self) -> int:
        """Heads of the recurrent state: the value heads."""
        return self.num_value_heads

    @property
    def state_channels(self) -> int:
        """Numbers of the recurrent state of one head."""
        return self.value_head_size * self.key_head_size

    def segments(self, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
        """Return the segments of the convolution's channels that a rank holds."""
        keys, values = (self.num_key_heads, self.key_head_size), (self.num_value_heads, self.value_head_size)
        return gated_delta_segments(*keys, *values, tp_rank, tp_size)


StateCache = Mamba1Cache | Mamba2Cache | GatedDeltaCache
LayerCache = AttentionCache | StateCache


def state_heads(cache: StateCache, tp_rank: int, tp_size: int) -> HeadRange:
    """Return the heads of the recurrent state that a rank holds: split evenly, never replicated."""
    what = f"{cache.num_heads} heads of a state cannot be split over {tp_size} ranks."
    require(cache.num_heads >= tp_size, what, "Use ranks that divide them.")
    return heads_of_rank(cache.num_heads, tp_rank, tp_size)


def conv_bytes(cache: StateCache, tp_size: int) -> int:
    """Return the bytes of the convolution's inputs that one layer keeps on one rank."""
    channels = sum(len(segment.held) for segment in cache.segments(0, tp_size))
    return channels * (cache.kernel_size - 1) * cache.itemsize


def recurrent_itemsize(cache: StateCache) -> int:
    """Return the bytes of one number of the recurrent state."""
    return cache.recurrent_itemsize or cache.itemsize


def state_bytes(cache: StateCache, tp_size: int) -> int:
    """Return the bytes of one layer's whole state on one rank.

    >>> state_bytes(Mamba2Cache(intermediate_size=8192, num_groups=1, state_size=128, num_heads=128, head_size=64,
    ...     kernel_size=4, itemsize=2), tp_size=2)
    1074688
    """
    recurrent = len(state_heads(cache, 0, tp_size)) * cache.state_channels * recurrent_itemsize(cache)
    return conv_bytes(cache, tp_size) + recurrent
