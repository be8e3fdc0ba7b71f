"""Failures that users of other systems reported and that need threads, memory or sockets to reproduce."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.errors import Reason
from kvferry.handoff.messages import Answer, Question
from kvferry.handoff.source import END
from kvferry.transport.protocol import Direction, Status

from ..counted_work import containers_of, lines_of
from ..support.faults import FaultPlan, FaultyTransport
from ..support.transport_peer import pattern
from ..support.transport_suite import apply, open_pair, random_offsets
from ..waits import wait_until
from .engines_that_write import Pairs, check_arrived, engines

__all__ = ["engines"]


def test_vllm_ascend_10548_a_load_waits_for_every_rank_that_writes(engines: Pairs) -> None:
    """vllm-ascend#10548: heads pulled from several ranks at once were used before all of them had come."""
    sender, [receiver] = engines.open(2, 1, faults=FaultPlan())
    [slow] = sender.ranks[1].transports.transports.values()
    assert isinstance(slow, FaultyTransport)
    slow._plan = FaultPlan(delay_seconds=1.0)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    wait_until(lambda: receiver.rank.cache.any() and not sender.ranks[0].writer._writes.num_open)
    assert receiver.is_waiting(0.3), "the other has not"
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])


def test_sglang_12779_a_stopped_prefill_worker_holds_no_other_load(engines: Pairs) -> None:
    """Its engine answers the handshake; the process of the rank itself is stopped, and answers nothing."""
    well, [receiver] = engines.open()
    ill, [other] = engines.open()
    other.close()
    engines.receivers = [receiver]
    goes_on = threading.Event()

    class Stopped:
        def answer(self, question: Question) -> Answer:
            goes_on.wait(20.0)
            return writer.answer(question)

    [stopped] = ill.ranks
    writer, stopped.answerer = stopped.answerer, Stopped()  # type: ignore[assignment]
    try:
        receiver.receive(ill.hold(), [1, 4], "y", "ill", seconds=1.5)
        for number in range(3):
            well.compute(END, [5, 1], f"x{number}")
            began_at = time.monotonic()
            receiver.receive(well.hold(), [0, 3], f"x{number}", f"well {number}")
            assert receiver.result().error is None
            assert time.monotonic() - began_at < 1.0
        check_arrived(well, [receiver], [5, 1], [0, 3])
        error = receiver.result().error
        assert error is not None
        assert error.reason is Reason.DEADLINE_EXCEEDED
    finally:
        goes_on.set()


def test_vllm_ascend_5960_engines_and_ranks_are_reached_by_what_they_name(engines: Pairs) -> None:
    """vllm-ascend#5960: ports computed by arithmetic collided across PP, PCP and DP. Here nothing is computed.

    Four engines on one host, two ranks each: every byte comes from the engine and the rank that named its port.
    """
    for number in range(4):
        sender, [receiver] = engines.open(2, 1)
        for rank in sender.ranks:
            rank.rank.cache += np.uint8(50 * number)
        if number < 3:
            receiver.close()
    assert len({sender.listener.port for sender in engines.senders}) == 4
    for number, sender in enumerate(reversed(engines.senders)):
        receiver.receive(sender.hold(), [1, 2, 4], f"x{number}", f"r{number}")
        sender.compute(END, [5, 0, 3], f"x{number}")
        assert receiver.result().error is None
        check_arrived(sender, [receiver], [5, 0, 3], [1, 2, 4])


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
