"""What the scheduler's role tells the workers, once per engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvferry.errors import KVFerryError
from kvferry.execution.guard_words import Held
from kvferry.handoff.messages import EndPoint
from kvferry.handoff.push.sender import Prompt
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.plan.request import GroupBlocks

MAX_HELD_REQUESTS = 16384
"""Guard words of each rank: more requests at a time are not exported."""


@dataclass(frozen=True, slots=True)
class PushedPrompt:
    """Which prompt is to be pushed: the router's id of the transfer, and what both sides compare."""

    transfer_id: str
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One request's ``num_tokens`` prompt tokens to load, as blocks of every cache group.

    ``error`` set means that it is to be reported as failed at once. With ``pushed`` nothing is read: the blocks, of
    which only the receiver's side counts, are announced.
    """

    request_id: str
    timeout_seconds: float
    hold: RemoteHold | None = None
    slot: int = 0
    num_tokens: int = 0
    blocks: tuple[GroupBlocks, ...] = ()
    error: KVFerryError | None = None
    pushed: PushedPrompt | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of one step: ``written`` holds the words of held requests that it writes, ``ended`` slots.

    One that ``computes`` nothing was begun only because something is pending.
    ``aborted`` loads are wanted no more, of ``lost`` ones the remote hold has ended. Of pushes: the ``prompts`` that it
    computes, by transfer id, and the transfers whose blocks it may overwrite, since they are ``preempted`` or
    ``ended_transfers``. ``set_aside`` are, with the rank that reported them, requests whose blocks are kept for as long
    as they are not quiet. The engine that gives the orders ``answers_at``.
    """

    computes: bool = True
    written: list[Held] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    prompts: list[tuple[str, Prompt]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended_transfers: list[str] = field(default_factory=list)
    set_aside: list[tuple[int, str]] = field(default_factory=list)
    answers_at: EndPoint | None = None


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """A rank's encoded :class:`kvferry.handoff.messages.RankEntry`."""

    entry: bytes
