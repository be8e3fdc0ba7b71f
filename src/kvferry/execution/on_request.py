"""Held prompts that their source writes on the destination's announcement, where reads are slow.

From the announcement on it is a push whose prompt has been computed: the guard word of the hold is the transfer id.
:class:`HeldWrites` tells a source's writer what is held, :class:`OnRequest` chooses at the destination, a
:class:`HeldLoad`, a job of the transfer thread, is one load. See docs/decisions/written-on-request.md.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from kvferry.errors import KVFerryError, Reason
from kvferry.execution.destination import Announcer, AwaitedLoad, FindSources, Announcement
from kvferry.execution.digests import first_held
from kvferry.execution.executor import QUIET_SECONDS
from kvferry.execution.guard_words import Held, Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.read import Read
from kvferry.execution.source_engines import SourceEngine
from kvferry.execution.source import Writer
from kvferry.handoff.guard_word import HeldPrompt
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

NOT_READ_INSTEAD = frozenset(
    {
        Reason.SOURCE_CHANGED,
        Reason.WRONG_PARAMETERS,
        Reason.INTEGRITY_MISMATCH,
        Reason.DEADLINE_EXCEEDED,
        Reason.ABORTED,
        Reason.WEIGHTS_CHANGED,
    }
)
"""Why a write fails where a read would fail too, or would hide wrong bytes. For any other reason a read may succeed: it
needs neither a way back nor the source's part."""
OUT_OF_REACH = frozenset({Reason.PEER_UNREACHABLE, Reason.PERMISSION_DENIED})


def transfer_id_of(word: bytes) -> str:
    """Return the transfer id of the hold with this guard word.

    >>> transfer_id_of(bytes(14) + b"ab")
    '00000000000000000000000000006162'
    """
    return word.hex()


class HeldWrites:
    """Tells a rank's ``writer`` which prompts it may write, as their guard words change.

    ``name_of`` returns the name of a cache group in the rank's shard by its index in what is held.
    """

    def __init__(self, writer: Writer, name_of: Callable[[int], str]) -> None:
        self._writer, self._name_of = writer, name_of

    def hold(self, held: Held, *, counts: bool) -> None:
        """The word of this hold counts from now on, or will count: until then nothing of the prompt is final."""
        assert held.prompt is not None, "who may be asked to write knows what is held"
        self._writer.hold(transfer_id_of(held.word), self._prompt_of(held.prompt, END if counts else 0))

    def end(self, words: Sequence[bytes]) -> None:
        """The holds of these words have ended."""
        self._writer.end([transfer_id_of(word) for word in words])

    def _prompt_of(self, held: HeldPrompt, num_final: int) -> Prompt:
        blocks = {}
        for index, (size, listed) in enumerate(zip(held.block_sizes, held.block_ids, strict=True)):
            ids = np.asarray(listed)
            begin = first_held(ids)
            blocks[self._name_of(index)] = BlockList(begin * size, ids[begin:].tolist())
        return Prompt(held.num_tokens, held.prompt_digest, blocks, num_final)


class HeldRequest(NamedTuple):
    """A load of a held prompt: ``engine`` returns the source engine, None while its handshake runs or before the blocks
    may be filled; ``find_sources`` the ranks that write.
    """

    push: Announcement
    engine: Callable[[], SourceEngine | None]
    find_sources: FindSources


class OnRequest:
    """Chooses for each load of one rank whether the source writes. With ``is_forced`` it always does."""

    def __init__(self, announcer: Announcer, *, is_forced: bool) -> None:
        self._announcer, self._is_forced = announcer, is_forced

    def load(self, read: Read, request: HeldRequest) -> "HeldLoad":
        """Return a load that is read by ``read`` unless it is written."""
        write = partial(self._announcer.push, request.push, request.find_sources)
        return HeldLoad(read, partial(self._is_written, request), write, partial(self._give_up, request))

    def _is_written(self, request: HeldRequest) -> bool | None:
        if self._is_forced:
            return True
        self._announcer.collect()
        engine = request.engine()
        if engine is None:
            return None
        transfer_id, now = request.push.transfer_id, time.monotonic()
        slow_reads = engine.slow_reads(transfer_id)
        if not slow_reads:
            return None if slow_reads is None else False
        writers = engine.writers(transfer_id)
        # Every one is asked, so that all are introduced at once.
        have_met = [self._announcer.introductions.meets(where, engine.shards, engine.version, now) for where in writers]
        if not writers or False in have_met:
            return False
        return None if None in have_met else True

    def _give_up(self, request: HeldRequest, error: KVFerryError) -> bool:
        """Return whether a load that could not be written is read."""
        if self._is_forced or error.reason in NOT_READ_INSTEAD:
            return False
        if error.reason in OUT_OF_REACH:
            with suppress(KVFerryError):  # of a handshake: the read says so too
                engine = request.engine()
                for where in () if engine is None else engine.writers(request.push.transfer_id):
                    self._announcer.introductions.avoid(where, error, time.monotonic())
        return True


class HeldLoad:
    """One load: ``read``, unless ``choose`` says that it is written; then the job that ``write`` makes.

    ``choose`` returns None while that is open, and may raise :class:`KVFerryError`. Where a write has failed, and
    nothing of it may land any more, ``is_read_instead`` says whether the read follows in the time that is left.
    """

    fills_blocks = True
    is_for_log = False
    can_wait = False

    def __init__(
        self,
        read: Read,
        choose: Callable[[], bool | None],
        write: Callable[[], AwaitedLoad],
        is_read_instead: Callable[[KVFerryError], bool],
    ) -> None:
        self.job_id = read.job_id
        self._read, self._choose, self._write, self._is_read_instead = read, choose, write, is_read_instead
        self._job: Read | AwaitedLoad = read
        self._is_chosen = self._is_cancelled = False

    @property
    def phase(self) -> Phase:
        """What the load waits for."""
        return self._job.phase

    @property
    def error(self) -> KVFerryError | None:
        """Why the load was given up."""
        return self._job.error

    @property
    def given_up_at(self) -> float | None:
        """When the load was given up."""
        return self._job.given_up_at

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Choose, then make bounded progress."""
        if not self._is_chosen and not self._read.is_ending(now):
            try:
                is_written = self._choose()
            except KVFerryError as error:
                self._read.cancel(error)
                is_written = False
            if is_written is None:
                return False
            self._is_chosen = True
            if is_written:
                self._job = self._write()
        moved = self._job.advance(scratch, now)
        if self._job is not self._read and self._job.phase is Phase.DONE and self._may_be_read(now):
            told = "kvferry: %s could not be written by its source and is read: %s"
            logger.warning(told, self.job_id, self.error, peer=self.job_id)
            self._job = self._read
        return moved

    def is_ending(self, now: float) -> bool:
        """Return whether the load is past its deadline or being stopped."""
        return self._job.is_ending(now)

    def cancel(self, error: KVFerryError) -> None:
        """Give up; the load is done once nothing of it may land any more."""
        self._is_cancelled = True
        self._job.cancel(error)

    def result(self, finished_at: float) -> JobResult:
        """Return how the load ended."""
        return self._job.result(finished_at)

    def _may_be_read(self, now: float) -> bool:
        error, given_up_at = self.error, self.given_up_at
        if error is None or self._is_cancelled or self._read.is_ending(now):
            return False
        # Later the engine may have been told that the write does not end, and have let the request fail.
        was_late = given_up_at is not None and now - given_up_at >= QUIET_SECONDS
        return not was_late and self._is_read_instead(error)
