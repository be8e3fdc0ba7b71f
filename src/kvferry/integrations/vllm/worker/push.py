"""What a worker has besides for pushes: a control end point of its own, and both sides of a push behind it."""

import logging
import secrets

from kvferry.execution.device import DeviceOrder
from kvferry.execution.executor import Executor
from kvferry.execution.pusher import Pusher
from kvferry.execution.receiver import Receiver
from kvferry.handoff.messages import Answer, EndPoint, Identity, Pushed, PushFailed, Question, Release
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.client import Courier
from kvferry.handoff.wire.server import Listener
from kvferry.integrations.vllm.step import StepMetadata
from kvferry.plan.layer_spans import LayerSpans
from kvferry.transport.registry import TransportSet

logger = logging.getLogger(__name__)

EPOCH_BITS = 53


class PushWorker:
    """One rank that may push and be pushed to; ``name`` tells it from all other ranks.

    ``hosts`` is where it listens, and where peers reach it; they may take ``answer_seconds`` to answer. With
    ``keeps_events`` results of pushes have events, and steps that compute prompts are kept.
    """

    def __init__(
        self,
        name: str,
        identity: Identity,
        shard: bytes,
        end_points: dict[str, bytes],
        parts: tuple[TransportSet, Executor, DeviceOrder],
        hosts: tuple[str, str],
        spans: LayerSpans,
        answer_seconds: float,
        keeps_events: bool,
    ) -> None:
        transports, executor, order = parts
        host, reachable_host = hosts
        self._epoch = secrets.randbits(EPOCH_BITS)
        self._answer_seconds = answer_seconds
        # One each: whoever collects answers takes all that have come.
        self._couriers = Courier(), Courier()
        sends, receives = self._couriers
        self.pusher = Pusher(shard, self._epoch, identity, transports, executor, sends, order, spans, keeps_events)
        self._receiver: Receiver | None = None
        self._listener = Listener(host, 0, self._answer)
        self.answers_at = EndPoint(reachable_host, self._listener.port, self._epoch)
        self._receiver = Receiver(
            name, identity, shard, end_points, self.answers_at, executor, receives, answer_seconds, keeps_events
        )

    @property
    def receiver(self) -> Receiver:
        """The side that is pushed to."""
        assert self._receiver is not None
        return self._receiver

    def take_back(self, orders: StepMetadata) -> None:
        """Void what is being read from blocks that the step may overwrite."""
        self.pusher.engine = None if orders.engine is None else orders.engine.where
        self.pusher.preempt(orders.preempted)
        self.pusher.end(orders.ended_transfers)

    def let_go(self, hold: RemoteHold) -> None:
        """A part of the push has failed here: the prefill engine need not go on for the others, which wait for all."""
        question = Release(hold.epoch, (hold.handle,))
        self._couriers[1].send(hold.host, hold.port, question, self._answer_seconds)

    def close(self) -> None:
        """Stop answering, after the executor has stopped writing: a receiver takes that for a proof that it has.

        Where a write has not ended yet, the listener ends with the process.
        """
        if self.pusher.is_quiet:
            self._listener.close()
        self.pusher.close()
        for courier in self._couriers:
            courier.close()

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, Pushed | PushFailed):
            return self.receiver.answer(question)
        return self.pusher.answer(question)
