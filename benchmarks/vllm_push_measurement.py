"""A vLLM worker extension that measures pushes and changes their grain while the engine runs, for benchmarks only."""

import json
from typing import TYPE_CHECKING

from vllm_stopwatch import StopwatchExtension

from kvferry.plan.push_grain import Grain

if TYPE_CHECKING:
    from kvferry.execution.pusher import Pusher


class PushMeasurementExtension(StopwatchExtension):
    """The worker extension of an engine with ``"push_grain": "auto"``; see :mod:`vllm_stopwatch`."""

    def force_grain(self, text: str) -> list[object]:
        """Push in this grain from now on: JSON of its name, ``null`` for the choice by measured times, and a length.

        Only lengths that the choice considers are at hand: 1, 2, 4 and so on.
        """
        name, layers_per_span = json.loads(text)
        grains = _pusher().grains
        grains.layers_per_span = layers_per_span
        grains.wish = None if name is None else Grain(name)
        return [name, layers_per_span]


def _pusher() -> "Pusher":
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvferry.integrations.vllm.connector import KVFerryConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, KVFerryConnector)
    push = connector._worker._push
    assert push is not None, "the engine pushes"
    return push.pusher
