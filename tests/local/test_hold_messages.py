"""Releases and renewals from a real client to the real server of a prefill engine, and their outcomes."""

import threading
import time
from collections.abc import Iterator

import pytest

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
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire import client as client_module
from kvferry.handoff.wire import hold_messages
from kvferry.handoff.wire.hold_messages import HoldMessages, LeaseKeeper, RenewalOutcome
from kvferry.handoff.wire.server import Server

HOST, EPOCH, LEASE = "127.0.0.1", 7, 60.0


class PrefillServer:
    """A prefill engine's control side: a real listener before a real state machine."""

    def __init__(self, num_holds: int = 0) -> None:
        self.holds = Holds(EPOCH, num_slots=max(1, num_holds), lease_seconds=LEASE)
        self.handles = []
        for number in range(num_holds):
            hold = self.holds.begin(f"r{number}")
            assert hold is not None
            self.holds.hold(f"r{number}", time.monotonic())
            self.handles.append(hold.handle)
        self.questions: list[Question] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.listener = Server(HOST, 0, self.answer)

    def answer(self, question: Question) -> Answer:
        self.questions.append(question)
        self.may_answer.wait(20)
        if isinstance(question, Renew):
            lost = self.holds.renew(question.epoch, question.handles, time.monotonic())
            return Renewed(EPOCH, LEASE, tuple(lost))
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
def messages() -> Iterator[HoldMessages]:
    messages = HoldMessages()
    yield messages
    messages.close()


def collect(messages: HoldMessages, number: int = 1) -> list[RenewalOutcome]:
    outcomes: list[RenewalOutcome] = []
    end = time.monotonic() + 20
    while len(outcomes) < number:
        assert time.monotonic() < end, f"only {len(outcomes)} outcomes"
        outcomes += messages.collect()
        time.sleep(0.002)
    return outcomes


def wait_for_end_of_all(prefill: PrefillServer) -> None:
    end = time.monotonic() + 20
    while prefill.holds.num_holds:
        assert time.monotonic() < end, "a hold was not released"
        time.sleep(0.002)


def test_a_release_ends_the_holds_and_is_no_outcome(prefill: PrefillServer, messages: HoldMessages) -> None:
    messages.release(prefill.remotes(), timeout_seconds=20)
    wait_for_end_of_all(prefill)
    assert len(prefill.questions) == 1, "one message to one destination"
    time.sleep(0.05)
    assert messages.collect() == []


def test_a_request_that_finishes_releases_its_hold_at_once(prefill: PrefillServer) -> None:
    """Not with the next renewals: an engine that is busy sends none for a while."""
    keeper = LeaseKeeper(LEASE)
    try:
        keeper.arrive("d", prefill.remotes()[0], LEASE)
        keeper.finish("d")
        end = time.monotonic() + 10
        while prefill.holds.num_holds == 3:
            assert time.monotonic() < end, "the hold was not released"
            time.sleep(0.002)
    finally:
        keeper.close()


def test_the_hold_of_a_sample_is_released_once_no_other_sample_can_come(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a later request no other call releases the hold, and the keeper would renew its lease for ever."""
    monkeypatch.setattr(hold_messages, "SIBLING_LINGER_SECONDS", 0.2)
    keeper = LeaseKeeper(LEASE)
    try:
        keeper.arrive("0_d", prefill.remotes()[0], LEASE)
        keeper.finish("0_d")
        time.sleep(0.05)
        assert prefill.questions == [], "another sample may use the hold"
        end = time.monotonic() + 10
        while prefill.holds.num_holds == 3:
            assert time.monotonic() < end, "the hold was not released"
            keeper.keep()
            time.sleep(0.002)
    finally:
        keeper.close()


def test_a_renewal_tells_the_held_from_the_lost(prefill: PrefillServer, messages: HoldMessages) -> None:
    gone = prefill.remote(Handle("r0", 999))
    before = time.monotonic()
    messages.renew([*prefill.remotes(), gone], timeout_seconds=20)
    (outcome,) = collect(messages)
    assert outcome.held == tuple(prefill.remotes())
    assert outcome.lost == (gone,)
    assert outcome.lease_seconds == LEASE
    assert before <= outcome.sent_at <= time.monotonic()


def test_a_restarted_engine_has_lost_all_holds(prefill: PrefillServer, messages: HoldMessages) -> None:
    former = [prefill.remote(handle, epoch=EPOCH - 1) for handle in prefill.handles]
    messages.renew([*former, prefill.remote(prefill.handles[0])], timeout_seconds=20)
    outcomes = collect(messages, 2)
    assert {outcome.lost for outcome in outcomes} == {tuple(former), ()}
    assert {outcome.held for outcome in outcomes} == {(), (prefill.remote(prefill.handles[0]),)}


@pytest.mark.parametrize("answer", [Refusal("unsupported", "a fault"), Noted(EPOCH)])
def test_after_another_refusal_no_hold_is_lost_and_renewals_go_on(
    prefill: PrefillServer, messages: HoldMessages, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Server(HOST, 0, lambda question: answer)
    hold = RemoteHold("p", EPOCH, HOST, refusing.port, Handle("a", 1))
    try:
        for _ in range(2):
            messages.renew([hold], timeout_seconds=20)
            end = time.monotonic() + 20
            while messages._holds_of and time.monotonic() < end:
                assert messages.collect() == []
                time.sleep(0.002)
            assert not messages._holds_of, "its end was not noticed"
    finally:
        refusing.close()


def test_a_pending_renewal_is_not_sent_twice(prefill: PrefillServer, messages: HoldMessages) -> None:
    """A silent prefill must not gather a message for each time that a lease was due."""
    prefill.may_answer.clear()
    first, second = prefill.remotes()[:2]
    messages.renew([first], timeout_seconds=20)
    for _ in range(10):
        messages.renew([first, second], timeout_seconds=20)
    prefill.may_answer.set()
    outcomes = collect(messages, 2)
    assert [outcome.held for outcome in outcomes] == [(first,), (second,)]
    messages.renew([first], timeout_seconds=20)
    assert [outcome.held for outcome in collect(messages)] == [(first,)]


def test_a_renewal_works_after_one_without_an_answer(
    prefill: PrefillServer, messages: HoldMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RESEND_SECONDS", 0.05)
    prefill.may_answer.clear()
    messages.renew(prefill.remotes(), timeout_seconds=0.1)
    end = time.monotonic() + 20
    while messages._holds_of and time.monotonic() < end:
        messages.collect()
        time.sleep(0.002)
    assert not messages._holds_of, "a renewal that timed out is still thought to be on its way"
    prefill.may_answer.set()
    messages.renew(prefill.remotes(), timeout_seconds=20)
    assert [outcome.held for outcome in collect(messages)] == [tuple(prefill.remotes())]


def test_more_holds_than_a_message_takes_go_in_several(messages: HoldMessages) -> None:
    prefill = PrefillServer(num_holds=MAX_REQUESTS_PER_MESSAGE + 1)
    try:
        messages.renew(prefill.remotes(), timeout_seconds=20)
        outcomes = collect(messages, 2)
        assert sorted(len(outcome.held) for outcome in outcomes) == [1, MAX_REQUESTS_PER_MESSAGE]
        messages.release(prefill.remotes(), timeout_seconds=20)
        wait_for_end_of_all(prefill)
        assert len(prefill.questions) == 4
    finally:
        prefill.close()


def test_a_hold_at_a_bad_address_affects_no_other(prefill: PrefillServer, messages: HoldMessages) -> None:
    bad = RemoteHold("p", EPOCH, "no such host", 5600, Handle("a", 1))
    messages.release([bad], timeout_seconds=20)
    messages.renew([bad, *prefill.remotes()], timeout_seconds=20)
    assert [outcome.held for outcome in collect(messages)] == [tuple(prefill.remotes())]


def test_close_twice(messages: HoldMessages) -> None:
    messages.close()
    messages.close()
