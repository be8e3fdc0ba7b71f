"""The parts of a scheduler's role: a source and a destination, for pulls or for pushes, and their state.

The role (:mod:`role`) answers vLLM's calls and does the work that pull and push share; the parts do the rest. A part
defines the calls in which it has work; the others return at once.
"""

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.errors import KVFerryError
from kvferry.execution.guard_words import Held
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.holds import Hold, Holds
from kvferry.handoff.messages import EndPoint
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.hold_messages import LeaseKeeper
from kvferry.handoff.wire.trust import Trust
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, guarded_blocks
from kvferry.integrations.vllm.scheduler.kept_blocks import KeptBlocks
from kvferry.integrations.vllm.scheduler.prompt_adapters import PromptAdapters
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import PromptLoad, StepMetadata
from kvferry.plan.digest_cells import Integrity

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


NOTICED_SECONDS = 15.0
"""How long a router that asks an engine whether it is ready may still send requests to one that drains."""


@dataclass
class EngineState:
    """The state that the role and its parts share. ``step`` has the orders for the next step.

    ``holds_lock`` guards ``holds``, which the server's thread uses too. ``answers_at`` is set once the server runs.
    """

    settings: Settings
    engine_id: str
    epoch: int
    tp_size: int
    groups: Sequence[GroupShape]
    caches_prefixes: bool
    holds: Holds
    trust: Trust
    leases: LeaseKeeper
    adapters: PromptAdapters
    kept_blocks: KeptBlocks = field(default_factory=KeptBlocks)
    holds_lock: threading.Lock = field(default_factory=threading.Lock)
    step: StepMetadata = field(default_factory=StepMetadata)
    answers_at: EndPoint = field(default_factory=lambda: EndPoint("127.0.0.1", 1, 0))

    @property
    def keeps_digests(self) -> bool:
        """Whether the ranks keep digests of held blocks."""
        return self.settings.wanted_integrity is not Integrity.OFF

    def held_prompt(self, digest: str, num_tokens: int, block_ids: Sequence[Sequence[int]]) -> HeldPrompt:
        """Return what is held of a request's first ``num_tokens``, whose digest is given."""
        sizes = [group.block_size for group in self.groups]
        return HeldPrompt(digest, num_tokens, sizes, guarded_blocks(self.groups, sizes, block_ids, num_tokens))

    def held(self, hold: Hold, prompt: HeldPrompt) -> Held:
        """Return the guard word of a pull's hold, and what is held if the ranks keep digests of it or may write it."""
        assert hold.slot is not None, "a pull's hold has a guard word"
        word = guard_word(self.engine_id, self.epoch, hold.handle, prompt)
        is_used = self.keeps_digests or self.settings.held_prompts != "read"
        return Held(hold.slot, word, prompt if is_used else None)


class Source(Protocol):
    """The part that holds this engine's prompts for decode engines."""

    def begin(self, request: "Request") -> None:
        """The engine has given blocks to a request whose prompt goes to a decode engine."""

    def finish(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """Such a request has ended: hold its blocks if the prompt ``is_complete``; return the answer's parameters."""

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Add orders for the requests that the next step computes."""

    def forget(self, request_id: str) -> None:
        """The hold of a request has ended."""
        return

    def publish(self) -> None:
        """The engine answers handshakes in this epoch from now on."""
        return

    def withdraw(self) -> float:
        """The engine drains: tell routers of it no longer. Return for how many seconds they may still send to it."""
        return NOTICED_SECONDS

    def close(self) -> None:
        """Stop answering; twice is fine."""
        return


class Destination(Protocol):
    """The part that finds the prefill engines of this engine's requests."""

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """A new request names its prefill engine. Wrong parameters fail the request's load."""

    def is_expected(self, request_id: str) -> bool:
        """Return whether the request names a prefill engine."""

    def is_ready(self, request_id: str) -> bool:
        """Return whether the prefill engine of an expected request is known, or the error that fails its load."""
        return True

    def expect_turn(self, request: "Request", params: Mapping[str, Any]) -> None:
        """A new request for a decode engine may name that engine's hold of the conversation so far: load from there.

        Where that cannot be, the engine computes the prompt.
        """
        return

    def num_tokens_of_turn(self, request_id: str) -> int | None:
        """Return how many tokens of the conversation are held for an expected turn; None for any other request."""
        return None

    def is_gone(self, request_id: str) -> bool:
        """Return whether the hold of an expected turn has ended, or its engine has not answered in time."""
        return False

    def block_sizes(self, request_id: str) -> Sequence[int]:
        """Return the prefill engine's block sizes by cache group; none where they are not known."""

    def hold_of(self, request_id: str) -> RemoteHold | None:
        """Return the remote hold of an expected request; None while the hold is not known."""

    def check_adapter(self, request: "Request") -> None:
        """Raise :class:`HandoffError` for a prompt of an adapter that this engine must compute, since it cannot know
        whether the prefill engine's adapter has the same weights.
        """

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> PromptLoad:
        """Return the order to load these tokens. Raises :class:`KVFerryError` where they cannot be loaded."""

    def finish(self, request_id: str) -> None:
        """The request is done with its remote hold; unknown requests are ignored."""

    def refuse_expected(self, error_of: Callable[[str], KVFerryError], loading: Container[str]) -> None:
        """The prompts of all expected requests are out of date: fail those that are not ``loading``, each with its
        error. Ranks may still use the holds of the others.
        """

    def fail(self, request_id: str) -> None:
        """A load has failed in a rank: knowledge of its prefill engine may be out of date."""
        return

    def turn(self) -> None:
        """A step is being prepared: take answers that have come."""
        return

    @property
    def has_pending_work(self) -> bool:
        """Whether the next step has something to do although the engine has no request; any thread may ask."""
        return False

    @property
    def waits(self) -> bool:
        """Whether a peer is to answer before a request, or the release of an ended one, can go on."""
        return False
