"""What the offload connector knows of a request: its stored blocks, its question to the tiers, its promise."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.adapters import Adapters
from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks
from kvferry.peer_log import PeerLog
from kvferry.tiers.load_rule import Decision
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Promise

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))


@dataclass(slots=True, eq=False)
class Question:
    """The blocks of each group for which a request asks the tiers, from ``first_token`` to ``boundary``."""

    first_token: int
    boundary: int
    wanted: Mapping[str, Sequence[BlockKey]]
    wait_seconds: float = 0.0
    """How long the request waits for lower tiers."""
    asked_at: float = 0.0
    promise: Promise | None = None


@dataclass(slots=True, eq=False)
class Decided:
    """What was decided for a hit; vLLM asks for it again in each step until it has room for the request."""

    first_token: int
    boundary: int
    decision: Decision


@dataclass(slots=True, eq=False)
class OffloadRequest:
    """A request. ``num_written``: tokens whose keys and values lie in its blocks after the last step that was built."""

    request: "Request"
    blocks: RequestBlocks | None = None
    num_written: int = 0
    may_load: bool = True
    may_store: bool = True
    question: Question | None = None
    decided: Decided | None = None
    promised: int = 0
    """Tokens that were promised in this call of vLLM's ``schedule``."""
    waits_since: float | None = None
    """The first question of those in a row that had no answer."""


def wanted_blocks(blocks: RequestBlocks, first_token: int, boundary: int) -> dict[str, Sequence[BlockKey]]:
    """Return the keys of each group that a load of these tokens needs."""
    return {
        group.name: keys[begin:end]
        for group, keys, (begin, end) in zip(
            blocks.groups, blocks.keys, blocks.needed(first_token, boundary), strict=True
        )
    }


def names_of(request: "Request", names: BlockNames, adapters: Adapters) -> BlockNames | None:
    """Return the names for a request now; None where the weights of its adapter are unknown."""
    adapter = request.lora_request
    if adapter is None:
        return names
    try:
        return adapters.names(names, adapter.lora_path, adapter.lora_int_id, is_read_again=adapter.load_inplace)
    except OSError as error:
        told = "kvferry: %s loads and stores nothing: its adapter cannot be read: %s"
        logger.warning(told, request.request_id, error, peer=request.request_id)
        return None
