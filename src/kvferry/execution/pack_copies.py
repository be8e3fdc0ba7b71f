"""Copies that a source is to make for a reader, as a message carries them, and back."""

from collections.abc import Sequence

import numpy as np

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Pack, PackCopy
from kvferry.plan.request import Integers
from kvferry.plan.staging.scatter import Merge

BlockLists = tuple[tuple[int, ...], ...]
_FIELDS = {
    "stage_offset": "stage_offset",
    "stage_block_stride": "stage_block_stride",
    "address": "destination_address",
    "block_stride": "destination_block_stride",
    "run_bytes": "run_bytes",
    "loops": "loops",
}
"""Of a :class:`PackCopy`, and what they are called in a :class:`Merge`. Blocks go apart, since copies share them."""


def as_message(packs: Sequence[Merge]) -> tuple[BlockLists, tuple[PackCopy, ...]]:
    """Return the lists of block ids of these copies, each once, and the copies, which name them by place.

    >>> packs = [Merge(offset, 16, 4096, 64, np.array([5, 3]), 8, ((2, 8, 32),)) for offset in (0, 32)]
    >>> blocks, copies = as_message(packs)
    >>> blocks, [(copy.stage_offset, copy.blocks) for copy in copies]
    (((5, 3),), [(0, 0), (32, 0)])
    """
    lists: dict[bytes, tuple[int, Integers]] = {}
    copies = []
    for pack in packs:
        ids = pack.destination_blocks
        place, _ = lists.setdefault(ids.tobytes(), (len(lists), ids))
        copies.append(PackCopy(**{name: getattr(pack, ours) for name, ours in _FIELDS.items()}, blocks=place))
    return tuple(tuple(ids.tolist()) for _, ids in lists.values()), tuple(copies)


def from_message(question: Pack) -> list[Merge]:
    """Return the copies that a question asks for: what :func:`as_message` was given.

    Raises :class:`HandoffError` (``invalid-request``) for a list of blocks that is not there.
    """
    lists = [np.array(ids, dtype=np.int64) for ids in question.blocks]
    missing = next((number for number, copy in enumerate(question.copies) if copy.blocks >= len(lists)), None)
    if missing is not None:
        place = question.copies[missing].blocks
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"copy {missing} names list {place} of blocks: there are {len(lists)}.",
            "Run the same kvferry version on both sides.",
        )
    return [
        Merge(**{ours: getattr(copy, name) for name, ours in _FIELDS.items()}, destination_blocks=lists[copy.blocks])
        for copy in question.copies
    ]
