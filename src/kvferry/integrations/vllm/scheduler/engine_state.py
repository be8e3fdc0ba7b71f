"""The state of one engine that the parts of the scheduler's role share."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.handoff.holds import Holds
from kvferry.handoff.messages import EndPoint
from kvferry.handoff.remote_holds import LeaseKeeper
from kvferry.handoff.wire.trust import Trust
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.kept_blocks import KeptBlocks
from kvferry.integrations.vllm.scheduler.params import PromptAdapters
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import StepMetadata


@dataclass
class EngineState:
    """The state of one engine. ``step`` has the orders for the next step.

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
