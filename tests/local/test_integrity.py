"""Pulls whose bytes are compared with the source's digests: real reads, real guard words, and bytes that change."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.execution import read
from kvferry.execution.guard_words import WORD_BYTES
from kvferry.execution.job import JobResult, Phase
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.protocol import Status, Transfer

from .engines_in_process import ROW_BYTES, SLOT, DecodeRank, PrefillEngine, Rank, filled_ranks, whole_blocks

SOURCE_IDS, DESTINATION_IDS = [5, 2, 3], [1, 0, 4]
NUM_TOKENS = 12


@contextmanager
def engines(
    transport: str = "memcpy",
    tp_size: int = 2,
    kept: Integrity = Integrity.FULL,
    wanted: Integrity = Integrity.FULL,
    **decode: object,
) -> Iterator[tuple[PrefillEngine, DecodeRank]]:
    """Yield a prefill engine that holds a prompt, and a decode rank."""
    prefill = PrefillEngine(transport, filled_ranks(tp_size), integrity=kept)
    rank = DecodeRank(transport, Rank(0, 1, layout=NamedLayout.LBNHC), integrity=wanted, **decode)  # type: ignore[arg-type]
    prefill.digest(NUM_TOKENS, SOURCE_IDS)
    yield prefill, rank
    rank.close()
    prefill.close()


def load(prefill: PrefillEngine, decode: DecodeRank) -> JobResult:
    return decode.load(prefill.hold(), SOURCE_IDS, DESTINATION_IDS)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("transport", ["memcpy", "cma"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_right_pull_is_compared_and_commits(transport: str, tp_size: int, strategy: Strategy) -> None:
    with engines(transport, tp_size, strategy=strategy) as (prefill, decode):
        result = load(prefill, decode)
        assert result.error is None
        assert result.num_compared_bytes == result.num_bytes == 3 * ROW_BYTES


@pytest.mark.parametrize("strategy", Strategy)
def test_a_bit_that_changes_on_the_way_fails_the_pull_and_says_where(strategy: Strategy) -> None:
    """The source computed its digests before the bit changed, as where a transport damages it."""
    with engines(strategy=strategy) as (prefill, decode):
        for rank, row, column in ((0, 5, 0), (1, 3, ROW_BYTES // 2 - 1), (1, 2, 1000)):
            assert load(prefill, decode).error is None
            prefill.ranks[rank].cache[row, column] ^= 32  # type: ignore[attr-defined]
            error = load(prefill, decode).error
            assert error is not None
            assert error.reason is Reason.INTEGRITY_MISMATCH
            assert f"rank tp {rank}/2" in error.message
            assert "tokens" in error.message
            prefill.ranks[rank].cache[row, column] ^= 32  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", [Integrity.SAMPLE, Integrity.FULL])
def test_a_sample_finds_a_block_of_another_prompt(kept: Integrity) -> None:
    with engines(kept=kept, wanted=Integrity.SAMPLE) as (prefill, decode):
        result = load(prefill, decode)
        assert result.error is None
        assert 0 < result.num_compared_bytes < result.num_bytes
        for rank in prefill.ranks:
            rank.cache[3] = np.random.default_rng(9).integers(0, 256, rank.cache.shape[1])  # type: ignore[attr-defined]
        error = load(prefill, decode).error
        assert error is not None
        assert error.reason is Reason.INTEGRITY_MISMATCH


def test_a_load_behind_a_cached_prefix_is_compared_from_there() -> None:
    with engines() as (prefill, decode):
        result = decode.load(prefill.hold(), SOURCE_IDS[1:], DESTINATION_IDS[1:])
        assert result.error is None, "the blocks begin a list of their own here"
        assert result.num_compared_bytes == 2 * ROW_BYTES


def test_an_engine_that_keeps_fewer_digests_is_refused_before_a_byte_moves() -> None:
    for kept, wanted in ((Integrity.SAMPLE, Integrity.FULL), (Integrity.OFF, Integrity.SAMPLE)):
        with engines(kept=kept, wanted=wanted) as (prefill, decode):
            error = decode.refusal(prefill.hold())
            assert error.reason is Reason.UNSUPPORTED
            assert f'"integrity": "{wanted}"' in error.message
            assert f'"{kept}"' in error.message
            assert not decode.rank.cache.any()  # type: ignore[attr-defined]


def test_a_rank_that_compares_nothing_reads_no_digests() -> None:
    with engines(wanted=Integrity.OFF) as (prefill, decode):
        prefill.ranks[0].cache[5, 0] ^= 1  # type: ignore[attr-defined]
        result = load(prefill, decode)
        assert (result.error, result.num_compared_bytes) == (None, 0)


def test_loads_wait_for_memory_for_digests_and_give_it_back() -> None:
    with engines() as (prefill, decode):
        blocks = [whole_blocks("full", SOURCE_IDS, DESTINATION_IDS)]
        decode.digests.take("another", decode.digests.region.length)
        waiting = decode.start(prefill.hold(), blocks)
        give_up = decode.start(prefill.hold(), blocks)
        for _ in range(200):
            for each in (waiting, give_up):
                each.advance(decode.scratch, time.monotonic())
        assert (waiting.phase, give_up.phase) == (Phase.PREPARING, Phase.PREPARING)
        give_up.cancel(KVFerryError(Reason.ABORTED, "no longer wanted."))
        give_up.advance(decode.scratch, time.monotonic())
        decode.digests.give_back("another")
        finish(waiting, decode)
        assert waiting.error is None
        assert decode.digests.take("all again", decode.digests.region.length) == 0


def test_digests_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(kept=Integrity.FULL) as (prefill, decode):
        decode.digests.region = type(decode.digests.region)(decode.digests.region.base_address, 8)
        error = load(prefill, decode).error
        assert error is not None
        assert error.reason is Reason.UNSUPPORTED
        assert '"integrity" to "sample"' in error.remedy


def test_other_jobs_go_on_between_two_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "COMPARED_PER_ADVANCE", 1)
    with engines() as (prefill, decode):
        job = decode.start(prefill.hold(), [whole_blocks("full", SOURCE_IDS, DESTINATION_IDS)])
        turns = finish(job, decode)
        assert job.error is None
        assert turns == 2, "a turn for each source rank: each compares in one piece"


class LateWords:
    """Guard words that are read after the data come when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.have_come, self.has_data = False, False
        advance = MemcpyTransport._advance

        def late(transport: MemcpyTransport, transfer: Transfer) -> Status:
            is_word = transfer.num_bytes == WORD_BYTES
            self.has_data |= not is_word
            return Status.PENDING if is_word and self.has_data and not self.have_come else advance(transport, transfer)

        patch.setattr(MemcpyTransport, "_advance", late)


def compared_before_words(job: read.Read, decode: DecodeRank, words: LateWords) -> int:
    """Advance the job until its data has come and longer; return how many bytes it has compared."""
    end = time.monotonic() + 20
    while not words.has_data:
        assert time.monotonic() < end
        job.advance(decode.scratch, time.monotonic())
    for _ in range(20):
        job.advance(decode.scratch, time.monotonic())
    assert job.phase is Phase.MOVING
    return job._num_compared_bytes


@pytest.mark.parametrize("strategy", Strategy)
def test_bytes_are_compared_while_the_words_after_them_come_unless_they_are_staged(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = LateWords(monkeypatch)
    with engines(strategy=strategy) as (prefill, decode):
        job = decode.start(prefill.hold(), [whole_blocks("full", SOURCE_IDS, DESTINATION_IDS)])
        compared = compared_before_words(job, decode, words)
        assert compared == (3 * ROW_BYTES if strategy is Strategy.DIRECT else 0)
        words.have_come = True
        finish(job, decode)
        assert job.error is None
        assert job._num_compared_bytes == 3 * ROW_BYTES


def test_a_source_that_changed_in_mid_read_is_told_as_such_also_where_bytes_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison ends first, and finds what a later owner of the blocks has written."""
    words = LateWords(monkeypatch)
    with engines() as (prefill, decode):
        prefill.ranks[0].cache[5, 0] ^= 1  # type: ignore[attr-defined]
        job = decode.start(prefill.hold(), [whole_blocks("full", SOURCE_IDS, DESTINATION_IDS)])
        compared_before_words(job, decode, words)
        for each in prefill.words:
            each.clear(SLOT)
        words.have_come = True
        finish(job, decode)
        assert job.error is not None
        assert job.error.reason is Reason.SOURCE_CHANGED


def finish(job: read.Read, decode: DecodeRank) -> int:
    """Advance to the end; return in how many turns the job compared."""
    compared, end = 0, time.monotonic() + 20
    while job.phase is not Phase.DONE:
        before = job._num_compared_bytes
        assert time.monotonic() < end
        if not job.advance(decode.scratch, time.monotonic()):
            time.sleep(0.001)
        compared += job._num_compared_bytes != before
    return compared
