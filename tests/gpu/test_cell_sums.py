"""Digests that a device computes are those of the processor, for every layout, alignment and short end."""

import numpy as np
import pytest

from kvferry.execution.digests import CellGrid, CellMemory, CellSums
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region

from ..support.dense import shard_for
from ..support.transport_memory import CudaMemory


@pytest.mark.parametrize("layout", NamedLayout)
@pytest.mark.parametrize(("head_size", "itemsize"), [(64, 2), (128, 1), (3, 2), (5, 1)])
def test_sums_of_the_device_are_those_of_the_processor(layout: NamedLayout, head_size: int, itemsize: int) -> None:
    sizes = {"num_kv_heads": 2, "head_size": head_size, "itemsize": itemsize, "block_size": 16, "num_blocks": 4}
    length = shard_for(layers=["0", "1"], layout=layout, **sizes).regions[0].length  # type: ignore[arg-type]
    content = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    on_device = CudaMemory(length)
    on_device.put(content)
    found = []
    for region in (Region(int(content.ctypes.data), length), on_device.region):
        place = {"base_address": region.base_address, "device": region.device}
        shard = shard_for(layers=["0", "1"], layout=layout, **place, **sizes)  # type: ignore[arg-type]
        grid = CellGrid(shard.groups[0])
        component = shard.groups[0].components[0]
        memory = CellMemory(shard, component, grid, grid.parts[0])
        places = np.add.outer(memory.cells, np.arange(4) * component.block_stride).ravel()
        num_tokens = np.arange(len(places)) % 16 + 1
        found.append(CellSums(memory).sums(places, num_tokens))
    of_processor, of_device = found
    assert np.array_equal(of_processor, of_device)
