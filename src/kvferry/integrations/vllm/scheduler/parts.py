"""What a scheduler's role is made of: a source part and a destination part, for pulls or for pushes, and their state.

The role (:mod:`role`) meets vLLM's calls and does what both modes share; a part does what differs.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.handoff.holds import Holds
from kvferry.handoff.messages import EndPoint
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.hold_messages import LeaseKeeper
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.kept_blocks import KeptBlocks
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import LoadOrder, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class EngineState:
    """What the role and its parts share. ``step`` are the orders of the step that is being prepared.

    ``holds_lock`` guards ``holds``, which the server's thread uses too. ``answers_at`` is known once the server runs.
    """

    settings: Settings
    engine_id: str
    epoch: int
    tp_size: int
    groups: Sequence[GroupShape]
    caches_prefixes: bool
    holds: Holds
    leases: LeaseKeeper
    kept_blocks: KeptBlocks = field(default_factory=KeptBlocks)
    holds_lock: threading.Lock = field(default_factory=threading.Lock)
    step: StepMetadata = field(default_factory=StepMetadata)
    answers_at: EndPoint = field(default_factory=lambda: EndPoint("127.0.0.1", 1, 0))


class Source(Protocol):
    """The part that holds the prompts of this engine for decode engines."""

    def begin(self, request: "Request") -> None:
        """The engine has given blocks to a request whose prompt another engine wants."""

    def finish(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """Such a request has ended: hold its blocks if the prompt ``is_complete``; return what to answer the client."""

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Order what the workers must know of the requests that the next step computes."""

    def forget(self, request_id: str) -> None:
        """The hold of a request has ended."""

    def publish(self) -> None:
        """The engine answers handshakes from now on."""

    def close(self) -> None:
        """Stop answering; twice is fine."""


class Destination(Protocol):
    """The part that knows where the prompts of this engine's requests come from."""

    timeout_seconds: float
    """After this a load fails."""

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """A new request names where its prompt comes from. Parameters that are wrong fail the request's load."""

    def is_expected(self, request_id: str) -> bool:
        """Return whether the request names where its prompt comes from."""

    def is_ready(self, request_id: str) -> bool:
        """Return whether the prefill engine of an expected request is known, or known to be unknowable."""

    def block_sizes(self, request_id: str) -> Sequence[int]:
        """Return the prefill engine's block sizes by cache group; none where they are not known."""

    def hold_of(self, request_id: str) -> RemoteHold | None:
        """Return the remote hold of an expected request, as far as it is known."""

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> LoadOrder:
        """Return the order to load these tokens. Raises :class:`KVFerryError` for what cannot be loaded."""

    def finish(self, request_id: str) -> None:
        """The request is done with its remote hold; unknown requests are ignored."""

    def fail(self, request_id: str) -> None:
        """A load has failed in a rank: what is known of its prefill engine may be out of date."""

    def turn(self) -> None:
        """A step is being prepared: go on with what waits for an answer."""

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must step although it has no request."""
