"""Traps of vLLM 0.32 that are hard to find, through vLLM's own objects, without an engine."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvferry.errors import HandoffError, Reason
from kvferry.execution.executor import Executor, JobResult, Phase
from kvferry.handoff.holds import lease_lost
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import PromptLoad, StepMetadata
from kvferry.integrations.vllm.translate import group_shapes
from kvferry.plan.match import GroupBlocks

from .scheduler_requests import FULL, PROMPT, STATE, allocated, next_step, request, run_prefill
from .test_vllm_states import DESTINATION_BLOCK, KINDS, SOURCE_BLOCK, Rank, carry_out
from .vllm_caches import CacheRank, full, move, window
from .worker_roles import make_worker_role


def test_trap_1_the_last_prompt_token_does_not_advance_a_mamba_state_twice(make_role: Any) -> None:
    """Mamba and "N-1": the prefill side drops the last token, the decode side asks for one less and computes it."""
    prefill, decode = make_role(FULL, STATE), make_role(FULL, STATE)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [9], max_tokens=20)
    assert params is not None
    assert params["kvferry"]["num_tokens"] == len(PROMPT) - 1
    ours = request(PROMPT, params, "d", max_tokens=8)
    decode.on_new_request(ours)
    assert decode.get_num_new_matched_tokens(ours, 0) == (len(PROMPT) - 1, True)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [16]), len(PROMPT) - 1)
    [order] = next_step(decode).loads
    assert order.error is None
    assert [blocks.last_token for blocks in order.blocks] == [len(PROMPT) - 1, 1]
    assert params["remote_block_ids"] == [[5, 4, 3, 2, 1], [9]]


@pytest.mark.parametrize(("sent", "received"), [("SD", "DS"), ("DS", "SD"), (None, "DS")])
def test_trap_4_conv_states_in_the_order_that_a_nixl_connector_asks_for(
    sent: str | None, received: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM sets the order DS for connectors named Nixl* only; beside one (or told to) a peer has it, we have SD."""

    def engine(order: str | None, tp_size: int) -> list[Rank]:
        monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
        if order:
            monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", order)
        get_conv_state_layout.cache_clear()
        return [Rank(KINDS["mamba2"], rank, tp_size) for rank in range(tp_size)]

    sources = engine(sent, 2)
    for rank in sources:
        rank.label(SOURCE_BLOCK)
    [destination] = engine(received, 1)
    carry_out(sources, destination)
    destination.check(DESTINATION_BLOCK)


def test_trap_5_a_mamba_layer_is_a_view_of_bytes_and_shared_layers_are_in_the_dict_only() -> None:
    """The shapes of conv and SSM states are in the specification; ``c`` reads the cache of ``a`` and is no group's."""
    kind = KINDS["mamba2"]
    spec = MambaSpec(
        shapes=kind.shapes(1),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=4096,
        page_size_padded=full(1).page_size_bytes,
        mamba_type=kind.backend,
    )
    ranks = [
        CacheRank({"m": spec, "a": full(1)}, layout, modules={"m": kind.layer(1)}, shared={"c": "a"})
        for layout in ("LBHNC", "BLHNC")
    ]
    state, attention = (ranks[0].groups().index([name]) for name in "ma")
    requests = [_whole(attention, 40, [7, 2, 9], [3, 8, 1]), _whole(state, 1, [4], [5])]
    for rank in ranks:
        view = rank.caches["m"]
        assert (view.dtype, tuple(view.shape[1:3])) == (torch.int8, (1, 1))
        assert {layer for group in rank.shard.groups for layer in group.layers} == {"m", "a"}
    source, destination = ranks
    source.label(requests)
    source.caches["m"][4] = torch.arange(source.caches["m"].shape[3]) % 97 + 1
    move([source], destination, requests)
    assert torch.equal(destination.caches["m"][5], source.caches["m"][4])
    destination.caches["m"][5] = 0
    destination.check(requests[:1], 48)


def _whole(group: int, num_tokens: int, source_ids: list[int], destination_ids: list[int]) -> GroupBlocks:
    return GroupBlocks(
        group=str(group),
        first_token=0,
        last_token=num_tokens,
        source_block_ids=source_ids,
        destination_block_ids=destination_ids,
    )


@pytest.mark.parametrize("layouts", [("LBHNC", "BLHNC"), ("BLHNC", "LBHNC")])
@pytest.mark.parametrize(("source_size", "destination_size"), [(1, 2), (2, 1)])
def test_trap_6_groups_interleave_their_layers_and_shorter_ones_leave_the_tail_of_a_row(
    layouts: tuple[str, str], source_size: int, destination_size: int
) -> None:
    """VLLM's own groups: ``layers[i::num_groups]``, so that the index within a group is no range of the model's."""

    def engine(layout: str, tp_size: int) -> list[CacheRank]:
        specs = {str(layer): full(tp_size) if layer % 3 == 2 else window(tp_size) for layer in range(7)}
        return [CacheRank(specs, layout, (rank, tp_size)) for rank in range(tp_size)]

    sources, destinations = engine(layouts[0], source_size), engine(layouts[1], destination_size)
    assert sources[0].groups() == [["0", "4"], ["1", "6"], ["3"], ["2", "5"]]
    ids = [([1 + 2 * group, 2 + 2 * group], [10 - 2 * group, 9 - 2 * group]) for group in range(4)]
    requests = [_whole(group, 32, *pair) for group, pair in enumerate(ids)]
    for rank in sources:
        rank.label(requests)
    for rank in destinations:
        move(sources, rank, requests)
        rank.check(requests, 32)


@pytest.mark.parametrize("sizes", [(48, 32), (32, 48)])
def test_trap_7_block_sizes_differ_without_anybody_asking(sizes: tuple[int, int], make_role: Any) -> None:
    """A hybrid's block size depends on TP: P and D each have their own, which the answer tells and the load obeys."""
    source, destination = (CacheRank({"0": full(1, size), "1": full(1, size)}, "BLHNC") for size in sizes)
    prefill, decode = (make_role(*group_shapes(rank.config)) for rank in (source, destination))
    blocks = [list(range(5, 5 - -(-len(PROMPT) // size), -1)) for size in sizes]
    params = run_prefill(prefill, PROMPT, blocks[0])
    assert params is not None
    assert params["kvferry"]["block_sizes"] == [sizes[0]]
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    num_tokens, _ = decode.get_num_new_matched_tokens(ours, 0)
    decode.update_state_after_alloc(ours, allocated(blocks[1]), num_tokens)
    [order] = next_step(decode).loads
    assert order.error is None
    [of_load] = order.blocks
    moved = [replace(of_load, source_block_ids=blocks[0])]
    source.label(moved)
    move([source], destination, moved)
    destination.check(moved, num_tokens)


def test_trap_8_asking_again_has_no_effect_and_the_load_is_ordered_once(make_role: Any) -> None:
    """``get_num_new_matched_tokens`` is called again after a failed allocation, preemption and load failure."""
    prefill, decode = make_role(FULL), make_role(FULL)
    ours = request(PROMPT, run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}, "d")
    decode.on_new_request(ours)
    assert {decode.get_num_new_matched_tokens(ours, 16) for _ in range(3)} == {(64, True)}
    assert next_step(decode).loads == [], "ordered by a question"
    decode.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 64)
    assert len(next_step(decode).loads) == 1
    assert decode.get_num_new_matched_tokens(ours, 0) == (0, False)
    decode.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 0)
    assert next_step(decode).loads == []


def test_trap_8_an_answer_that_was_dropped_lets_the_remote_hold_go(make_role: Any) -> None:
    """The answer may be dropped (``prompt_logprobs``, partial tails): without external tokens the hold is released."""
    prefill, decode = make_role(FULL), make_role(FULL)
    ours = request(PROMPT, run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}, "d")
    decode.on_new_request(ours)
    decode.get_num_new_matched_tokens(ours, 0)
    assert decode._state.leases._holds._uses
    decode.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 0)
    assert not decode._state.leases._holds._uses
    assert next_step(decode).loads == []


def test_trap_10_vllm_ascend_14142_a_rejection_before_admission_lets_the_remote_hold_go(make_role: Any) -> None:
    """It arrives as a request that is aborted at once, with the prompt ``[0]``: made here by vLLM itself."""
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    admitted: list[Any] = []

    async def admit(found: Any) -> None:
        admitted.append(found)

    front: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=admit))
    asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(front, "d", params or {}))
    [rejected] = admitted
    assert (rejected.prompt_token_ids, rejected.abort_immediately) == ([0], True)
    ours = Request.from_engine_core_request(rejected, None)
    decode.on_new_request(ours)
    assert decode._state.leases._holds._uses
    assert decode.request_finished(ours, ([],), is_complete=False) == (False, None)
    assert not decode._state.leases._holds._uses
    assert next_step(decode).loads == []


class Ended:
    """A load that is over when the executor first looks at it."""

    fills_blocks, is_for_log, can_wait = True, False, False
    given_up_at: float | None = None

    def __init__(self, job_id: str, error: HandoffError | None) -> None:
        self.job_id, self.error, self.phase = job_id, error, Phase.PREPARING

    def advance(self, now: float) -> bool:
        self.phase = Phase.DONE
        return True

    def is_ending(self, now: float) -> bool:
        return False

    def cancel(self, error: HandoffError) -> None:
        self.error = self.error or error

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id, self.error)


class CountedRank:
    """A worker's role with an executor, without an engine; its loads fail as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.role = make_worker_role(monkeypatch, Settings(transport="cma"))
        self.executor = Executor()
        self.role._rank = SimpleNamespace(executor=self.executor, client=SimpleNamespace(close=lambda: None))
        self.role._account = lambda result: None

    def submit(self, request_id: str, error: HandoffError | None) -> None:
        self.role._orders[request_id] = PromptLoad(request_id, 20.0)
        self.executor.submit(Ended(request_id, error))

    def output(self) -> Any:
        received, failed = self.role.take_finished()
        output = KVConnectorOutput(finished_recving=received, failed_recving=failed)
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


def test_trap_11_every_rank_reports_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aggregator counts each rank once: a double report leaves a counter that never reaches zero.

    Four requests on two ranks: one is received, one fails, one is refused before it starts, one is aborted besides.
    """
    error = HandoffError(Reason.SOURCE_CHANGED, "the source changed.")
    ranks, aggregator = [CountedRank(monkeypatch) for _ in range(2)], KVOutputAggregator(2)
    ended: list[str] = []
    failed: set[str] = set()
    try:
        for rank in ranks:
            rank.submit("received", None)
            rank.submit("failed", error)
            rank.submit("aborted", error)
            refused = PromptLoad("refused", 1.0, error=lease_lost("refused"))
            orders = StepMetadata(loads=[refused], aborted=["aborted"])
            rank.role.begin_step(orders)
            rank.role.end_loads(orders)
        end = time.monotonic() + 20
        last = 0.0
        while time.monotonic() < end and (last == 0.0 or time.monotonic() < last + 0.1):
            found = aggregator.aggregate([rank.output() for rank in ranks])
            assert found is not None
            assert found.kv_connector_output is not None
            ended += sorted(found.kv_connector_output.finished_recving or ())
            failed |= found.kv_connector_output.failed_recving
            last = last or (time.monotonic() if len(ended) >= 4 else 0.0)
            time.sleep(0.002)
    finally:
        for rank in ranks:
            rank.role.shutdown()
    assert sorted(ended) == ["aborted", "failed", "received", "refused"]
    assert failed == {"aborted", "failed", "refused"}
    assert aggregator._recv_remaining_count == {}
    # What the scheduler refused is counted beside what the transfers did, which this rank does not account for.
    assert [rank.role.take_statistics().data["failures"] for rank in ranks] == [{"lease-expired": 1}] * 2
