"""The state machine of the decode engine's remote holds against a model of it, over arbitrary sequences of events."""

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.handoff.holds import sampling_family
from kvferry.handoff.messages import Handle
from kvferry.handoff.remote_holds import MIN_RENEW_SECONDS, RENEW_SHARE, SIBLING_LINGER_SECONDS, RemoteHold, RemoteHolds

LINGER, SHARE, LEASE, STALLED = SIBLING_LINGER_SECONDS, RENEW_SHARE, 60.0, 200.0
HOLDS = [
    RemoteHold("p", 7, "127.0.0.1", 5600, Handle("a", 1)),
    RemoteHold("p", 7, "127.0.0.1", 5600, Handle("a", 2)),
    RemoteHold("q", 8, "127.0.0.1", 5601, Handle("a", 1)),
]
request_ids = st.sampled_from(["x", "y", "0_z", "1_z", "2_z"])
some_holds = st.lists(st.sampled_from(HOLDS), max_size=3, unique=True)


class Model(msgspec.Struct):
    """What one remote hold should be."""

    lease_end: float
    requests: set[str]
    linger_until: float = 0.0
    is_lost: bool = False


class RemoteHoldsMachine(RuleBasedStateMachine):
    """The model: who reads which hold, until when it lingers, whether it is lost, and when the engine last stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.side = RemoteHolds(STALLED)
        self.now = 0.0
        self.model: dict[RemoteHold, Model] = {}
        self.reads: dict[str, RemoteHold] = {}
        self.progress_at = 0.0
        self.times_read: Counter[RemoteHold] = Counter()
        self.times_released: Counter[RemoteHold] = Counter()

    def finish_in_model(self, request_id: str) -> None:
        hold = self.reads.pop(request_id, None)
        if hold is not None:
            self.model[hold].requests.remove(request_id)
            if sampling_family(request_id) != request_id:
                self.model[hold].linger_until = self.now + LINGER

    @rule(request_id=request_ids, hold=st.sampled_from(HOLDS))
    def arrive(self, request_id: str, hold: RemoteHold) -> None:
        self.side.arrive(request_id, hold, LEASE, self.now)
        if not self.reads:
            self.progress_at = self.now
        if self.reads.get(request_id) != hold:
            self.finish_in_model(request_id)
        if hold not in self.model:
            self.model[hold] = Model(self.now + LEASE, set())
            self.times_read[hold] += 1
        self.model[hold].requests.add(request_id)
        self.reads[request_id] = hold

    @rule()
    def step(self) -> None:
        self.side.step(self.now)
        self.progress_at = self.now

    @rule(request_id=request_ids)
    def finish(self, request_id: str) -> None:
        self.side.finish(request_id, self.now)
        self.finish_in_model(request_id)

    @rule(holds=some_holds, delay=st.sampled_from([0.0, 0.3, 30.0]))
    def renewed(self, holds: list[RemoteHold], delay: float) -> None:
        sent_at = self.now - delay
        self.side.renewed(holds, sent_at, LEASE)
        for hold in holds:
            if hold in self.model:
                self.model[hold].lease_end = sent_at + LEASE

    @rule(holds=some_holds)
    def lost(self, holds: list[RemoteHold]) -> None:
        requests = self.side.lost(holds)
        expected = [request_id for hold in holds if hold in self.model for request_id in self.model[hold].requests]
        assert sorted(requests) == sorted(expected)
        for hold in holds:
            if hold in self.model:
                self.model[hold].is_lost = True

    @rule()
    def take_releases(self) -> None:
        expected = {
            hold
            for hold, model in self.model.items()
            if not model.requests and (model.is_lost or model.linger_until <= self.now)
        }
        releases = self.side.take_releases(self.now)
        assert len(releases) == len(set(releases))
        assert set(releases) == expected
        for hold in releases:
            del self.model[hold]
            self.times_released[hold] += 1

    @rule()
    def take_renewals(self) -> None:
        renewals = self.side.take_renewals(self.now)
        assert len(renewals) == len(set(renewals))
        assert not renewals or self.now - self.progress_at < STALLED, "renewed although the engine's steps do not end"
        assert set(renewals) <= {hold for hold, model in self.model.items() if not model.is_lost}
        assert self.side.take_renewals(self.now) == [], "what was just asked is not asked again"

    @rule()
    def renew_before_the_lease_ends(self) -> None:
        """Liveness: whoever steps and asks once every quarter of a lease has renewed each live hold in time."""
        self.step()
        at_risk = {
            hold for hold, model in self.model.items() if not model.is_lost and model.lease_end <= self.now + LEASE / 4
        }
        renewals = set(self.side.take_renewals(self.now))
        self.now += LEASE / 4 + MIN_RENEW_SECONDS
        renewals |= set(self.side.take_renewals(self.now))
        assert at_risk <= renewals

    @rule(seconds=st.sampled_from([0.01, 0.49, 0.5, 10.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds_are_counted(self) -> None:
        assert len(self.side._uses) == len(self.model)
        assert self.times_read - self.times_released == Counter(self.model.keys()), "one release per reading"

    @invariant()
    def a_request_reads_under_the_lease_of_its_live_hold(self) -> None:
        for request_id in ("x", "y", "0_z", "1_z", "2_z"):
            hold = self.reads.get(request_id)
            lease = self.side.lease_of(request_id)
            if hold is None or self.model[hold].is_lost:
                assert lease is None
            else:
                assert lease is not None
                assert lease.end == pytest.approx(self.model[hold].lease_end)

    def teardown(self) -> None:
        """Nothing leaks once every request has finished and time has passed."""
        for request_id in list(self.reads):
            self.finish(request_id)
        self.now += LINGER
        self.take_releases()
        assert not self.side._uses
        assert self.side.take_renewals(self.now + LEASE) == []


RemoteHoldsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRemoteHolds = RemoteHoldsMachine.TestCase


def test_a_sample_finds_the_hold_of_the_sibling_that_finished_first() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("0_z", HOLDS[0], LEASE, now=0.0)
    side.finish("0_z", now=1.0)
    assert side.take_releases(now=1.49) == []
    side.arrive("1_z", HOLDS[0], LEASE, now=1.49)
    assert side.take_releases(now=9.0) == []
    side.finish("1_z", now=9.0)
    assert side.take_releases(now=9.49) == []
    assert side.take_releases(now=9.5) == [HOLDS[0]]


def test_a_request_alone_releases_at_once() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=0.0)
    side.finish("x", now=0.0)
    assert side.take_releases(now=0.0) == [HOLDS[0]]
    assert side.take_releases(now=0.0) == []


def test_renewals_to_a_silent_engine_become_more_frequent_within_a_bound() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=0.0)
    asked = [tick / 100 for tick in range(0, 7001) if (side.step(tick / 100), side.take_renewals(tick / 100))[1]]
    gaps = [after - before for before, after in pairwise(asked)]
    assert asked[0] == 0.0
    assert max(gaps) == pytest.approx(SHARE * LEASE, abs=0.011)
    assert min(gaps) == pytest.approx(MIN_RENEW_SECONDS, abs=0.011)


def test_an_engine_whose_steps_do_not_end_stops_renewing_until_they_do() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=1000.0)  # idle before: no step could end
    assert side.take_renewals(now=1000.0 + STALLED - 1) == [HOLDS[0]]
    side.arrive("y", HOLDS[1], LEASE, now=1000.0 + STALLED)
    assert side.take_renewals(now=1000.0 + STALLED) == [], "a paused engine takes new requests, and none makes progress"
    side.step(now=5000.0)
    assert side.take_renewals(now=5000.0) == [HOLDS[0], HOLDS[1]]


def test_a_request_that_waits_in_the_queue_of_a_living_engine_is_renewed_for_ever() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=0.0)
    for now in range(0, 10_000, 10):
        side.step(float(now))
        if renewals := side.take_renewals(float(now)):
            side.renewed(renewals, float(now), LEASE)
        assert not side.running_lease("x", float(now)).is_over(float(now) + LEASE * SHARE)


def test_holds_of_one_engine_come_to_be_renewed_together() -> None:
    """Else an engine with a thousand waiting requests sends as many messages in each interval."""
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=0.0)
    side.renewed([HOLDS[0]], 0.0, LEASE)
    side.arrive("y", HOLDS[1], LEASE, now=9.0)
    side.renewed([HOLDS[1]], 9.0, LEASE)
    side.arrive("z", HOLDS[2], LEASE, now=9.0)
    side.renewed([HOLDS[2]], 9.0, LEASE)
    assert side.take_renewals(now=11.9) == []
    assert side.take_renewals(now=12.0) == [HOLDS[0]], "the other one has most of its time left"
    side.renewed([HOLDS[0]], 12.0, LEASE)
    assert side.take_renewals(now=21.0) == HOLDS, "the other one is due within half of an interval"


def test_one_engine_in_two_epochs_is_two_destinations() -> None:
    restarted = msgspec.structs.replace(HOLDS[0], epoch=8)
    assert restarted.engine != HOLDS[0].engine
    assert HOLDS[1].engine == HOLDS[0].engine


def test_naming_another_hold_releases_the_earlier_hold() -> None:
    side = RemoteHolds(STALLED)
    side.arrive("x", HOLDS[0], LEASE, now=0.0)
    side.arrive("x", HOLDS[1], LEASE, now=1.0)
    assert side.take_releases(now=1.0) == [HOLDS[0]]
    side.finish("x", now=2.0)
    assert side.take_releases(now=2.0) == [HOLDS[1]]
