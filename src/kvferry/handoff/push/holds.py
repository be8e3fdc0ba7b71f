"""Which prompts a sending engine holds for receivers, by transfer id: the scheduler's part of a push.

Pure: messages and the time are inputs. A prompt *begins* when the engine gives it blocks, is *held* from when it has
finished until a receiver releases it or its lease runs out, and has *ended* then. Receivers name a transfer before its
prompt has come, so an unknown one is one that may still come; one that has ended is remembered as lost.
"""

from collections.abc import Iterable

import msgspec

from kvferry.handoff.bounded import Bounded
from kvferry.handoff.epochs import check_epoch
from kvferry.handoff.lease import Lease
from kvferry.handoff.messages import Handle

MAX_REMEMBERED = 1 << 16
TRANSFER_GENERATION = 0
"""The generation in every handle of a push: a router makes each transfer id once."""


class HeldPrompt(msgspec.Struct):
    """The request whose blocks are pushed; ``lease`` runs once the request has finished."""

    request_id: str
    lease: Lease | None = None


class EndedPrompt(msgspec.Struct, frozen=True):
    """A prompt whose blocks are held no longer; the engine's own references ended before if it ``was_held``.

    ``request_id`` is empty where none had begun.
    """

    transfer_id: str
    request_id: str
    was_held: bool
    has_expired: bool


class PushHolds:
    """All prompts of one sending engine.

    >>> holds = PushHolds(epoch=7, lease_seconds=60)
    >>> holds.begin("x", "r"), holds.begin("x", "sample of the same")
    (True, False)
    >>> holds.hold("r", now=0.0), holds.renew(7, [handle_of("x"), handle_of("to come")], now=50.0)
    ('x', [])
    >>> holds.expire(109.0), holds.release(7, [handle_of("x")]), holds.take_ended()[0].has_expired
    (None, None, False)
    >>> holds.renew(7, [handle_of("x")], now=50.0) == [handle_of("x")], holds.begin("x", "r")
    (True, False)
    """

    def __init__(self, epoch: int, lease_seconds: float) -> None:
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self._prompts: dict[str, HeldPrompt] = {}
        self._transfers: dict[str, str] = {}
        self._lost: Bounded[str, None] = Bounded(MAX_REMEMBERED)
        self._ended: list[EndedPrompt] = []

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has something to return."""
        return bool(self._ended)

    @property
    def num_held(self) -> int:
        """Prompts that have begun and not ended."""
        return len(self._prompts)

    def begin(self, transfer_id: str, request_id: str) -> bool:
        """A request gets blocks: return whether it is the one that is pushed, from now on or as before.

        Not one whose transfer has been released already, or which another request, such as a parallel sample, serves.
        """
        if transfer_id in self._lost:
            return False
        prompt = self._prompts.setdefault(transfer_id, HeldPrompt(request_id))
        if prompt.request_id != request_id or prompt.lease is not None:
            return False
        self._transfers[request_id] = transfer_id
        return True

    def transfer_of(self, request_id: str) -> str | None:
        """Return the transfer that an unfinished request serves."""
        return self._transfers.get(request_id)

    def hold(self, request_id: str, now: float) -> str | None:
        """The request has finished: start the lease, and return the transfer for which its blocks are to be held."""
        transfer_id = self._transfers.pop(request_id, None)
        if transfer_id is not None:
            self._prompts[transfer_id].lease = Lease.granted(now, self.lease_seconds)
        return transfer_id

    def drop(self, request_id: str) -> None:
        """The request ends without being held."""
        transfer_id = self._transfers.get(request_id)
        if transfer_id is not None:
            self._end(transfer_id)

    def abandon(self, transfer_id: str) -> None:
        """A request of this transfer ends that never began: unless another one serves it, nobody will."""
        if transfer_id not in self._prompts:
            self._end(transfer_id)

    def renew(self, epoch: int, handles: Iterable[Handle], now: float) -> list[Handle]:
        """Extend leases; return the handles of transfers that have ended. Raises on a foreign epoch."""
        check_epoch(epoch, self.epoch)
        lost = []
        for handle in handles:
            prompt = self._prompts.get(handle.request_id)
            if prompt is not None and prompt.lease is not None:
                prompt.lease = Lease.granted(now, self.lease_seconds)
            elif handle.request_id in self._lost:
                lost.append(handle)
        return lost

    def release(self, epoch: int, handles: Iterable[Handle]) -> None:
        """End transfers, begun or not: nobody wants them any more. Raises on a foreign epoch."""
        check_epoch(epoch, self.epoch)
        for handle in handles:
            self._end(handle.request_id)

    def expire(self, now: float) -> None:
        """End what nobody took in time."""
        over = [tid for tid, prompt in self._prompts.items() if prompt.lease is not None and prompt.lease.is_over(now)]
        for transfer_id in over:
            self._end(transfer_id, has_expired=True)

    def take_ended(self) -> list[EndedPrompt]:
        """Return the prompts that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, transfer_id: str, *, has_expired: bool = False) -> None:
        if transfer_id in self._lost:
            return
        self._lost.setdefault(transfer_id)
        prompt = self._prompts.pop(transfer_id, None)
        if prompt is None:
            # Ranks may have been told of blocks for it already.
            self._ended.append(EndedPrompt(transfer_id, "", was_held=False, has_expired=False))
            return
        self._transfers.pop(prompt.request_id, None)
        self._ended.append(EndedPrompt(transfer_id, prompt.request_id, prompt.lease is not None, has_expired))


def handle_of(transfer_id: str) -> Handle:
    """Return the handle by which receivers name a transfer."""
    return Handle(transfer_id, TRANSFER_GENERATION)
