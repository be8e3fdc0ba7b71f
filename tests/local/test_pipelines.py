"""Engines that are pipelines: a decode rank gets the layers of its stage from whatever stages hold them."""

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.execution.destination import Announcement, SourceRank
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Region, Shard, heads_of_rank

from ..support.dense import shard_for
from . import cache_memory
from .engines_in_process import (
    BLOCK_SIZE,
    EPOCH,
    HEAD_SIZE,
    HEADS,
    ITEMSIZE,
    NUM_BLOCKS,
    DecodeRank,
    PrefillEngine,
    whole_blocks,
)
from .engines_that_write import HELD, SECONDS, Batches, Pairs, ReceivingRank, SendingEngine, engines

__all__ = ["engines"]

PAGE_BYTES = BLOCK_SIZE * HEAD_SIZE * 2 * ITEMSIZE
WINDOW, NUM_TOKENS = 8, 8
# Layers by cache group, stage by stage. Layer 3 is the only one of group "2", and group "1" is in two of three stages.
WHOLE = ({"0": ["0", "4", "5"], "1": ["1", "2"], "2": ["3"]},)
HALVES = ({"0": ["0"], "1": ["1", "2"]}, {"0": ["4", "5"], "2": ["3"]})
THIRDS = ({"0": ["0"], "1": ["1"]}, {"1": ["2"], "2": ["3"]}, {"0": ["4", "5"]})
Stages = Sequence[Mapping[str, Sequence[str]]]
# Block ids by group, disjoint on each side as vLLM's are.
ASKED = [whole_blocks("0", [5, 0], [1, 2]), whole_blocks("1", [3], [4]), whole_blocks("2", [4, 1], [0, 3])]


class StageRank:
    """Memory of one rank of a stage, an array ``[block, head, layer, page]`` for each cache group."""

    def __init__(self, stages: Stages, pp_rank: int, tp_rank: int, tp_size: int) -> None:
        heads = heads_of_rank(HEADS, tp_rank, tp_size)
        self.heads = range(heads.start, heads.end)
        self.layers = stages[pp_rank]
        held = {
            group: cache_memory.caches.allocate((NUM_BLOCKS, len(self.heads), len(layers), PAGE_BYTES))
            for group, layers in self.layers.items()
        }
        self.cache = {group: cache.content for group, cache in held.items()}
        self._held = held
        ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": len(stages)}
        parts = [self._part(group, ranks) for group in self.layers]
        groups = [
            msgspec.structs.replace(
                part.groups[0], components=(msgspec.structs.replace(part.groups[0].components[0], region=index),)
            )
            for index, part in enumerate(parts)
        ]
        self.shard = Shard(regions=tuple(part.regions[0] for part in parts), groups=tuple(groups), **ranks)

    def _part(self, group: str, ranks: Mapping[str, int]) -> Shard:
        return shard_for(
            layers=self.layers[group],
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            layout=NamedLayout.BHLNC,
            kind=CacheKind.SLIDING_WINDOW if group == "1" else CacheKind.ATTENTION,
            window=WINDOW if group == "1" else 0,
            group_name=group,
            base_address=self._held[group].address,
            device=self._held[group].device,
            **ranks,
        )

    @property
    def regions(self) -> list[Region]:
        return list(self.shard.regions)

    def labelled(self, block_ids: Mapping[str, Mapping[int, int]]) -> dict[str, np.ndarray]:
        """Return what this rank holds when block ``to`` of each group has the labels of block ``of`` (``{of: to}``)."""
        pages = {group: np.zeros_like(array) for group, array in self.cache.items()}
        for group, layers in self.layers.items():
            for number, layer in enumerate(layers):
                for index, head in enumerate(self.heads):
                    generator = np.random.default_rng(zlib.crc32(f"{layer}/{head}".encode()))
                    labels = generator.integers(1, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=np.uint8)
                    for of, to in block_ids[group].items():
                        pages[group][to, index, number] = labels[of]
        return pages


def ranks_of(stages: Stages, tp_size: int) -> list[StageRank]:
    return [StageRank(stages, stage, rank, tp_size) for stage in range(len(stages)) for rank in range(tp_size)]


def filled(ranks: Sequence[StageRank]) -> list[StageRank]:
    everything = {block_id: block_id for block_id in range(NUM_BLOCKS)}
    for rank in ranks:
        for group, labels in rank.labelled(dict.fromkeys(WHOLE[0], everything)).items():
            rank.cache[group][:] = labels
    return list(ranks)


@pytest.fixture
def prefill() -> Iterator[PrefillEngine]:
    engine = PrefillEngine(filled(ranks_of(HALVES, 2)))
    yield engine
    engine.close()


@pytest.fixture
def decode() -> DecodeRank:
    return DecodeRank(StageRank(WHOLE, 0, 0, 1))


@pytest.mark.parametrize(
    ("prefill_stages", "prefill_tp", "decode_stages", "decode_tp", "num_sources"),
    [
        (HALVES, 1, WHOLE, 1, [2]),
        (WHOLE, 1, HALVES, 1, [1, 1]),
        (HALVES, 2, WHOLE, 2, [2, 2]),
        (WHOLE, 2, HALVES, 1, [2, 2]),
        (HALVES, 1, THIRDS, 1, [1, 2, 1]),
        (THIRDS, 1, HALVES, 2, [2, 2, 2, 2]),
    ],
    ids=["pp2-1", "1-pp2", "pp2x2-2", "2-pp2", "pp2-pp3", "pp3-pp2x2"],
)
def test_a_stage_gets_its_layers_from_the_stages_that_hold_them(
    prefill_stages: Stages,
    prefill_tp: int,
    decode_stages: Stages,
    decode_tp: int,
    num_sources: Sequence[int],
    engines: Pairs,
) -> None:
    prefill = SendingEngine(0, None, Batches.CHUNKS, ranks=filled(ranks_of(prefill_stages, prefill_tp)))
    engines.senders.append(prefill)
    moved = {blocks.group: dict(zip(blocks.source_ids, blocks.destination_ids, strict=True)) for blocks in ASKED}
    held = {blocks.group: BlockList(blocks.source_first_token, blocks.source_ids) for blocks in ASKED}
    hold = prefill.hold(HELD)
    for rank in prefill.ranks:
        blocks = {group: held[group] for group in rank.rank.layers}
        rank.writer.hold([(transfer_of(HELD), Prompt(NUM_TOKENS, "prompt", blocks, END))])
    for rank, expected in zip(ranks_of(decode_stages, decode_tp), num_sources, strict=True):
        decode = ReceivingRank(rank)
        engines.receivers.append(decode)

        def find(decode: ReceivingRank = decode) -> list[SourceRank] | None:
            engine = decode.engines.get(hold)
            return None if engine is None else engine.sources(transfer_of(HELD), ASKED)

        deadline = time.monotonic() + SECONDS
        decode.announcer.announce(Announcement("r", transfer_of(HELD), NUM_TOKENS, "prompt", deadline, EPOCH), find)
        result = decode.result()
        assert (result.error, result.num_sources) == (None, expected)
        for group, labels in rank.labelled(moved).items():
            np.testing.assert_array_equal(rank.cache[group], labels, f"{rank.shard.rank_name}, group {group}")


def test_a_layer_that_no_stage_holds_is_refused_by_name(prefill: PrefillEngine) -> None:
    decode = DecodeRank(StageRank(({"0": ["0"]}, {"0": ["4", "draft.0"]}), 1, 0, 1))
    error = decode.refusal(prefill.hold())
    assert error.reason is Reason.LAYER_MISMATCH
    assert "group '0': no source has layers draft.0" in error.message


def test_a_layer_in_two_stages_is_refused(prefill: PrefillEngine, decode: DecodeRank) -> None:
    prefill.ranks[2:] = [StageRank(({}, {"0": ["0", "4", "5"], "2": ["3"]}), 1, rank, 2) for rank in range(2)]
    assert decode.refusal(prefill.hold()).reason is Reason.LAYER_MISMATCH


def test_a_directory_without_a_stage_or_rank_is_refused(prefill: PrefillEngine, decode: DecodeRank) -> None:
    whole = prefill.directory().ranks
    for ranks, missing in ((whole[:2], "rank 0 of pipeline stage 1"), (whole[:-1], "rank 1 of pipeline stage 1")):
        prefill.answer = lambda question, ranks=ranks: prefill.directory(ranks=ranks)
        error = decode.refusal(prefill.hold())
        assert error.reason is Reason.MISSING_SOURCE
        assert missing in error.message
        decode.forget_failures()


def test_a_directory_that_mistakes_its_ranks_is_refused(prefill: PrefillEngine, decode: DecodeRank) -> None:
    whole = prefill.directory().ranks
    renamed = msgspec.structs.replace(whole[0], pp_rank=1)
    other_size = PrefillEngine(filled(ranks_of(HALVES, 1)))
    wrong = {
        "twice": (*whole, whole[-1]),
        "another stage": (renamed, *whole[1:]),
        "stages exchanged": tuple(msgspec.structs.replace(entry, pp_rank=1 - entry.pp_rank) for entry in whole),
        "other sizes": (*whole[:2], *other_size.directory().ranks[1:]),
    }
    other_size.close()
    for what, ranks in wrong.items():
        prefill.answer = lambda question, ranks=ranks: prefill.directory(ranks=ranks)
        assert decode.refusal(prefill.hold()).reason is Reason.MALFORMED_MESSAGE, what
        decode.forget_failures()


def test_only_a_stage_of_a_pipeline_may_leave_a_group_to_others(prefill: PrefillEngine, decode: DecodeRank) -> None:
    """Elsewhere a group that the rank does not have is a mistake, and so is one that is left out of its stage."""
    engine = decode.engine(prefill.hold())
    stage = DecodeRank(StageRank(HALVES, 0, 0, 1)).engine(prefill.hold())
    for each, asked in ((engine, [*ASKED, whole_blocks("3", [2], [5])]), (stage, ASKED[:1])):
        with pytest.raises(KVFerryError) as refused:
            each.sources("x", asked)
        assert refused.value.reason is Reason.INVALID_REQUEST
