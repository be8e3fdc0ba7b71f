"""Digests of cells in memory: one gather and one weighted sum for many cells, on a CPU by numpy, on a GPU by torch."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.arrays import Addresses, Integers, memory_at
from kvferry.layout.shard import Region
from kvferry.plan.digest_cells import CellMemory

if TYPE_CHECKING:
    import torch

MOST_BYTES = 1 << 20
"""Bytes that one call sums: few enough for a core's cache, so that the sum reads them there."""


class CellSums:
    """Sums cells of one part in one rank's memory.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.plan.digest_cells import CellGrid
    >>> from kvferry.testing.dense_shards import shard_for
    >>> memory = np.arange(4096, dtype=np.uint8)
    >>> shard = shard_for(layers=["0"], num_kv_heads=1, head_size=8, itemsize=2, block_size=16, num_blocks=8,
    ...     layout=NamedLayout.LBHNC, base_address=memory.ctypes.data)
    >>> grid = CellGrid(shard.groups[0])
    >>> sums = CellSums(CellMemory(shard, shard.groups[0].components[0], grid, grid.parts[0]))
    >>> before = sums.sums(np.array([0, 512]), np.array([16, 3]))
    >>> memory[[5, 512 + 3 * 32]] ^= 1
    >>> (before == sums.sums(np.array([0, 512]), np.array([16, 3]))).tolist()
    [False, True]
    """

    def __init__(self, memory: CellMemory) -> None:
        self.memory = memory

    def sums(self, places: Integers, num_tokens: Integers) -> Addresses:
        """Return the digest of each cell that begins at ``places`` of its region, over its first ``num_tokens``."""
        if self.memory.region.device != "cpu":
            return self._on_device.sums(places, num_tokens)
        runs = self._view[places[:, None] + self.memory.offsets]
        tokens = self.memory.tokens
        if self.memory.are_pairs:
            numbers, tokens = runs.view("<u8").reshape(len(places), -1), tokens[::2]
        else:
            numbers = runs.view(f"<u{self.memory.number_bytes}").reshape(len(places), -1).astype(np.uint64)
        if (short := np.flatnonzero(num_tokens <= tokens.max())).size:
            numbers[short] *= (tokens < num_tokens[short, None]).astype(np.uint64)
        if not self.memory.are_pairs:
            return np.asarray(np.einsum("cn,n->c", numbers, self.memory.weights))
        first, second = self._pair_weights
        sums = np.einsum("cn,n->c", numbers, first)
        numbers >>= np.uint64(32)
        return np.asarray(sums + np.einsum("cn,n->c", numbers, second))

    @cached_property
    def _pair_weights(self) -> tuple[Addresses, Addresses]:
        """The weights of pairs, and what the second word of a pair counts beside its part of the pair."""
        first, second = self.memory.weights[::2].copy(), self.memory.weights[1::2]
        return first, second - (first << np.uint64(32))

    @cached_property
    def _view(self) -> Any:
        """The region as runs that begin at every byte: an index is an offset."""
        region, run_bytes = self.memory.region, self.memory.run_bytes
        return memory_at(region.base_address, (region.length - run_bytes + 1,), (1,), run_bytes)

    @cached_property
    def _on_device(self) -> "DeviceCells":
        return DeviceCells(self.memory, device_bytes(self.memory.region))


class DeviceCells:
    """The sums of :class:`CellSums` by torch; ``region`` is the memory's region as bytes."""

    def __init__(self, memory: CellMemory, region: "torch.Tensor") -> None:
        import torch

        # A GPU loads a number only from a multiple of its size.
        self._widest = int(np.gcd.reduce([memory.number_bytes, region.data_ptr(), *memory.offsets.tolist()]))
        self._memory = memory
        self._region = region
        self._torch = torch

    def sums(self, places: Integers, num_tokens: Integers) -> Addresses:
        """Return the digests; waits for the device."""
        torch, memory, device = self._torch, self._memory, self._region.device
        narrow = int(np.gcd.reduce(places, initial=self._widest))
        kinds = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
        numbers = self._region[: len(self._region) // narrow * narrow].view(kinds[narrow])
        per_run = memory.run_bytes // narrow
        steps = (memory.offsets[:, None] // narrow + np.arange(per_run)).ravel()
        first = torch.from_numpy(places // narrow).to(device)
        gathered = numbers[first[:, None] + torch.from_numpy(steps).to(device)].to(torch.int64)
        gathered &= (1 << 8 * narrow) - 1
        weights, tokens = self._by_number(narrow)
        counted = torch.from_numpy(tokens).to(device) < torch.from_numpy(num_tokens).to(device)[:, None]
        sums = (gathered * torch.from_numpy(weights.view(np.int64)).to(device) * counted).sum(dim=1)
        return np.asarray(sums.cpu().numpy().view(np.uint64))

    def _by_number(self, narrow: int) -> tuple[Addresses, Integers]:
        """Return the weights and tokens of numbers that are ``narrow`` bytes of those of the memory."""
        memory = self._memory
        step = memory.number_bytes // narrow
        shifts = (np.arange(step) * 8 * narrow).astype(np.uint64)
        return (memory.weights[:, None] << shifts).ravel(), np.repeat(memory.tokens, step)


def device_bytes(region: Region) -> "torch.Tensor":
    """Return a region of a GPU's memory as a tensor of bytes."""
    import torch

    return torch.as_tensor(_DeviceMemory(region), device=region.device)


class _DeviceMemory:
    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "data": (region.base_address, False),
            "shape": (region.length,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
