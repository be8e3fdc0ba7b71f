"""A small request for every group, by which a pair of engines is proved before any request waits."""

from collections.abc import Sequence

from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.layout.shard import Shard
from kvferry.plan.request import GroupBlocks

SAMPLE_BLOCKS = 3


def sample_requests(sources: Sequence[Shard], destination: Shard) -> list[GroupBlocks]:
    """Return requests of up to :data:`SAMPLE_BLOCKS` blocks of each group that the destination holds.

    Groups overlay each other in memory, so no two are given a block of the same id. Ids descend. Raises
    :class:`PlanError`: ``group-mismatch`` where no source has a group, ``unsupported`` for fewer blocks than groups.
    """
    held = [_held_by_all(sources, group) for group in destination.groups]
    fewest = min(min(group.num_blocks for group in groups) for groups in held)
    num_blocks = min(SAMPLE_BLOCKS, fewest // len(held))
    if num_blocks == 0:
        what = f"{len(held)} cache groups share {fewest} blocks, too few to try each group on blocks of its own."
        raise PlanError(Reason.UNSUPPORTED, what, "Give the KV caches more memory.")
    return [_request(groups, turn * num_blocks, num_blocks) for turn, groups in enumerate(held)]


def _held_by_all(sources: Sequence[Shard], wanted: CacheGroup) -> list[CacheGroup]:
    held = [found for source in sources if (found := source.group(wanted.name))]
    if not held:
        raise PlanError(
            Reason.GROUP_MISMATCH,
            f"the prefill engine has no cache group {wanted.name!r}.",
            "Serve the same model with the same cache settings on both engines.",
        )
    return [wanted, *held]


def _request(groups: Sequence[CacheGroup], first_id: int, num_blocks: int) -> GroupBlocks:
    is_state = groups[0].kind is CacheKind.STATE
    num_blocks = 1 if is_state else num_blocks
    ids = range(first_id + num_blocks - 1, first_id - 1, -1)
    return GroupBlocks(
        group=groups[0].name,
        first_token=0,
        last_token=num_blocks * min(group.tokens_per_position for group in groups),
        source_block_ids=ids,
        destination_block_ids=ids,
    )
