"""The holds that a decode engine keeps: releases and renewals from a real client to a prefill engine's real server."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import remote_holds
from kvferry.handoff.holds import Holds
from kvferry.handoff.messages import (
    MAX_REQUESTS_PER_MESSAGE,
    Answer,
    Handle,
    Noted,
    Question,
    Refusal,
    Release,
    Renew,
    Renewed,
)
from kvferry.handoff.remote_holds import LeaseKeeper, RemoteHold
from kvferry.handoff.wire import client as client_module
from kvferry.handoff.wire.server import Server

from ..waits import wait_until

HOST, EPOCH, LEASE = "127.0.0.1", 7, 60.0
SHORT_LEASE = 0.4
"""A lease that the decode engine renews every 0.1 s, the shortest interval."""


class PrefillServer:
    """A prefill engine's control side: a real listener before a real state machine."""

    def __init__(self, num_holds: int = 0) -> None:
        self.holds = Holds(EPOCH, max_holds=max(1, num_holds), lease_seconds=LEASE)
        self.handles = []
        for number in range(num_holds):
            hold = self.holds.begin(f"r{number}")
            assert hold is not None
            self.holds.hold(f"r{number}", time.monotonic())
            self.handles.append(hold.handle)
        self.questions: list[Question] = []
        self.lease_seconds = LEASE
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.listener = Server(HOST, 0, self.answer)

    def answer(self, question: Question) -> Answer:
        self.questions.append(question)
        self.may_answer.wait(20)
        if isinstance(question, Renew):
            lost = self.holds.renew(question.epoch, question.handles, time.monotonic())
            return Renewed(EPOCH, self.lease_seconds, tuple(lost))
        assert isinstance(question, Release)
        self.holds.release(question.epoch, question.handles)
        return Noted(EPOCH)

    def remote(self, handle: Handle, epoch: int = EPOCH) -> RemoteHold:
        return RemoteHold("p", epoch, HOST, self.listener.port, handle)

    def remotes(self) -> list[RemoteHold]:
        return [self.remote(handle) for handle in self.handles]

    def close(self) -> None:
        self.may_answer.set()
        self.listener.close()


@pytest.fixture
def prefill() -> Iterator[PrefillServer]:
    prefill = PrefillServer(num_holds=3)
    yield prefill
    prefill.close()


@pytest.fixture
def keeper() -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(LEASE)
    yield keeper
    keeper.close()


def arrive(keeper: LeaseKeeper, *holds: RemoteHold, lease_seconds: float = LEASE) -> list[str]:
    """Let one request arrive for each hold, and return the requests' ids."""
    request_ids = [f"d{number}" for number, _ in enumerate(holds)]
    for request_id, hold in zip(request_ids, holds, strict=True):
        keeper.arrive(request_id, hold, lease_seconds)
    return request_ids


def lease_end(keeper: LeaseKeeper, request_id: str) -> float:
    return keeper.running_lease(request_id).end


def renewals(prefill: PrefillServer) -> list[Renew]:
    return [question for question in prefill.questions if isinstance(question, Renew)]


def test_a_release_ends_the_holds(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    first, *others = arrive(keeper, *prefill.remotes())
    keeper.finish(first)
    wait_until(lambda: prefill.holds.num_holds == 2, "the hold was not released at once")
    assert prefill.questions == [Release(EPOCH, (prefill.handles[0],))]
    for request_id in others:
        keeper.finish(request_id)
    wait_until(lambda: not prefill.holds.num_holds, "a hold was not released")
    assert keeper.take_lost() == []


def test_the_hold_of_a_sample_is_released_once_no_other_sample_can_come(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a later request no other call releases the hold, and the keeper would renew its lease for ever."""
    monkeypatch.setattr(remote_holds, "SIBLING_LINGER_SECONDS", 0.2)
    keeper = LeaseKeeper(LEASE)
    try:
        keeper.arrive("0_d", prefill.remotes()[0], LEASE)
        keeper.finish("0_d")
        time.sleep(0.05)
        assert prefill.questions == [], "another sample may use the hold"
        wait_until(lambda: prefill.holds.num_holds == 2, "the hold was not released", each=keeper.keep)
    finally:
        keeper.close()


def test_a_renewal_tells_the_held_from_the_lost(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    *held, lost = arrive(keeper, *prefill.remotes(), prefill.remote(Handle("r0", 999)), lease_seconds=30.0)
    before = time.monotonic()
    wait_until(lambda: lease_end(keeper, held[0]) > before + 31, "the lease was not renewed", each=keeper.keep)
    assert len(prefill.questions) == 1, "one message to one prefill engine"
    assert keeper.take_lost() == [lost]
    assert keeper.take_lost() == []
    ends = {lease_end(keeper, request_id) for request_id in held}
    assert len(ends) == 1
    assert before + LEASE <= ends.pop() <= time.monotonic() + LEASE
    with pytest.raises(HandoffError) as refused:
        keeper.running_lease(lost)
    assert refused.value.reason is Reason.LEASE_EXPIRED


def test_a_restarted_engine_has_lost_all_holds(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    earlier = [prefill.remote(handle, epoch=EPOCH - 1) for handle in prefill.handles]
    *lost, held = arrive(keeper, *earlier, prefill.remotes()[0])
    found: list[str] = []

    def keep() -> None:
        keeper.keep()
        found.extend(keeper.take_lost())

    wait_until(lambda: len(found) == 3, "the loss of a hold was not noticed", each=keep)
    assert sorted(found) == lost
    assert keeper.running_lease(held)


@pytest.mark.parametrize("answer", [Refusal("unsupported", "a fault"), Noted(EPOCH)])
def test_after_another_refusal_no_hold_is_lost_and_renewals_go_on(answer: Answer, keeper: LeaseKeeper) -> None:
    questions: list[Question] = []

    def refuse(question: Question) -> Answer:
        questions.append(question)
        return answer

    refusing = Server(HOST, 0, refuse)
    try:
        (request_id,) = arrive(keeper, RemoteHold("p", EPOCH, HOST, refusing.port, Handle("a", 1)), lease_seconds=5.0)
        wait_until(lambda: len(questions) == 2, "the renewal was not sent again", each=keeper.keep)
        assert keeper.running_lease(request_id)
        assert keeper.take_lost() == []
    finally:
        refusing.close()


def test_a_pending_renewal_is_not_sent_twice(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    """A silent prefill must not gather a message for each time that a lease was due."""
    prefill.lease_seconds = SHORT_LEASE
    prefill.may_answer.clear()
    first, second = prefill.remotes()[:2]
    keeper.arrive("d0", first, SHORT_LEASE)
    keeper.keep()
    keeper.arrive("d1", second, SHORT_LEASE)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        keeper.keep()
        time.sleep(0.01)
    prefill.may_answer.set()
    time.sleep(0.3)
    assert [question.handles for question in renewals(prefill)] == [(first.handle,), (second.handle,)]
    wait_until(lambda: len(renewals(prefill)) >= 3, "no renewal followed an answer", each=keeper.keep)


def test_a_renewal_works_after_one_without_an_answer(prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_SECONDS", 0.05)
    keeper = LeaseKeeper(lease_seconds=0.1)
    try:
        prefill.may_answer.clear()
        request_ids = arrive(keeper, *prefill.remotes(), lease_seconds=0.5)
        keeper.keep()
        time.sleep(0.3)
        prefill.may_answer.set()
        before = time.monotonic()

        def step() -> None:
            keeper.step()  # the keeper's own lease is over: an engine without steps would renew no more
            keeper.keep()

        for request_id in request_ids:
            wait_until(lambda r=request_id: _end(keeper, r) > before + 31, "the lease was not renewed", each=step)  # type: ignore[misc]
    finally:
        keeper.close()


def _end(keeper: LeaseKeeper, request_id: str) -> float:
    try:
        return lease_end(keeper, request_id)
    except HandoffError:
        return 0.0


def test_more_holds_than_a_message_takes_go_in_several(keeper: LeaseKeeper) -> None:
    prefill = PrefillServer(num_holds=MAX_REQUESTS_PER_MESSAGE + 1)
    try:
        request_ids = arrive(keeper, *prefill.remotes(), lease_seconds=30.0)
        before = time.monotonic()
        for request_id in request_ids:
            is_renewed = partial(lambda one: lease_end(keeper, one) > before + 31, request_id)
            wait_until(is_renewed, "a lease was not renewed", each=keeper.keep)
        assert sorted(len(question.handles) for question in renewals(prefill)) == [1, MAX_REQUESTS_PER_MESSAGE]
    finally:
        prefill.close()


def test_vllm_53095_the_leases_of_a_batch_of_128_are_all_renewed_again_and_again(keeper: LeaseKeeper) -> None:
    """VLLM#53095: heartbeats of a push failed to renew the leases of a batch of 128."""
    prefill = PrefillServer(num_holds=128)
    prefill.lease_seconds = SHORT_LEASE
    try:
        request_ids = arrive(keeper, *prefill.remotes(), lease_seconds=SHORT_LEASE)
        end = time.monotonic() + 4 * SHORT_LEASE
        while time.monotonic() < end:
            keeper.step()
            keeper.keep()
            time.sleep(0.01)
        assert {request_id for request_id in request_ids if _end(keeper, request_id) <= end - SHORT_LEASE} == set()
        assert keeper.take_lost() == []
        keeper.step()
    finally:
        prefill.close()


def test_a_hold_at_a_bad_address_affects_no_other(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    bad = RemoteHold("p", EPOCH, "no such host", 5600, Handle("a", 1))
    request_ids = arrive(keeper, *prefill.remotes(), bad, lease_seconds=30.0)
    before = time.monotonic()
    wait_until(lambda: lease_end(keeper, request_ids[0]) > before + 31, "the lease was not renewed", each=keeper.keep)
    keeper.finish(request_ids[-1])
    for request_id in request_ids[:-1]:
        keeper.finish(request_id)
    wait_until(lambda: not prefill.holds.num_holds, "a hold was not released")


def test_two_names_of_one_engine_affect_no_other_hold(prefill: PrefillServer, keeper: LeaseKeeper) -> None:
    """A client writes the engine's id: the same hold under two ids must not end the thread that renews all holds."""
    hold = prefill.remotes()[0]
    arrive(keeper, RemoteHold("other", EPOCH, hold.host, hold.port, hold.handle), *prefill.remotes(), lease_seconds=30)
    before = time.monotonic()
    wait_until(lambda: lease_end(keeper, "d3") > before + 31, "the lease was not renewed", each=keeper.keep)


def test_an_engine_whose_steps_do_not_end_renews_no_more_until_they_do(prefill: PrefillServer) -> None:
    prefill.lease_seconds = SHORT_LEASE
    keeper = LeaseKeeper(lease_seconds=0.5)
    try:
        arrive(keeper, prefill.remotes()[0], lease_seconds=SHORT_LEASE)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            keeper.keep()
            time.sleep(0.01)
        while_stalled = len(renewals(prefill))
        assert while_stalled >= 2
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            keeper.keep()
            time.sleep(0.01)
        assert len(renewals(prefill)) == while_stalled, "a hung engine pins the prefill engine's blocks"
        keeper.step()
        wait_until(lambda: len(renewals(prefill)) > while_stalled, "no renewal followed a step", each=keeper.keep)
    finally:
        keeper.close()


def test_close_twice(keeper: LeaseKeeper) -> None:
    keeper.close()
    keeper.close()
