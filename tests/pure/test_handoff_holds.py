"""The state machine of the prefill engine's holds against a model of it, over arbitrary sequences of events."""

from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import holds
from kvferry.handoff.holds import (
    GENERATION_BITS,
    HOLD_PREFIX,
    RENEWED_LEASE_SECONDS,
    TRANSFER_GENERATION,
    Ending,
    Hold,
    Holds,
    Lease,
    handle_of_transfer,
    is_of_hold,
    sampling_family,
    transfer_of,
)
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Handle

EPOCH, MAX_HOLDS, LEASE, RENEWED, MOST = 7, 4, 60.0, RENEWED_LEASE_SECONDS, 150.0
TRANSFERS = ["x", "y", "z", "0_t", "1_t"]
transfer_ids = st.sampled_from(TRANSFERS)
request_ids = st.sampled_from(["a", "b", "0_c", "1_c", "2_c", "11_d", "d"])


class HoldsMachine(RuleBasedStateMachine):
    """The model: live holds by name, the end of their leases and when they were held, which ones a decode engine has
    renewed, and what has ended since it was last asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.side = Holds(EPOCH, MAX_HOLDS, LEASE, MOST)
        self.now = 0.0
        self.live: dict[str, Hold] = {}
        self.lease_end: dict[str, float] = {}
        self.held_at: dict[str, float] = {}
        self.renewed: set[str] = set()
        self.known: list[Handle] = []
        self.transfers: dict[str, str] = {}
        self.ended_transfers: set[str] = set()
        self.ended: Counter[tuple[Handle, Ending, bool]] = Counter()
        self.named: set[Handle] = set()

    def end(self, request_id: str, ending: Ending) -> None:
        hold = self.live.pop(request_id)
        self.renewed.discard(request_id)
        self.held_at.pop(request_id, None)
        self.ended[hold.handle, ending, self.lease_end.pop(request_id, None) is not None] += 1

    def start_lease(self, name: str) -> float:
        self.held_at[name] = self.now
        self.lease_end[name] = self.now + (RENEWED if name in self.renewed else LEASE)
        return self.lease_end[name]

    def renew_in_model(self, name: str) -> None:
        self.renewed.add(name)
        if name in self.lease_end:
            self.lease_end[name] = min(self.now + RENEWED, self.held_at[name] + MOST)

    @rule(request_id=request_ids)
    def begin(self, request_id: str) -> None:
        hold = self.side.begin(request_id)
        if request_id in self.lease_end:
            assert hold is None, "a finished request of this id is still held"
        elif request_id in self.live:
            assert hold is not None
            assert hold.handle == self.live[request_id].handle
        elif len(self.live.keys() - set(TRANSFERS)) == MAX_HOLDS:
            assert hold is None, "more holds than there is room for"
        else:
            assert hold is not None, "room was not given"
            assert hold.handle.request_id == request_id
            assert hold.handle.generation not in {handle.generation for handle in self.known}
            assert not hold.is_held
            self.live[request_id] = hold
            self.known.append(hold.handle)

    @rule(request_id=request_ids)
    def hold(self, request_id: str) -> None:
        hold = self.side.hold(request_id, self.now)
        assert (hold is not None) == (request_id in self.live and request_id not in self.lease_end)
        if hold is not None:
            assert hold.lease is not None
            assert hold.handle == self.live[request_id].handle
            assert hold.lease.end == self.start_lease(request_id)

    @rule(request_id=request_ids)
    def drop(self, request_id: str) -> None:
        self.side.drop(request_id)
        if request_id in self.live and request_id not in self.lease_end:
            self.end(request_id, Ending.DROPPED)

    @rule(transfer_id=transfer_ids, request_id=st.sampled_from(["r", "s"]))
    def begin_transfer(self, transfer_id: str, request_id: str) -> None:
        if self.transfers.get(request_id, transfer_id) != transfer_id:
            return  # a request has one transfer
        hold = self.side.begin_transfer(transfer_id, request_id)
        has_ended = transfer_id in self.ended_transfers
        is_taken = transfer_id in self.live and request_id not in self.transfers
        assert (hold is None) == (has_ended or is_taken)
        if hold is not None:
            assert hold.handle == handle_of_transfer(transfer_id)
            self.live[transfer_id] = hold
            self.transfers[request_id] = transfer_id

    @rule(request_id=st.sampled_from(["r", "s"]), ends_well=st.booleans())
    def finish_transfer(self, request_id: str, ends_well: bool) -> None:
        transfer_id = self.transfers.pop(request_id, None)
        if ends_well:
            hold = self.side.hold(request_id, self.now)
            assert (hold is None) == (transfer_id is None)
            if transfer_id is not None:
                self.start_lease(transfer_id)
            return
        self.side.drop(request_id)
        if transfer_id is not None:
            self.end_transfer(transfer_id, Ending.DROPPED)

    @rule(transfer_id=transfer_ids)
    def drop_transfer(self, transfer_id: str) -> None:
        self.side.drop_transfer(transfer_id)
        if transfer_id not in self.live:
            self.end_transfer(transfer_id, Ending.DROPPED)

    @rule(transfer_id=transfer_ids, epoch=st.sampled_from((EPOCH, EPOCH + 1)))
    def release_transfer(self, transfer_id: str, epoch: int) -> None:
        self.side.release(epoch, [handle_of_transfer(transfer_id)])
        self.end_transfer(transfer_id, Ending.RELEASED)

    @rule(transfer_id=transfer_ids)
    def renew_transfer(self, transfer_id: str) -> None:
        handle = handle_of_transfer(transfer_id)
        lost = self.side.renew(EPOCH, [handle], self.now)
        assert lost == ([handle] if transfer_id in self.ended_transfers else [])
        if transfer_id in self.live:
            self.renew_in_model(transfer_id)

    def end_transfer(self, transfer_id: str, ending: Ending) -> None:
        if transfer_id in self.ended_transfers:
            return
        self.ended_transfers.add(transfer_id)
        self.transfers = {request: name for request, name in self.transfers.items() if name != transfer_id}
        self.live.pop(transfer_id, None)
        self.renewed.discard(transfer_id)
        self.held_at.pop(transfer_id, None)
        was_held = self.lease_end.pop(transfer_id, None) is not None
        self.ended[handle_of_transfer(transfer_id), ending, was_held] += 1

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
        live = {hold.handle for hold in self.live.values()}
        assert self.side.renew(EPOCH, handles, self.now) == [handle for handle in handles if handle not in live]
        families = {sampling_family(handle.request_id) for handle in set(handles) & live}
        for member in self.live.keys() - set(TRANSFERS):
            if sampling_family(member) in families:
                self.renew_in_model(member)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
        self.side.release(EPOCH, handles)
        for handle in handles:
            if handle not in {hold.handle for hold in self.live.values()}:
                continue
            family = sampling_family(handle.request_id)
            for member in [m for m in self.lease_end if m not in TRANSFERS and sampling_family(m) == family]:
                self.end(member, Ending.RELEASED)

    @rule(seconds=st.sampled_from([0.5, 9.0, 11.0, 59.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.side.expire(self.now)
        for request_id in [request_id for request_id, end in self.lease_end.items() if end <= self.now]:
            end = self.end_transfer if request_id in TRANSFERS else self.end
            if self.held_at[request_id] + MOST <= self.now:
                end(request_id, Ending.TOO_OLD)
            else:
                end(request_id, Ending.ABANDONED if request_id in self.renewed else Ending.EXPIRED)

    @rule(seconds=st.sampled_from([3.0, 70.0]))
    def stand_still(self, seconds: float) -> None:
        """The process is stopped, and its leases wait for it."""
        self.now += seconds
        self.side.forgive(seconds)
        for name, end in self.lease_end.items():
            self.lease_end[name] = min(end + seconds, self.held_at[name] + MOST)

    @rule()
    def take_ended(self) -> None:
        ended = self.side.take_ended()
        assert Counter((end.handle, end.ending, end.was_held) for end in ended) == self.ended
        assert not self.side.has_ended
        assert all(end.hold is None or end.hold.handle == end.handle for end in ended)
        handles = {end.handle for end in ended}
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
        assert self.side.num_holds == len(self.live)
        assert self.side.has_ended == bool(self.ended)

    def teardown(self) -> None:
        """Nothing has leaked: after the last lease all room can be given again."""
        self.take_ended()
        for hold in self.live.values():
            self.side.hold(hold.request_id, self.now)
        self.side.expire(self.now + LEASE)
        assert self.side.num_holds == 0
        assert {end.handle for end in self.side.take_ended()} == {hold.handle for hold in self.live.values()}
        assert None not in [self.side.begin(f"last-{number}") for number in range(MAX_HOLDS)]
        assert self.side.begin("one too many") is None


HoldsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHolds = HoldsMachine.TestCase


def held(side: Holds, request_id: str, now: float = 0.0) -> Hold:
    side.begin(request_id)
    hold = side.hold(request_id, now)
    assert hold is not None
    return hold


def test_releasing_the_named_sample_releases_its_siblings_and_nobody_else() -> None:
    side = Holds(EPOCH, 8, LEASE)
    first = held(side, "0_cmpl")
    held(side, "1_cmpl")
    held(side, "0_cmplx")
    side.begin("2_cmpl")  # still computing: its blocks are the engine's own
    side.release(EPOCH, [first.handle])
    assert [end.hold.handle.request_id for end in side.take_ended()] == ["0_cmpl", "1_cmpl"]
    assert side.num_holds == 2


def test_a_handle_of_an_earlier_generation_ends_nothing() -> None:
    side = Holds(EPOCH, 1, LEASE)
    former = held(side, "a")
    side.release(EPOCH, [former.handle])
    held(side, "a", now=1.0)
    side.release(EPOCH, [former.handle])
    assert side.num_holds == 1
    assert side.renew(EPOCH, [former.handle], now=2.0) == [former.handle]


def test_a_wrong_request_id_lets_the_right_hold_go_and_touches_no_other() -> None:
    """Parameters that were changed on their way are refused; the generation, a secret, names their hold."""
    side = Holds(EPOCH, 4, LEASE)
    ours, theirs = held(side, "a"), held(side, "b")
    wrong = Handle("b", ours.handle.generation)
    assert side.renew(EPOCH, [wrong], now=1.0) == [wrong]
    side.release(EPOCH, [wrong])
    assert [end.handle for end in side.take_ended()] == [ours.handle]
    side.release(EPOCH, [wrong, Handle("b", 1), Handle("c", 2)])
    assert (side.take_ended(), side.open_hold("b"), side.num_holds) == ([], None, 1)
    side.release(EPOCH, [theirs.handle])
    assert side.num_holds == 0


def test_ends_that_no_step_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step hangs, peers may release transfers of which nobody has heard."""
    monkeypatch.setattr(holds, "MAX_REMEMBERED", 100)
    side = Holds(EPOCH, 2, LEASE)
    hold = held(side, "a")
    handles = [handle_of_transfer(f"x{number}") for number in range(99)]
    side.release(EPOCH, handles)
    side.release(EPOCH, handles)
    with pytest.raises(HandoffError) as refused:
        side.release(EPOCH, [handle_of_transfer("y"), handle_of_transfer("z"), hold.handle])
    assert refused.value.reason is Reason.DEADLINE_EXCEEDED
    ended = [end.handle for end in side.take_ended()]
    assert len(ended) == 100
    assert hold.handle in ended, "the release of a hold is never refused"
    side.release(EPOCH, [handle_of_transfer("z")])
    assert [end.handle.request_id for end in side.take_ended()] == ["z"]


def test_a_transfer_is_released_although_the_epoch_has_changed_since_the_decode_engine_asked() -> None:
    """Its prompt may have begun after the reset: nobody else would release it before its first lease is over."""
    side = Holds(EPOCH, 1, LEASE)
    side.reset(EPOCH + 1)
    side.begin_transfer("x", "a")
    side.hold("a", 0.0)
    side.release(EPOCH, [handle_of_transfer("x"), handle_of_transfer("to come")])
    assert [(end.handle.request_id, end.ending) for end in side.take_ended()] == [
        ("x", Ending.RELEASED),
        ("to come", Ending.RELEASED),
    ]
    assert side.begin_transfer("to come", "b") is None
    own = held(side, "c")
    with pytest.raises(HandoffError, match="epoch"):
        side.release(EPOCH, [handle_of_transfer("y"), own.handle])
    assert side.num_holds == 1


def test_a_lease_ends_at_its_last_moment_and_not_before() -> None:
    side = Holds(EPOCH, 2, LEASE)
    held(side, "a")
    hold = held(side, "b")
    side.renew(EPOCH, [hold.handle], now=59.0)
    side.expire(59.999)
    assert side.num_holds == 2
    side.expire(60.0)
    assert [(end.handle.request_id, end.ending) for end in side.take_ended()] == [("a", Ending.EXPIRED)]
    side.expire(59.0 + RENEWED - 0.001)
    assert side.num_holds == 1
    side.expire(59.0 + RENEWED)
    assert [end.ending for end in side.take_ended()] == [Ending.ABANDONED]


def test_hole_12_a_killed_decode_engine_leaves_its_holds_for_the_length_of_a_renewal_and_not_of_a_first_lease() -> None:
    side = Holds(EPOCH, 2, LEASE)
    loaded, unseen = held(side, "a"), held(side, "b")
    side.renew(EPOCH, [loaded.handle], now=1.0)
    side.expire(1.0 + RENEWED)
    assert [end.handle for end in side.take_ended()] == [loaded.handle]
    assert side.renew(EPOCH, [unseen.handle], now=LEASE - 1) == [], "the router may be slow"


def test_a_decode_engine_that_was_killed_before_the_prompt_ended_has_no_first_lease() -> None:
    """A transfer is renewed while its prompt is computed."""
    side = Holds(EPOCH, 1, LEASE)
    transfer = side.begin_transfer("x", "r")
    assert transfer is not None
    side.renew(EPOCH, [transfer.handle], now=0.0)
    hold = side.hold("r", now=30.0)
    assert hold is not None
    assert hold.lease == Lease(30.0 + RENEWED)


def test_hole_6_no_hold_outlives_the_greatest_age_whatever_is_renewed() -> None:
    side = Holds(EPOCH, 1, LEASE, max_hold_seconds=100.0)
    hold = held(side, "a")
    for now in range(0, 100, 5):
        assert side.renew(EPOCH, [hold.handle], float(now)) == []
        side.expire(float(now))
    side.forgive(50.0)
    side.expire(99.9)
    assert side.num_holds == 1
    side.expire(100.0)
    assert [end.ending for end in side.take_ended()] == [Ending.TOO_OLD]


def test_a_prefill_engine_that_was_stopped_waits_for_the_renewals_that_it_could_not_receive() -> None:
    side = Holds(EPOCH, 1, LEASE)
    hold = held(side, "a")
    side.renew(EPOCH, [hold.handle], now=0.0)
    side.forgive(40.0)
    side.expire(45.0)
    assert side.renew(EPOCH, [hold.handle], now=45.0) == []
    side.expire(45.0 + RENEWED)
    assert side.num_holds == 0


def test_a_request_that_is_still_computing_never_expires() -> None:
    side = Holds(EPOCH, 1, LEASE)
    side.begin("a")
    side.expire(1e9)
    assert side.num_holds == 1


def test_a_second_request_of_an_id_that_is_still_held_touches_nothing() -> None:
    side = Holds(EPOCH, 2, LEASE)
    former = held(side, "a")
    assert side.begin("a") is None
    assert side.hold("a", now=1.0) is None
    side.drop("a")
    assert side.num_holds == 1
    assert side.renew(EPOCH, [former.handle], now=2.0) == []


def test_a_second_request_of_a_transfer_that_is_still_held_touches_nothing() -> None:
    side = Holds(EPOCH, 2, LEASE)
    assert side.begin_transfer("x", "r") is not None
    assert side.hold("r", now=0.0) is not None
    assert side.begin_transfer("x", "r") is None
    assert side.open_hold("r") is None
    assert side.num_holds == 1


def test_an_id_that_no_message_can_carry_begins_no_hold() -> None:
    """No decode engine could name the hold, so nobody could release it."""
    side = Holds(EPOCH, 1, LEASE)
    assert side.begin("a" * (MAX_IDENTIFIER_LENGTH + 1)) is None
    assert side.begin("a" * MAX_IDENTIFIER_LENGTH) is not None


def test_a_draining_engine_begins_nothing_and_goes_on_with_what_has_begun() -> None:
    side = Holds(EPOCH, 4, LEASE)
    begun = side.begin("a"), side.begin_transfer("x", "b")
    side.drain()
    assert (side.begin("a"), side.begin_transfer("x", "b")) == begun
    assert side.begin("c") is None
    assert side.begin_transfer("y", "d") is None
    assert [(ended.handle, ended.ending) for ended in side.take_ended()] == [(handle_of_transfer("y"), Ending.REFUSED)]
    assert side.renew(EPOCH, [handle_of_transfer("y")], now=0.0) == [handle_of_transfer("y")], "the engine is told"
    assert side.hold("a", now=0.0) is not None
    assert side.num_holds == 2


def yielding(side: Holds, request_id: str) -> Hold:
    hold = side.hold_yielding(request_id, now=0.0, seconds=100.0)
    assert hold is not None
    return hold


def endings(side: Holds) -> list[tuple[str, Ending]]:
    return [(ended.handle.request_id, ended.ending) for ended in side.take_ended()]


def test_a_hold_that_yields_has_a_first_lease_of_its_own_and_renewals_as_any_other() -> None:
    side = Holds(EPOCH, 4, LEASE, max_hold_seconds=1000.0)
    _, second = yielding(side, "a"), yielding(side, "b")
    assert side.open_hold("a") is None, "its request has ended"
    assert side.renew(EPOCH, [second.handle], now=95.0) == []
    side.expire(99.9)
    assert endings(side) == []
    side.expire(100.0)
    assert endings(side) == [("a", Ending.EXPIRED)]
    side.expire(95.0 + side.renewed_lease_seconds)
    assert endings(side) == [("b", Ending.ABANDONED)]
    assert [yielding(side, name).handle.request_id for name in "cdef"] == [*"cdef"], "their room is free"


def test_where_there_is_no_room_the_oldest_answer_that_nobody_loads_yields() -> None:
    """A prompt for a decode engine takes its room, and so does a later answer; what is loaded stays."""
    side = Holds(EPOCH, 4, LEASE)
    held(side, "prompt")
    loaded, *_ = [yielding(side, name) for name in ("loaded", "oldest", "newest")]
    side.renew(EPOCH, [loaded.handle], now=1.0)
    assert side.begin("next prompt") is not None
    assert endings(side) == [("oldest", Ending.YIELDED)]
    yielding(side, "next answer")
    assert endings(side) == [("newest", Ending.YIELDED)]
    assert side.hold("next prompt", now=1.0) is not None
    assert side.begin("one more") is not None
    assert endings(side) == [("next answer", Ending.YIELDED)]
    assert side.begin("too many") is None
    assert side.hold_yielding("too many", 1.0, 9.0) is None
    assert endings(side) == []


def test_only_holds_that_yield_end_with_their_blocks_or_when_an_engine_drains() -> None:
    side = Holds(EPOCH, 8, LEASE)
    prompt, begun = held(side, "prompt"), side.begin("open")
    transfer = side.begin_transfer("x", "of a router")
    assert begun is not None
    assert transfer is not None
    answer = yielding(side, "answer")
    handles = [hold.handle for hold in (prompt, begun, transfer, answer)]
    side.yield_blocks([*handles, Handle("answer", 1), handle_of_transfer("unknown")])
    assert endings(side) == [("answer", Ending.YIELDED)]
    yielding(side, "answer")
    assert (side.num_holds, side.num_lasting) == (4, 3)
    side.drain()
    assert endings(side) == [("answer", Ending.YIELDED)]
    assert (side.num_holds, side.num_lasting) == (3, 3)


def test_a_reset_ends_every_hold_and_refuses_messages_of_before() -> None:
    """Also prompts that are being computed: their first tokens were computed with the former weights."""
    side = Holds(EPOCH, 4, LEASE)
    former = held(side, "held")
    side.begin("open")
    side.begin_transfer("x", "r")
    side.reset(EPOCH + 1)
    assert [(end.handle.request_id, end.ending) for end in side.take_ended()] == [
        (name, Ending.RESET) for name in ("held", "open", "x")
    ]
    for message in (side.release, partial(side.renew, now=1.0)):
        with pytest.raises(HandoffError) as caught:
            message(EPOCH, [former.handle])
        assert caught.value.reason is Reason.PEER_CHANGED
    assert side.hold("open", now=1.0) is None
    assert side.renew(EPOCH + 1, [former.handle], now=1.0) == [former.handle]
    assert None not in [side.begin(name) for name in "abcd"], "their room is free"


def test_a_held_or_unknown_request_has_no_open_hold() -> None:
    side = Holds(EPOCH, 4, LEASE)
    held(side, "a")
    hold = side.begin("b")
    side.begin("c")
    assert [side.open_hold(request_id) for request_id in ("a", "b", "d")] == [None, hold, None]


def test_a_transfer_that_was_released_before_its_prompt_came_does_not_begin() -> None:
    side = Holds(EPOCH, 1, LEASE)
    handle = handle_of_transfer("x")
    side.release(EPOCH, [handle, handle])
    assert [(ended.handle, ended.hold) for ended in side.take_ended()] == [(handle, None)]
    assert side.begin_transfer("x", "r") is None
    assert side.renew(EPOCH, [handle], now=0.0) == [handle]


def test_a_transfer_ends_with_the_one_sample_that_serves_it() -> None:
    side = Holds(EPOCH, 1, LEASE)
    assert side.begin_transfer("x", "0_r") is not None
    assert side.begin_transfer("x", "1_r") is None
    side.drop("1_r")
    side.drop_transfer("x")
    assert side.num_holds == 1, "another sample serves it"
    side.drop("0_r")
    assert [ended.ending for ended in side.take_ended()] == [Ending.DROPPED]


def test_a_request_and_a_router_s_transfer_may_have_the_same_id() -> None:
    """A client may know a transfer's id, and names its own request so: neither hold touches the other."""
    side = Holds(EPOCH, 2, LEASE)
    own, transfer = side.begin("x"), side.begin_transfer("x", "r")
    assert own is not None
    assert transfer is not None
    assert own.handle != transfer.handle
    assert own.transfer_id != transfer.transfer_id == "x"
    assert (side.open_hold("x"), side.open_hold("r")) == (own, transfer)
    side.hold("x", now=0.0)
    side.hold("r", now=0.0)
    assert side.renew(EPOCH, [transfer.handle], now=55.0) == []
    side.expire(LEASE - 0.1)
    assert side.num_holds == 2
    side.expire(LEASE)
    assert [end.handle for end in side.take_ended()] == [own.handle], "it was not the one that was renewed"
    assert side.begin("x") is not None
    side.release(EPOCH, [transfer.handle])
    assert [end.handle for end in side.take_ended()] == [transfer.handle]
    assert side.num_holds == 1
    side.drop_transfer("x")
    assert side.num_holds == 1, "a transfer's id drops no hold of this engine"


def test_a_request_has_one_open_hold() -> None:
    side = Holds(EPOCH, 2, LEASE)
    own = side.begin("a")
    assert side.begin_transfer("x", "a") is None
    assert side.open_hold("a") == own
    transfer = side.begin_transfer("y", "b")
    assert side.begin("b") is None
    assert side.open_hold("b") == transfer


@given(st.integers(1, (1 << GENERATION_BITS) - 1), st.text(min_size=1, max_size=9))
def test_the_transfer_id_of_a_hold_names_its_generation_and_nothing_of_its_request(
    generation: int, request_id: str
) -> None:
    transfer_id = transfer_of(Handle(request_id, generation))
    assert is_of_hold(transfer_id)
    assert len(transfer_id) == len(HOLD_PREFIX) + 16
    assert transfer_id == transfer_of(Handle("another", generation)) != transfer_of(Handle(request_id, generation ^ 2))
    assert handle_of_transfer(transfer_id).generation == generation


@pytest.mark.parametrize("transfer_id", ["x", "hold", "hold :0000000000000001", " hold:0000000000000001"])
def test_a_router_s_transfer_id_names_its_own_transfer(transfer_id: str) -> None:
    assert not is_of_hold(transfer_id)
    handle = handle_of_transfer(transfer_id)
    assert handle == Handle(transfer_id, TRANSFER_GENERATION)
    assert transfer_of(handle) == transfer_id


@pytest.mark.parametrize("transfer_id", ["hold:", "hold:0000000000000001", "hold:xyz", "hold:000000000000001"])
def test_a_router_s_transfer_id_that_begins_as_that_of_a_hold_is_refused(transfer_id: str) -> None:
    """Nobody begins, drops or ends a transfer of such an id: the ranks would end the hold of another request."""
    side = Holds(EPOCH, 2, LEASE)
    assert side.begin_transfer(transfer_id, "a") is None
    assert side.open_hold("a") is None
    side.drop_transfer(transfer_id)
    side.release(EPOCH, [Handle(transfer_id, TRANSFER_GENERATION)])
    assert (side.num_holds, side.take_ended()) == (0, [])
    side.drain()
    assert side.begin_transfer(transfer_id, "a") is None
    assert side.take_ended() == []


def test_a_rank_that_knows_only_the_transfer_id_releases_the_hold() -> None:
    """The destination of a write may be dead: the source's rank asks its own engine to end the hold."""
    side = Holds(EPOCH, 2, LEASE)
    hold, transfer = held(side, "a"), side.begin_transfer("x", "r")
    assert transfer is not None
    side.release(EPOCH, [handle_of_transfer(each.transfer_id) for each in (hold, transfer)])
    assert [(end.handle, end.ending) for end in side.take_ended()] == [
        (hold.handle, Ending.RELEASED),
        (transfer.handle, Ending.RELEASED),
    ]
