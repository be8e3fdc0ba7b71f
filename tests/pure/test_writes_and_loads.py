"""The state machines of a write at its source and of a load at its destination, one rule at a time."""

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import source as source_module
from kvferry.handoff.destination import ASK_AGAIN_SECONDS, DestinationLoad
from kvferry.handoff.handshake import Adapter
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.messages import EndPoint, Handle, WriteKey
from kvferry.handoff.source import END, Cut, Need, Prompt, SourceWrite, SourceWrites, WriteRequest, WriteState
from kvferry.plan.planner import Span

FULL, STATE = Span("full"), Span("state")
KEY = WriteKey("d", 1, 1)
NOW = 0.0
HOLD = transfer_of(Handle("r", 43))
GAVE_UP = HandoffError(Reason.TRANSFER_FAILED, "a write failed.")


def writing(**needs: Need) -> SourceWrite:
    return SourceWrite("x", {Span(group): need for group, need in needs.items()}, deadline=30.0)


def asked(key: WriteKey = KEY, transfer_id: str = "x", digest: str = "p") -> WriteRequest:
    return WriteRequest(key, transfer_id, 40, digest, {FULL: Need(0, 40, 16)}, deadline=30.0)


def prompt(num_final: int, digest: str = "p") -> Prompt:
    return Prompt(40, digest, {}, num_final)


def load_of(
    expected: dict[int, str], deadline: float = 30.0, fence_seconds: float = 60.0, transfer_id: str = "x"
) -> DestinationLoad:
    answers_at = {index: EndPoint("10.0.0.1", 5601 + index, 7) for index in expected}
    return DestinationLoad("r", transfer_id, expected, answers_at, deadline, fence_seconds)


# The source.


def test_a_source_that_falls_behind_sends_one_larger_batch() -> None:
    """Back-pressure: whatever becomes final while something is on its way goes together, and nothing queues up."""
    write = writing(full=Need(0, 100, 16))
    assert write.take({FULL: 16}) == (Cut(FULL, 0, 16),)
    assert [write.take({FULL: final}) for final in (32, 48, 70)] == [(), (), ()]
    write.landed()
    assert write.take({FULL: 70}) == (Cut(FULL, 16, 64),)


def test_a_prefix_hit_within_a_block_goes_from_its_first_token() -> None:
    write = writing(full=Need(23, 100, 16))
    assert write.take({FULL: 20}) == ()
    assert write.take({FULL: 31}) == ()
    assert write.take({FULL: 33}) == (Cut(FULL, 23, 32),)


def test_a_state_goes_only_when_the_prompt_has_ended() -> None:
    write = writing(full=Need(0, 16, 16), state=Need(0, 1, 1 << 40))
    assert write.take({FULL: 16, STATE: 16}) == (Cut(FULL, 0, 16),)
    write.landed()
    assert write.state is WriteState.OPEN
    assert write.take({FULL: END, STATE: END}) == (Cut(STATE, 0, 1),)
    write.landed()
    assert (write.state, write.error) == (WriteState.OVER, None)


def test_blocks_in_flight_at_a_preemption_are_sent_again() -> None:
    write = writing(full=Need(0, 32, 16))
    assert write.take({FULL: 16}) == (Cut(FULL, 0, 16),)
    write.void()
    write.landed()
    assert write.take({FULL: END}) == (Cut(FULL, 0, 32),)


def test_a_failed_write_ends_only_after_its_last_running_write() -> None:
    write = writing(full=Need(0, 32, 16))
    write.take({FULL: 16})
    write.fail(GAVE_UP)
    assert write.state is WriteState.STOPPING
    write.stopped(None)
    assert (write.state, str(write.error)) == (WriteState.OVER, str(GAVE_UP))


def test_failure_after_completion_changes_nothing() -> None:
    write = writing(full=Need(0, 16, 16))
    write.take({FULL: END})
    write.landed()
    write.fail(GAVE_UP)
    assert (write.state, write.error) == (WriteState.OVER, None)


def test_nothing_wanted_is_complete_at_once() -> None:
    assert writing(full=Need(48, 48, 16)).state is WriteState.OVER


def test_an_announcement_after_the_prompt_has_ended_is_refused_with_the_reason() -> None:
    side = SourceWrites()
    side.compute("x", prompt(END))
    side.end("x", GAVE_UP)
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(), NOW)
    assert refused.value.reason is Reason.TRANSFER_FAILED
    side.compute("x", prompt(END))
    assert side.prompt_of(KEY) is None


def test_an_announcement_that_comes_after_its_revocation_writes_nothing() -> None:
    side = SourceWrites()
    side.compute("x", prompt(END))
    assert side.revoke(KEY, 0.0)
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(), NOW)
    assert (refused.value.reason, side.take(KEY)) == (Reason.ABORTED, ())


def test_revocations_of_writes_that_nobody_announced_let_no_other_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its announcement may come yet: the write would write blocks that another request has by then."""
    monkeypatch.setattr(source_module, "MAX_REVOKED", 4)
    side = SourceWrites()
    assert side.revoke(KEY, 0.0)
    forged = [WriteKey("forged", 1, number) for number in range(1, 20)]
    said = [side.revoke(key, 1.0) for key in forged]
    assert said == [True] * 3 + [False] * 16, "what cannot be remembered is not quiet"
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(), NOW)
    assert refused.value.reason is Reason.ABORTED
    assert side.revoke(KEY, 2.0)
    assert side.revoke(forged[0], 2.0), "it is remembered"
    later = source_module.REVOKED_SECONDS
    assert [side.revoke(WriteKey("d/1", 1, number), later) for number in (1, 2)] == [True, False]


def stranger_announces_and_revokes(side: SourceWrites, num_writes: int) -> None:
    for number in range(1, 1 + num_writes):
        key = WriteKey("a stranger", 1, number)
        side.announce(asked(key, "y"), 1.0)
        assert side.revoke(key, 1.0)


def test_writes_that_a_stranger_announces_and_revokes_let_none_be_forgotten_that_was_never_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MAX_REMEMBERED", 8)
    side = SourceWrites()
    assert side.revoke(KEY, 0.0)
    stranger_announces_and_revokes(side, 20)
    side.compute("x", prompt(END))
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(), 2.0)
    assert (refused.value.reason, side.take(KEY)) == (Reason.ABORTED, ())


def test_writes_that_a_stranger_announces_and_revokes_let_no_failed_write_be_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a write that it does not know, a source says that it is quiet."""
    monkeypatch.setattr(source_module, "MAX_REMEMBERED", 8)
    side = SourceWrites()
    side.compute("x", prompt(16))
    side.announce(asked(), NOW)
    assert side.take(KEY)
    side.stopped(KEY, GAVE_UP, may_land=True)
    stranger_announces_and_revokes(side, 20)
    assert not side.revoke(KEY, 2.0)


def test_an_announcement_that_was_refused_takes_no_room_of_those_that_never_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its destination revokes it, however often a client asks for a prompt that is not held."""
    monkeypatch.setattr(source_module, "MAX_REVOKED", 4)
    side = SourceWrites()
    keys = [WriteKey("d", 1, number) for number in range(1, 20)]
    for key in keys:
        side.refuse(key, GAVE_UP)
        assert side.revoke(key, 0.0)
    assert side.revoke(WriteKey("d", 1, 20), 0.0)
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(keys[0]), NOW)
    assert refused.value.reason is GAVE_UP.reason


def test_a_refusal_that_comes_twice_does_not_end_a_write_that_has_begun() -> None:
    """An announcement that is sent again may be refused since a fence, and the first is being written."""
    side = SourceWrites()
    side.compute("x", prompt(16))
    side.announce(asked(), NOW)
    assert side.take(KEY)
    side.refuse(KEY, GAVE_UP)
    assert not side.revoke(KEY, 0.0)
    side.stopped(KEY, None, may_land=True)
    side.refuse(KEY, GAVE_UP)
    assert not side.revoke(KEY, 0.0)


def test_a_revoked_write_is_not_quiet_before_its_writes_are() -> None:
    side = SourceWrites()
    side.compute("x", prompt(16))
    side.announce(asked(), NOW)
    assert side.take(KEY)
    assert not side.revoke(KEY, 0.0)
    assert side.is_stopping(KEY)
    side.stopped(KEY, None)
    assert side.revoke(KEY, 0.0)


@pytest.mark.parametrize("may_land", [True, False])
@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_write_that_failed_in_a_connection_is_never_quiet_by_its_source_s_word(
    is_revoked: bool, may_land: bool
) -> None:
    side = SourceWrites()
    side.compute("x", prompt(16))
    side.announce(asked(), NOW)
    assert side.take(KEY)
    if is_revoked:
        assert not side.revoke(KEY, 0.0)
    side.stopped(KEY, None if is_revoked else GAVE_UP, may_land=may_land)
    over = side.outcome(KEY)
    assert over is not None
    assert over.may_land is may_land
    assert [side.revoke(KEY, 0.0), side.revoke(KEY, 0.0)] == [not may_land] * 2


def test_another_prompt_fails_the_write_in_either_order() -> None:
    for announced_first in (True, False):
        side = SourceWrites()
        steps = [
            lambda side=side: side.announce(asked(digest="q"), NOW),
            lambda side=side: side.compute("x", prompt(16)),
        ]
        for step in steps if announced_first else reversed(steps):
            step()
        over = side.outcome(KEY)
        assert over is not None
        assert over.error is not None
        assert over.error.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "is_refused"),
    [
        ("sql", "a", "b", True),
        ("sql", "a", "a", False),
        ("sql", "a", "", True),
        ("sql", "", "b", True),
        ("sql", "", "", True),
        ("", "", "", False),
        ("", "", "b", True),
        ("", "a", "", True),
    ],
)
def test_an_adapter_that_is_not_known_to_be_the_same_fails_the_write(
    name: str, prefill: str, decode: str, is_refused: bool
) -> None:
    """The last rows have an adapter on one side alone."""
    side = SourceWrites()
    side.announce(msgspec.structs.replace(asked(), adapter=decode), NOW)
    side.compute("x", msgspec.structs.replace(prompt(16), adapter=Adapter(name, prefill)))
    over = side.outcome(KEY)
    assert (over is not None) == is_refused
    assert bool(side.take(KEY)) != is_refused
    assert over is None or (over.error is not None and over.error.reason is Reason.ADAPTER_MISMATCH)


def test_replicas_of_a_destination_with_one_name_are_told_apart_by_their_epochs() -> None:
    side, replica = SourceWrites(), WriteKey("d", 2, 1)
    side.announce(asked(), NOW)
    side.announce(asked(replica, "y"), NOW)
    side.revoke(replica, 0.0)
    side.compute("x", prompt(END))
    assert side.take(KEY) == (Cut(FULL, 0, 40),)
    assert side.num_open == 1


def test_several_destinations_are_served_from_one_prompt() -> None:
    """Parallel samples (``n``) carry one transfer id, and so do the ranks of a destination."""
    side, keys = SourceWrites(), [WriteKey("d", 1, number) for number in range(3)]
    for key in keys:
        side.announce(asked(key), NOW)
    side.compute("x", prompt(END))
    for key in keys:
        assert side.take(key) == (Cut(FULL, 0, 40),)
        side.landed(key)
    assert [over.error for key in keys if (over := side.outcome(key))] == [None] * 3


def test_a_late_write_is_given_up() -> None:
    side = SourceWrites()
    side.announce(asked(), NOW)
    side.tick(KEY, 29.9)
    assert side.num_open == 1
    side.tick(KEY, 30.0)
    over = side.outcome(KEY)
    assert over is not None
    assert over.error is not None
    assert over.error.reason is Reason.DEADLINE_EXCEEDED


def test_a_step_that_begins_vouches_only_for_what_was_computed_here_before() -> None:
    """Not for its prefix hits: the engine names blocks in its cache that another prompt of the same step computes."""
    side = SourceWrites()
    side.announce(asked(), NOW)
    side.begin_step({"x": prompt(32)})
    assert side.take(KEY) == ()
    side.compute("x", prompt(32))
    side.begin_step({"x": prompt(END)})
    assert side.take(KEY) == (Cut(FULL, 0, 32),)
    side.landed(KEY)
    side.preempt("x")
    side.begin_step({"x": prompt(END)})
    assert side.take(KEY) == ()
    side.reach(FULL)
    assert side.take(KEY) == (Cut(FULL, 32, 40),)


# The destination.


def test_every_source_must_be_done_and_with_its_own_digest() -> None:
    """Not a count: a source that says "done" twice is one source."""
    load = load_of({0: "a", 1: "b"})
    for source in (0, 1):
        load.announcing(source)
    load.done(0, "a")
    load.done(0, "a")
    load.done(7, "b")
    assert not load.is_over
    load.done(1, "b")
    assert (load.is_over, load.error) == (True, None)


def test_done_with_another_digest_is_a_failure() -> None:
    load = load_of({0: "a", 1: "b"})
    for source in (0, 1):
        load.announcing(source)
    load.done(0, "b")
    assert load.error is not None
    assert load.error.reason is Reason.WRONG_SOURCE
    assert (load.is_over, load.writers) == (False, [1])


def test_a_failed_load_waits_for_every_source_that_may_write() -> None:
    load = load_of({0: "a", 1: "b", 2: "c"})
    for source in (0, 1):
        load.announcing(source)
    load.done(0, "a")
    load.fail(GAVE_UP)
    assert (load.is_over, load.writers) == (False, [1])
    load.quiet(1)
    assert (load.is_over, str(load.error)) == (True, str(GAVE_UP))


def test_a_late_done_ends_the_wait_for_an_acknowledgement() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.due(30.0)
    load.done(0, "a")
    assert load.is_over
    assert load.error is not None
    assert load.error.reason is Reason.DEADLINE_EXCEEDED


def test_a_committed_load_is_not_harmed_by_what_comes_later() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.done(0, "a")
    load.refused(0, GAVE_UP)
    load.fail(GAVE_UP)
    load.due(99.0)
    assert (load.is_over, load.error) == (True, None)


def test_a_source_that_is_done_cannot_fail_the_load_of_the_others() -> None:
    load = load_of({0: "a", 1: "b"})
    for source in (0, 1):
        load.announcing(source)
    load.done(0, "a")
    load.refused(0, GAVE_UP)
    load.ended(0, GAVE_UP, may_land=False)
    assert load.error is None
    load.done(1, "b")
    assert (load.is_over, load.error) == (True, None)


def test_a_source_that_stops_before_it_is_done_fails_the_load_at_once() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.quiet(0)
    assert load.is_over
    assert load.error is not None
    assert load.error.reason is Reason.ABORTED
    load.announcing(0)
    assert load.is_over, "it stays quiet"


def test_a_done_of_a_source_without_an_announcement_is_ignored() -> None:
    load = load_of({0: "a"})
    load.done(0, "a")
    assert not load.is_over


def test_a_hold_must_be_known_at_once_or_by_a_time_and_a_router_s_transfer_at_any_time() -> None:
    at_once, soon, whenever = (
        msgspec.structs.replace(asked(transfer_id=HOLD), known_by=known_by) for known_by in (NOW, NOW + 5, None)
    )
    with pytest.raises(HandoffError, match="are not those of a prompt") as refused:
        SourceWrites().announce(at_once, NOW)
    assert refused.value.reason is Reason.WRONG_PARAMETERS
    for is_known in (True, False):
        side = SourceWrites()
        side.announce(soon, NOW)
        side.tick(KEY, NOW + 4.9)
        if is_known:
            side.compute(HOLD, prompt(0))
        assert side.outcome(KEY) is None
        side.tick(KEY, NOW + 5)
        over = side.outcome(KEY)
        assert (over is None) == is_known
        assert over is None or (over.error is not None and over.error.reason is Reason.SOURCE_CHANGED)
    router = SourceWrites()
    assert router.announce(whenever, NOW)
    router.tick(KEY, NOW + 29.9)
    assert router.outcome(KEY) is None


def test_a_hold_that_is_known_in_time_and_final_later_is_written_then() -> None:
    """The device still computes what the engine has launched."""
    side = SourceWrites()
    side.compute(HOLD, prompt(0))
    assert side.announce(msgspec.structs.replace(asked(transfer_id=HOLD), known_by=NOW), NOW)
    side.tick(KEY, NOW + 5)
    assert side.take(KEY) == ()
    side.compute(HOLD, prompt(END))
    assert side.take(KEY) == (Cut(FULL, 0, 40),)


@pytest.mark.parametrize("seconds", [0, 5])
def test_an_announcement_of_an_ended_hold_is_told_why_it_ended(seconds: int) -> None:
    """However long its prompt may be awaited."""
    side = SourceWrites()
    side.compute(HOLD, prompt(END))
    side.end(HOLD, GAVE_UP)
    request = msgspec.structs.replace(asked(transfer_id=HOLD), known_by=NOW + seconds)
    with pytest.raises(HandoffError) as refused:
        side.announce(request, NOW)
    assert refused.value.reason is GAVE_UP.reason


def test_a_hold_that_ends_while_its_write_is_in_flight_fails_the_write() -> None:
    """The engine gives its blocks to others: what the batch carries may be theirs."""
    side = SourceWrites()
    side.compute(HOLD, prompt(END))
    side.announce(asked(transfer_id=HOLD), NOW)
    assert side.take(KEY)
    side.end(HOLD, GAVE_UP)
    assert (side.is_stopping(KEY), side.outcome(KEY)) == (True, None)
    assert not side.landed(KEY)
    over = side.outcome(KEY)
    assert over is not None
    assert str(over.error) == str(GAVE_UP)


def test_ended_holds_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_REMEMBERED", 4)
    side = SourceWrites()
    holds = [transfer_of(Handle("r", generation)) for generation in range(1, 10)]
    for transfer_id in holds:
        side.compute(transfer_id, prompt(END))
        side.end(transfer_id, GAVE_UP)
    assert (side._prompts, side.num_open, list(side._ended)) == ({}, 0, holds[-4:])
    with pytest.raises(HandoffError) as forgotten:
        side.announce(msgspec.structs.replace(asked(transfer_id=holds[0]), known_by=NOW), NOW)
    assert forgotten.value.reason is Reason.WRONG_PARAMETERS, "it is refused all the same"


@pytest.mark.parametrize(("transfer_id", "reason"), [(HOLD, Reason.WRONG_PARAMETERS), ("x", Reason.INVALID_REQUEST)])
@pytest.mark.parametrize("change", [{"num_tokens": 41}, {"prompt_digest": "q"}])
def test_hole_13_another_prompt_than_that_of_the_hold_has_wrong_parameters(
    transfer_id: str, reason: Reason, change: dict[str, object]
) -> None:
    """A hold's transfer id comes from the parameters of a request, a router's from the router."""
    side = SourceWrites()
    side.compute(transfer_id, prompt(END))
    side.announce(msgspec.structs.replace(asked(transfer_id=transfer_id), **change), NOW)
    over = side.outcome(KEY)
    assert over is not None
    assert over.error is not None
    assert over.error.reason is reason
    assert side.take(KEY) == ()


def test_a_reset_fails_every_write_and_ends_every_known_prompt() -> None:
    """Those in flight too: half of their bytes may be of the former weights."""
    side = SourceWrites()
    in_flight, waiting, unknown, late = (WriteKey("d", 1, number) for number in range(1, 5))
    side.compute("x", prompt(END))
    side.compute("y", prompt(0))
    side.announce(asked(in_flight, "x"), NOW)
    side.announce(asked(waiting, "y"), NOW)
    side.announce(asked(unknown, "to come"), NOW)
    assert side.take(in_flight)
    side.fail_all(GAVE_UP)
    assert side.is_stopping(in_flight)
    assert not side.landed(in_flight)
    for key in (in_flight, waiting, unknown):
        over = side.outcome(key)
        assert over is not None
        assert str(over.error) == str(GAVE_UP)
    assert (side._prompts, side.num_open, list(side._ended)) == ({}, 0, ["x", "y"])
    for transfer_id in ("x", "y"):
        with pytest.raises(HandoffError) as refused:
            side.announce(asked(late, transfer_id), NOW)
        assert refused.value.reason is GAVE_UP.reason


def test_a_router_s_transfer_whose_prompt_comes_after_a_reset_is_written() -> None:
    side, again = SourceWrites(), WriteKey("d", 1, 2)
    side.announce(asked(), NOW)
    side.fail_all(GAVE_UP)
    assert side.announce(asked(again), NOW)
    side.compute("x", prompt(END))
    assert side.take(again) == (Cut(FULL, 0, 40),)


def test_a_reset_stops_a_step_that_computes_layer_by_layer() -> None:
    side = SourceWrites()
    side.announce(asked(), NOW)
    side.begin_step({"x": prompt(END)})
    side.fail_all(GAVE_UP)
    side.reach(FULL)
    assert side.take(KEY) == ()
    side.compute("x", prompt(END))
    assert side.prompt_of(KEY) is None
    with pytest.raises(HandoffError, match="a write failed"):
        side.announce(asked(WriteKey("d", 1, 2)), NOW)


def test_an_announcement_that_is_asked_again_begins_nothing_and_changes_nothing() -> None:
    """Until the write is over, and after it."""
    side = SourceWrites()
    assert side.announce(asked(), NOW)
    assert not side.announce(msgspec.structs.replace(asked(), deadline=99.0), NOW)
    side.compute("x", prompt(END))
    assert side.take(KEY)
    assert not side.announce(asked(), NOW)
    assert side.take(KEY) == (), "the batch is in flight"
    side.landed(KEY)
    assert not side.announce(asked(), NOW)
    over = side.outcome(KEY)
    assert (side.num_open, over) == (0, source_module.Outcome(None))


def test_a_span_that_has_run_wakes_only_writes_that_need_the_span() -> None:
    side, wanted, other = SourceWrites(), Span("0", 1), Span("0", 2)
    running = {"x": Prompt(32, "p", {}, num_final=END)}
    early = WriteRequest(KEY, "x", 32, "p", {wanted: Need(0, 32, 16)}, deadline=9.0)
    side.begin_step(running)
    assert not side.reach(wanted)
    side.announce(early, NOW)
    assert (side.reach(wanted), side.reach(other)) == (True, False)
    side.begin_step(running)
    assert (side.reach(wanted), side.reach(other)) == (True, False)
    side.begin_step({"y": Prompt(32, "p", {}, num_final=END)})
    assert not side.reach(wanted)


def steps(load: DestinationLoad, now: float) -> list[tuple[str, int]]:
    return [(step.name, source) for step, source in load.due(now)]


def test_a_revocation_is_repeated_only_after_it_was_answered() -> None:
    load = load_of({0: "a", 1: "b"})
    assert steps(load, 0.0) == [("ANNOUNCE", 0), ("ANNOUNCE", 1)]
    load.announcing(0)
    assert steps(load, 0.1) == [("ANNOUNCE", 1)], "until the announcement arrives"
    load.announcing(1)
    assert steps(load, 0.2) == []
    load.fail(GAVE_UP)
    assert steps(load, 0.3) == [("REVOKE", 0), ("REVOKE", 1)]
    assert steps(load, 0.9) == [], "not before the last one was answered"
    load.still_writing(0, 0.9)
    load.quiet(1)
    assert steps(load, 0.92) == []
    assert steps(load, 0.96) == [("REVOKE", 0)]
    assert not load.is_over
    load.quiet(0)
    assert (steps(load, 5.0), load.is_over) == ([], True)


def test_sources_that_may_be_writing_are_checked_once_a_second() -> None:
    load = load_of({0: "a", 1: "b"})
    load.announcing(0)
    load.announcing(1)
    load.done(1, "b")
    assert steps(load, 0.0) == [("CHECK_ALIVE", 0)]
    assert steps(load, 0.99) == []
    assert steps(load, 1.0) == [("CHECK_ALIVE", 0)]


def failed(fence_seconds: float = 60.0) -> DestinationLoad:
    """A load of two sources, both of which may be writing, that has failed."""
    load = load_of({0: "a", 1: "b"}, fence_seconds=fence_seconds)
    for source in (0, 1):
        load.announcing(source)
    load.fail(GAVE_UP)
    load.due(0.0)
    return load


def test_vllm_46283_a_source_that_confirms_nothing_is_fenced_once_after_the_time_that_was_set() -> None:
    load = failed(fence_seconds=60.0)
    load.quiet(1)
    assert not [step for step, _ in steps(load, 59.9) if step == "FENCE"]
    assert ("FENCE", 0) in steps(load, 60.0)
    assert not [step for step, _ in steps(load, 600.0) if step == "FENCE"], "a fence is not repeated"
    assert not load.is_over, "the driver says when the fence stands"
    load.fenced(0, GAVE_UP)
    assert load.is_over


def test_a_load_that_goes_on_asks_for_no_fence_and_ends_with_one() -> None:
    load = load_of({0: "a"}, deadline=1e9, fence_seconds=1.0)
    load.announcing(0)
    assert ("FENCE", 0) not in steps(load, 1e6)
    load.fenced(0, GAVE_UP)
    assert (load.is_over, str(load.error)) == (True, str(GAVE_UP))


def test_a_source_that_has_ended_may_have_sent_bytes_that_land_later() -> None:
    """They lie in the buffers of a connection: only a fence, which is due at once, ends the load."""
    load = failed()
    load.quiet(1)
    load.ended(0, GAVE_UP, may_land=True)
    load.ended(0, GAVE_UP, may_land=True)
    assert (load.is_over, load.may_land, load.writers) == (False, [0], [])
    assert steps(load, 1.0) == [("FENCE", 0)]
    load.fenced(0, GAVE_UP)
    assert load.is_over


def test_the_end_of_a_source_that_writes_into_the_destination_s_memory_itself_ends_the_load() -> None:
    load = failed()
    load.quiet(1)
    load.ended(0, GAVE_UP, may_land=False)
    assert load.is_over


def test_the_end_of_a_source_fails_a_load_that_goes_on() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.ended(0, GAVE_UP, may_land=True)
    assert (str(load.error), load.is_over) == (str(GAVE_UP), False)
    load.done(0, "a")
    assert load.is_over, "all of its bytes have landed"


def test_a_write_that_failed_keeps_the_blocks_until_a_fence_whatever_the_source_says_later() -> None:
    """It says so of itself: that it writes no more is no news of what lies in the connection."""
    load = load_of({0: "a"})
    load.announcing(0)
    load.due(4.5)
    load.broke(0, GAVE_UP, fence_at=5.0)
    load.quiet(0)
    load.refused(0, GAVE_UP)
    load.broke(0, GAVE_UP, fence_at=0.0)
    assert (str(load.error), load.is_broken(0), load.is_over, load.writers) == (str(GAVE_UP), True, False, [])
    assert (steps(load, 4.9), steps(load, 5.0), steps(load, 5.4)) == ([], [("FENCE", 0)], [])
    load.fenced(0, GAVE_UP)
    assert (load.is_over, load.is_broken(0)) == (True, False)


def test_a_source_whose_write_failed_is_checked_until_its_process_has_ended_which_asks_for_a_fence_again() -> None:
    """While it lived, the fence may have been refused: of a GPU's memory it keeps no process of this host out."""
    load = load_of({0: "a"})
    load.announcing(0)
    load.broke(0, GAVE_UP, fence_at=0.0)
    assert steps(load, 1.0) == [("FENCE", 0), ("CHECK_ALIVE", 0)]
    assert steps(load, 500.0) == [("CHECK_ALIVE", 0)]
    load.ended(0, GAVE_UP, may_land=False)
    assert (load.is_over, load.is_broken(0)) == (False, False), "what the failed write has sent may land all the same"
    assert (steps(load, 501.0), steps(load, 502.0)) == ([("FENCE", 0)], [])


def test_a_write_that_failed_does_not_hasten_the_fence_for_a_source_that_is_being_asked_to_stop() -> None:
    load = failed(fence_seconds=60.0)
    load.broke(0, GAVE_UP, fence_at=0.0)
    assert [each for each in steps(load, 1.0) if each[0] == "FENCE"] == [("FENCE", 0)]
    assert ("FENCE", 1) in steps(load, 60.0)


def test_a_fence_that_is_due_earlier_is_not_put_off_by_a_write_that_failed() -> None:
    load = failed(fence_seconds=3.0)
    load.broke(1, GAVE_UP, fence_at=50.0)
    assert ("FENCE", 1) in steps(load, 3.0)


def test_a_write_that_failed_after_the_fence_is_due_for_one_of_its_own() -> None:
    """The fence for another source may have left this one out, which lived on this host and wrote."""
    load = failed(fence_seconds=3.0)
    assert ("FENCE", 1) in steps(load, 3.0)
    load.fenced(0, GAVE_UP)
    load.broke(1, GAVE_UP, fence_at=3.9)
    assert (steps(load, 3.8), steps(load, 3.9)) == ([], [("FENCE", 1)])


def test_a_fence_does_not_touch_a_source_that_was_told_nothing() -> None:
    load = load_of({0: "a"})
    load.fenced(0, GAVE_UP)
    assert (load.error, load.is_over) == (None, False)


def test_the_deadline_ends_a_waiting_load() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.due(0.5)
    assert steps(load, 30.0) == [("REVOKE", 0), ("CHECK_ALIVE", 0)]
    load.still_writing(0, 30.0)
    assert load.error is not None
    assert load.error.reason is Reason.DEADLINE_EXCEEDED
    assert steps(load, 31.0) == [("REVOKE", 0), ("CHECK_ALIVE", 0)]
    assert ("FENCE", 0) not in steps(load, 89.9)
    assert ("FENCE", 0) in steps(load, 90.0)
    assert not load.is_over


def test_a_part_that_has_landed_counts_once_it_has_been_compared() -> None:
    load = load_of({0: "a", 1: "b"})
    load.announcing(0)
    load.announcing(1)
    assert (load.landed(0, "a"), load.landed(0, "a"), load.landed(1, "b")) == (True, False, True)
    load.done(0, "a")
    assert not load.is_over
    load.done(1, "b")
    assert (load.is_over, load.error) == (True, None)


def test_a_part_that_landed_wrong_gives_the_blocks_back_once_the_others_are_quiet() -> None:
    load = load_of({0: "a", 1: "b"})
    load.announcing(0)
    load.announcing(1)
    assert load.landed(0, "a")
    load.fail(HandoffError(Reason.INTEGRITY_MISMATCH, "damaged"))
    assert (load.is_over, load.writers, load.may_land) == (False, [1], [1])
    load.quiet(1)
    assert load.is_over


def test_a_source_that_ends_while_its_part_is_compared_fails_nothing() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    assert load.landed(0, "a")
    for may_land in (True, False):
        load.ended(0, HandoffError(Reason.PEER_DIED, "ended"), may_land=may_land)
    load.quiet(0)
    load.refused(0, GAVE_UP)
    load.fenced(0, GAVE_UP)
    load.done(0, "a")
    assert (load.is_over, load.error) == (True, None)


def test_a_load_that_is_not_compared_by_its_deadline_names_the_source() -> None:
    load = load_of({0: "a", 1: "b"})
    load.announcing(0)
    load.announcing(1)
    load.done(0, "a")
    assert load.landed(1, "b")
    load.due(31.0)
    assert load.error is not None
    assert load.error.message == "r was not written in time by the prefill ranks at 10.0.0.1:5602."
    assert load.is_over


def test_a_source_that_has_answered_is_asked_again_until_it_reports() -> None:
    """Its report may be lost: that costs seconds, and not the deadline."""
    load = load_of({0: "a", 1: "b"})
    for source in (0, 1):
        load.announcing(source)
    load.due(0.0)
    assert ("ASK_AGAIN", 0) not in steps(load, 9.0), "the client still sends the announcement"
    load.answered(0, 10.0)
    early = steps(load, 10.0 + ASK_AGAIN_SECONDS - 0.1)
    assert ("ASK_AGAIN", 0) not in early
    assert ("ASK_AGAIN", 0) in steps(load, 10.0 + ASK_AGAIN_SECONDS)
    assert ("ASK_AGAIN", 0) not in steps(load, 20.0), "not before it has answered again"
    load.answered(0, 20.0)
    load.landed(0, "a")
    assert not [each for each in steps(load, 29.0) if each[0] == "ASK_AGAIN"], "it has reported"
    load.done(0, "a")
    load.answered(1, 20.0)
    assert ("ASK_AGAIN", 1) in steps(load, 29.5)


def test_a_load_that_has_failed_asks_no_source_again_but_to_stop() -> None:
    load = load_of({0: "a"})
    load.announcing(0)
    load.answered(0, 0.0)
    load.fail(GAVE_UP)
    assert steps(load, 5.0) == [("REVOKE", 0), ("CHECK_ALIVE", 0)]


@pytest.mark.parametrize(("transfer_id", "blames_the_router"), [(HOLD, False), ("x", True)])
def test_a_load_that_is_late_names_the_ranks_that_did_not_write_and_what_to_open(
    transfer_id: str, blames_the_router: bool
) -> None:
    """Of a hold the router has done its part: its parameters came."""
    load = load_of({0: "a", 1: "b", 2: "c"}, transfer_id=transfer_id)
    for source in (0, 1):
        load.announcing(source)
    load.done(1, "b")
    load.due(30.0)
    assert load.error is not None
    assert load.error.reason is Reason.DEADLINE_EXCEEDED
    assert "10.0.0.1:5601, 10.0.0.1:5603" in load.error.message
    assert "5602" not in load.error.message
    assert "ports" in load.error.remedy
    assert ("router" in load.error.remedy) is blames_the_router
