"""The events of one push with their times: plain data for the transfer log.

All times are seconds of the host's monotonic clock, which its processes share.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.handoff.push.sender import Batch, PushRequest
from kvferry.plan.layer_spans import Span

MAX_BATCHES = 1024
"""Batches kept of one push; later ones are only counted."""


class PushEvents:
    """The events of one push; ``layers_of`` names the layers of each span that is not all layers of its group."""

    def __init__(self, request: PushRequest, layers_of: Mapping[Span, Sequence[str]]) -> None:
        self._request, self._layers_of = request, layers_of
        self._announced_at = time.monotonic()
        self._batches: list[dict[str, Any]] = []
        self._num_left_out = 0
        self._latest: dict[str, Any] = {}

    def posted(self, batch: Batch, num_descriptors: int, num_bytes: int, now: float) -> None:
        """The source has submitted a batch to the transport."""
        self._latest = {"posted_at": now, "landed_at": None, "bytes": num_bytes, "descriptors": num_descriptors}
        if len(self._batches) == MAX_BATCHES:
            self._num_left_out += 1
            return
        self._latest["spans"] = [
            {
                "group": cut.span.group,
                "layers": list(self._layers_of.get(cut.span, ())),
                "tokens": [cut.first_token, cut.end_token],
            }
            for cut in batch
        ]
        self._batches.append(self._latest)

    def landed(self, now: float) -> None:
        """The batch has landed. A batch that failed or was stopped never lands."""
        self._latest["landed_at"] = now

    def as_dict(self) -> dict[str, Any]:
        """Return the events, ready for JSON; empty ``layers`` mean all layers of the group."""
        return {
            "transfer_id": self._request.transfer_id,
            "receiver": self._request.key.receiver,
            "num_tokens": self._request.num_tokens,
            "clock": clock(),
            "announced_at": self._announced_at,
            "batches": self._batches,
            "batches_left_out": self._num_left_out,
        }


def clock() -> dict[str, float]:
    """Return the time of day and the monotonic time of one moment, so that logs of two hosts can be compared.

    >>> sorted(clock())
    ['monotonic', 'wall']
    """
    return {"wall": time.time(), "monotonic": time.monotonic()}
