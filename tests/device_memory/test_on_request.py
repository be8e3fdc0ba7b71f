"""Held prompts on a device that their source writes on request: the tests of host memory, over NIXL."""

import numpy as np
import pytest

from kvferry.execution import introductions
from kvferry.plan.digest_cells import Integrity

from ..local import test_on_request
from ..local.engines_in_process import Rank, filled_ranks
from ..local.engines_on_request import Engines, engines
from . import standin_nixl

__all__ = ["engines"]


@pytest.mark.parametrize("integrity", [Integrity.OFF, Integrity.SAMPLE, Integrity.FULL])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_held_prompt_is_written(source_tp: int, target_tp: int, integrity: Integrity, engines: Engines) -> None:
    standin_nixl.submissions.clear()
    test_on_request.test_a_held_prompt_is_written(source_tp, target_tp, integrity, engines)
    data = {each for each in standin_nixl.submissions if "VRAM" in each}
    assert data == {("WRITE", "VRAM", "VRAM")}


@pytest.mark.parametrize(
    ("sources", "targets", "tp_size"),
    [
        (test_on_request.HALVES, test_on_request.WHOLE, 1),
        (test_on_request.WHOLE, test_on_request.HALVES, 1),
        (test_on_request.HALVES, test_on_request.WHOLE, 2),
    ],
)
def test_pipeline_stages_with_windows(
    sources: test_on_request.Stages, targets: test_on_request.Stages, tp_size: int, engines: Engines
) -> None:
    test_on_request.test_stages_of_a_pipeline_write_their_layers(sources, targets, tp_size, engines)


def test_a_word_counts_once_the_device_has_done_the_step(engines: Engines) -> None:
    """Before, an announcement waits."""
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    held = engine.held(test_on_request.prompt_in(test_on_request.SOURCE))
    for each in engine.ranks:
        each.step_words.begin([], [held])
    test_on_request.load(rank, engine, held)
    assert rank.is_waiting(0.2)
    for each in engine.ranks:
        each.step_words.finish()
    assert rank.result().error is None
    test_on_request.check_arrived(engine, [rank])


def test_a_hold_that_ends_in_the_middle_ends_the_write(engines: Engines) -> None:
    test_on_request.test_a_hold_that_ends_in_the_middle_ends_the_write("release", engines)


def test_auto_writes_memory_of_a_device(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads a GPU's memory over TCP, on one host too."""
    monkeypatch.setattr(introductions, "MEET_SECONDS", 15.0)
    engine, [rank] = engines.open(
        filled_ranks(2),
        [Rank(0, 1)],
        target_is_forced=False,
        target_slow_reads=test_on_request.SLOW,
    )
    test_on_request.load(rank, engine, test_on_request.held_by(engine))
    result = rank.result()
    assert (result.error, result.way) == (None, "written")
    assert np.asarray(rank.rank.cache).any()
