"""The orders of the scheduler's role to the workers, once per engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.errors import KVFerryError
from kvferry.execution.guard_words import Held
from kvferry.handoff.messages import EndPoint, Handle, Identity
from kvferry.handoff.source import Prompt
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.plan.request import GroupBlocks

EPOCH_BITS = 53  # an epoch passes through JSON, which routers may parse as a double
MAX_HELD_REQUESTS = 16384
"""Guard words of each rank: at most so many requests are held at a time."""


@dataclass(frozen=True, slots=True)
class AnnouncedPrompt:
    """A prompt to be pushed: its transfer id, the router's or a guard word, and what both engines compare: tokens,
    digest, and the digest of its adapter's weights, empty where there is none.
    """

    transfer_id: str
    num_tokens: int
    digest: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """One request's ``num_tokens`` prompt tokens to load, as blocks of every cache group.

    A worker reports an order with an ``error`` as failed at once. An order without a guard word ``held`` is announced
    and has no source blocks; any other order is read under that word, or announced as ``pushed`` where the source
    writes what it holds. ``is_late`` says that the source sets the word with its next step. The engine computes what
    an ``is_optional`` load does not bring.
    """

    request_id: str
    timeout_seconds: float
    hold: RemoteHold | None = None
    held: Held | None = None
    num_tokens: int = 0
    blocks: tuple[GroupBlocks, ...] = ()
    error: KVFerryError | None = None
    pushed: AnnouncedPrompt | None = None
    is_late: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class EngineEndPoint:
    """Where the scheduler of this engine answers its workers, and the ``secret`` that their reports carry."""

    where: EndPoint
    secret: bytes = field(repr=False)  # vLLM logs the orders of a step that fails


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of one step.

    ``computes`` is false for a step that computes no token. ``wait_seconds``: how long the step waits where the engine
    waits for what no rank is told of; else 0. ``written`` are the guard words of requests whose prompt
    the step computes to its end, ``late`` the words of finished requests that earlier steps have written;
    ``ended_slots`` are the slots to clear before. The requests of ``aborted`` loads have ended, and the remote holds
    of ``lost`` loads; ``outdated`` loads bring prompts of before a reset of the cache. ``prompts`` are the pushed
    prompts that the step computes, by transfer id; the step may overwrite the blocks of transfers that are
    ``preempted`` or ``ended_transfers``. The engine drains and has refused ``refused_transfers``. ``quarantined`` are
    requests whose blocks are kept while a peer may still write into them, each with the rank that reported the request.
    """

    computes: bool = True
    wait_seconds: float = 0.0
    written: list[Held] = field(default_factory=list)
    late: dict[Handle, Held] = field(default_factory=dict)
    ended_slots: list[int] = field(default_factory=list)
    loads: list[PromptLoad] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    prompts: list[tuple[str, Prompt]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended_transfers: list[str] = field(default_factory=list)
    refused_transfers: list[str] = field(default_factory=list)
    quarantined: list[tuple[int, str]] = field(default_factory=list)
    engine: EngineEndPoint | None = None


@dataclass
class FailedTurns(KVConnectorWorkerMetadata):
    """The optional loads that have failed in a rank since its last step; vLLM aggregates those of all ranks."""

    request_ids: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FailedTurns":
        """Return the failed loads of both."""
        assert isinstance(other, FailedTurns)
        return FailedTurns(self.request_ids | other.request_ids)


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """A rank's encoded :class:`kvferry.handoff.messages.RankEntry`, and the identity that the rank found."""

    entry: bytes
    identity: Identity
