"""Shards: what one rank holds of a KV cache, and where; and their form as bytes, for the handshake."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import KVFerryError, LayoutError, PlanError, Reason
from kvferry.layout.component import MAX_INTEGER, Component, Name, affine_step, require
from kvferry.layout.group import CacheGroup

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
    >>> from kvferry.layout.dense import shard_for
    >>> shard = shard_for(layers=["0"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10,
    ...     layout=NamedLayout.BHLNC)
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
