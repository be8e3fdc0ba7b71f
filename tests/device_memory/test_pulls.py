"""Pulls between engines whose caches lie on a device: guard words, strategies, digests, prefix hits, pipelines.

The tests are those of host memory; here every cache and stage lies on a device, and every transport is NIXL.
"""

import numpy as np
import pytest

from kvferry.plan.digest_cells import Integrity
from kvferry.plan.staging.strategy import Strategy

from ..local import test_integrity, test_pipeline_reads, test_source_engines
from ..local.engines_in_process import DecodeRank, PrefillEngine, Rank, filled_ranks
from . import device, standin_nixl


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_labelled_bytes_arrive_exactly(tp_size: int, strategy: Strategy) -> None:
    test_source_engines.test_labelled_bytes_arrive_exactly("nixl", tp_size, strategy)
    assert bool(device.num_merged) == (strategy is Strategy.SCATTER)


@pytest.mark.parametrize("strategy", Strategy)
def test_a_hold_that_has_ended_is_not_read(strategy: Strategy) -> None:
    prefill = PrefillEngine("memcpy", filled_ranks())
    test_source_engines.test_a_hold_that_has_ended_is_not_read(prefill, strategy)
    prefill.close()


def test_words_and_digests_stay_in_host_memory() -> None:
    """The data go from device to device; a guard word and digests are read from the host, by a submission each."""
    standin_nixl.submissions.clear()
    test_integrity.test_a_right_pull_is_compared_and_commits("nixl", 1, Strategy.DIRECT)
    kinds = [kinds for _, *kinds in map(list, standin_nixl.submissions)]
    assert kinds.count(["VRAM", "VRAM"]) > 0
    assert kinds.count(["DRAM", "DRAM"]) >= 4, "the nonce, the words before and after, and the digests"
    assert len(kinds) == kinds.count(["VRAM", "VRAM"]) + kinds.count(["DRAM", "DRAM"])


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_digests_of_a_right_pull_agree(tp_size: int, strategy: Strategy) -> None:
    test_integrity.test_a_right_pull_is_compared_and_commits("nixl", tp_size, strategy)


@pytest.mark.parametrize("strategy", Strategy)
def test_a_bit_that_changes_on_the_way_is_found(strategy: Strategy) -> None:
    test_integrity.test_a_bit_that_changes_on_the_way_fails_the_pull_and_says_where(strategy)


@pytest.mark.parametrize("kept", [Integrity.SAMPLE, Integrity.FULL])
def test_a_sample_finds_a_block_of_another_prompt(kept: Integrity) -> None:
    test_integrity.test_a_sample_finds_a_block_of_another_prompt(kept)


def test_a_load_behind_a_cached_prefix_is_compared_from_there() -> None:
    test_integrity.test_a_load_behind_a_cached_prefix_is_compared_from_there()


@pytest.mark.parametrize("strategy", Strategy)
def test_pipeline_stages_with_windows(strategy: Strategy) -> None:
    halves, whole = test_pipeline_reads.HALVES, test_pipeline_reads.WHOLE
    load = test_pipeline_reads.test_a_stage_gets_its_layers_from_the_stages_that_hold_them
    load(halves, 2, whole, 2, [2, 2], strategy)


@pytest.mark.parametrize("sides", ["source", "destination"])
def test_an_engine_on_a_device_and_one_on_the_host(sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of kinds of memory is one that NIXL moves."""
    standin_nixl.submissions.clear()
    with monkeypatch.context() as patch:
        host_first = sides == "destination"
        device.use_host_caches(patch, host_first)
        prefill = PrefillEngine("nixl", filled_ranks(1))
    with monkeypatch.context() as patch:
        device.use_host_caches(patch, not host_first)
        decode = DecodeRank("nixl", Rank(0, 1))
    result = decode.load(prefill.hold(), [3, 1], [2, 5])
    assert result.error is None
    assert np.array_equal(decode.rank.cache[[2, 5]], prefill.ranks[0].cache[[3, 1]])  # type: ignore[attr-defined]
    expected = ("READ", "DRAM", "VRAM") if sides == "source" else ("READ", "VRAM", "DRAM")
    assert expected in standin_nixl.submissions
    decode.close()
    prefill.close()
