"""A cache group: layers that share block ids and one cache kind."""

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.layout.component import MAX_INTEGER, MAX_LAYERS, Atom, Component, Name, require
from kvferry.layout.token_share import WHOLE, TokenShare

MAX_COMPONENTS = 64
MAX_BLOCK_SIZE = 2**20
MAX_BLOCKS = 2**31
MAX_TOKENS_PER_POSITION = 2**22
"""Tokens of one block on all context-parallel ranks together. Plans are tried on a few such positions."""
MAX_SCALES = 4 * MAX_LAYERS


class CacheKind(StrEnum):
    """What a group's blocks hold."""

    ATTENTION = "attention"
    """Keys and values of each KV head (MHA, GQA, MQA)."""
    MLA = "mla"
    """One latent vector a token, the same on every tensor-parallel rank."""
    SLIDING_WINDOW = "sliding-window"
    """Keys and values of the last ``window`` tokens; blocks that have left the window are given back."""
    STATE = "state"
    """One state of a Mamba or linear-attention layer a block. There is no token axis: the block size is 1, and a
    request moves "token" 0 to 1 from and to the block that holds its last state."""


class TensorScale(msgspec.Struct, frozen=True):
    """The scale by which one tensor of one layer, such as ``k``, was quantised."""

    layer: Name
    tensor: Name
    value: float


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a cache group. ``block_size`` is in tokens, ``window`` is too and 0 where all are kept.

    Components may be held in different heads: a Mamba state's segments are each split by rank on their own. Their
    item sizes may differ too, as where a recurrent state is kept wider than the convolution's. ``scales`` are those
    of caches quantised a tensor at a time; scales kept in the pages are content, or a component of their own.

    >>> from kvferry.layout.component import HeadRange
    >>> latent = Component(name="latent", layers=("0",), layer_offsets=(0,), heads=(HeadRange(0, 1),), total_heads=1,
    ...     num_channels=576, itemsize=2, block_stride=18432, head_stride=18432, token_stride=1152, channel_stride=2)
    >>> CacheGroup(name="full", kind=CacheKind.MLA, block_size=16, num_blocks=100, components=(latent,),
    ...     token_share=TokenShare(1, 2, 1))
    full (mla, 100 blocks of 16 tokens, share 1/2 by 1, heads 0:1 of 1)
      latent LBHNC: base + b*18432 + h*18432 + n*1152 + c*2
    """

    name: Name
    kind: CacheKind
    block_size: int
    num_blocks: int
    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    window: int = 0
    token_share: TokenShare = WHOLE
    scales: Annotated[tuple[TensorScale, ...], msgspec.Meta(max_length=MAX_SCALES)] = ()

    def __post_init__(self) -> None:
        require(0 < self.block_size <= MAX_BLOCK_SIZE, f"group {self.name!r} has a block size of {self.block_size}.")
        require(0 < self.num_blocks <= MAX_BLOCKS, f"group {self.name!r} has {self.num_blocks} blocks.")
        require(bool(self.components), f"group {self.name!r} has no components.")
        names = [component.name for component in self.components]
        require(len(set(names)) == len(names), f"group {self.name!r} names a component twice: {names}.")
        for component in self.components:
            self._check_component(component)
        self._check_kind()
        self._check_scales()
        require(
            self.tokens_per_position <= MAX_TOKENS_PER_POSITION,
            f"group {self.name!r} has {self.tokens_per_position} tokens in one block of every rank, at most "
            f"{MAX_TOKENS_PER_POSITION} are planned.",
            "Use smaller blocks or fewer context-parallel ranks.",
        )

    def _check_kind(self) -> None:
        where, share = f"group {self.name!r} ({self.kind})", self.token_share
        slides = self.kind is CacheKind.SLIDING_WINDOW
        fits = 0 < self.window < MAX_INTEGER if slides else self.window == 0
        require(fits, f"{where} has a window of {self.window} tokens.", "A sliding window has one, nothing else has.")
        if self.kind is CacheKind.STATE:
            require(self.block_size == 1, f"{where} has blocks of {self.block_size} tokens.", "A block holds 1 state.")
            require(share.is_whole, f"{where} is held in {share!r}.", "A state cannot be dealt out by tokens.")
        divides = self.block_size % share.interleave == 0
        require(divides, f"{where}: {share!r} does not divide blocks of {self.block_size} tokens.")

    def _check_scales(self) -> None:
        named = [(scale.layer, scale.tensor) for scale in self.scales]
        require(len(set(named)) == len(named), f"group {self.name!r} names a scale twice.")
        for scale in self.scales:
            sound = scale.layer in self.layers and math.isfinite(scale.value) and scale.value > 0
            require(sound, f"group {self.name!r} has a scale of {scale.value} for {scale.layer!r}, {scale.tensor!r}.")

    def _check_component(self, component: Component) -> None:
        where = f"group {self.name!r}, component {component.name!r}"
        first = self.components[0]
        require(set(component.layers) == set(first.layers), f"{where}: layers differ from those of {first.name!r}.")
        require(component.atom is first.atom, f"{where}: its atom differs from that of {first.name!r}.")
        if component.atom is Atom.PAGE:
            row = component.num_channels * component.itemsize
            column = self.block_size * component.itemsize
            dense = (row, component.itemsize), (component.itemsize, column)
            require(
                (component.token_stride, component.channel_stride) in dense,
                f"{where}: a packed page must lie in one piece.",
                "Use a layout that ends in NC.",
            )

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers that this rank holds."""
        return frozenset(self.components[0].layers)

    def component(self, name: str) -> Component:
        """Return the component of that name, which must exist."""
        return next(component for component in self.components if component.name == name)

    @property
    def tokens_per_position(self) -> int:
        """Consecutive global tokens that one position of a list of block ids covers, on all ranks together."""
        return self.block_size * self.token_share.size

    def __repr__(self) -> str:
        holds = f"{self.num_blocks} blocks of {self.block_size} tokens"
        terms = [f"{self.num_blocks} states" if self.kind is CacheKind.STATE else holds]
        terms += [f"window {self.window}"] if self.window else []
        terms += [] if self.token_share.is_whole else [repr(self.token_share)]
        heads = [_heads(component) for component in self.components]
        alike = len(set(heads)) == 1
        terms += heads[:1] if alike else []
        parts = zip(self.components, heads, strict=True)
        lines = [f"  {component!r}" + ("" if alike else f", {held}") for component, held in parts]
        return "\n".join([f"{self.name} ({self.kind}, {', '.join(terms)})", *lines])


def _heads(component: Component) -> str:
    return f"heads {' '.join(map(repr, component.heads))} of {component.total_heads}"
