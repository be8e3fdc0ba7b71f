"""A cache group: layers that share block ids and one cache kind."""

from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.layout.strided import Atom, Component, HeadRange, Name, require

MAX_COMPONENTS = 64
MAX_BLOCK_SIZE = 2**20
MAX_BLOCKS = 2**31
MAX_KV_HEADS = 2**16


class CacheKind(StrEnum):
    """What a group's blocks hold."""

    ATTENTION = "attention"
    """Keys and values of each KV head (MHA, GQA, MQA)."""
    MLA = "mla"
    """One latent vector a token, the same on every tensor-parallel rank."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a cache group. ``block_size`` is in tokens, ``num_kv_heads`` counts over all ranks.

    >>> latent = Component(name="latent", layers=("0",), layer_offsets=(0,), heads=(HeadRange(0, 1),), num_channels=576,
    ...     itemsize=2, block_stride=18432, head_stride=18432, token_stride=1152, channel_stride=2)
    >>> CacheGroup(name="full", kind=CacheKind.MLA, block_size=16, num_blocks=100, num_kv_heads=1, components=(latent,))
    full (mla, 100 blocks of 16 tokens, heads 0:1 of 1)
      latent LBHNC: base + b*18432 + h*18432 + n*1152 + c*2
    """

    name: Name
    kind: CacheKind
    block_size: int
    num_blocks: int
    num_kv_heads: int
    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]

    def __post_init__(self) -> None:
        require(0 < self.block_size <= MAX_BLOCK_SIZE, f"group {self.name!r} has a block size of {self.block_size}.")
        require(0 < self.num_blocks <= MAX_BLOCKS, f"group {self.name!r} has {self.num_blocks} blocks.")
        require(0 < self.num_kv_heads <= MAX_KV_HEADS, f"group {self.name!r} has {self.num_kv_heads} KV heads.")
        require(bool(self.components), f"group {self.name!r} has no components.")
        names = [component.name for component in self.components]
        require(len(set(names)) == len(names), f"group {self.name!r} names a component twice: {names}.")
        for component in self.components:
            self._check_component(component)

    def _check_component(self, component: Component) -> None:
        where = f"group {self.name!r}, component {component.name!r}"
        first = self.components[0]
        require(component.heads == first.heads, f"{where}: heads differ from those of component {first.name!r}.")
        require(set(component.layers) == set(first.layers), f"{where}: layers differ from those of {first.name!r}.")
        last = max(held.end for held in component.heads)
        require(last <= self.num_kv_heads, f"{where}: holds head {last - 1} of {self.num_kv_heads}.")
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
    def heads(self) -> tuple[HeadRange, ...]:
        """Global heads that this rank holds, in local order."""
        return self.components[0].heads

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers that this rank holds."""
        return frozenset(self.components[0].layers)

    def __repr__(self) -> str:
        held = " ".join(map(repr, self.heads))
        head = f"{self.name} ({self.kind}, {self.num_blocks} blocks of {self.block_size} tokens, "
        lines = [f"{head}heads {held} of {self.num_kv_heads})", *(f"  {component!r}" for component in self.components)]
        return "\n".join(lines)
