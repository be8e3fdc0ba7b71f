"""The cache of one layer of a model, as integers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvferry.layout.shard import CacheKind, HeadRange, heads_of_rank, require
from kvferry.layout.states import ConvSegment


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
class StateCache:
    """The state of one layer: a convolution, which keeps ``kernel_size - 1`` inputs, and a recurrent state.

    ``split`` of ``sizes``, a rank and the number of ranks are the convolution's segments on that rank. The recurrent
    state has ``num_heads`` of ``num_channels``; ``recurrent_itemsize`` is given where its dtype is another one.

    >>> from kvferry.layout.states import mamba2_segments
    >>> StateCache(split=mamba2_segments, sizes=(8192, 1, 128), num_heads=128, num_channels=64 * 128, kernel_size=4,
    ...     itemsize=2).num_bytes(tp_size=2)
    1074688
    """

    split: Callable[..., tuple[ConvSegment, ...]]
    sizes: tuple[int, ...]
    num_heads: int
    num_channels: int
    kernel_size: int
    itemsize: int
    recurrent_itemsize: int | None = None
    kind: ClassVar = CacheKind.STATE
    window: ClassVar = 0

    @property
    def state_itemsize(self) -> int:
        """Bytes of one number of the recurrent state."""
        return self.recurrent_itemsize or self.itemsize

    def segments(self, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
        """Return the segments of the convolution's channels that a rank holds."""
        return self.split(*self.sizes, tp_rank, tp_size)

    def heads(self, tp_rank: int, tp_size: int) -> HeadRange:
        """Return the heads of the recurrent state that a rank holds: split evenly, never replicated."""
        what = f"{self.num_heads} heads of a state cannot be split over {tp_size} ranks."
        require(self.num_heads >= tp_size, what, "Use ranks that divide them.")
        return heads_of_rank(self.num_heads, tp_rank, tp_size)

    def conv_bytes(self, tp_size: int) -> int:
        """Return the bytes of the convolution's inputs that one layer keeps on one rank."""
        channels = sum(len(segment.held) for segment in self.segments(0, tp_size))
        return channels * (self.kernel_size - 1) * self.itemsize

    def num_bytes(self, tp_size: int) -> int:
        """Return the bytes of one layer's whole state on one rank."""
        return self.conv_bytes(tp_size) + len(self.heads(0, tp_size)) * self.num_channels * self.state_itemsize


LayerCache = AttentionCache | StateCache
