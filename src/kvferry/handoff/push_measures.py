"""What computing and pushing take here: running medians of an engine's own steps and of its own batches."""

import threading
from collections import deque
from statistics import median
from typing import TypeVar

from kvferry.plan.push_grain import Amount, Wire
from kvferry.plan.staging.strategy import typical_costs

NUM_KEPT = 15
TYPICAL_BATCH_SECONDS = 0.5e-3
"""From a wake of the transfer thread to a batch posted and found landed, but for the moving itself."""
PACKED = " by gather"
"""Behind a transport's name: what is packed before it is written takes the time of the copy too."""

Key = TypeVar("Key", int, str)


class Measures:
    """Safe to use from any thread.

    >>> measures = Measures()
    >>> measures.note_step(num_tokens=256, seconds_per_layer=0.002)
    >>> measures.seconds_per_layer(300), measures.seconds_per_layer(8)
    (0.002, 0.002)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[int, deque[float]] = {}
        self._batches: dict[str, deque[float]] = {}
        self._rates: dict[str, deque[float]] = {}

    def note_step(self, num_tokens: int, seconds_per_layer: float) -> None:
        """A step has computed so many tokens of prompts."""
        if num_tokens > 0:
            with self._lock:
                self._kept(self._layers, num_tokens.bit_length()).append(seconds_per_layer)

    def seconds_per_layer(self, num_tokens: int) -> float | None:
        """Return how long a layer takes for about so many tokens, None before the first step.

        It is that of steps within a factor of two, else of those nearest in size.
        """
        size = num_tokens.bit_length()
        with self._lock:
            if not self._layers:
                return None
            return median(self._layers[min(self._layers, key=lambda each: (abs(each - size), each))])

    def note_batch(self, transport: str, amount: Amount, seconds: float) -> None:
        """A batch has landed so long after it was posted.

        One that mostly moves tells of the rate, beside what is typical of the transport; one of next to nothing tells
        what every batch takes.
        """
        wire, typical = self.wire(transport), _typical(transport)
        moving, typically = (each.seconds(amount) - each.seconds_per_batch for each in (wire, typical))
        with self._lock:
            if moving > wire.seconds_per_batch:
                found = max(seconds - wire.seconds_per_batch, 0.1 * seconds)
                self._kept(self._rates, transport).append(found / typically)
            else:
                self._kept(self._batches, transport).append(max(seconds - moving, 0.0))

    def wire(self, transport: str) -> Wire:
        """Return what moving takes over a transport: what is typical of it, and as much slower as was measured."""
        wire = _typical(transport)
        with self._lock:
            rates, batches = self._rates.get(transport), self._batches.get(transport)
            slower = median(rates) if rates else 1.0
            batch = median(batches) if batches else wire.seconds_per_batch
        return Wire(wire.seconds_per_descriptor * slower, wire.seconds_per_byte * slower, batch)

    def _kept(self, by_key: dict[Key, deque[float]], key: Key) -> deque[float]:
        return by_key.setdefault(key, deque(maxlen=NUM_KEPT))


def _typical(transport: str) -> Wire:
    costs = typical_costs(transport.removesuffix(PACKED))
    per_copied_byte = 1 / costs.copy_bytes_per_second if transport.endswith(PACKED) else 0.0
    return Wire(costs.seconds_apart, 1 / costs.bytes_per_second + per_copied_byte, TYPICAL_BATCH_SECONDS)
