"""Shards: what one rank holds of a KV cache, and where; and their form as bytes, for the handshake."""

import itertools
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import KVFerryError, LayoutError, PlanError, Reason

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

    >>> from kvferry.layout.shard import HeadRange
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


HOST_DEVICE = "cpu"
"""The device of memory of the host, by its name in torch."""
MAX_REGIONS = 4096
MAX_GROUPS = 64
MAX_CHECKED_INTERVALS = 1 << 20
"""Above this many content vectors the exhaustive check for overlaps is left out."""
MAX_SHARD_BYTES = 1 << 20
"""Limit of the encoding of a shard."""
SAME_VERSION = "Run the same kvferry version in both engines."


class Region(msgspec.Struct, frozen=True):
    """Registered memory of one rank: ``length`` bytes from ``base_address``.

    >>> Region(0x1000, 4096)
    cpu 0x1000 + 4096
    """

    base_address: int
    length: int
    device: Name = HOST_DEVICE

    def __post_init__(self) -> None:
        fits = self.base_address >= 0 and self.length > 0 and self.base_address + self.length <= MAX_INTEGER
        require(fits, f"region of {self.length} bytes at {self.base_address} does not exist.")

    def __repr__(self) -> str:
        return f"{self.device} {self.base_address:#x} + {self.length}"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds: its regions, its share of each cache group, and which rank it is.

    Raises :class:`LayoutError` unless every element lies inside its region and no two elements of a component overlap.
    """

    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.tp_rank < self.tp_size, f"tensor-parallel rank {self.tp_rank} of {self.tp_size}.")
        require(0 <= self.pp_rank < self.pp_size, f"pipeline-parallel rank {self.pp_rank} of {self.pp_size}.")
        require(bool(self.groups), f"{self.rank_name} holds no cache group.")
        names = [group.name for group in self.groups]
        require(len(set(names)) == len(names), f"{self.rank_name} names a group twice: {names}.")
        layers = [layer for group in self.groups for layer in group.layers]
        require(len(set(layers)) == len(layers), f"{self.rank_name} names a layer in two groups.")
        for group in self.groups:
            for component in group.components:
                self._check_memory(group, component)

    def _check_memory(self, group: CacheGroup, component: Component) -> None:
        where = f"{self.rank_name}, group {group.name!r}, component {component.name!r}"
        require(component.region < len(self.regions), f"{where}: region {component.region} does not exist.")
        region = self.regions[component.region]
        axes = [(group.num_blocks, component.block_stride), *_inner_axes(component, group.block_size)]
        end = max(component.layer_offsets) + component.itemsize + sum((count - 1) * stride for count, stride in axes)
        if end > region.length:
            raise LayoutError(
                Reason.OUT_OF_REGION,
                f"{where}: reaches byte {end} of a region of {region.length} bytes.",
                "Check the strides and the number of blocks.",
            )
        disjoint = not elements_overlap(component, group.num_blocks, group.block_size)
        require(disjoint, f"{where}: elements overlap ({component!r}).", "Check the strides and layer offsets.")

    @property
    def rank_name(self) -> str:
        """The rank's name in messages."""
        pipeline = f" pp {self.pp_rank}/{self.pp_size}" if self.pp_size > 1 else ""
        return f"rank tp {self.tp_rank}/{self.tp_size}{pipeline}"

    def group(self, name: str) -> CacheGroup | None:
        """Return the group of that name, or None where the rank does not hold it."""
        return next((group for group in self.groups if group.name == name), None)

    def __repr__(self) -> str:
        regions = ", ".join(map(repr, self.regions))
        return "\n".join([f"{self.rank_name} [{regions}]", *map(repr, self.groups)])


def is_nested(axes: Iterable[tuple[int, int]], itemsize: int) -> bool:
    """Return whether each stride is at least the extent of all shorter strides, which excludes any overlap.

    >>> is_nested([(4, 8), (4, 2)], 2), is_nested([(4, 6), (4, 2)], 2)
    (True, False)
    """
    reach = itemsize
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride < reach:
            return False
        reach += (count - 1) * stride
    return True


def elements_overlap(component: Component, num_blocks: int, block_size: int) -> bool:
    """Return whether two distinct elements share a byte; above ``MAX_CHECKED_INTERVALS`` an overlap may be missed."""
    inner = _inner_axes(component, block_size)
    axes = [*inner, (num_blocks, component.block_stride)]
    if not is_nested(axes, component.itemsize):
        return True
    offsets = tuple(sorted(component.layer_offsets))
    step = affine_step(offsets)
    if step is not None and is_nested([*axes, (len(offsets), step)], component.itemsize):
        return False
    return _content_overlaps(component, min(num_blocks, 2), inner)


def _inner_axes(component: Component, block_size: int) -> list[tuple[int, int]]:
    return [
        (component.num_heads, component.head_stride),
        (block_size, component.token_stride),
        (component.num_channels, component.channel_stride),
    ]


def _content_overlaps(component: Component, num_blocks: int, inner: list[tuple[int, int]]) -> bool:
    """Enumerate every element of the first blocks of all layers and look for two with a common byte."""
    starts, length = np.asarray(component.layer_offsets, dtype=np.int64), component.itemsize
    for count, stride in sorted([*inner, (num_blocks, component.block_stride)], key=lambda axis: axis[1]):
        if stride == length:
            length *= count
            continue
        if starts.size * count > MAX_CHECKED_INTERVALS:
            return False
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    starts.sort()
    return bool(np.any(np.diff(starts) < length))


shard_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Shard)


def encode_shard(shard: Shard) -> bytes:
    """Return the shard as MessagePack. Raises :class:`PlanError` (``unsupported``) above :data:`MAX_SHARD_BYTES`, and
    for one that :func:`decode_shard` refuses.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> groups = form_groups(dict.fromkeys("0", AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)))
    >>> shard = model_shard(groups, frozenset("0"), RankMemory(layout=NamedLayout.BHLNC, block_size=16, num_blocks=10))
    >>> decode_shard(encode_shard(shard)) == shard
    True
    """
    encoded = shard_encoder.encode(shard)
    if len(encoded) > MAX_SHARD_BYTES:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"the shard of {shard.rank_name} encodes to {len(encoded)} bytes; the limit is {MAX_SHARD_BYTES}.",
            "Split the model's layers over more pipeline stages.",
        )
    try:
        _decoder.decode(encoded)  # only a decoder checks lengths
    except msgspec.ValidationError as error:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"no other engine could read the shard of {shard.rank_name}: {error}.",
            "Run another model, or split its layers over more pipeline stages.",
        ) from error
    return encoded


def decode_shard(encoded: bytes) -> Shard:
    """Return the shard, with all checks of its constructor.

    Raises :class:`KVFerryError`: for a shard that cannot exist with the reason of the failed check, else
    ``malformed-message``.
    """
    if len(encoded) > MAX_SHARD_BYTES:
        raise PlanError(
            Reason.MALFORMED_MESSAGE,
            f"a received shard has {len(encoded)} bytes; the limit is {MAX_SHARD_BYTES}.",
            SAME_VERSION,
        )
    try:
        return _decoder.decode(encoded)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, KVFerryError):
            raise error.__cause__ from None
        raise PlanError(Reason.MALFORMED_MESSAGE, f"a message is no shard: {error}.", SAME_VERSION) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PlanError(Reason.MALFORMED_MESSAGE, f"a message is no shard: {error}.", SAME_VERSION) from None
