"""Prompts that an engine holds: written behind a prefix, until the hold ends, and once the device has done its work."""

import dataclasses
import time

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason, helps_to_repeat
from kvferry.execution.destination import Announcement, Compares, SourceRank
from kvferry.execution.device import CudaOrder, DeferredActions
from kvferry.execution.digests import Integrity
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.messages import Announce, Handle, Revoke
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.plan.match import GroupBlocks

from ..support.faults import FaultPlan
from ..waits import wait_until
from .engines_in_process import BLOCK_SIZE, EPOCH, ROW_BYTES
from .engines_that_write import (
    HELD,
    SECONDS,
    Pairs,
    ReceivingRank,
    SendingEngine,
    check_arrived,
    engines,
    recorded_questions,
)
from .fake_cuda import FakeCuda
from .test_write_proofs import running_process

__all__ = ["engines"]

SOURCE, TARGET = [5, 1, 4], [0, 3, 2]
HOLD = transfer_of(HELD)


def reason_of(receiver: ReceivingRank) -> Reason:
    error = receiver.result().error
    assert error is not None
    return error.reason


def await_write(sender: SendingEngine) -> None:
    wait_until(lambda: all(rank.writer._writes.num_open for rank in sender.ranks))


def end(sender: SendingEngine) -> None:
    for rank in sender.ranks:
        rank.writer.end([HOLD])


def test_a_hold_is_written_and_compared_from_the_end_of_a_prefix_that_is_there(engines: Pairs) -> None:
    sender, [receiver] = engines.open(kept=Integrity.FULL, compares=Compares(Integrity.FULL))
    num_tokens = 3 * BLOCK_SIZE - 1
    sender.ranks[0].writer.hold([(HOLD, Prompt(num_tokens, "prompt", {"full": BlockList(0, SOURCE)}, END))])
    blocks = GroupBlocks(
        group="full",
        first_token=BLOCK_SIZE,
        last_token=num_tokens,
        source_block_ids=[0, 0],
        source_first_token=BLOCK_SIZE,
        destination_block_ids=TARGET[1:],
        destination_first_token=BLOCK_SIZE,
    )
    hold = sender.hold(HELD)

    def find() -> list[SourceRank] | None:
        engine = receiver.engines.get(hold)
        return None if engine is None else engine.sources(HOLD, [blocks])

    request = Announcement("r", HOLD, num_tokens, "prompt", time.monotonic() + SECONDS, EPOCH)
    receiver.announcer.announce(request, find)
    result = receiver.result()
    assert result.error is None
    assert result.num_bytes == result.num_compared_bytes == 2 * ROW_BYTES
    check_arrived(sender, [receiver], SOURCE[1:], TARGET[1:])
    assert not receiver.rank.cache[[TARGET[0], 1, 4, 5]].any()


def test_hole_13_a_source_tells_parameters_of_no_hold_from_a_hold_that_has_ended(engines: Pairs) -> None:
    """Once both were to be sent again, with the advice to raise ``lease_seconds``."""
    sender, [receiver] = engines.open(2)
    forged, told = Handle("x", HELD.generation + 1), []
    sender.compute(END, SOURCE, HOLD)
    for number, handle in enumerate((forged, HELD, forged)):
        if handle is HELD:
            end(sender)
        receiver.receive(sender.hold(handle), TARGET, job_id=f"r{number}")
        error = receiver.result().error
        assert error is not None
        told.append((error.reason, "lease_seconds" in error.remedy, "the router copies" in error.remedy))
    wrong = Reason.WRONG_PARAMETERS, False, True
    assert told == [wrong, (Reason.LEASE_EXPIRED, True, False), wrong]
    assert not helps_to_repeat(Reason.WRONG_PARAMETERS)
    assert not receiver.rank.cache.any()


@pytest.mark.parametrize("how", ["release", "reset"])
def test_aws_do_eks_84_a_hold_that_ends_in_the_middle_ends_the_write(how: str, engines: Pairs) -> None:
    """aws-do-eks#84: requests were decoded from blocks that the prefill side had freed at the end of their lease.

    The batch in flight does not count, whatever it has written.
    """
    sender, [receiver] = engines.open(2, faults=FaultPlan(delay_seconds=2.0))
    sender.compute(END, SOURCE, HOLD)
    receiver.receive(sender.hold(HELD), TARGET)
    await_write(sender)
    assert receiver.is_waiting(0.1)
    if how == "release":
        end(sender)
    else:
        for rank in sender.ranks:
            rank.writer.end_epoch(EPOCH + 1)
    assert reason_of(receiver) is (Reason.LEASE_EXPIRED if how == "release" else Reason.WEIGHTS_CHANGED)


def test_a_hold_that_is_never_told_is_awaited_for_a_bounded_time(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever time the destination asks for."""
    monkeypatch.setattr("kvferry.execution.source.LATE_SECONDS", 0.4)
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(HELD), TARGET, late_seconds=1e5)
    assert receiver.is_waiting(0.2)
    assert reason_of(receiver) is Reason.SOURCE_CHANGED


def ordered_by_device(sender: SendingEngine) -> FakeCuda:
    """Let the engine's only rank compute on a device, which does its work on command."""
    cuda = FakeCuda.of_this_thread("cpu")
    writer, order = sender.ranks[0].writer, CudaOrder("cpu", cuda)
    writer._rank, writer._deferred = dataclasses.replace(writer._rank, order=order), DeferredActions(order)
    return cuda


def test_a_hold_that_the_device_has_not_computed_is_known_and_awaited(engines: Pairs) -> None:
    """The decode engine may know the hold before its blocks are final."""
    sender, [receiver] = engines.open()
    cuda = ordered_by_device(sender)
    sender.compute(END, SOURCE, HOLD)
    receiver.receive(sender.hold(HELD), TARGET)
    assert receiver.is_waiting(0.3)
    assert not receiver.rank.cache.any()
    cuda.current_stream("cpu").run()
    assert receiver.result().error is None
    check_arrived(sender, [receiver], SOURCE, TARGET)


def test_a_hold_that_ends_before_the_device_has_computed_it_ends_its_write(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    cuda = ordered_by_device(sender)
    sender.compute(END, SOURCE, HOLD)
    receiver.receive(sender.hold(HELD), TARGET)
    await_write(sender)
    end(sender)
    assert reason_of(receiver) is Reason.LEASE_EXPIRED
    cuda.current_stream("cpu").run()
    time.sleep(0.1)
    assert not receiver.rank.cache.any()


def test_a_source_that_dies_in_the_middle_fails_the_load_and_no_other_source_writes_on(engines: Pairs) -> None:
    with running_process() as (process, child):
        sender, [receiver] = engines.open(2, faults=FaultPlan(hang=True), process=process)
        sender.compute(END, SOURCE, HOLD)
        receiver.receive(sender.hold(HELD), TARGET)
        await_write(sender)
        sender.ranks[0].listener.close()
        child.kill()
        child.wait()
        assert reason_of(receiver) in (Reason.PEER_DIED, Reason.PEER_UNREACHABLE)
    wait_until(lambda: not sender.ranks[1].writer._writes.num_open)


def test_a_doubled_announcement_writes_once_and_one_after_its_revocation_never(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    asked = recorded_questions(source)
    sender.compute(END, SOURCE, HOLD)
    receiver.receive(sender.hold(HELD), TARGET)
    assert receiver.result().error is None
    [right] = [question for question in asked if isinstance(question, Announce)]
    receiver.rank.cache[:] = 7
    source.writer.answer(right)
    revoked = msgspec.structs.replace(right, key=msgspec.structs.replace(right.key, number=99))
    source.writer.answer(Revoke(source.epoch, revoked.key))
    with pytest.raises(HandoffError) as refused:
        source.writer.answer(revoked)
    assert refused.value.reason is Reason.ABORTED
    time.sleep(0.1)
    assert (receiver.rank.cache == 7).all()
