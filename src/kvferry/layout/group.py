"""A cache group (layers that share block ids and one cache kind) and the tokens that a rank holds of it."""

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.layout.component import MAX_INTEGER, MAX_LAYERS, Atom, Component, Name, require

MAX_COMPONENTS = 64
MAX_BLOCK_SIZE = 2**20
MAX_BLOCKS = 2**31
MAX_TOKENS_PER_POSITION = 2**22
"""Tokens of one block on all context-parallel ranks together. Proofs enumerate a few such positions."""
MAX_SCALES = 4 * MAX_LAYERS
MAX_SHARES = 2**16


class CacheKind(StrEnum):
    """What the blocks of a group hold."""

    ATTENTION = "attention"
    """Keys and values of each KV head (MHA, GQA, MQA)."""
    MLA = "mla"
    """One latent vector per token, the same on every tensor-parallel rank."""
    SLIDING_WINDOW = "sliding-window"
    """Keys and values of the last ``window`` tokens; the engine frees blocks that lie before the window."""
    STATE = "state"
    """One state of a Mamba or linear-attention layer per block. There is no token axis: the block size is 1, and a
    request moves "token" 0 to 1 between the blocks that hold its last state."""


class TokenShare(msgspec.Struct, frozen=True):
    """The tokens that one context-parallel rank holds: every ``size``-th stretch of ``interleave`` consecutive tokens.

    Global token t is on rank ``(t // interleave) % size``, at local index
    ``t // (interleave * size) * interleave + t % interleave``. With an interleave of 1 the ranks take turns token by
    token, with one of the block size block by block. Ranks share block ids: one position of a list of ids names one
    block on every rank, and these blocks together hold ``block_size * size`` consecutive tokens.

    Prefill- and decode-context parallelism both split tokens this way; ``rank`` and ``size`` count both together. The
    default holds all tokens.

    >>> [token for token in range(12) if token // 2 % 3 == 1], TokenShare(1, 3, 2).is_whole
    ([2, 3, 8, 9], False)
    >>> TokenShare(1, 3, 2)
    share 1/3 by 2
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.size <= MAX_SHARES, f"token share {self.rank} of {self.size} does not exist.")
        require(self.interleave > 0, f"a token share has an interleave of {self.interleave} tokens.")
        require(not self.is_whole or self.interleave == 1, "a share of all tokens has an interleave of 1.")

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds every token."""
        return self.size == 1

    @property
    def split(self) -> tuple[int, int]:
        """Size and interleave, which the ranks of one engine have in common."""
        return self.size, self.interleave

    def overlaps(self, other: "TokenShare") -> bool:
        """Return whether both shares have a token in common.

        A share is a set of residues modulo ``size * interleave``. By the Chinese remainder theorem two residues have a
        common token exactly if they agree modulo the greatest common divisor of both moduli. Modulo that divisor each
        share is an interval of a circle.

        >>> TokenShare(0, 2, 1).overlaps(TokenShare(1, 2, 1)), TokenShare(0, 2, 1).overlaps(TokenShare(1, 2, 2))
        (False, True)
        """
        circle = math.gcd(self.size * self.interleave, other.size * other.interleave)
        apart = other.rank * other.interleave - self.rank * self.interleave
        return apart % circle < self.interleave or -apart % circle < other.interleave

    def __repr__(self) -> str:
        return f"share {self.rank}/{self.size} by {self.interleave}"


WHOLE = TokenShare()
"""All tokens."""


class TensorScale(msgspec.Struct, frozen=True):
    """The scale with which one tensor of one layer, such as ``k``, was quantised."""

    layer: Name
    tensor: Name
    value: float


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a cache group. ``block_size`` and ``window`` count tokens; a window of 0 means all tokens.

    Components of one group may hold different heads: each segment of a Mamba state is split by rank on its own. Their
    item sizes may differ too: a recurrent state may be wider than the convolution's. ``scales`` are those of caches
    that are quantised per tensor; scales inside the pages are content, or a component of their own.

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
            f"group {self.name!r} has {self.tokens_per_position} tokens in one block of every rank; the limit is "
            f"{MAX_TOKENS_PER_POSITION}.",
            "Use smaller blocks or fewer context-parallel ranks.",
        )

    def _check_kind(self) -> None:
        where, share = f"group {self.name!r} ({self.kind})", self.token_share
        slides = self.kind is CacheKind.SLIDING_WINDOW
        fits = 0 < self.window < MAX_INTEGER if slides else self.window == 0
        require(fits, f"{where} has a window of {self.window} tokens.", "Only sliding-window groups have a window.")
        if self.kind is CacheKind.STATE:
            require(self.block_size == 1, f"{where} has blocks of {self.block_size} tokens.", "A block holds 1 state.")
            require(share.is_whole, f"{where} has token {share!r}.", "A state cannot be split by tokens.")
        divides = self.block_size % share.interleave == 0
        require(divides, f"{where}: the interleave of {share!r} does not divide blocks of {self.block_size} tokens.")

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
        require(component.atom is first.atom, f"{where}: the atom differs from that of {first.name!r}.")
        if component.atom is Atom.PAGE:
            row = component.num_channels * component.itemsize
            column = self.block_size * component.itemsize
            dense = (row, component.itemsize), (component.itemsize, column)
            require(
                (component.token_stride, component.channel_stride) in dense,
                f"{where}: a packed page must be contiguous.",
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
        """Consecutive global tokens of one position of a list of block ids, on all ranks together."""
        return self.block_size * self.token_share.size

    def __repr__(self) -> str:
        blocks = f"{self.num_blocks} blocks of {self.block_size} tokens"
        terms = [f"{self.num_blocks} states" if self.kind is CacheKind.STATE else blocks]
        terms += [f"window {self.window}"] if self.window else []
        terms += [] if self.token_share.is_whole else [repr(self.token_share)]
        heads = [_heads(component) for component in self.components]
        alike = len(set(heads)) == 1
        terms += heads[:1] if alike else []
        pairs = zip(self.components, heads, strict=True)
        lines = [f"  {component!r}" + ("" if alike else f", {held}") for component, held in pairs]
        return "\n".join([f"{self.name} ({self.kind}, {', '.join(terms)})", *lines])


def _heads(component: Component) -> str:
    return f"heads {' '.join(map(repr, component.heads))} of {component.total_heads}"
