"""Writes between engines whose caches lie on a device: holds, chunks, spans of layers, digests.

The tests are those of host memory; here every cache lies on a device, and every transport is NIXL.
"""

import threading

import numpy as np
import pytest

from kvferry.errors import Reason
from kvferry.execution.device import Mark
from kvferry.execution.digests import Integrity
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.source import END
from kvferry.layout.named_layouts import NamedLayout

from ..local import test_write_integrity, test_writes
from ..local.engines_in_process import BLOCK_SIZE, LAYERS, Rank
from ..local.engines_that_write import HELD, Batches, Pairs, ReceivingRank, SendingEngine, check_arrived, engines
from ..local.test_writes import layer_bytes
from ..waits import wait_until
from . import device, standin_nixl
from .device import ImmediateOrder

__all__ = ["engines"]

TENSOR_PARALLEL = pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])


@TENSOR_PARALLEL
def test_chunks_are_written_while_the_prompt_is_computed(source_tp: int, target_tp: int, engines: Pairs) -> None:
    standin_nixl.submissions.clear()
    test_writes.test_chunks_are_written_while_the_prompt_is_computed(source_tp, target_tp, engines)
    data = {each for each in standin_nixl.submissions if "VRAM" in each}
    assert data == {("WRITE", "VRAM", "VRAM")}


@TENSOR_PARALLEL
def test_a_held_prompt_is_written_from_device_to_device(source_tp: int, target_tp: int, engines: Pairs) -> None:
    """Only the nonce of a connection is read, and from the host."""
    standin_nixl.submissions.clear()
    sender, receivers = engines.open(source_tp, target_tp)
    sender.compute(END, [5, 1], transfer_of(HELD))
    for receiver in receivers:
        receiver.receive(sender.hold(HELD), [2, 4])
        assert receiver.result().error is None
    check_arrived(sender, receivers, [5, 1], [2, 4])
    assert set(standin_nixl.submissions) == {("WRITE", "VRAM", "VRAM"), ("READ", "DRAM", "DRAM")}


@pytest.mark.parametrize(("late_seconds", "reason"), [(5.0, None), (0.2, Reason.SOURCE_CHANGED)])
def test_a_hold_may_be_told_late(late_seconds: float, reason: Reason | None, engines: Pairs) -> None:
    test_writes.test_a_hold_may_be_told_late(late_seconds, reason, engines)


class LateOrder(ImmediateOrder):
    """Of a device that has done its work when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def mark(self) -> Mark:
        done = self.done

        class DoneMark:
            def is_over(self) -> bool:
                return done.is_set()

            def wait(self) -> None:
                assert done.wait(20.0)

        return DoneMark()


@pytest.mark.parametrize("is_late", [False, True], ids=["told by its step", "told later"])
def test_a_hold_is_written_once_the_device_has_done_the_step(
    is_late: bool, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then an announcement waits, also that of a hold which is told by the step that computes its end."""
    order = LateOrder()
    monkeypatch.setattr(device.DeviceCaches, "order", order)
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    prompt = test_writes.prompt_of([5, 1], END)
    (source.writer.hold if is_late else source.writer.compute)([(transfer_of(HELD), prompt)])
    receiver.receive(sender.hold(HELD), [2, 4])
    assert receiver.is_waiting(0.3)
    assert not receiver.rank.cache.any()
    order.done.set()
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [2, 4])


class SteppedOrder(ImmediateOrder):
    """Of a device that has done the work behind each mark when the test says so."""

    def __init__(self) -> None:
        self.done: list[threading.Event] = []

    def mark(self) -> Mark:
        late = LateOrder()
        self.done.append(late.done)
        return late.mark()


def test_a_layer_is_written_once_the_device_has_done_it_and_no_further_than_its_step(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched meanwhile: a layer of the first must not declare what only the next computes."""
    order = SteppedOrder()
    monkeypatch.setattr(device.DeviceCaches, "order", order)
    sender, [receiver] = engines.open(batches=Batches.SPANS)
    receiver.receive(sender.hold(), [0, 3])
    [source] = sender.ranks
    for num_final in (BLOCK_SIZE, END):
        prompts = [("x", test_writes.prompt_of([5, 1], num_final))]
        source.writer.begin_step(prompts)
        for layer in LAYERS:
            source.writer.reach(layer)
        source.writer.compute(prompts)
    begun, first_layer, *others = order.done
    begun.set()
    assert receiver.is_waiting(0.3)
    assert not receiver.rank.cache.any()
    first_layer.set()
    wait_until(lambda: np.array_equal(layer_bytes(receiver.rank, 0, 0), layer_bytes(source.rank, 5, 0)))
    assert receiver.is_waiting(0.3)
    assert not layer_bytes(receiver.rank, 0, 1).any()
    assert not receiver.rank.cache[3].any()
    for done in others:
        done.set()
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])


def test_a_layer_arrives_before_the_next_has_run(engines: Pairs) -> None:
    test_writes.test_a_layer_arrives_before_the_next_has_run(engines)


def test_a_whole_prompt_goes_when_it_has_been_computed(engines: Pairs) -> None:
    test_writes.test_a_whole_prompt_goes_when_it_has_been_computed(engines)


def test_a_preempted_prompt_is_written_again(engines: Pairs) -> None:
    test_writes.test_a_preempted_prompt_is_pushed_again(engines)


def test_an_aborted_prompt_fails_the_load_at_once(engines: Pairs) -> None:
    test_writes.test_an_aborted_prompt_fails_the_load_at_once(engines)


def test_an_aborted_receiver_has_its_blocks_back_when_all_sources_are_quiet(engines: Pairs) -> None:
    test_writes.test_an_aborted_receiver_has_its_blocks_back_when_all_sources_are_quiet(engines)


@pytest.mark.parametrize("batches", Batches)
@pytest.mark.parametrize("wanted", [Integrity.SAMPLE, Integrity.FULL])
@TENSOR_PARALLEL
def test_digests_of_a_right_write_agree(
    source_tp: int, target_tp: int, wanted: Integrity, batches: Batches, engines: Pairs
) -> None:
    test_write_integrity.test_a_right_push_is_compared_and_commits(source_tp, target_tp, wanted, batches, engines)


def test_a_sample_finds_a_block_that_never_arrived(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    test_write_integrity.test_a_sample_finds_a_block_that_never_arrived(engines, monkeypatch)


@pytest.mark.parametrize("batches", Batches)
def test_a_bit_that_changes_on_the_way_is_found(
    batches: Batches, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_write_integrity.test_a_bit_that_changes_on_the_way_fails_the_push_and_says_where(
        1, batches, NamedLayout.BHLNC, engines, monkeypatch
    )


@pytest.mark.parametrize("on_host", ["source", "destination"])
def test_an_engine_on_a_device_and_one_on_the_host(
    on_host: str, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair of kinds of memory is one that NIXL moves."""
    standin_nixl.submissions.clear()
    with monkeypatch.context() as patch:
        device.use_host_caches(patch, on_host == "source")
        sender = SendingEngine(1, None, Batches.CHUNKS, transport="nixl")
        engines.senders.append(sender)
    with monkeypatch.context() as patch:
        device.use_host_caches(patch, on_host == "destination")
        receiver = ReceivingRank(Rank(0, 1), transport="nixl")
        engines.receivers.append(receiver)
    receiver.receive(sender.hold(), [2, 5])
    sender.compute(END, [3, 1])
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [3, 1], [2, 5])
    expected = ("WRITE", "DRAM", "VRAM") if on_host == "source" else ("WRITE", "VRAM", "DRAM")
    assert expected in standin_nixl.submissions
