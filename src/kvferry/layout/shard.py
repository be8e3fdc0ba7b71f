"""What one rank holds of a KV cache, and where."""

from typing import Annotated

import msgspec

from kvferry.errors import LayoutError, Reason
from kvferry.layout.component import MAX_INTEGER, Component, Name, require
from kvferry.layout.group import CacheGroup
from kvferry.layout.overlap import elements_overlap, extent

MAX_REGIONS = 4096
MAX_GROUPS = 64


class Region(msgspec.Struct, frozen=True):
    """Registered memory of one rank: ``length`` bytes from ``base_address``.

    >>> Region(0x1000, 4096)
    cpu 0x1000 + 4096
    """

    base_address: int
    length: int
    device: Name = "cpu"

    def __post_init__(self) -> None:
        fits = self.base_address >= 0 and self.length > 0 and self.base_address + self.length <= MAX_INTEGER
        require(fits, f"region of {self.length} bytes at {self.base_address} does not exist.")

    def __repr__(self) -> str:
        return f"{self.device} {self.base_address:#x} + {self.length}"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds: its regions, its part of each cache group, and which rank it is.

    Raises :class:`LayoutError` unless every element lies inside its region and apart from every other element of
    its component.
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
        axes = [
            (group.num_blocks, component.block_stride),
            (component.num_heads, component.head_stride),
            (group.block_size, component.token_stride),
            (component.num_channels, component.channel_stride),
        ]
        end = max(component.layer_offsets) + extent(axes, component.itemsize)
        if end > region.length:
            raise LayoutError(
                Reason.OUT_OF_REGION,
                f"{where}: reaches byte {end} of a region of {region.length} bytes.",
                "Check the strides and the number of blocks.",
            )
        apart = not elements_overlap(component, group.num_blocks, group.block_size)
        require(apart, f"{where}: elements overlap ({component!r}).", "Check the strides and layer offsets.")

    @property
    def rank_name(self) -> str:
        """The rank as messages name it."""
        pipeline = f" pp {self.pp_rank}/{self.pp_size}" if self.pp_size > 1 else ""
        return f"rank tp {self.tp_rank}/{self.tp_size}{pipeline}"

    def group(self, name: str) -> CacheGroup | None:
        """Return the group of that name, or None where this rank has none."""
        return next((group for group in self.groups if group.name == name), None)

    def __repr__(self) -> str:
        regions = ", ".join(map(repr, self.regions))
        return "\n".join([f"{self.rank_name} [{regions}]", *map(repr, self.groups)])
