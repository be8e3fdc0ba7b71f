"""Pushes between engines whose caches lie on a device: whole prompts, chunks, spans of layers, digests."""

import pytest

from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.digest_cells import Integrity

from ..local import test_push, test_push_integrity
from ..local.engines_that_write import Batches, Pairs, engines
from . import standin_nixl

__all__ = ["engines"]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])
def test_chunks_are_pushed_while_the_prompt_is_computed(source_tp: int, target_tp: int, engines: Pairs) -> None:
    standin_nixl.submissions.clear()
    test_push.test_chunks_are_pushed_while_the_prompt_is_computed(source_tp, target_tp, engines)
    data = {each for each in standin_nixl.submissions if "VRAM" in each}
    assert data == {("WRITE", "VRAM", "VRAM")}


def test_a_layer_arrives_before_the_next_has_run(engines: Pairs) -> None:
    test_push.test_a_layer_arrives_before_the_next_has_run(engines)


def test_a_whole_prompt_goes_when_it_has_been_computed(engines: Pairs) -> None:
    test_push.test_a_whole_prompt_goes_when_it_has_been_computed(engines)


def test_a_preempted_prompt_is_pushed_again(engines: Pairs) -> None:
    test_push.test_a_preempted_prompt_is_pushed_again(engines)


def test_an_aborted_receiver_has_its_blocks_back_when_all_sources_are_quiet(engines: Pairs) -> None:
    test_push.test_an_aborted_receiver_has_its_blocks_back_when_all_sources_are_quiet(engines)


@pytest.mark.parametrize("batches", Batches)
@pytest.mark.parametrize("wanted", [Integrity.SAMPLE, Integrity.FULL])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])
def test_digests_of_a_right_push_agree(
    source_tp: int, target_tp: int, wanted: Integrity, batches: Batches, engines: Pairs
) -> None:
    test_push_integrity.test_a_right_push_is_compared_and_commits(source_tp, target_tp, wanted, batches, engines)


def test_a_sample_finds_a_block_that_never_arrived(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    test_push_integrity.test_a_sample_finds_a_block_that_never_arrived(engines, monkeypatch)


@pytest.mark.parametrize("batches", Batches)
def test_a_bit_that_changes_on_the_way_is_found(
    batches: Batches, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_push_integrity.test_a_bit_that_changes_on_the_way_fails_the_push_and_says_where(
        1, batches, NamedLayout.BHLNC, engines, monkeypatch
    )
