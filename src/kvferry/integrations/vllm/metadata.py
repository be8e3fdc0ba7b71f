"""What the scheduler's role tells the workers, once per engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvferry.errors import KVFerryError
from kvferry.handoff.decode_side import RemoteHold
from kvferry.handoff.guard import Held
from kvferry.plan.request import GroupBlocks


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One request's ``num_tokens`` prompt tokens to load, as blocks of every cache group.

    ``error`` set means that it is to be reported as failed at once.
    """

    request_id: str
    timeout_seconds: float
    hold: RemoteHold | None = None
    slot: int = 0
    num_tokens: int = 0
    blocks: tuple[GroupBlocks, ...] = ()
    error: KVFerryError | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of one step: ``written`` holds the words of held requests that it writes, ``ended`` slots.

    ``aborted`` loads are wanted no more, of ``lost`` ones the remote hold has ended.
    """

    written: list[Held] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """A rank's encoded :class:`kvferry.handoff.protocol.RankEntry`."""

    entry: bytes
