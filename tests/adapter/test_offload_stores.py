"""The stores of an engine with real host memory, without an engine: what is offered, kept, landed and cancelled."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.integrations.vllm.offload_step import OffloadStatistics, StoreOrder
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.offload_stores import Stores
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, stored_groups
from kvferry.layout.shard import CacheKind
from kvferry.layout.slab import slab_shard
from kvferry.tiers.host_memory import HostMemory
from kvferry.tiers.stack import Stack

from .offload_engine import rank_shard

FULL = GroupShape(CacheKind.ATTENTION, 16)
NUM_BLOCKS = 20


@dataclass(eq=False)
class Block:
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int = 1
    block_hash: bytes | None = b"hash"


@dataclass
class Pool:
    """VLLM's pool of blocks, all of which have a reference of a request."""

    blocks: list[Block] = field(default_factory=lambda: [Block(number) for number in range(NUM_BLOCKS)])
    num_gpu_blocks: int = NUM_BLOCKS

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    @property
    def kept(self) -> list[int]:
        """Blocks to which stores have references."""
        return [block.block_id for block in self.blocks if block.ref_cnt > 1]


class Storing:
    """Stores of an engine with so many ranks, cache groups and blocks of host memory."""

    def __init__(self, num_ranks: int = 1, num_groups: int = 2, host_blocks: int = 20) -> None:
        self.groups = stored_groups([FULL] * num_groups, 0, 16)
        shard = rank_shard([0] * num_groups, 2, 0, 1)
        sizes = {str(number): host_blocks for number in range(num_groups)}
        self.stack = Stack(HostMemory(slab_shard([shard], sizes, base_address=1 << 30)))
        self.pool, self.statistics = Pool(), OffloadStatistics()
        self.stores = Stores(self.groups, num_ranks, 0, count(1), Counter(), self.statistics, None)
        self.stores.bind(self.pool)  # type: ignore[arg-type]
        self.stores.max_kept = 100

    def blocks(self, number: int, num_blocks: int = 4, **names: Any) -> RequestBlocks:
        """Return the blocks of a request that has as many in each group."""
        blocks = RequestBlocks(self.groups, BlockNames(bytes(14), {}, **names))
        blocks.update([bytes([number, place]) * 16 for place in range(num_blocks)])
        return blocks

    def offer(self, blocks: RequestBlocks, first_block: int = 1, *, is_last: bool = False) -> None:
        """Offer all blocks, those of the groups one behind the other in the pool."""
        number = len(blocks.keys[0])
        ids = [
            list(range(first_block + group * number, first_block + (group + 1) * number))
            for group in range(len(self.groups))
        ]
        request: Any = SimpleNamespace(num_prompt_tokens=number * 16)
        self.stores.offer(self.stack, request, blocks, number * 16, lambda: ids, is_last=is_last)

    def order(self) -> list[StoreOrder]:
        self.stores.order(self.stack)
        return self.stores.take_orders()

    def land(self, order: StoreOrder, num_ranks: int = 1, *, has_landed: bool = True) -> bool:
        return self.stores.land(self.stack, order.job_id, num_ranks, has_landed=has_landed)

    @property
    def refused(self) -> dict[str, int]:
        """Blocks that were not stored, by tier and reason."""
        found: dict[str, int] = self.statistics.data["refused_blocks"]
        return found

    def held(self, blocks: RequestBlocks) -> list[list[bool]]:
        """Return which blocks of each group host memory has, visible or not."""
        return [[not missing for missing in self.stack.is_missing(keys)] for keys in blocks.keys]

    def visible(self, blocks: RequestBlocks) -> list[list[bool]]:
        """Return which blocks of each group a load would be promised."""
        wanted = {group.name: keys for group, keys in zip(self.groups, blocks.keys, strict=True)}
        promise = self.stack.ask("who asks", wanted, now=0.0, wait_seconds=0.0)
        self.stack.drop("who asks")
        assert promise is not None
        return [promise.held[group.name].tolist() for group in self.groups]


ALL, NONE = [[True] * 4] * 2, [[False] * 4] * 2


def test_what_may_not_be_kept_yet_is_offered_again() -> None:
    """In the order of the request's blocks: a hit needs the first ones first."""
    storing = Storing(num_groups=1)
    blocks = storing.blocks(1)
    storing.stores.max_kept = 3
    storing.offer(blocks)
    assert blocks.num_offered == [3]
    assert not storing.stores.has_offered(blocks, 64)
    [order] = storing.order()
    storing.offer(blocks)
    assert storing.order() == [], "nothing more is kept before these have landed"
    storing.land(order)
    storing.offer(blocks)
    assert storing.stores.has_offered(blocks, 64)
    [order] = storing.order()
    storing.land(order)
    assert storing.visible(blocks) == [[True] * 4]
    assert storing.refused == {}


def test_the_blocks_of_a_request_that_ends_are_refused_where_no_more_may_be_kept() -> None:
    storing = Storing()
    storing.stores.max_kept = 3
    storing.offer(storing.blocks(1), is_last=True)
    assert storing.refused == {"host_memory,stores-behind": 5}


def test_a_request_has_offered_all_once_each_group_has() -> None:
    storing = Storing()
    blocks = storing.blocks(1)
    storing.stores.max_kept = 5
    storing.offer(blocks)
    assert blocks.num_offered == [4, 1]
    assert not storing.stores.has_offered(blocks, 64)
    assert not storing.stores.has_offered(None, 64)


def test_sources_are_kept_in_every_group_until_the_last_rank_has_copied_them() -> None:
    """Then, and not before, a load may be promised the blocks."""
    storing = Storing(num_ranks=3)
    blocks = storing.blocks(1)
    storing.offer(blocks)
    [order] = storing.order()
    for num_ranks in (1, 1):
        assert storing.pool.kept == list(range(1, 9))
        assert not storing.land(order, num_ranks)
        assert storing.stores.are_under_way
        assert (storing.held(blocks), storing.visible(blocks)) == (ALL, NONE)
    assert not storing.land(order)
    assert (storing.pool.kept, storing.visible(blocks)) == ([], ALL)
    assert (storing.stores.are_under_way, storing.stores.jobs) == (False, {})


@pytest.mark.parametrize("failed", [0, 1])
def test_a_store_that_one_rank_could_not_copy_is_visible_in_no_group(failed: int) -> None:
    storing = Storing(num_ranks=2)
    blocks = storing.blocks(1)
    storing.offer(blocks)
    [order] = storing.order()
    for rank in range(2):
        storing.land(order, has_landed=rank != failed)
    assert (storing.pool.kept, storing.visible(blocks), storing.held(blocks)) == ([], NONE, NONE)


def test_a_cancelled_store_is_visible_in_no_group_and_its_blocks_may_be_offered_again() -> None:
    """Once all ranks have reported: until then they write into its slots."""
    storing = Storing(num_ranks=2)
    blocks = storing.blocks(1)
    storing.offer(blocks)
    [order] = storing.order()
    storing.stores.cancel(storing.stack)
    assert not storing.land(order)
    assert storing.pool.kept == list(range(1, 9))
    assert storing.land(order)
    assert (storing.pool.kept, storing.visible(blocks), storing.held(blocks)) == ([], NONE, NONE)
    blocks.num_offered = [0, 0]
    storing.offer(blocks)
    [order] = storing.order()
    assert not storing.land(order, 2)
    assert storing.visible(blocks) == ALL


@pytest.mark.parametrize("certain", [(True, True), (True, False), (False, True)])
def test_a_store_whose_names_are_not_certain_any_more_is_not_visible(certain: tuple[bool, bool]) -> None:
    """An adapter was read again from other files while its blocks were copied."""
    storing = Storing()
    each = [
        storing.blocks(number, num_blocks=2, is_certain=lambda value=value: value)
        for number, value in enumerate(certain)
    ]
    for number, blocks in enumerate(each):
        storing.offer(blocks, 1 + 4 * number)
    [order] = storing.order()
    assert storing.land(order) is not all(certain)
    assert [storing.visible(blocks) for blocks in each] == [[[all(certain)] * 2] * 2] * 2


def test_slots_belong_to_the_blocks_whose_keys_were_accepted() -> None:
    """Blocks that others store, or that have no room, take nobody's place."""
    storing = Storing(num_groups=1, host_blocks=3)
    first, second = storing.blocks(1, num_blocks=2), storing.blocks(1, num_blocks=4)
    storing.offer(first)
    storing.offer(second, 5)
    [order] = storing.order()
    [copy] = order.blocks
    assert copy.source_ids.tolist() == [5, 6, 7], "of equal blocks those of the later request"
    assert storing.refused == {"host_memory,tier-full": 1}
    storing.land(order)
    assert storing.visible(second) == [[True, True, True, False]]


def test_a_report_of_a_store_that_is_not_under_way_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    storing = Storing()
    blocks = storing.blocks(1)
    storing.offer(blocks)
    [order] = storing.order()
    assert not storing.stores.land(storing.stack, order.job_id + 1, 1, has_landed=True)
    assert "which is not under way" in caplog.text
    assert storing.visible(blocks) == NONE
