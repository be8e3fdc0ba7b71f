"""The holder's state machine against a model of it, over arbitrary sequences of events."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.holds import Ending, Hold, PrefillSide, sampling_family
from kvferry.handoff.messages import Handle

EPOCH, NUM_SLOTS, LEASE = 7, 4, 60.0
request_ids = st.sampled_from(["a", "b", "0_c", "1_c", "2_c", "11_d", "d"])


class PrefillSideMachine(RuleBasedStateMachine):
    """The model: live holds by request, the end of their leases, and what has ended since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self.side = PrefillSide(EPOCH, NUM_SLOTS, LEASE)
        self.now = 0.0
        self.live: dict[str, Hold] = {}
        self.lease_end: dict[str, float] = {}
        self.known: list[Handle] = []
        self.ended: Counter[tuple[Handle, Ending, bool]] = Counter()
        self.named: set[Handle] = set()

    def end(self, request_id: str, ending: Ending) -> None:
        hold = self.live.pop(request_id)
        self.ended[hold.handle, ending, self.lease_end.pop(request_id, None) is not None] += 1

    @rule(request_id=request_ids)
    def begin(self, request_id: str) -> None:
        hold = self.side.begin(request_id)
        if request_id in self.lease_end:
            assert hold is None, "a finished request of this id is still held"
        elif request_id in self.live:
            assert hold is not None
            assert (hold.handle, hold.slot) == (self.live[request_id].handle, self.live[request_id].slot)
        elif len(self.live) == NUM_SLOTS:
            assert hold is None, "more holds than slots"
        else:
            assert hold is not None, "a free slot was not given"
            assert 0 <= hold.slot < NUM_SLOTS
            assert hold.handle.request_id == request_id
            assert hold.handle.generation not in {handle.generation for handle in self.known}
            assert not hold.is_exported
            self.live[request_id] = hold
            self.known.append(hold.handle)

    @rule(request_id=request_ids)
    def export(self, request_id: str) -> None:
        hold = self.side.export(request_id, self.now)
        assert (hold is not None) == (request_id in self.live and request_id not in self.lease_end)
        if hold is not None:
            assert hold.lease is not None
            assert hold.lease.end == self.now + LEASE
            assert hold.handle == self.live[request_id].handle
            self.lease_end[request_id] = self.now + LEASE

    @rule(request_id=request_ids)
    def drop(self, request_id: str) -> None:
        self.side.drop(request_id)
        if request_id in self.live and request_id not in self.lease_end:
            self.end(request_id, Ending.NOT_EXPORTED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
        live = {hold.handle for hold in self.live.values()}
        assert self.side.renew(EPOCH, handles, self.now) == [handle for handle in handles if handle not in live]
        families = {sampling_family(handle.request_id) for handle in set(handles) & live}
        for member in self.lease_end:
            if sampling_family(member) in families:
                self.lease_end[member] = self.now + LEASE

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
        self.side.release(EPOCH, handles)
        for handle in handles:
            if handle not in {hold.handle for hold in self.live.values()}:
                continue
            family = sampling_family(handle.request_id)
            for member in [member for member in self.lease_end if sampling_family(member) == family]:
                self.end(member, Ending.RELEASED)

    @rule(seconds=st.sampled_from([0.5, 20.0, 59.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.side.expire(self.now)
        for request_id in [request_id for request_id, end in self.lease_end.items() if end <= self.now]:
            self.end(request_id, Ending.EXPIRED)

    @rule()
    def take_ended(self) -> None:
        ended = self.side.take_ended()
        assert Counter((end.hold.handle, end.ending, end.hold.is_exported) for end in ended) == self.ended
        assert not self.side.has_ended
        handles = {end.hold.handle for end in ended}
        assert len(handles) == len(ended)
        assert not handles & self.named, "an ended hold was named twice"
        self.named |= handles
        self.ended.clear()

    @rule(epoch=st.integers(0, 100).filter(lambda epoch: epoch != EPOCH), data=st.data())
    def meet_a_foreign_epoch(self, epoch: int, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.known), max_size=2)) if self.known else []
        for ask in (lambda: self.side.release(epoch, handles), lambda: self.side.renew(epoch, handles, self.now)):
            with pytest.raises(HandoffError) as caught:
                ask()
            assert caught.value.reason is Reason.PEER_CHANGED

    @invariant()
    def holds_are_counted(self) -> None:
        assert self.side.num_held == len(self.live)
        assert self.side.has_ended == bool(self.ended)

    @invariant()
    def live_holds_share_no_slot(self) -> None:
        assert len({hold.slot for hold in self.live.values()}) == len(self.live)

    def teardown(self) -> None:
        """Nothing has leaked: after the last lease every slot can be given again."""
        self.take_ended()
        for request_id in self.live:
            self.side.export(request_id, self.now)
        self.side.expire(self.now + LEASE)
        assert self.side.num_held == 0
        assert {end.hold.handle for end in self.side.take_ended()} == {hold.handle for hold in self.live.values()}
        holds = [self.side.begin(f"last-{number}") for number in range(NUM_SLOTS)]
        assert sorted(hold.slot for hold in holds if hold is not None) == list(range(NUM_SLOTS))
        assert self.side.begin("one too many") is None


PrefillSideMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefillSide = PrefillSideMachine.TestCase


def exported(side: PrefillSide, request_id: str, now: float = 0.0) -> Hold:
    side.begin(request_id)
    hold = side.export(request_id, now)
    assert hold is not None
    return hold


def test_releasing_the_named_sample_releases_its_siblings_and_nobody_else() -> None:
    side = PrefillSide(EPOCH, 8, LEASE)
    first = exported(side, "0_cmpl")
    exported(side, "1_cmpl")
    exported(side, "0_cmplx")
    side.begin("2_cmpl")  # still computing: its blocks are the engine's own
    side.release(EPOCH, [first.handle])
    assert [end.hold.handle.request_id for end in side.take_ended()] == ["0_cmpl", "1_cmpl"]
    assert side.num_held == 2


def test_a_handle_of_a_former_generation_ends_nothing() -> None:
    side = PrefillSide(EPOCH, 1, LEASE)
    former = exported(side, "a")
    side.release(EPOCH, [former.handle])
    exported(side, "a", now=1.0)
    side.release(EPOCH, [former.handle])
    assert side.num_held == 1
    assert side.renew(EPOCH, [former.handle], now=2.0) == [former.handle]


def test_a_lease_ends_at_its_last_moment_and_not_before() -> None:
    side = PrefillSide(EPOCH, 1, LEASE)
    hold = exported(side, "a")
    side.expire(59.999)
    assert side.num_held == 1
    side.renew(EPOCH, [hold.handle], now=59.999)
    side.expire(60.0)
    assert side.num_held == 1
    side.expire(119.999)
    assert [end.ending for end in side.take_ended()] == [Ending.EXPIRED]


def test_a_request_that_is_still_computing_never_expires() -> None:
    side = PrefillSide(EPOCH, 1, LEASE)
    side.begin("a")
    side.expire(1e9)
    assert side.num_held == 1


def test_a_second_request_of_an_id_that_is_still_held_touches_nothing() -> None:
    side = PrefillSide(EPOCH, 2, LEASE)
    former = exported(side, "a")
    assert side.begin("a") is None
    assert side.export("a", now=1.0) is None
    side.drop("a")
    assert side.num_held == 1
    assert side.renew(EPOCH, [former.handle], now=2.0) == []


def test_what_is_exported_or_unknown_is_not_unfinished() -> None:
    side = PrefillSide(EPOCH, 4, LEASE)
    exported(side, "a")
    hold = side.begin("b")
    side.begin("c")
    assert side.unfinished(["a", "b", "d"]) == [hold]
