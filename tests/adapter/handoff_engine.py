"""Engines without a model that hand prompts to one another: vLLM's scheduler, the connector and real bytes."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.scheduler import role as scheduler_role
from kvferry.integrations.vllm.worker import role as worker_role

from ..support.faults import FaultPlan, FaultyTransport, SwapRanges
from .label_engine import PATIENCE_SECONDS, LabelEngine
from .model_files import write_model
from .scheduler_requests import let_sleep
from .vllm_caches import CacheRank

WRONG_BYTES = FaultPlan(swap=SwapRanges(first=0, second=64, length=64))
"""Exchanges some bytes of what is written: only the digests show it."""
IDENTITY = Identity("m", "w", "a", "float32", 4, 4, 8, "none", "float32")


class Answer(msgspec.Struct, frozen=True):
    """The end of a request: its new tokens, a prefill engine's parameters, and whether the client gets an error."""

    tokens: list[int]
    params: dict[str, Any]
    has_failed: bool


class HandoffEngine(LabelEngine):
    """An engine with the connector, which prefills and decodes."""

    def __init__(self, rank: CacheRank, model: Path, engine_id: str, *, layout: str, **given: Any) -> None:
        arguments = {name: given.pop(name) for name in ("asynchronous", "otlp_traces_endpoint") if name in given}
        extra = {"transport": "cma", "lease_seconds": 600.0, **given}
        policy = {
            "kv_load_failure_policy": extra.pop("failure_policy", "fail"),
            "kv_role": extra.pop("kv_role", "kv_both"),
        }
        connector = {"kv_connector": "KVFerryConnector", "kv_connector_extra_config": extra}
        transfer = {**connector, **policy, "engine_id": engine_id}
        super().__init__(rank, model, transfer, layout=layout, **arguments)
        self.connector: Any = self.scheduler.connector
        let_sleep(self.connector._scheduler)
        self.connector._scheduler._engine._core.scheduler = self.scheduler
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def ask(
        self, name: str, prompt: Sequence[int], params: dict[str, Any], max_tokens: int = 3, **parts: Any
    ) -> Answer:
        """Run a request with these ``kv_transfer_params``, and whatever the connector has to do behind it.

        ``parts`` are others of vLLM's request: a salt, an adapter.
        """
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, **parts)
        self.scheduler.add_request(request)
        assert request.prompt_token_ids is not None
        # The connector may have left the last token to the decode engine.
        self._tokens[name] = list(request.prompt_token_ids)
        tokens: list[int] = []
        answered: dict[str, Any] = {}
        has_failed = False
        until, steps = time.monotonic() + PATIENCE_SECONDS, deque[tuple[Any, Any]]()
        while self.scheduler.has_requests() or steps:
            assert time.monotonic() < until, "the engine does not come to an end"
            output = self.scheduler.schedule()
            steps.append((output, self._execute(output)))
            while steps and (len(steps) >= self._depth or not self.scheduler.has_unfinished_requests()):
                for outputs in self.scheduler.update_from_output(*steps.popleft()).values():
                    for each in outputs.outputs:
                        tokens += each.new_token_ids
                        answered |= each.kv_transfer_params or {}
                        has_failed |= each.finish_reason is FinishReason.ERROR
        return Answer(tokens, answered, has_failed)

    @contextmanager
    def writes_with(self, plan: FaultPlan) -> Iterator[None]:
        """Let faults change what this engine writes meanwhile."""
        role: Any = self.worker._worker
        transports, destinations = role._transports.transports, role._source.writer.destinations

        def connect_by(transport: Any) -> None:
            transports["cma"] = transport
            for known in destinations.known.values():
                destinations.connect_anew(known)

        inner = transports["cma"]
        connect_by(FaultyTransport(inner, plan))
        try:
            yield
        finally:
            connect_by(inner)

    def release(self, *request_ids: str) -> None:
        """End the holds of these requests, or all holds; the engine's next step frees their blocks."""
        state = self.connector._scheduler._state
        with state.holds_lock:
            for hold in list(state.holds._holds.values()):
                if not request_ids or hold.request_id in request_ids:
                    state.holds.release(state.epoch, [hold.handle])


def configure_logs() -> None:
    """Do before the test what vLLM does since 0.31 with its first configuration: close its logger to pytest.

    Pytest listens at loggers that are closed when the test begins, and misses one that is closed during the test.
    """
    try:
        from vllm.config import LoggingConfig
        from vllm.logger import configure_logging_if_needed
    except ImportError:
        return
    configure_logging_if_needed(LoggingConfig())


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes an engine with caches for these layers."""
    configure_logs()
    register()
    model = write_model(tmp_path / "model")
    made: list[HandoffEngine] = []

    def make(
        specs: dict[str, Any], layout: str = "LBHNC", num_blocks: int = 30, engine_id: str = "", **given: Any
    ) -> HandoffEngine:
        rank = CacheRank(specs, layout, num_blocks=num_blocks)
        for name, value in {
            "get_tensor_model_parallel_rank": 0,
            "get_pp_group": SimpleNamespace(rank_in_group=0),
            "register_caches": rank.shard,
            "identity_of": IDENTITY,
        }.items():
            monkeypatch.setattr(worker_role, name, lambda *_, value=value: value)
        monkeypatch.setattr(scheduler_role, "identity_of", lambda *_: IDENTITY)
        made.append(HandoffEngine(rank, model, engine_id or f"engine-{len(made)}", layout=layout, **given))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
