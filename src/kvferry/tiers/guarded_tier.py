"""A lower tier behind a guard: what it raises is a failure of the tier, and no error of a request or of the engine.

Errors of a device, file or peer should not leave the verbs of a tier. Where one does, whatever its type, the verb has
failed, and the tier is *suspended*: left alone, each time for twice as long, at most for ``suspend_seconds * 2 **
(MAX_RAISED - 2)``. After ``MAX_RAISED`` errors of a verb in a row the tier is *set aside* for good, and at once where
it may have begun a copy without returning it: nobody can wait for the end of that copy.

A tier that is set aside is closed, on a thread of its own because that may take seconds, and is asked nothing more.
Slots that its copies use are free when it has closed without an error, and not before.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeVar

import numpy as np

from kvferry.errors import Reason, TierError
from kvferry.tiers.protocol import (
    CLOSE_SECONDS,
    BlockKey,
    Load,
    LowerTier,
    Presence,
    Presences,
    Slots,
    Store,
    TierCopy,
)

logger = logging.getLogger(__name__)

MAX_RAISED = 5
"""So many errors of a verb in a row are no accident."""
QUICK_SECONDS = 0.25
"""How long the caller waits for the end of a tier that is set aside; most end at once."""
MAX_CLOSE_SECONDS = CLOSE_SECONDS + 20.0
"""How long the caller waits for the end of a tier when all is closed: for its copies, then for Mooncake, which goes on
asking a master that has died: the heartbeat, a new connection and the unmount take 5.3 s each, 19 s were measured, and
the interpreter stands still meanwhile, so that a shorter wait ends no sooner."""

Answer = TypeVar("Answer")


class GuardedTier:
    """The verbs of a lower tier, which raise nothing. ``failures`` counts blocks and calls that failed, by reason."""

    def __init__(self, tier: LowerTier, suspend_seconds: float) -> None:
        self.name = tier.capabilities.name
        self.failures: Counter[Reason] = Counter()
        self._tier, self._suspend_seconds = tier, suspend_seconds
        self._suspended_until = -np.inf
        self._num_raised: Counter[str] = Counter()
        """By verb: errors in a row."""
        self._closing: _Closing | None = None

    @property
    def is_set_aside(self) -> bool:
        """Whether the tier is asked nothing more."""
        return self._closing is not None

    @property
    def is_gone(self) -> bool:
        """Whether the tier is closed and touches no slot any more."""
        return self._closing is not None and self._closing.is_over.is_set() and self._closing.error is None

    def is_suspended(self, now: float) -> bool:
        """Return whether the tier is left alone for now, or for ever."""
        return self.is_set_aside or now < self._suspended_until

    def look_up(self, keys: Sequence[BlockKey], now: float) -> Presences:
        """Return which blocks the tier holds: none where it fails or is suspended."""
        if not self.is_suspended(now):
            found = self._call("look_up", self._tier.look_up, now, keys, num_blocks=len(keys))
            if found is not None:
                return found
        return np.full(len(keys), Presence.ABSENT, np.uint8)

    def lost_among(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        """Return which blocks, none of which could be loaded, the tier does not hold; also while it is suspended."""
        found = self._call("look_up", self._tier.look_up, now, keys, num_blocks=len(keys))
        return [] if found is None else list(compress(keys, found != Presence.HELD))

    def num_emptied(self, now: float) -> int:
        """Return how often the tier has lost all that it held; 0 where it is set aside."""
        return self._call("num_emptied", lambda: self._tier.num_emptied, now) or 0

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots, num_open: int, now: float) -> Load | None:
        """Return the begun load; None where nothing was begun. The caller has ``num_open`` loads that have not ended.

        A load that may have been begun, and that the tier did not return, is returned as one that does not end.
        """
        load = self._call("prepare_load", self._tier.prepare_load, now, keys, slots, num_blocks=len(keys))
        if load is not None or self._has_begun_nothing("num_loads", num_open):
            return load
        self._set_aside("it may move bytes for a load that it did not return")
        return Load(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots, num_open: int, now: float) -> Store | None:
        """Return the begun store, as :meth:`prepare_load`."""
        store = self._call("prepare_store", self._tier.prepare_store, now, keys, slots, num_blocks=len(keys))
        if store is not None or self._has_begun_nothing("num_stores", num_open):
            return store
        self._set_aside("it may move bytes for a store that it did not return")
        return Store(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))

    def poll(self, now: float) -> None:
        """Let the tier make progress. Which copies have ended stands in the copies: what is returned may be lost."""
        self._call("poll", self._tier.poll, now)

    def complete(self, copy: TierCopy, now: float) -> bool:
        """Complete a copy that has ended; return whether the tier did."""

        def complete() -> bool:
            if isinstance(copy, Load):
                self._tier.complete_load(copy)
            elif isinstance(copy, Store):
                self._tier.complete_store(copy)
            return True

        return self._call("complete_load" if isinstance(copy, Load) else "complete_store", complete, now) is True

    def cancel(self, copy: TierCopy, now: float) -> None:
        """Give a copy up, which then ends as soon as it can."""
        self._call("cancel", self._tier.cancel, now, copy)

    def fail(self, num_blocks: int, error: TierError, now: float) -> None:
        """Count blocks that failed, and leave the tier alone."""
        self.failures[error.reason] += num_blocks
        self.suspend(error, now)

    def suspend(self, error: Exception, now: float, seconds: float = 0.0) -> None:
        """Leave the tier alone for a while; say why, once."""
        seconds = seconds or self._suspend_seconds
        if not self.is_suspended(now):
            is_known = isinstance(error, TierError)
            told = error if is_known else repr(error)
            logger.warning("%s is left alone for %g s: %s", self.name, seconds, told, exc_info=not is_known and error)
        self._suspended_until = max(self._suspended_until, now + seconds)

    def close(self) -> None:
        """Begin to close the tier; ``close_error`` says how it went."""
        if self._closing is None:
            self._closing = _Closing(self.name, self._tier)

    def close_error(self, deadline: float) -> TierError | None:
        """Wait for the end of ``close`` until a time of ``monotonic``; return why slots may still be used."""
        assert self._closing is not None, "close comes first"
        if self._closing.is_over.wait(max(0.0, deadline - time.monotonic())):
            return self._closing.error
        hangs = f"{self.name} has not closed for {MAX_CLOSE_SECONDS:g} s."
        return TierError(Reason.DEADLINE_EXCEEDED, hangs, "Keep the slab mapped until the process ends.")

    def _call(
        self, name: str, verb: Callable[..., Answer], now: float, *arguments: object, num_blocks: int = 1
    ) -> Answer | None:
        """Call a verb of the tier; None where it raises, or the tier is set aside."""
        if self.is_set_aside:
            return None
        try:
            answer = verb(*arguments)
        except Exception as error:
            self._note_raised(name, error, max(1, num_blocks), now)
            return None
        del self._num_raised[name]
        return answer

    def _note_raised(self, name: str, error: Exception, num_blocks: int, now: float) -> None:
        """Count an error of a verb; leave the tier alone for twice as long as after the last, or for ever."""
        self.failures[error.reason if isinstance(error, TierError) else Reason.TIER_FAILED] += num_blocks
        if self.is_suspended(now):
            return  # copies of a tier that is left alone are still driven, in every step
        self.suspend(error, now, self._suspend_seconds * 2 ** self._num_raised[name])
        self._num_raised[name] += 1
        if self._num_raised[name] == MAX_RAISED:
            self._set_aside(f"{name} has raised errors {MAX_RAISED} times in a row, the last one {error!r}")

    def _has_begun_nothing(self, kind: str, num_open: int) -> bool:
        """Return whether the tier has no other open copy than those that its caller knows."""
        if self.is_set_aside:
            return False
        try:
            return bool(self._tier.snapshot()[kind] <= num_open)
        except Exception:
            logger.debug("%s has no snapshot", self.name, exc_info=True)
            return False

    def _set_aside(self, why: str) -> None:
        if self._closing is None:
            logger.error("%s is closed and stays out of use, since %s.", self.name, why)
            self.close()
            assert self._closing is not None
            self._closing.is_over.wait(QUICK_SECONDS)


class _Closing:
    """A call of ``close``, on a thread of its own. ``error``: why the tier may still touch slots, once it is over."""

    def __init__(self, name: str, tier: LowerTier) -> None:
        self.error: TierError | None = None
        self.is_over = threading.Event()
        self._name, self._tier = name, tier
        try:
            threading.Thread(target=self._close, name=f"kvferry-close-{name}", daemon=True).start()
        except RuntimeError:  # there is no other thread to be had, or the interpreter ends
            self._close()

    def _close(self) -> None:
        try:
            self._tier.close()
        except TierError as error:
            self.error = error.without_traceback()
        except Exception as error:
            raised = f"{self._name} cannot be closed: {error!r}."
            self.error = TierError(Reason.TIER_FAILED, raised, "Keep the slab mapped until the process ends.")
        finally:
            self.is_over.set()
