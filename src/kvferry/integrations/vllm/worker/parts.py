"""What a worker's role is made of: a source part and a destination part, for pulls or for pushes, and their rank.

The role (:mod:`role`) meets vLLM's calls and does what both modes share; a part does what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.execution.device import DeviceOrder, Mark
from kvferry.execution.executor import Executor
from kvferry.execution.route import Routes
from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm.step import LoadOrder, StepMetadata
from kvferry.transport.registry import TransportSet


@dataclass(frozen=True)
class Rank:
    """What the role and its parts share: one rank, whose ``name`` no other rank has and whose ``shard`` is encoded."""

    name: str
    shard: bytes
    identity: Identity
    end_points: dict[str, bytes]
    transports: TransportSet
    executor: Executor
    order: DeviceOrder
    routes: Routes


class Source(Protocol):
    """The part that lets other engines have this rank's cache."""

    def take_back(self, orders: StepMetadata) -> None:
        """Void reads of blocks that the step may overwrite, before the step touches any block."""

    def begin_step(self, orders: StepMetadata) -> None:
        """The step is about to run."""

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer."""

    def finish_step(self) -> None:
        """The step has launched everything that it writes."""

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps that the transfer log wants to know of and that have ended since the last call."""

    def end_holds(self) -> None:
        """The engine stops: its blocks are about to go. Twice is fine."""

    def close(self) -> None:
        """Stop, after the executor has; twice is fine."""


class Destination(Protocol):
    """The part that fills this rank's cache."""

    def expect(self, order: LoadOrder, launched_before: Mark) -> None:
        """A load is ordered, before the step computes; the blocks are clear once ``launched_before`` is over."""

    def start(self, order: LoadOrder, launched_before: Mark) -> None:
        """The step has begun to compute."""

    def fail(self, order: LoadOrder) -> None:
        """The load has failed in this rank."""

    def close(self) -> None:
        """Stop, after the executor has; twice is fine."""
