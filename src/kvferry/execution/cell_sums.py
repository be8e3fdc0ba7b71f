"""Digests of cells in memory: one gather and one weighted sum for many cells, on a CPU by numpy, on a GPU by torch."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.arrays import Addresses, Integers, memory_at
from kvferry.execution import device_memory
from kvferry.layout.shard import HOST_DEVICE
from kvferry.plan.digest_cells import CellMemory

if TYPE_CHECKING:
    import torch

MOST_BYTES = 1 << 20
"""Bytes that one call sums: few enough for a core's cache, so that the sum reads them there."""


class CellSums:
    """Sums cells of one part in one rank's memory.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.plan.digest_cells import CellGrid
    >>> from kvferry.layout.dense import shard_for
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

    def sums(self, places: Integers, num_tokens: Integers | None = None) -> Addresses:
        """Return the digest of each cell that begins at ``places`` of its region.

        A digest covers the first ``num_tokens`` of its cell; None: all.
        """
        memory = self.memory
        if memory.region.device != HOST_DEVICE:
            whole = np.full(len(places), self._num_tokens) if num_tokens is None else num_tokens
            return self._on_device.sums(places, whole)
        numbers = self._view[places].view(self._number).reshape(len(places), -1)
        if num_tokens is not None and (short := np.flatnonzero(num_tokens < self._num_tokens)).size:
            numbers[short] *= memory.tokens < num_tokens[short, None]
        return np.asarray(np.einsum("cn,n->c", numbers, memory.weights, dtype=np.uint64))

    @cached_property
    def _number(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"<u{self.memory.number_bytes}")

    @cached_property
    def _num_tokens(self) -> int:
        """The tokens of a cell."""
        return int(self.memory.tokens.max()) + 1

    @cached_property
    def _view(self) -> Any:
        """The region as cells that begin at every byte: an index is a place."""
        region, run_bytes, loops = self.memory.region, self.memory.run_bytes, self.memory.loops
        cell_bytes = run_bytes + sum((count - 1) * stride for count, stride in loops)
        counts, strides = [count for count, _ in loops], [stride for _, stride in loops]
        num_places = max(0, region.length - cell_bytes + 1)
        return memory_at(region.base_address, (num_places, *counts), (1, *strides), run_bytes)

    @cached_property
    def _on_device(self) -> "DeviceCells":
        return DeviceCells(self.memory, device_memory.as_bytes(self.memory.region))


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
