"""Components and heads: where each element of one array lies, and which heads a rank holds."""

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.errors import LayoutError, Reason

MAX_LAYERS = 4096
"""Layers of one component. A peer sends components, so every list in a component is bounded."""
MAX_HEAD_RANGES = 64
MAX_HEADS = 2**24
"""Global heads of one component. The heads of a convolution's state are the convolution's channels: thousands."""
MAX_NAME_LENGTH = 512
MAX_INTEGER = 2**62
"""Bound of every size and offset, so that a sum of two fits in 64 signed bits."""

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
    """The innermost axes that must not be split, because a kernel packs them."""

    CONTENT = "content"
    """Axis C. The content of one head and token may move alone."""
    PAGE = "page"
    """Axes N and C. Only the whole page of a block and head may move; ``packing`` names the order inside."""


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One array that a rank stores for each of its layers and blocks.

    An element lies at ``layer_offsets[l] + b*block_stride + h*head_stride + n*token_stride + c*channel_stride``
    bytes from the start of its region: l counts the layers and h the heads that this rank holds, b is the block id,
    n the token slot, c the channel. A *head* is the unit that tensor parallelism splits: a KV head, or one channel of
    a convolution's state (see :mod:`kvferry.layout.states`). Raises :class:`LayoutError` (``invalid-layout``) for
    sizes, strides, layers or heads that cannot exist.

    >>> Component(name="kv", layers=("0", "1"), layer_offsets=(0, 4096), heads=(HeadRange(0, 4),), total_heads=8,
    ...     num_channels=128, itemsize=2, block_stride=32768, head_stride=8192, token_stride=256, channel_stride=2)
    kv BHLNC: base + b*32768 + h*8192 + l*4096 + n*256 + c*2
    """

    name: Name
    layers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    """Global layer names, in local order."""
    layer_offsets: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    """Bytes from the region's start to each layer's first element, in any order: hybrid groups interleave layers."""
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
    """The order inside a page where the atom is PAGE, such as ``cpu_attn:amx:bfloat16``; empty elsewhere."""
    is_padding: bool = False
    """Whether these are bytes of a block that no kernel reads. Padding moves only from a source with equal padding of
    the same rank, where it joins the runs around it."""

    def __post_init__(self) -> None:
        self._check_layers()
        self._check_heads()
        sizes = (self.num_channels, self.itemsize, self.block_stride)
        for size in (*sizes, self.head_stride, self.token_stride, self.channel_stride):
            require(0 < size < MAX_INTEGER, f"component {self.name!r} has a size or stride of {size}.")
        require(self.region >= 0, f"component {self.name!r} names region {self.region}.")
        packed = self.atom is Atom.PAGE
        require(packed == bool(self.packing), f"component {self.name!r}: atom {self.atom}, packing {self.packing!r}.")

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
        """Return whether both are the same component of a model; layouts and held heads may differ."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("name", "total_heads", "num_channels", "itemsize", "is_padding")
        )

    @property
    def num_heads(self) -> int:
        """The number of heads that this rank holds."""
        return sum(len(held) for held in self.heads)

    def __repr__(self) -> str:
        strides = [
            ("B", self.block_stride),
            ("H", self.head_stride),
            ("N", self.token_stride),
            ("C", self.channel_stride),
        ]
        return formula(self.name, self.layer_offsets, strides)


def heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> HeadRange:
    """Return the global KV heads of a tensor-parallel rank by vLLM's rule.

    Up to ``num_kv_heads`` ranks split the heads evenly; with more ranks, each rank holds one head and several ranks
    hold the same.

    >>> heads_of_rank(8, 1, 2), heads_of_rank(2, 5, 8), heads_of_rank(6, 2, 3)
    (4:8, 1:2, 4:6)
    >>> heads_of_rank(8, 0, 3)
    Traceback (most recent call last):
        ...
    kvferry.errors.LayoutError: ... [indivisible-heads]
    """
    require(0 <= tp_rank < tp_size and num_kv_heads > 0, f"rank {tp_rank} of {tp_size} with {num_kv_heads} KV heads.")
    larger, smaller = max(num_kv_heads, tp_size), min(num_kv_heads, tp_size)
    if larger % smaller:
        raise LayoutError(
            Reason.INDIVISIBLE_HEADS,
            f"{num_kv_heads} KV heads cannot be split over {tp_size} tensor-parallel ranks.",
            f"Use a tensor-parallel size that divides {num_kv_heads} or is a multiple of it.",
        )
    if tp_size > num_kv_heads:
        head = tp_rank // (tp_size // num_kv_heads)
        return HeadRange(head, head + 1)
    each = num_kv_heads // tp_size
    return HeadRange(tp_rank * each, (tp_rank + 1) * each)


def affine_step(offsets: Sequence[int]) -> int | None:
    """Return the constant difference of the offsets; None where the difference varies.

    >>> affine_step((0, 4096, 8192)), affine_step((0, 1, 5)), affine_step((7,))
    (4096, None, 0)
    """
    steps = {after - before for before, after in itertools.pairwise(offsets)} or {0}
    return steps.pop() if len(steps) == 1 else None


def formula(name: str, layer_offsets: Sequence[int], strides: Sequence[tuple[str, int]]) -> str:
    """Return a component as its name, its memory order and its address formula.

    ``strides`` names the axes other than L with their strides in bytes.

    >>> formula("kv", (0, 4096, 8192), [("B", 98304), ("H", 12288), ("N", 256), ("C", 2)])
    'kv BHLNC: base + b*98304 + h*12288 + l*4096 + n*256 + c*2'
    >>> formula("kv", (64, 0, 4096), [("B", 98304), ("H", 12288), ("N", 256), ("C", 2)])
    'kv B H N C: base + layer[l] + b*98304 + h*12288 + n*256 + c*2'
    """
    step = affine_step(layer_offsets)
    origin = f" + {layer_offsets[0]}" if step is not None and layer_offsets[0] else ""
    terms = list(strides)
    if step:
        terms.append(("L", step))
    # Longest stride first is the memory order. Axes of equal strides keep their order.
    terms.sort(key=lambda term: -abs(term[1]))
    order = "".join(axis for axis, _ in terms) if step is not None else " ".join(axis for axis, _ in terms)
    if step == 0:
        order = "L" + order
    layers = " + layer[l]" if step is None else ""
    return f"{name} {order}: base{origin}{layers}" + "".join(f" + {axis.lower()}*{stride}" for axis, stride in terms)
