"""One rank of this process: how peers know it, and what moves its bytes."""

from dataclasses import dataclass

from kvferry.execution.device import DeviceOrder
from kvferry.execution.executor import Executor
from kvferry.handoff.messages import Identity
from kvferry.handoff.wire.client import Client
from kvferry.transport.registry import TransportSet


@dataclass(frozen=True)
class OwnRank:
    """One rank. ``name`` is unique among all ranks, ``shard`` is encoded, ``end_points`` are those of the rank's memory
    in ``transports``.
    """

    name: str
    shard: bytes
    identity: Identity
    end_points: dict[str, bytes]
    transports: TransportSet
    executor: Executor
    order: DeviceOrder
    client: Client
    """Only a destination collects its answers."""
