"""The state machine of a pull, over every sequence of inputs up to a length: no commit without right guard words."""

from collections.abc import Iterator

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.guard_word import CLEARED, HeldPrompt, being_written, guard_word
from kvferry.handoff.messages import Handle
from kvferry.handoff.pull_read import Action, PullRead, State


def word_of(epoch: int, generation: int) -> bytes:
    return guard_word("p", epoch, Handle("a", generation), HeldPrompt("digest", 1, [], []))


RIGHT, OTHER_HOLD, OTHER_EPOCH = word_of(7, 1), word_of(7, 2), word_of(8, 1)
WRITTEN = being_written(RIGHT)
DEADLINE = 10.0
FAILURE = HandoffError(Reason.TRANSFER_FAILED, "a read failed.")
WORDS = {
    "right": RIGHT,
    "other hold": OTHER_HOLD,
    "other epoch": OTHER_EPOCH,
    "cleared": CLEARED,
    "written": WRITTEN,
    "other epoch written": being_written(OTHER_EPOCH),
}


def give(pull: PullRead, name: str) -> tuple[Action, ...]:
    if name in WORDS:
        return pull.words_read([RIGHT, WORDS[name]], now=1.0)
    if name == "fail":
        return pull.fail(FAILURE, now=1.0)
    if name == "late":
        return pull.tick(DEADLINE)
    if name == "data":
        pull.round_begun()
        return pull.data_read()
    return {"copied": pull.copied, "quiet": pull.quiet}[name]()


def sequences(num_rounds: int, length: int) -> Iterator[tuple[list[str], list[Action]]]:
    """Yield every run of a driver that gives the inputs which its last action allows, and may fail or be late."""
    pending: list[list[str]] = [[]]
    while pending:
        names = pending.pop()
        pull = PullRead("r", now=0.0, deadline=DEADLINE)
        actions = list(pull.begin([RIGHT, RIGHT], num_rounds))
        for name in names:
            actions += give(pull, name)
        yield names, actions
        if pull.is_over or len(names) == length:
            continue
        asked = {
            Action.READ_WORDS: list(WORDS),
            Action.READ_DATA: ["data"],
            Action.AWAIT_COPIES: ["copied"],
            Action.STOP: ["quiet"],
        }[actions[-1]]
        pending += [[*names, name] for name in [*asked, "fail", "late"]]


@pytest.mark.parametrize(("num_rounds", "length"), [(1, 6), (2, 8)])
def test_a_commit_has_seen_right_words_before_and_after_every_round(num_rounds: int, length: int) -> None:
    num_commits = num_given_back = 0
    for names, actions in sequences(num_rounds, length):
        commits, gives_back = actions.count(Action.COMMIT), actions.count(Action.GIVE_BACK)
        assert commits + gives_back <= 1, names
        if commits:
            num_commits += 1
            steps = [name for name in names if name != "written"]
            assert steps == ["right", *["data", "right"] * num_rounds, "copied"], names
        if gives_back:
            num_given_back += 1
            assert Action.STOP in actions[: actions.index(Action.GIVE_BACK)], names
            assert names[-1] == "quiet"
        rounds = actions.count(Action.COPY_ROUND)
        assert rounds <= max(0, names.count("right") - 1), f"{names}: copied before the words were read again"
    assert num_commits > 0
    assert num_given_back > 10


@pytest.mark.parametrize("word", ["other hold", "other epoch", "cleared", "written", "other epoch written"])
def test_a_word_that_changed_under_the_data_ends_the_load(word: str) -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    assert [*give(pull, "right"), *give(pull, "data"), *give(pull, word)] == [
        Action.READ_DATA,
        Action.READ_WORDS,
        Action.STOP,
    ]
    assert pull.error is not None
    assert pull.error.reason is Reason.SOURCE_CHANGED
    assert give(pull, "quiet") == (Action.GIVE_BACK,)
    assert pull.state is State.FAILED


@pytest.mark.parametrize("word", ["other hold", "other epoch", "cleared", "other epoch written"])
def test_a_word_of_another_hold_ends_the_load_before_any_data(word: str) -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    assert give(pull, word) == (Action.STOP,)
    assert pull.error is not None
    assert pull.error.reason is Reason.SOURCE_CHANGED, "the first source has the right word: the hold ends just now"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((CLEARED, CLEARED), Reason.SOURCE_CHANGED),
        ((OTHER_HOLD, OTHER_HOLD), Reason.WRONG_PARAMETERS),
        ((OTHER_HOLD, CLEARED), Reason.WRONG_PARAMETERS),
        ((being_written(OTHER_HOLD), being_written(OTHER_HOLD)), Reason.WRONG_PARAMETERS),
    ],
)
def test_hole_13_a_hold_that_has_ended_is_told_from_parameters_that_are_not_those_of_a_hold(
    words: tuple[bytes, bytes], reason: Reason
) -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    assert pull.words_read(words, now=1.0) == (Action.STOP,)
    assert pull.error is not None
    assert pull.error.reason is reason
    # A slot that is free may be a forged one: what to check first is the router.
    assert "kv_transfer_params of r" in pull.error.message
    assert pull.error.remedy.startswith("Check that the router")
    assert ("lease_seconds" in pull.error.remedy) is (reason is Reason.SOURCE_CHANGED)


@pytest.mark.parametrize("moment", ["between the sources", "while it is read"])
def test_a_hold_that_ends_meanwhile_has_right_parameters(moment: str) -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    if moment == "between the sources":
        pull.words_read((RIGHT, CLEARED), now=1.0)
    else:
        pull.words_read((RIGHT, RIGHT), now=1.0)
        pull.round_begun()
        pull.data_read()
        pull.words_read((CLEARED, CLEARED), now=2.0)
    assert pull.error is not None
    assert "stopped holding" in pull.error.message
    assert "router" not in pull.error.remedy
    assert "raise lease_seconds" in pull.error.remedy


@pytest.mark.parametrize("word", [CLEARED, OTHER_HOLD])
def test_a_word_that_comes_with_the_next_step_is_waited_for_and_not_for_long(word: bytes) -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE, word_by=2.0)
    pull.begin([RIGHT, RIGHT], 1)
    assert pull.words_read([RIGHT, word], now=1.9) == (Action.READ_WORDS,)
    assert pull.words_read([RIGHT, RIGHT], now=1.95) == (Action.READ_DATA,)
    late = PullRead("r", now=0.0, deadline=DEADLINE, word_by=2.0)
    late.begin([RIGHT, RIGHT], 1)
    assert late.words_read([word, word], now=2.0) == (Action.STOP,)
    changed = PullRead("r", now=0.0, deadline=DEADLINE, word_by=2.0)
    changed.begin([RIGHT, RIGHT], 1)
    changed.words_read([RIGHT, RIGHT], now=0.1)
    changed.round_begun()
    changed.data_read()
    assert changed.words_read([RIGHT, word], now=0.2) == (Action.STOP,), "waited for a word that was there before"


def test_blocks_that_are_being_written_are_waited_for_until_the_deadline() -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    assert give(pull, "written") == (Action.READ_WORDS,)
    assert pull.tick(DEADLINE - 0.001) == ()
    assert pull.tick(DEADLINE) == (Action.STOP,)
    assert pull.error is not None
    assert pull.error.reason is Reason.DEADLINE_EXCEEDED
    assert pull.given_up_at == DEADLINE


def test_the_first_reason_counts_and_a_committed_pull_cannot_fail() -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 1)
    pull.fail(FAILURE, now=1.0)
    assert pull.tick(DEADLINE) == ()
    assert pull.error is not None
    assert pull.error.reason is Reason.TRANSFER_FAILED
    committed = PullRead("r", now=0.0, deadline=DEADLINE)
    committed.begin([RIGHT, RIGHT], 1)
    for name in ("right", "data", "right", "copied"):
        give(committed, name)
    assert (committed.tick(DEADLINE), committed.fail(FAILURE, 1.0), committed.error) == ((), (), None)


def test_a_snapshot_is_plain_and_relative_to_now() -> None:
    pull = PullRead("r", now=0.0, deadline=DEADLINE)
    pull.begin([RIGHT, RIGHT], 2)
    pull.fail(FAILURE, now=1.0)
    assert pull.snapshot(now=4.0) == {
        "state": "stopping its transfers",
        "error": "transfer-failed",
        "rounds_left": 2,
        "deadline_in": 6.0,
    }
