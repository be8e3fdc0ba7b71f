"""Failures that users of other systems reported and that need threads, memory or sockets to reproduce."""

import time
from functools import partial

import msgspec
import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.handoff.messages import RankEntry
from kvferry.handoff.pull_read import State
from kvferry.testing.transport_peer import pattern
from kvferry.testing.transport_suite import apply, open_pair, random_offsets
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import TransportSet, open_transports

from ..counted_work import containers_of, lines_of
from .engines_in_process import DecodeRank, PrefillEngine, Rank, filled_ranks
from .test_staged_loads import Pair, Watched, run


class OneIsSlow(Watched):
    """Keeps the data of the second rank from arriving."""

    held: Transfer | None = None

    def submit(self, *arguments: object) -> Transfer:
        transfer = super().submit(*arguments)
        if transfer.num_bytes > 16:
            self.held = transfer
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        return Status.PENDING if transfer is self.held else self.inner.poll(transfer)


def test_vllm_ascend_10548_parallel_pulls_do_not_race_the_merge() -> None:
    """vllm-ascend#10548: heads pulled from several ranks at once were merged before all of them had come."""
    pair = Pair()
    slow = OneIsSlow(pair.destination)
    load = pair.load(transport=slow)
    for _ in range(50):
        load.advance(pair.scratch, time.monotonic())
    assert [transfer.status for _, transfer in load._transfers] == [Status.DONE, Status.PENDING]
    assert load._pull.state is State.DATA
    assert not pair.cache.any(), "merged while a rank's data was on its way"
    assert not pair.is_stage_free, "another load could overwrite what has come"
    slow.held = None
    assert run(load, pair.scratch).error is None
    assert pair.is_exact


class RanksApart(PrefillEngine):
    """A prefill engine whose ranks each have transports of their own, as processes have."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__("memcpy", ranks)
        self.each: list[TransportSet] = [open_transports("memcpy") for _ in ranks]
        own = [
            each.register([*rank.regions, words.region])
            for each, rank, words in zip(self.each, ranks, self.words, strict=True)
        ]
        entries: tuple[RankEntry, ...] = tuple(
            msgspec.structs.replace(entry, end_points=end_points)
            for entry, end_points in zip(self.directory().ranks, own, strict=True)
        )
        self.answer = lambda question: self.directory(ranks=entries)

    def close(self) -> None:
        super().close()
        for each in self.each:
            each.close()


def test_vllm_ascend_5960_engines_and_ranks_are_reached_by_what_they_name() -> None:
    """vllm-ascend#5960: ports computed by arithmetic collided across PP, PCP and DP. Here nothing is computed.

    Four engines on one host, two ranks each: every byte comes from the engine and the rank that named its end points.
    """
    engines = []
    try:
        for number in range(4):
            ranks = filled_ranks(2)
            for rank in ranks:
                rank.cache += np.uint8(50 * number)
            engines.append(RanksApart(ranks))
        assert len({engine.listener.port for engine in engines}) == 4
        for engine in reversed(engines):
            decode = DecodeRank("memcpy", Rank(0, 1))
            assert decode.load(engine.hold(), [5, 0, 3], [1, 2, 4]).error is None
            rows = np.concatenate([rank.cache for rank in engine.ranks], axis=1)  # type: ignore[attr-defined]
            np.testing.assert_array_equal(decode.rank.cache[[1, 2, 4]], rows[[5, 0, 3]])  # type: ignore[attr-defined]
            decode.transports.close()
    finally:
        for engine in engines:
            engine.close()


def test_nixl_176_15000_segments_do_not_hold_their_caller_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """nixl#176: 15000 segments cost 0.6 s in the call that starts a transfer; here other loads would wait meanwhile.

    NIXL is handed some hundred at a time, by ``poll``. To submit 15000 takes no more lines of Python than 1500, and no
    more lists or tuples.
    """
    pytest.importorskip("nixl")
    from kvferry.transport.nixl import NixlTransfer, NixlTransport

    handed_over: list[int] = []
    post = NixlTransport._post

    def counted(self: NixlTransport, transfer: NixlTransfer, descriptors: Descriptors) -> None:
        handed_over.append(len(descriptors))
        post(self, transfer, descriptors)

    monkeypatch.setattr(NixlTransport, "_post", counted)
    descriptors = random_offsets(176, np.full(15000, 256))
    with open_pair("kvferry.transport.nixl:NixlTransport") as pair:
        pair.remote.fill(2)
        handed_over.clear()
        ways = [partial(pair.submit, Direction.READ, descriptors[:count]) for count in (1500, 15000)]
        assert len({lines_of(way) for way in ways}) == 1
        assert [containers_of(way) for way in ways] == [0, 0]
        assert not handed_over
        transfer = pair.submit(Direction.READ, descriptors)
        num_polls = 1
        while pair.transport.poll(transfer) is Status.PENDING:
            num_polls += 1
        assert transfer.status is Status.DONE
        assert sum(handed_over) == len(descriptors)
        assert len(handed_over) <= num_polls, "one call of NIXL's each"
        assert max(handed_over) <= 1000
        assert len(handed_over) <= 100, "nor one by one"
        assert np.array_equal(pair.local, apply(descriptors, pattern(2, len(pair.local)), np.zeros_like(pair.local), 0))
