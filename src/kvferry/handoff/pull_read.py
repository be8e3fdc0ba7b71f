"""A pull as a decode rank decides it: guard words, data, guard words again, over one or more source ranks.

Pure: landings, guard words and the time are inputs; each input returns the actions that follow, in order. The
guard word of a source is a seqlock: the source changes the word *before* its blocks can be reused, so equal words
before and after the data prove that every byte between came from the hold. A word names the hold, its prompt and its
blocks (:mod:`kvferry.handoff.guard_word`): another word before the data proves that the request's parameters name other
blocks than those of its prompt. Clocks prove nothing here; the deadline only ends the wait.

Data comes in *rounds*: all data at once, or as much as a stage holds. The words after one round are the words before
the next. A round is copied out of the stage only if its words were right.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.guard_word import being_written, is_cleared


class Action(Enum):
    """What the driver of a pull does next."""

    READ_WORDS = 1
    READ_DATA = 2
    """Read the next round, once the stage has room."""
    COPY_ROUND = 3
    """Copy the round out of the stage into the cache."""
    AWAIT_COPIES = 4
    STOP = 5
    """Cancel the transfers, and call :meth:`PullRead.quiet` when all have ended."""
    COMMIT = 6
    """The engine may use the blocks."""
    GIVE_BACK = 7
    """The pull has failed, and nothing writes into its blocks."""


class State(Enum):
    """Where a pull stands."""

    PREPARING = "preparing"
    WORDS_BEFORE = "reading the guard words before the data"
    BETWEEN_ROUNDS = "waiting for room in the stage"
    DATA = "reading the data"
    WORDS_AFTER = "reading the guard words after the data"
    COPYING = "copying from the stage into the cache, and comparing digests"
    STOPPING = "stopping its transfers"
    COMMITTED = "committed"
    FAILED = "failed"


class PullRead:
    """One pull. ``deadline`` is on the caller's clock, as every ``now``.

    Until ``word_by`` a source may not have set the word yet: the words before the data are read again.

    >>> word = bytes(range(1, 17))
    >>> pull = PullRead("r", now=0.0, deadline=30.0)
    >>> pull.begin([word], num_rounds=1), pull.words_read([being_written(word)], now=0.1)
    ((<Action.READ_WORDS: 1>,), (<Action.READ_WORDS: 1>,))
    >>> pull.words_read([word], now=0.2), pull.round_begun(), pull.data_read()
    ((<Action.READ_DATA: 2>,), None, (<Action.READ_WORDS: 1>,))
    >>> [action.name for action in pull.words_read([word], now=0.3)]
    ['COPY_ROUND', 'AWAIT_COPIES']
    >>> pull.copied(), pull.state.value, pull.error
    ((<Action.COMMIT: 6>,), 'committed', None)
    """

    def __init__(self, job_id: str, now: float, deadline: float, word_by: float = 0.0) -> None:
        self.job_id = job_id
        self.state = State.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._began_at, self._deadline, self._word_by = now, deadline, word_by
        self._expected: Sequence[bytes] = ()
        self._num_rounds = 0

    @property
    def is_over(self) -> bool:
        """Whether the engine may have the blocks: filled, or untouched from now on."""
        return self.state in (State.COMMITTED, State.FAILED)

    def begin(self, expected: Sequence[bytes], num_rounds: int) -> tuple[Action, ...]:
        """The sources are known; ``expected`` has the guard word that this rank must find at each that has one."""
        if self.state is not State.PREPARING:
            return ()
        self._expected, self._num_rounds = tuple(expected), num_rounds
        self.state = State.WORDS_BEFORE
        return (Action.READ_WORDS,)

    def words_read(self, found: Sequence[bytes], now: float) -> tuple[Action, ...]:
        """The guard words have landed, one for each expected word."""
        if self.state not in (State.WORDS_BEFORE, State.WORDS_AFTER):
            return ()
        if tuple(found) != self._expected:
            if self.state is State.WORDS_BEFORE and self._may_become_right(found, now):
                return (Action.READ_WORDS,)
            return self._stop(self._refused(found), now)
        if self.state is State.WORDS_BEFORE:
            self.state = State.BETWEEN_ROUNDS
            return (Action.READ_DATA,)
        self._num_rounds -= 1
        if self._num_rounds > 0:
            self.state = State.BETWEEN_ROUNDS
            return (Action.COPY_ROUND, Action.READ_DATA)
        self.state = State.COPYING
        return (Action.COPY_ROUND, Action.AWAIT_COPIES)

    def round_begun(self) -> None:
        """The stage had room: the reads of the round have been submitted."""
        if self.state is State.BETWEEN_ROUNDS:
            self.state = State.DATA

    def data_read(self) -> tuple[Action, ...]:
        """Every byte of the round has landed."""
        if self.state is not State.DATA:
            return ()
        self.state = State.WORDS_AFTER
        return (Action.READ_WORDS,)

    def copied(self) -> tuple[Action, ...]:
        """Every copy out of the stage has ended."""
        if self.state is not State.COPYING:
            return ()
        self.state = State.COMMITTED
        return (Action.COMMIT,)

    def fail(self, error: KVFerryError, now: float) -> tuple[Action, ...]:
        """Give up; the first error stays. Transfers in flight must end before the blocks are given back."""
        return () if self.is_over or self.state is State.STOPPING else self._stop(error, now)

    def tick(self, now: float) -> tuple[Action, ...]:
        """Give up once the deadline has passed."""
        return self.fail(self._late(now), now) if now >= self._deadline else ()

    def is_ending(self, now: float) -> bool:
        """Return whether the pull is past its deadline or being stopped."""
        return self.state is State.STOPPING or now >= self._deadline

    def quiet(self) -> tuple[Action, ...]:
        """All transfers and copies of a pull that was given up have ended."""
        if self.state is not State.STOPPING:
            return ()
        self.state = State.FAILED
        return (Action.GIVE_BACK,)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state as plain data, times relative to ``now``, the error as its reason code."""
        return {
            "state": self.state.value,
            "error": None if self.error is None else self.error.reason.value,
            "rounds_left": self._num_rounds,
            "deadline_in": self._deadline - now,
        }

    def _stop(self, error: KVFerryError, now: float) -> tuple[Action, ...]:
        self.error, self.given_up_at = error.without_traceback(), now
        self.state = State.STOPPING
        return (Action.STOP,)

    def _may_become_right(self, found: Sequence[bytes], now: float) -> bool:
        pairs = zip(found, self._expected, strict=True)
        return now < self._word_by or any(word == being_written(expected) for word, expected in pairs)

    def _refused(self, found: Sequence[bytes]) -> HandoffError:
        if self.state is State.WORDS_AFTER:
            return _source_changed(self.job_id, "while")
        are_others = [word != expected for word, expected in zip(found, self._expected, strict=True)]
        if not all(are_others):
            return _source_changed(self.job_id, "before")
        # A slot that is free says nothing of the hold that it may have had.
        is_free = all(is_cleared(word) for word in found)
        return not_held(self.job_id) if is_free else wrong_parameters(self.job_id)

    def _late(self, now: float) -> HandoffError:
        return HandoffError(
            Reason.DEADLINE_EXCEEDED,
            f"the load of {self.job_id} was still {self.state.value} after {now - self._began_at:.1f} s.",
            "Check the source of the blocks (prefill engine or tier). For a pull, load_timeout_seconds sets the limit.",
        )


CHECK_PARAMETERS = (
    "Check that the router copies the prefill engine's kv_transfer_params unchanged into the request of the same "
    "prompt, and that no client sets them."
)


def _source_changed(job_id: str, when: str) -> HandoffError:
    return HandoffError(
        Reason.SOURCE_CHANGED,
        f"the prefill engine stopped holding the blocks of {job_id} {when} they were read.",
        "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
    )


def wrong_parameters(prompt: str, different: str = "the guard word that they name is another one") -> HandoffError:
    """Return the error of a request whose parameters name other blocks than those of its ``prompt``.

    ``different`` names the field and both values where one field alone is known to be wrong: a guard word is a digest
    of most of them.
    """
    return HandoffError(
        Reason.WRONG_PARAMETERS,
        f"the kv_transfer_params of {prompt} are not those of a prompt that the prefill engine holds: {different}.",
        f"{CHECK_PARAMETERS} Then send the prompt again.",
    )


def not_held(prompt: str) -> HandoffError:
    """Return the error of a ``prompt`` of which nothing is held: its parameters are wrong, or its hold has ended."""
    return HandoffError(
        Reason.SOURCE_CHANGED,
        f"the prefill engine holds nothing under the kv_transfer_params of {prompt}: they are not those of a prompt "
        "that it holds, or that prompt's hold was released or has expired.",
        f"{CHECK_PARAMETERS} Send the prompt again; if unchanged parameters of first loads fail so, raise "
        "lease_seconds on the prefill side.",
    )
