"""The parts of a worker's role: a source and a destination, for pulls or for pushes, and the rank that they share.

The role (:mod:`role`) answers vLLM's calls and does the work that pull and push share; the parts do the rest. A part
defines the calls in which it has work; the others return at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.execution.device import Mark
from kvferry.execution.own_rank import OwnRank
from kvferry.execution.source_engines import SourceEngines
from kvferry.integrations.vllm.step import PromptLoad, StepMetadata


@dataclass(frozen=True)
class Rank(OwnRank):
    """One rank, which the role and its parts share."""

    source_engines: SourceEngines


class Source(Protocol):
    """The part that gives this rank's cache to other engines."""

    def void_transfers(self, orders: StepMetadata) -> None:
        """Void transfers out of blocks that the step may overwrite, before the step writes any block."""
        return

    def begin_step(self, orders: StepMetadata) -> None:
        """The step is about to run."""

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer."""
        return

    def finish_step(self) -> None:
        """The step has launched all of its writes."""

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps for the transfer log that have ended since the last call."""
        return ()

    def end_epoch(self, names: Sequence[str]) -> None:
        """The cache was reset, and the holds of these ``names`` have ended: let nobody take their blocks."""

    def end_holds(self) -> None:
        """The engine stops: its blocks are about to be freed. Twice is fine."""
        return

    def close(self) -> None:
        """Stop, once the executor has stopped; twice is fine."""
        return


class Destination(Protocol):
    """The part that fills this rank's cache."""

    def expect(self, order: PromptLoad, launched_before: Mark) -> None:
        """Prepare a load before the step computes; the load may fill its blocks once ``launched_before`` is over."""
        return

    def start(self, order: PromptLoad, launched_before: Mark) -> None:
        """Start the load; the step has begun to compute."""
        return

    def fail(self, order: PromptLoad) -> None:
        """The load has failed in this rank."""
        return

    def take_num_fences(self) -> int:
        """Return how many fences there were since the last call."""
        return 0
