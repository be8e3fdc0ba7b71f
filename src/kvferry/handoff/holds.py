"""Holds: the prompts whose blocks a prefill engine keeps for a decode engine.

Pure: messages and the time are inputs. A hold is *open* from the first block of its prompt, *held* under a lease from
the prompt's end, and *ended* by a release, by the end of its lease, or because the engine drops the prompt.
:meth:`Holds.take_ended` returns each ended hold once. Only then may the engine free the blocks, and only after every
rank has ended the writes of the hold.

A hold has one of two kinds of :class:`Handle`. The request's id and a generation name a hold of this engine; the decode
engine learns both from the prefill engine's answer. Nobody can guess a generation: a message that names one comes from
who has read that answer. A router's transfer id names the hold of a *transfer*; decode engines know the id before the
prefill engine has the prompt: an unknown transfer may still begin, an ended one is remembered. Announcements name both
by a transfer id, :func:`transfer_of` the handle.
"""

import re
import secrets
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Bounded, Handle

MAX_REMEMBERED = 1 << 16
"""Ended transfers that are remembered."""
RENEWED_LEASE_SECONDS = 10.0
"""The longest lease that a renewal grants. A decode engine renews several times in this time, so a hold that its decode
engine has renewed ends soon after the renewals stop."""
TRANSFER_GENERATION = 0
"""The generation in every handle of a transfer: a router makes each transfer id once."""
GENERATION_BITS = 62
HOLD_PREFIX = "hold:"
"""The begin of the transfer ids of holds of this engine; a router's transfer id that begins so is refused."""
_HOLD_ID = re.compile(f"{HOLD_PREFIX}([0-9a-f]{{16}})")
_SAMPLE_PREFIX = re.compile(r"^\d+_")


def sampling_family(request_id: str) -> str:
    """Return the id that the parallel samples (``n`` > 1) of one request share.

    >>> sampling_family("1_cmpl-7"), sampling_family("cmpl-7")
    ('cmpl-7', 'cmpl-7')
    """
    return _SAMPLE_PREFIX.sub("", request_id)


def transfer_of(handle: Handle) -> str:
    """Return the transfer id by which destinations announce blocks for the hold with this handle.

    Only who knows the generation knows the transfer id of a hold of this engine.

    >>> transfer_of(Handle("a", 0x2B)), transfer_of(Handle("x", TRANSFER_GENERATION))
    ('hold:000000000000002b', 'x')
    """
    if handle.generation == TRANSFER_GENERATION:
        return handle.request_id
    return f"{HOLD_PREFIX}{handle.generation:016x}"


def is_of_hold(transfer_id: str) -> bool:
    """Return whether a transfer id is that of a hold of the prefill engine, not a router's."""
    return transfer_id.startswith(HOLD_PREFIX)


def handle_of_transfer(transfer_id: str) -> Handle:
    """Return a handle that names the hold with this transfer id to its engine.

    The generation alone names a hold of that engine, so the handle does without the request's id.

    >>> handle_of_transfer("x"), handle_of_transfer("hold:000000000000002b").generation
    (Handle(request_id='x', generation=0), 43)
    """
    found = _HOLD_ID.fullmatch(transfer_id)
    return Handle(transfer_id, TRANSFER_GENERATION if found is None else int(found[1], 16))


def check_epoch(epoch: int, own: int, who: str = "engine") -> None:
    """Raise :class:`HandoffError` (peer-changed) for a message to an earlier process of this prefill engine or rank.

    >>> check_epoch(7, own=7)
    >>> check_epoch(6, own=7, who="rank")
    Traceback (most recent call last):
    kvferry.errors.HandoffError: the message is for epoch 6 of this rank, which is in epoch 7. ...
    """
    if epoch != own:
        raise HandoffError(
            Reason.PEER_CHANGED,
            f"the message is for epoch {epoch} of this {who}, which is in epoch {own}.",
            "The prefill engine was restarted or its cache was reset: send the prompt again.",
        )


class Lease(msgspec.Struct, frozen=True):
    """A promise to hold until ``end``, in seconds of the monotonic clock of the process that keeps the lease.

    A decode engine computes ``end`` from the moment at which it *sent* a granted renewal, so its view ends before the
    prefill engine's. The first lease starts with the prefill engine's answer, which travels through a router: counted
    from the request's arrival, it may end late until the first renewal corrects it. Leases serve liveness only: a write
    ends by the source's own hand.

    >>> lease = Lease.granted(sent_at=10.0, seconds=60.0)
    >>> lease.end, lease.is_over(69.0), lease.is_over(70.0)
    (70.0, False, True)
    """

    end: float

    @classmethod
    def granted(cls, sent_at: float, seconds: float) -> "Lease":
        """Return the lease that a grant of ``seconds``, asked for at ``sent_at``, gives."""
        return cls(sent_at + seconds)

    def is_over(self, now: float) -> bool:
        return now >= self.end

    def remaining(self, now: float) -> float:
        return max(0.0, self.end - now)


class Ending(StrEnum):
    """Why a hold ended: a release; no decode engine came within the first lease; the decode engine's renewals stopped;
    the hold reached the greatest age; the engine dropped the prompt, reset its cache, or drains and refused the prompt;
    the engine needed the blocks or the room of a hold that yields.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    TOO_OLD = "too-old"
    DROPPED = "dropped"
    RESET = "reset"
    REFUSED = "refused"
    YIELDED = "yielded"


UNRELEASED = (Ending.EXPIRED, Ending.ABANDONED, Ending.TOO_OLD)
"""Ends by a lease: no decode engine has released the hold."""


class Hold(msgspec.Struct, frozen=True):
    """The blocks of one request.

    ``held_at`` is the time at which the request finished; ``is_renewed`` says whether a decode engine has renewed the
    hold. A hold that ``yields`` ends when its engine needs the blocks or the room, or drains: the engine that loads it
    can compute the tokens too.
    """

    handle: Handle
    request_id: str
    lease: Lease | None = None
    held_at: float | None = None
    is_renewed: bool = False
    yields: bool = False

    @property
    def is_held(self) -> bool:
        """Whether the request has finished and its blocks are kept for a decode engine."""
        return self.lease is not None

    @property
    def is_transfer(self) -> bool:
        """Whether the router's transfer id names the hold."""
        return self.handle.generation == TRANSFER_GENERATION

    @property
    def transfer_id(self) -> str:
        """The transfer id of the hold, as :func:`transfer_of`."""
        return transfer_of(self.handle)


class Ended(msgspec.Struct, frozen=True):
    """A hold that has ended. ``hold`` is None for a transfer that ended before its prompt began."""

    handle: Handle
    ending: Ending
    hold: Hold | None

    @property
    def was_held(self) -> bool:
        """Whether the engine keeps references to the blocks, which can go now."""
        return self.hold is not None and self.hold.is_held


class Holds:
    """All holds of one prefill engine.

    ``epoch`` names this process since its start or its last reset; messages for an earlier epoch are refused. The first
    lease of a hold takes ``lease_seconds``, since a router may be slow. A renewal grants ``renewed_lease_seconds`` from
    then on, which may end earlier than the first lease: a decode engine that has renewed and stops has gone. No hold
    outlives ``max_hold_seconds``. At most ``max_holds`` holds are no transfers.

    >>> holds = Holds(epoch=7, max_holds=2, lease_seconds=60)
    >>> hold = holds.begin("a")
    >>> holds.hold("a", now=0.0).lease.end
    60.0
    >>> holds.release(7, [hold.handle]), [ended.ending.value for ended in holds.take_ended()]
    (None, ['released'])
    >>> transfer = holds.begin_transfer("x", "b").handle
    >>> holds.renew(7, [transfer, handle_of_transfer("to come")], now=50.0), holds.release(7, [transfer])
    ([], None)
    >>> holds.renew(7, [transfer], now=50.0) == [transfer], holds.begin_transfer("x", "b")
    (True, None)
    """

    def __init__(
        self, epoch: int, max_holds: int, lease_seconds: float, max_hold_seconds: float = float("inf")
    ) -> None:
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self.renewed_lease_seconds = min(lease_seconds, RENEWED_LEASE_SECONDS)
        self.is_draining = False
        """Whether no more holds begin."""
        self._max_holds, self._max_hold_seconds = max_holds, max_hold_seconds
        self._holds: dict[Handle, Hold] = {}
        self._open_of: dict[str, Handle] = {}
        """The handle of each request's open hold."""
        self._own_of: dict[str, Handle] = {}
        """The handle of each request's hold, open or held, that is no transfer."""
        self._families: dict[str, set[Handle]] = {}
        self._of_generation: dict[int, Handle] = {}
        self._ended_transfers: Bounded[str, None] = Bounded(MAX_REMEMBERED)
        self._ended: list[Ended] = []
        self._expires_at = float("inf")

    @property
    def num_holds(self) -> int:
        """Holds that have begun and not ended."""
        return len(self._holds)

    @property
    def num_lasting(self) -> int:
        """Holds that do not yield."""
        return sum(not hold.yields for hold in self._holds.values())

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has something to return."""
        return bool(self._ended)

    # The engine's requests.

    def begin(self, request_id: str) -> Hold | None:
        """Open a hold of this engine; a preempted request that begins again keeps its hold.

        Where ``max_holds`` are taken, the oldest hold that yields ends. None where the request cannot be held: all are
        taken, a finished request of the same id is still held, the request serves a transfer, the id is too long for a
        message, or the engine drains.
        """
        if (handle := self._open_of.get(request_id) or self._own_of.get(request_id)) is not None:
            hold = self._holds[handle]
            return None if hold.is_held or hold.is_transfer else hold
        if len(self._own_of) >= self._max_holds:
            yielding = (hold for hold in self._holds.values() if hold.yields and not hold.is_renewed)
            if (oldest := next(yielding, None)) is not None:
                self._end(oldest, Ending.YIELDED)
        if self.is_draining or len(self._own_of) >= self._max_holds or len(request_id) > MAX_IDENTIFIER_LENGTH:
            return None
        # Nobody can guess it, and it is no transfer's.
        handle = Handle(request_id, secrets.randbits(GENERATION_BITS) or 1)
        self._own_of[request_id] = self._of_generation[handle.generation] = handle
        self._families.setdefault(sampling_family(request_id), set()).add(handle)
        return self._open(Hold(handle, request_id))

    def begin_transfer(self, transfer_id: str, request_id: str) -> Hold | None:
        """Open the hold of a router's transfer for this request; a preempted request that begins again keeps its hold.

        None where the transfer has ended, where another request, such as a parallel sample, serves the transfer, where
        the request has another open hold, and for a transfer id of a hold. In an engine that drains an unknown transfer
        ends, so that its announcements are refused.
        """
        if transfer_id in self._ended_transfers or is_of_hold(transfer_id):
            return None
        handle = Handle(transfer_id, TRANSFER_GENERATION)
        if (hold := self._holds.get(handle)) is not None:
            return hold if hold.request_id == request_id and not hold.is_held else None
        if self.is_draining:
            self._end_unbegun(handle, Ending.REFUSED)
            return None
        return None if request_id in self._open_of else self._open(Hold(handle, request_id))

    def open_hold(self, request_id: str) -> Hold | None:
        """Return the hold of a request that has begun and not finished."""
        handle = self._open_of.get(request_id)
        return None if handle is None else self._holds[handle]

    def hold(self, request_id: str, now: float) -> Hold | None:
        """Start the lease of a finished request; None if it has no open hold."""
        if (hold := self.open_hold(request_id)) is None:
            return None
        del self._open_of[request_id]
        return self._extend(msgspec.structs.replace(hold, held_at=now), now)

    def hold_yielding(self, request_id: str, now: float, seconds: float) -> Hold | None:
        """Hold a finished request that has no open hold, under a first lease of ``seconds``; None as :meth:`begin`."""
        if (hold := self.begin(request_id)) is None:
            return None
        del self._open_of[request_id]
        return self._lease(msgspec.structs.replace(hold, held_at=now, yields=True), now + seconds)

    def yield_blocks(self, handles: Iterable[Handle]) -> None:
        """End those of these holds that yield: the engine gives their blocks to others."""
        for handle in handles:
            if (hold := self._holds.get(handle)) is not None and hold.yields:
                self._end(hold, Ending.YIELDED)

    def drop(self, request_id: str) -> None:
        """End the open hold of a request that was aborted or has nothing to send."""
        if (hold := self.open_hold(request_id)) is not None:
            self._end(hold, Ending.DROPPED)

    def drop_transfer(self, transfer_id: str) -> None:
        """End a transfer whose request ended before its hold began, unless another request serves the transfer."""
        handle = Handle(transfer_id, TRANSFER_GENERATION)
        if handle not in self._holds:
            self._end_unbegun(handle, Ending.DROPPED)

    def drain(self) -> None:
        """Begin no more holds; those that have begun go on, unless they yield."""
        self.is_draining = True
        self.yield_blocks(list(self._holds))

    def reset(self, epoch: int) -> None:
        """The blocks of all holds are worthless, since the weights may have changed: end every hold, open or held.

        Messages for the former epoch are refused from now on.
        """
        for hold in list(self._holds.values()):
            self._end(hold, Ending.RESET)
        self.epoch = epoch

    # Messages and time.

    def renew(self, epoch: int, handles: Iterable[Handle], now: float) -> list[Handle]:
        """Extend leases; return the handles that are no longer held. Raises as :func:`check_epoch`."""
        check_epoch(epoch, self.epoch)
        lost = []
        for handle in handles:
            if (hold := self._holds.get(handle)) is not None:
                for member in self._family(hold):
                    renewed = self._holds[member.handle] = msgspec.structs.replace(member, is_renewed=True)
                    if renewed.is_held:
                        self._extend(renewed, now)
            elif handle.generation != TRANSFER_GENERATION or handle.request_id in self._ended_transfers:
                lost.append(handle)
        return lost

    def release(self, epoch: int, handles: Iterable[Handle]) -> None:
        """End holds that the decode engine no longer uses; ignore ended ones. Raises as :func:`check_epoch`.

        Each parallel sample of one prompt has a hold, but the decode engine knows one of them: a release ends all held
        ones of the family. The generation alone names a hold of this engine here: parameters that were changed on their
        way fail, and their hold must not stay for it. A transfer ends whether its hold is held,
        open or has not begun, and in any epoch: its prompt may begin after the change of the epoch that the decode
        engine knows. Raises :class:`HandoffError` (deadline-exceeded) where :data:`MAX_REMEMBERED` ends wait for the
        engine's next step.
        """
        handles = tuple(handles)
        if not handles or any(handle.generation != TRANSFER_GENERATION for handle in handles):
            check_epoch(epoch, self.epoch)
        unbegun = []
        for handle in handles:
            hold = self._holds.get(self._of_generation.get(handle.generation, handle))
            if hold is None:
                if handle.generation == TRANSFER_GENERATION:
                    unbegun.append(handle)
                continue
            for member in self._family(hold):
                if member.is_held or member.is_transfer:
                    self._end(member, Ending.RELEASED)
        for handle in unbegun:
            if len(self._ended) >= MAX_REMEMBERED:
                raise HandoffError(
                    Reason.DEADLINE_EXCEEDED,
                    f"the ends of {len(self._ended)} holds and transfers wait for the next step of this engine: its "
                    "steps hang.",
                    "Check the prefill engine: what is announced for the transfer ends by its own deadline.",
                )
            self._end_unbegun(handle, Ending.RELEASED)

    def forgive(self, seconds: float) -> None:
        """Let all leases end later by ``seconds``, in which this process did not run and no renewal could arrive."""
        for hold in list(self._holds.values()):
            if hold.lease is not None:
                self._lease(hold, hold.lease.end + seconds)

    def expire(self, now: float) -> None:
        """End the holds whose lease is over, and those of the greatest age."""
        if now < self._expires_at:
            return  # no lease ends before: there may be thousands
        for hold in [hold for hold in self._holds.values() if hold.lease is not None and hold.lease.is_over(now)]:
            assert hold.held_at is not None
            ending = Ending.ABANDONED if hold.is_renewed else Ending.EXPIRED
            self._end(hold, Ending.TOO_OLD if now >= hold.held_at + self._max_hold_seconds else ending)
        leases = (hold.lease.end for hold in self._holds.values() if hold.lease is not None)
        self._expires_at = min(leases, default=float("inf"))

    def take_ended(self) -> list[Ended]:
        """Return the holds that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def _family(self, hold: Hold) -> list[Hold]:
        """Return the holds of all parallel samples of a prompt; a transfer has one hold."""
        if hold.is_transfer:
            return [hold]
        return [self._holds[handle] for handle in sorted(self._families[sampling_family(hold.request_id)])]

    def _open(self, hold: Hold) -> Hold:
        self._holds[hold.handle] = hold
        self._open_of[hold.request_id] = hold.handle
        return hold

    def _extend(self, hold: Hold, now: float) -> Hold:
        seconds = self.renewed_lease_seconds if hold.is_renewed else self.lease_seconds
        return self._lease(hold, Lease.granted(now, seconds).end)

    def _lease(self, hold: Hold, end: float) -> Hold:
        """Let the lease of a held prompt end at ``end``, but not after the greatest age of a hold."""
        assert hold.held_at is not None
        lease = Lease(min(end, hold.held_at + self._max_hold_seconds))
        self._expires_at = min(self._expires_at, lease.end)
        held = self._holds[hold.handle] = msgspec.structs.replace(hold, lease=lease)
        return held

    def _end(self, hold: Hold, ending: Ending) -> None:
        del self._holds[hold.handle]
        if not hold.is_held:
            del self._open_of[hold.request_id]
        if hold.is_transfer:
            self._ended_transfers[hold.handle.request_id] = None
        else:
            del self._own_of[hold.request_id], self._of_generation[hold.handle.generation]
            name = sampling_family(hold.request_id)
            self._families[name].discard(hold.handle)
            if not self._families[name]:
                del self._families[name]
        self._ended.append(Ended(hold.handle, ending, hold))

    def _end_unbegun(self, handle: Handle, ending: Ending) -> None:
        """End a transfer that has not begun: ranks may have announcements for it."""
        if handle.request_id not in self._ended_transfers and not is_of_hold(handle.request_id):
            self._ended_transfers[handle.request_id] = None
            self._ended.append(Ended(handle, ending, None))


def engine_drains(transfer_id: str) -> HandoffError:
    """Return the error of a transfer whose prompt came to an engine that drains."""
    return HandoffError(
        Reason.DRAINING,
        f"the prefill engine drains and takes no more prompts: {transfer_id} is not computed.",
        "Send the prompt again, to another prefill engine: take this one out of the router.",
    )


def weights_changed(request_id: str) -> HandoffError:
    """Return the error of a request whose prompt was computed before this engine's cache was reset."""
    return HandoffError(
        Reason.WEIGHTS_CHANGED,
        f"the cache of this engine was reset, and {request_id} waits for a prompt that was computed before.",
        "Send the prompt again.",
    )


def lease_lost(request_id: str) -> HandoffError:
    return HandoffError(
        Reason.LEASE_EXPIRED,
        f"the prefill engine no longer holds the blocks of {request_id}.",
        "Send the prompt again to both engines: kv_transfer_params load one prompt once. If first loads fail so too, "
        "raise lease_seconds on the prefill side.",
    )
