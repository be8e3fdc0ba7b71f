"""The receiver's messages to holders: releases and renewals, batched per destination, sent by a courier."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from kvferry.errors import Reason
from kvferry.handoff.messages import MAX_REQUESTS_PER_MESSAGE, Handle, Refusal, Release, Renew, Renewed
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.client import Courier, Parcel

logger = logging.getLogger(__name__)


class RenewalOutcome(msgspec.Struct, frozen=True):
    """What a holder said: which holds it still has, under which lease, and which are lost."""

    held: tuple[RemoteHold, ...]
    lost: tuple[RemoteHold, ...]
    sent_at: float
    lease_seconds: float


class Errands:
    """Sends releases and renewals and collects what renewals came to."""

    def __init__(self) -> None:
        self._courier = Courier()
        self._holds_of: dict[tuple[str, int, int, Handle], RemoteHold] = {}

    def release(self, holds: Iterable[RemoteHold], timeout_seconds: float) -> None:
        """Tell the holders that nobody here reads these any more; sent again until acknowledged."""
        for (host, port, epoch), handles in _batches(holds):
            self._courier.send(host, port, Release(epoch, handles), timeout_seconds)

    def renew(self, holds: Iterable[RemoteHold], timeout_seconds: float) -> None:
        """Ask the holders to hold on; holds whose last renewal is still on its way are left out."""
        holds = [hold for hold in holds if (*hold.destination, hold.handle) not in self._holds_of]
        for hold in holds:
            self._holds_of[(*hold.destination, hold.handle)] = hold
        for (host, port, epoch), handles in _batches(holds):
            self._courier.send(host, port, Renew(epoch, handles), timeout_seconds)

    def collect(self) -> list[RenewalOutcome]:
        """Return the renewals that were answered since the last call."""
        outcomes: list[RenewalOutcome] = []
        for parcel in self._courier.collect():
            if isinstance(parcel.question, Renew):
                outcomes.extend(self._renewal_outcome(parcel, parcel.question))
            elif parcel.answer is None or isinstance(parcel.answer, Refusal):
                _log_undelivered(parcel)
        return outcomes

    def close(self) -> None:
        """Stop the courier; twice is fine."""
        self._courier.close()

    def _renewal_outcome(self, parcel: Parcel, question: Renew) -> Iterator[RenewalOutcome]:
        destination = (parcel.host, parcel.port, question.epoch)
        holds = {handle: self._holds_of.pop((*destination, handle), None) for handle in question.handles}
        if isinstance(parcel.answer, Renewed):
            lost = set(parcel.answer.lost)
            lease_seconds = parcel.answer.lease_seconds
        elif isinstance(parcel.answer, Refusal) and parcel.answer.reason == Reason.PEER_CHANGED:
            lost, lease_seconds = set(question.handles), 0.0
        else:
            _log_undelivered(parcel)
            return
        known = {handle: hold for handle, hold in holds.items() if hold is not None}
        yield RenewalOutcome(
            held=tuple(hold for handle, hold in known.items() if handle not in lost),
            lost=tuple(hold for handle, hold in known.items() if handle in lost),
            sent_at=parcel.sent_at,
            lease_seconds=lease_seconds,
        )


def _batches(holds: Iterable[RemoteHold]) -> Iterator[tuple[tuple[str, int, int], tuple[Handle, ...]]]:
    by_destination: dict[tuple[str, int, int], list[Handle]] = defaultdict(list)
    for hold in holds:
        by_destination[hold.destination].append(hold.handle)
    for destination, handles in by_destination.items():
        for start in range(0, len(handles), MAX_REQUESTS_PER_MESSAGE):
            yield destination, tuple(handles[start : start + MAX_REQUESTS_PER_MESSAGE])


def _log_undelivered(parcel: Parcel) -> None:
    kind = type(parcel.question).__name__.lower()
    refusal = parcel.answer if isinstance(parcel.answer, Refusal) else None
    why = "no answer" if refusal is None else f"{refusal.message} {refusal.remedy}"
    logger.warning("kvferry: a %s to %s:%d came to nothing: %s", kind, parcel.host, parcel.port, why)
