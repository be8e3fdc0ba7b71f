"""The state machines of a push's sender and receiver, one rule at a time."""

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.adapters import Adapter
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.push import sender
from kvferry.handoff.destination import DestinationLoad
from kvferry.handoff.source import END, Cut, Need, Prompt, WriteRequest, WriteState, SourceWrites, SourceWrite
from kvferry.plan.layer_spans import Span

FULL, STATE = Span("full"), Span("state")
KEY = WriteKey("d", 1, 1)
NOW = 0.0
GAVE_UP = HandoffError(Reason.TRANSFER_FAILED, "a write failed.")


def sending(**needs: Need) -> SourceWrite:
    return SourceWrite("x", {Span(group): need for group, need in needs.items()}, deadline=30.0)


def asked(key: WriteKey = KEY, transfer_id: str = "x", digest: str = "p") -> WriteRequest:
    return WriteRequest(key, transfer_id, 40, digest, {FULL: Need(0, 40, 16)}, deadline=30.0)


def prompt(num_final: int, digest: str = "p") -> Prompt:
    return Prompt(40, digest, {}, num_final)


# The sender.


def test_a_sender_that_falls_behind_sends_one_larger_batch() -> None:
    """Back-pressure: whatever becomes final while something is on its way goes together, and nothing queues up."""
    push = sending(full=Need(0, 100, 16))
    assert push.take({FULL: 16}) == (Cut(FULL, 0, 16),)
    assert [push.take({FULL: final}) for final in (32, 48, 70)] == [(), (), ()]
    push.landed()
    assert push.take({FULL: 70}) == (Cut(FULL, 16, 64),)


def test_a_prefix_hit_within_a_block_goes_from_its_first_token() -> None:
    push = sending(full=Need(23, 100, 16))
    assert push.take({FULL: 20}) == ()
    assert push.take({FULL: 31}) == ()
    assert push.take({FULL: 33}) == (Cut(FULL, 23, 32),)


def test_a_state_goes_only_when_the_prompt_has_ended() -> None:
    push = sending(full=Need(0, 16, 16), state=Need(0, 1, 1 << 40))
    assert push.take({FULL: 16, STATE: 16}) == (Cut(FULL, 0, 16),)
    push.landed()
    assert push.state is WriteState.OPEN
    assert push.take({FULL: END, STATE: END}) == (Cut(STATE, 0, 1),)
    push.landed()
    assert (push.state, push.error) == (WriteState.OVER, None)


def test_blocks_in_flight_at_a_preemption_are_sent_again() -> None:
    push = sending(full=Need(0, 32, 16))
    assert push.take({FULL: 16}) == (Cut(FULL, 0, 16),)
    push.void()
    push.landed()
    assert push.take({FULL: END}) == (Cut(FULL, 0, 32),)


def test_a_failed_push_ends_only_after_its_last_running_write() -> None:
    push = sending(full=Need(0, 32, 16))
    push.take({FULL: 16})
    push.fail(GAVE_UP)
    assert push.state is WriteState.STOPPING
    push.stopped(None)
    assert (push.state, str(push.error)) == (WriteState.OVER, str(GAVE_UP))


def test_failure_after_completion_changes_nothing() -> None:
    push = sending(full=Need(0, 16, 16))
    push.take({FULL: END})
    push.landed()
    push.fail(GAVE_UP)
    assert (push.state, push.error) == (WriteState.OVER, None)


def test_nothing_wanted_is_complete_at_once() -> None:
    assert sending(full=Need(48, 48, 16)).state is WriteState.OVER


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


def test_revocations_of_pushes_that_nobody_announced_let_no_other_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its announcement may come yet: the push would write blocks that another request has by then."""
    monkeypatch.setattr(sender, "MAX_REVOKED", 4)
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
    later = sender.REVOKED_SECONDS
    assert [side.revoke(WriteKey("d/1", 1, number), later) for number in (1, 2)] == [True, False]


def stranger_announces_and_revokes(side: SourceWrites, num_pushes: int) -> None:
    for number in range(1, 1 + num_pushes):
        key = WriteKey("a stranger", 1, number)
        side.announce(asked(key, "y"), 1.0)
        assert side.revoke(key, 1.0)


def test_pushes_that_a_stranger_announces_and_revokes_let_none_be_forgotten_that_was_never_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "MAX_REMEMBERED", 8)
    side = SourceWrites()
    assert side.revoke(KEY, 0.0)
    stranger_announces_and_revokes(side, 20)
    side.compute("x", prompt(END))
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(), 2.0)
    assert (refused.value.reason, side.take(KEY)) == (Reason.ABORTED, ())


def test_pushes_that_a_stranger_announces_and_revokes_let_no_failed_write_be_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a push that it does not know, a source says that it is quiet."""
    monkeypatch.setattr(sender, "MAX_REMEMBERED", 8)
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
    monkeypatch.setattr(sender, "MAX_REVOKED", 4)
    side = SourceWrites()
    keys = [WriteKey("d", 1, number) for number in range(1, 20)]
    for key in keys:
        side.refuse(key, GAVE_UP)
        assert side.revoke(key, 0.0)
    assert side.revoke(WriteKey("d", 1, 20), 0.0)
    with pytest.raises(HandoffError) as refused:
        side.announce(asked(keys[0]), NOW)
    assert refused.value.reason is GAVE_UP.reason


def test_a_refusal_that_comes_twice_does_not_end_a_push_that_has_begun() -> None:
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


def test_a_revoked_push_is_not_quiet_before_its_writes_are() -> None:
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


def test_another_prompt_fails_the_push_in_either_order() -> None:
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
def test_an_adapter_that_is_not_known_to_be_the_same_fails_the_push(
    name: str, prefill: str, decode: str, is_refused: bool
) -> None:
    """An engine of version 9 says no digest. The last rows have an adapter on one side alone."""
    side = SourceWrites()
    side.announce(msgspec.structs.replace(asked(), adapter=decode), NOW)
    side.compute("x", msgspec.structs.replace(prompt(16), adapter=Adapter(name, prefill)))
    over = side.outcome(KEY)
    assert (over is not None) == is_refused
    assert bool(side.take(KEY)) != is_refused
    assert over is None or (over.error is not None and over.error.reason is Reason.ADAPTER_MISMATCH)


def test_replicas_of_a_receiver_with_one_name_are_told_apart_by_their_epochs() -> None:
    side, replica = SourceWrites(), WriteKey("d", 2, 1)
    side.announce(asked(), NOW)
    side.announce(asked(replica, "y"), NOW)
    side.revoke(replica, 0.0)
    side.compute("x", prompt(END))
    assert side.take(KEY) == (Cut(FULL, 0, 40),)
    assert side.num_open == 1


def test_several_receivers_are_served_from_one_prompt() -> None:
    """Parallel samples (``n``) carry one transfer id, and so do the ranks of a receiver."""
    side, keys = SourceWrites(), [WriteKey("d", 1, number) for number in range(3)]
    for key in keys:
        side.announce(asked(key), NOW)
    side.compute("x", prompt(END))
    for key in keys:
        assert side.take(key) == (Cut(FULL, 0, 40),)
        side.landed(key)
    assert [over.error for key in keys if (over := side.outcome(key))] == [None] * 3


def test_a_late_push_is_given_up() -> None:
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


# The receiver.


def test_every_source_must_be_done_and_with_its_own_digest() -> None:
    """Not a count: a source that says "done" twice is one source."""
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    for source in (0, 1):
        push.announcing(source)
    push.done(0, "a")
    push.done(0, "a")
    push.done(7, "b")
    assert not push.is_over
    push.done(1, "b")
    assert (push.is_over, push.error) == (True, None)


def test_done_with_another_digest_is_a_failure() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    for source in (0, 1):
        push.announcing(source)
    push.done(0, "b")
    assert push.error is not None
    assert push.error.reason is Reason.WRONG_SOURCE
    assert (push.is_over, push.writers) == (False, [1])


def test_a_failed_push_waits_for_every_source_that_may_write() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b", 2: "c"}, deadline=30.0)
    for source in (0, 1):
        push.announcing(source)
    push.done(0, "a")
    push.fail(GAVE_UP)
    assert (push.is_over, push.writers) == (False, [1])
    push.quiet(1)
    assert (push.is_over, str(push.error)) == (True, str(GAVE_UP))


def test_a_late_done_ends_the_wait_for_an_acknowledgement() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.due(30.0)
    push.done(0, "a")
    assert push.is_over
    assert push.error is not None
    assert push.error.reason is Reason.DEADLINE_EXCEEDED


def test_a_committed_push_is_not_harmed_by_what_comes_later() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.done(0, "a")
    push.refused(0, GAVE_UP)
    push.fail(GAVE_UP)
    push.due(99.0)
    assert (push.is_over, push.error) == (True, None)


def test_a_source_that_is_done_cannot_fail_the_push_of_the_others() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    for source in (0, 1):
        push.announcing(source)
    push.done(0, "a")
    push.refused(0, GAVE_UP)
    push.ended(0, GAVE_UP, may_land=False)
    assert push.error is None
    push.done(1, "b")
    assert (push.is_over, push.error) == (True, None)


def test_a_source_that_stops_before_it_is_done_fails_the_push_at_once() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.quiet(0)
    assert push.is_over
    assert push.error is not None
    assert push.error.reason is Reason.ABORTED
    push.announcing(0)
    assert push.is_over, "it stays quiet"


def test_a_done_of_a_source_without_an_announcement_is_ignored() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.done(0, "a")
    assert not push.is_over


def test_a_held_prompt_must_be_known_at_once_or_by_a_time() -> None:
    at_once, soon = (msgspec.structs.replace(asked(), known_by=known_by) for known_by in (NOW, NOW + 5))
    with pytest.raises(HandoffError, match="are not those of a prompt") as refused:
        SourceWrites().announce(at_once, NOW)
    assert refused.value.reason is Reason.WRONG_PARAMETERS
    for is_known in (True, False):
        side = SourceWrites()
        side.announce(soon, NOW)
        side.tick(KEY, NOW + 4.9)
        if is_known:
            side.compute("x", prompt(0))
        assert side.outcome(KEY) is None
        side.tick(KEY, NOW + 5)
        over = side.outcome(KEY)
        assert (over is None) == is_known
        assert over is None or (over.error is not None and over.error.reason is Reason.SOURCE_CHANGED)


@pytest.mark.parametrize("seconds", [0, 5])
def test_an_announcement_of_an_ended_hold_is_told_why_it_ended(seconds: int) -> None:
    """Until it comes again, and however long its word may be awaited."""
    side = SourceWrites()
    side.compute("x", prompt(END))
    side.end("x", GAVE_UP, may_return=True)
    request = msgspec.structs.replace(asked(), known_by=NOW + seconds)
    if seconds:
        side.announce(request, NOW)
        side.tick(KEY, NOW + seconds)
        over = side.outcome(KEY)
        assert over is not None
        assert over.error is not None
        assert over.error.reason is GAVE_UP.reason
    else:
        with pytest.raises(HandoffError) as refused:
            side.announce(request, NOW)
        assert refused.value.reason is GAVE_UP.reason
    side.compute("x", prompt(END))
    again = msgspec.structs.replace(request, key=msgspec.structs.replace(KEY, number=KEY.number + 1))
    assert side.announce(again, NOW + seconds)


def test_a_span_that_has_run_wakes_only_pushes_that_need_the_span() -> None:
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


def steps(push: DestinationLoad, now: float) -> list[tuple[str, int]]:
    return [(step.name, source) for step, source in push.due(now)]


def test_a_revocation_is_repeated_only_after_it_was_answered() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    assert steps(push, 0.0) == [("ANNOUNCE", 0), ("ANNOUNCE", 1)]
    push.announcing(0)
    assert steps(push, 0.1) == [("ANNOUNCE", 1)], "until the announcement arrives"
    push.announcing(1)
    assert steps(push, 0.2) == []
    push.fail(GAVE_UP)
    assert steps(push, 0.3) == [("REVOKE", 0), ("REVOKE", 1)]
    assert steps(push, 0.9) == [], "not before the last one was answered"
    push.still_writing(0, 0.9)
    push.quiet(1)
    assert steps(push, 0.92) == []
    assert steps(push, 0.96) == [("REVOKE", 0)]
    assert not push.is_over
    push.quiet(0)
    assert (steps(push, 5.0), push.is_over) == ([], True)


def test_sources_that_may_be_writing_are_checked_once_a_second() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    push.announcing(0)
    push.announcing(1)
    push.done(1, "b")
    assert steps(push, 0.0) == [("CHECK_ALIVE", 0)]
    assert steps(push, 0.99) == []
    assert steps(push, 1.0) == [("CHECK_ALIVE", 0)]


def failed(fence_seconds: float = 60.0) -> DestinationLoad:
    """A push of two sources, both of which may be writing, that has failed."""
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0, fence_seconds=fence_seconds)
    for source in (0, 1):
        push.announcing(source)
    push.fail(GAVE_UP)
    push.due(0.0)
    return push


def test_vllm_46283_a_source_that_confirms_nothing_is_fenced_once_after_the_time_that_was_set() -> None:
    push = failed(fence_seconds=60.0)
    push.quiet(1)
    assert not [step for step, _ in steps(push, 59.9) if step == "FENCE"]
    assert ("FENCE", 0) in steps(push, 60.0)
    assert not [step for step, _ in steps(push, 600.0) if step == "FENCE"], "a fence is not repeated"
    assert not push.is_over, "the driver says when the fence stands"
    push.fenced(0, GAVE_UP)
    assert push.is_over


def test_a_push_that_goes_on_asks_for_no_fence_and_ends_with_one() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=1e9, fence_seconds=1.0)
    push.announcing(0)
    assert ("FENCE", 0) not in steps(push, 1e6)
    push.fenced(0, GAVE_UP)
    assert (push.is_over, str(push.error)) == (True, str(GAVE_UP))


def test_a_source_that_has_ended_may_have_sent_bytes_that_land_later() -> None:
    """They lie in the buffers of a connection: only a fence, which is due at once, ends the push."""
    push = failed()
    push.quiet(1)
    push.ended(0, GAVE_UP, may_land=True)
    push.ended(0, GAVE_UP, may_land=True)
    assert (push.is_over, push.may_land, push.writers) == (False, [0], [])
    assert steps(push, 1.0) == [("FENCE", 0)]
    push.fenced(0, GAVE_UP)
    assert push.is_over


def test_the_end_of_a_source_that_writes_into_the_receivers_memory_itself_ends_the_push() -> None:
    push = failed()
    push.quiet(1)
    push.ended(0, GAVE_UP, may_land=False)
    assert push.is_over


def test_the_end_of_a_source_fails_a_push_that_goes_on() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.ended(0, GAVE_UP, may_land=True)
    assert (str(push.error), push.is_over) == (str(GAVE_UP), False)
    push.done(0, "a")
    assert push.is_over, "all of its bytes have landed"


def test_a_write_that_failed_keeps_the_blocks_until_a_fence_whatever_the_source_says_later() -> None:
    """It says so of itself: that it writes no more is no news of what lies in the connection."""
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.due(4.5)
    push.broke(0, GAVE_UP, fence_at=5.0)
    push.quiet(0)
    push.refused(0, GAVE_UP)
    push.broke(0, GAVE_UP, fence_at=0.0)
    assert (str(push.error), push.is_broken(0), push.is_over, push.writers) == (str(GAVE_UP), True, False, [])
    assert (steps(push, 4.9), steps(push, 5.0), steps(push, 5.4)) == ([], [("FENCE", 0)], [])
    push.fenced(0, GAVE_UP)
    assert (push.is_over, push.is_broken(0)) == (True, False)


def test_a_source_whose_write_failed_is_checked_until_its_process_has_ended_which_asks_for_a_fence_again() -> None:
    """While it lived, the fence may have been refused: of a GPU's memory it keeps no process of this host out."""
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.broke(0, GAVE_UP, fence_at=0.0)
    assert steps(push, 1.0) == [("FENCE", 0), ("CHECK_ALIVE", 0)]
    assert steps(push, 500.0) == [("CHECK_ALIVE", 0)]
    push.ended(0, GAVE_UP, may_land=False)
    assert (push.is_over, push.is_broken(0)) == (False, False), "what the failed write has sent may land all the same"
    assert (steps(push, 501.0), steps(push, 502.0)) == ([("FENCE", 0)], [])


def test_a_write_that_failed_does_not_hasten_the_fence_for_a_source_that_is_being_asked_to_stop() -> None:
    push = failed(fence_seconds=60.0)
    push.broke(0, GAVE_UP, fence_at=0.0)
    assert [each for each in steps(push, 1.0) if each[0] == "FENCE"] == [("FENCE", 0)]
    assert ("FENCE", 1) in steps(push, 60.0)


def test_a_fence_that_is_due_earlier_is_not_put_off_by_a_write_that_failed() -> None:
    push = failed(fence_seconds=3.0)
    push.broke(1, GAVE_UP, fence_at=50.0)
    assert ("FENCE", 1) in steps(push, 3.0)


def test_a_write_that_failed_after_the_fence_is_due_for_one_of_its_own() -> None:
    """The fence for another source may have left this one out, which lived on this host and wrote."""
    push = failed(fence_seconds=3.0)
    assert ("FENCE", 1) in steps(push, 3.0)
    push.fenced(0, GAVE_UP)
    push.broke(1, GAVE_UP, fence_at=3.9)
    assert (steps(push, 3.8), steps(push, 3.9)) == ([], [("FENCE", 1)])


def test_a_fence_does_not_touch_a_source_that_was_told_nothing() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.fenced(0, GAVE_UP)
    assert (push.error, push.is_over) == (None, False)


def test_the_deadline_ends_a_waiting_push_and_the_snapshot_says_so() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    push.due(0.5)
    assert steps(push, 30.0) == [("REVOKE", 0), ("CHECK_ALIVE", 0)]
    push.still_writing(0, 30.0)
    assert push.snapshot(31.0) == {
        "sources": {0: "announced"},
        "error": "deadline-exceeded",
        "deadline_in": -1.0,
        "revoke_in": {0: 0.0},
        "fence_in": {0: 59.0},
    }


def test_snapshots_of_a_rank_that_pushes_are_plain() -> None:
    side, span = SourceWrites(), Span("0")
    needs = {span: Need(0, 32, 16)}
    side.announce(WriteRequest(WriteKey("d/0", 7, 1), "x", 32, "p", needs, deadline=9.0), NOW)
    side.compute("x", Prompt(32, "p", {}, num_final=16))
    assert len(side.take(WriteKey("d/0", 7, 1))) == 1
    side.end("y", GAVE_UP)
    assert side.snapshot(now=4.0) == {
        "prompts": {"x": 16},
        "pushes": {
            "d/0 7 1": {"state": "pushing", "reached": {"0/0": 0}, "in_flight": 1, "error": None, "deadline_in": 5.0}
        },
        "ended": ["y"],
    }


def test_a_part_that_has_landed_counts_once_it_has_been_compared() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    push.announcing(0)
    push.announcing(1)
    assert (push.landed(0, "a"), push.landed(0, "a"), push.landed(1, "b")) == (True, False, True)
    push.done(0, "a")
    assert not push.is_over
    push.done(1, "b")
    assert (push.is_over, push.error) == (True, None)


def test_a_part_that_landed_wrong_gives_the_blocks_back_once_the_others_are_quiet() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    push.announcing(0)
    push.announcing(1)
    assert push.landed(0, "a")
    push.fail(HandoffError(Reason.INTEGRITY_MISMATCH, "damaged"))
    assert (push.is_over, push.writers, push.may_land) == (False, [1], [1])
    push.quiet(1)
    assert push.is_over


def test_a_source_that_ends_while_its_part_is_compared_fails_nothing() -> None:
    push = DestinationLoad("r", {0: "a"}, deadline=30.0)
    push.announcing(0)
    assert push.landed(0, "a")
    for may_land in (True, False):
        push.ended(0, HandoffError(Reason.PEER_DIED, "ended"), may_land=may_land)
    push.quiet(0)
    push.refused(0, GAVE_UP)
    push.fenced(0, GAVE_UP)
    push.done(0, "a")
    assert (push.is_over, push.error) == (True, None)


def test_a_push_that_is_not_compared_by_its_deadline_names_the_source() -> None:
    push = DestinationLoad("r", {0: "a", 1: "b"}, deadline=30.0)
    push.announcing(0)
    push.announcing(1)
    push.done(0, "a")
    assert push.landed(1, "b")
    push.due(31.0)
    assert push.error is not None
    assert "by source ranks [1]" in push.error.message
    assert push.is_over
