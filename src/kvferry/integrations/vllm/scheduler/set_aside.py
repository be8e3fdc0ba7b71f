"""Blocks of requests that have failed, kept because somebody may still write there.

A peer that vanished without a word, or is stopped, cannot say that it writes no more. Its request need not wait for
that: it fails, and only its blocks wait, by references of their own.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.scheduler.kept_blocks import HeldBlocks

logger = logging.getLogger(__name__)

BlockIds = Sequence[Sequence[int]]


class SetAside:
    """What each rank has reported of its requests whose blocks are not quiet; references are taken in ``held``.

    :meth:`note` is for the listener's thread, the rest for the scheduler's.
    """

    def __init__(self, held: HeldBlocks, num_ranks: int) -> None:
        self._held = held
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._reports: dict[int, tuple[int, frozenset[str]]] = {}
        self._has_news = False
        self._agreed: set[tuple[int, str]] = set()
        self._kept: set[str] = set()

    @property
    def has_news(self) -> bool:
        """Whether :meth:`turn` has something to do."""
        return self._has_news

    def note(self, rank: int, number: int, request_ids: Iterable[str]) -> None:
        """A rank reports all of its requests that are not quiet; the report with its largest number counts.

        Raises :class:`HandoffError` (invalid-request) for a rank that there is none of.
        """
        if rank >= self._num_ranks:
            raise HandoffError(
                Reason.INVALID_REQUEST, f"rank {rank} of {self._num_ranks} reports.", "Only this engine's ranks may."
            )
        with self._lock:
            if number > self._reports.get(rank, (0, frozenset()))[0]:
                self._reports[rank] = number, frozenset(request_ids)
                self._has_news = True

    def turn(self, loading: Mapping[str, BlockIds]) -> list[tuple[int, str]]:
        """Keep the blocks of the requests that were reported, let go those of which no rank reports any more.

        Return by rank the requests whose blocks are kept from now on, so that the rank may let the engine fail them.
        ``loading`` are the blocks of those that the engine waits for; another is none of its requests.
        """
        if not self._has_news:
            return []
        with self._lock:
            self._has_news = False
            reported = {(rank, request_id) for rank, (_, ids) in self._reports.items() for request_id in ids}
        for request_id in {request_id for _, request_id in reported} - self._kept:
            if request_id in loading:
                self._held.hold(_name(request_id), loading[request_id])
                self._kept.add(request_id)
        agreed = {(rank, request_id) for rank, request_id in reported if request_id in self._kept}
        for request_id in self._kept - {request_id for _, request_id in agreed}:
            self._kept.remove(request_id)
            self._held.free(_name(request_id))
            logger.warning("kvferry: nobody writes into the blocks of %s any more: they are free.", request_id)
        told, self._agreed = agreed - self._agreed, agreed
        return sorted(told)


def _name(request_id: str) -> str:
    return f"aside/{request_id}"
