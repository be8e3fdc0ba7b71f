"""Affine memory: where each element of one array lies."""

import itertools
from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.errors import LayoutError, Reason
from kvferry.layout import notation

MAX_LAYERS = 4096
"""Layers in one component. Peers send components, so every list in them is bounded."""
MAX_HEAD_RANGES = 64
MAX_HEADS = 2**24
"""Global heads of one component. The heads of a convolution's state are its channels, so there may be many."""
MAX_NAME_LENGTH = 512
MAX_INTEGER = 2**62
"""Bound of every size and offset, so that sums of two fit signed 64 bits."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]


def require(condition: bool, what: str, remedy: str = "") -> None:
    """Raise INVALID_LAYOUT unless the condition holds."""
    if not condition:
        raise LayoutError(Reason.INVALID_LAYOUT, what, remedy)


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """Global heads ``start`` up to but not including ``end``.

    >>> len(HeadRange(4, 8))
    4
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        require(0 <= self.start < self.end <= MAX_INTEGER, f"head range {self!r} is empty or negative.")

    def __len__(self) -> int:
        return self.end - self.start

    def __repr__(self) -> str:
        return f"{self.start}:{self.end}"


class Atom(StrEnum):
    """The innermost axes that may not be split, because a kernel packs what is inside."""

    CONTENT = "content"
    """The content of one head and token may be moved alone."""
    PAGE = "page"
    """Only the whole page of a block and head, axes N and C, may be moved. Its inside is named by ``packing``."""


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One array that a rank stores for each of its layers and blocks.

    An element lies at ``layer_offsets[l] + b*block_stride + h*head_stride + n*token_stride + c*channel_stride``
    bytes from the start of its region: l counts the layers and h the heads that this rank holds, b is the block id,
    n the token slot, c the channel. A *head* is whatever tensor parallelism deals out: a KV head, or one channel of a
    convolution's state (see :mod:`kvferry.layout.states`). Raises :class:`LayoutError` (``invalid-layout``) for
    anything else.

    >>> Component(name="kv", layers=("0", "1"), layer_offsets=(0, 4096), heads=(HeadRange(0, 4),), total_heads=8,
    ...     num_channels=128, itemsize=2, block_stride=32768, head_stride=8192, token_stride=256, channel_stride=2)
    kv BHLNC: base + b*32768 + h*8192 + l*4096 + n*256 + c*2
    """

    name: Name
    layers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    """Global layer names, in local order."""
    layer_offsets: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    """Bytes from the region's start to each layer's first element. Any integers: hybrid groups interleave layers."""
    heads: Annotated[tuple[HeadRange, ...], msgspec.Meta(max_length=MAX_HEAD_RANGES)]
    """Global heads held, in local order. A latent cache has the one head 0:1."""
    total_heads: int
    """Global heads over all ranks."""
    num_channels: int
    itemsize: int
    block_stride: int
    head_stride: int
    token_stride: int
    channel_stride: int
    region: int = 0
    """Index into the shard's regions."""
    atom: Atom = Atom.CONTENT
    packing: Name = ""
    """Names the inside of a page where the atom is PAGE, such as ``cpu_attn:amx:bfloat16``."""
    is_padding: bool = False
    """Bytes of a group's own blocks that nobody reads. They are moved, so that runs join, where a source has as many of
    the same rank, and left alone elsewhere."""

    def __post_init__(self) -> None:
        self._check_layers()
        self._check_heads()
        sizes = (self.num_channels, self.itemsize, self.block_stride)
        for size in (*sizes, self.head_stride, self.token_stride, self.channel_stride):
            require(0 < size < MAX_INTEGER, f"component {self.name!r} has a size or stride of {size}.")
        require(self.region >= 0, f"component {self.name!r} names region {self.region}.")
        packed = self.atom is Atom.PAGE
        require(packed == bool(self.packing), f"component {self.name!r}: a packing is named exactly for pages.")

    def _check_layers(self) -> None:
        require(bool(self.layers), f"component {self.name!r} has no layers.")
        require(len(set(self.layers)) == len(self.layers), f"component {self.name!r} names a layer twice.")
        require(
            len(self.layers) == len(self.layer_offsets),
            f"component {self.name!r} has {len(self.layers)} layers and {len(self.layer_offsets)} layer offsets.",
        )
        lowest, highest = min(self.layer_offsets), max(self.layer_offsets)
        require(lowest >= 0 and highest < MAX_INTEGER, f"component {self.name!r} has a layer offset out of range.")

    def _check_heads(self) -> None:
        require(bool(self.heads), f"component {self.name!r} has no heads.")
        ordered = sorted(self.heads, key=lambda held: held.start)
        apart = all(before.end <= after.start for before, after in itertools.pairwise(ordered))
        require(apart, f"component {self.name!r} holds a head twice: {list(self.heads)}.")
        last = ordered[-1].end - 1
        require(self.total_heads <= MAX_HEADS, f"component {self.name!r} has {self.total_heads} heads.")
        require(last < self.total_heads, f"component {self.name!r} holds head {last} of {self.total_heads}.")

    def is_like(self, other: "Component") -> bool:
        """Return whether both have elements of the same number and size, however they lie and are dealt out."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("name", "total_heads", "num_channels", "itemsize", "is_padding")
        )

    @property
    def num_heads(self) -> int:
        """Heads that this rank holds."""
        return sum(len(held) for held in self.heads)

    def __repr__(self) -> str:
        strides = [
            ("B", self.block_stride),
            ("H", self.head_stride),
            ("N", self.token_stride),
            ("C", self.channel_stride),
        ]
        return notation.formula(self.name, self.layer_offsets, strides)
