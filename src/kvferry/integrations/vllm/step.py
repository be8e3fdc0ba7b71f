"""The orders of the scheduler's role to the workers, once per engine step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.errors import KVFerryError
from kvferry.handoff.messages import EndPoint, Identity
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import Prompt
from kvferry.plan.match import GroupBlocks

MAX_HELD_REQUESTS = 16384
"""At most so many prompts that are no transfers are held at a time."""


@dataclass(frozen=True, slots=True)
class AnnouncedPrompt:
    """What a destination announces of a prompt: the transfer id of its hold, and what both engines compare: tokens,
    digest, and the digest of its adapter's weights, empty where there is none.
    """

    transfer_id: str
    num_tokens: int
    digest: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """One request's ``num_tokens`` prompt tokens to load, as blocks of every cache group.

    A worker reports an order with an ``error`` as failed at once; any other one it announces to the source ranks of the
    ``hold``, whose engine has blocks of ``source_block_sizes``. They may learn of the hold ``late_seconds`` later. The
    engine computes what an ``is_optional`` load does not bring. ``trace_headers`` are those of the client that name its
    span, if any; None where vLLM's tracing is off.
    """

    request_id: str
    timeout_seconds: float
    hold: RemoteHold | None = None
    num_tokens: int = 0
    blocks: tuple[GroupBlocks, ...] = ()
    error: KVFerryError | None = None
    announced: AnnouncedPrompt | None = None
    source_block_sizes: tuple[int, ...] = ()
    late_seconds: float = 0.0
    is_optional: bool = False
    trace_headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EngineEndPoint:
    """Where the scheduler of this engine answers its workers, and the ``secret`` that their reports carry."""

    where: EndPoint
    secret: bytes = field(repr=False)  # vLLM logs the orders of a step that fails


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of one step.

    ``computes`` is false for a step that computes no token. ``wait_seconds``: how long the step waits where the engine
    waits for what no rank is told of; else 0.

    Prompts are named by transfer id. ``prompts`` are those of routers' transfers that the step computes, in part or to
    the end; ``finished`` are held ones that the step computes to their end; ``held`` are those of ended requests, which
    earlier steps have computed. The step may overwrite the blocks of transfers that are ``preempted`` or
    ``ended_transfers``. The engine drains and has refused ``refused_transfers``.

    The requests of ``aborted`` loads have ended, and the remote holds of ``lost`` loads; ``outdated`` loads bring
    prompts of before a reset of the cache. ``quarantined`` are requests whose blocks are kept while a peer may still
    write into them, each with the rank that reported the request.
    """

    computes: bool = True
    wait_seconds: float = 0.0
    prompts: list[tuple[str, Prompt]] = field(default_factory=list)
    finished: list[tuple[str, Prompt]] = field(default_factory=list)
    held: list[tuple[str, Prompt]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended_transfers: list[str] = field(default_factory=list)
    refused_transfers: list[str] = field(default_factory=list)
    loads: list[PromptLoad] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
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
