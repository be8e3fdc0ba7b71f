"""A reset of an engine's cache: weights were changed in place, and nothing that was computed before may be loaded."""

import queue
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.request import Request

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.destination import SourceEngines
from kvferry.handoff.handshake import fetch_directory
from kvferry.handoff.holds import handle_of_transfer
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Announce,
    DirectoryRequest,
    EndPoint,
    RankEntry,
    Release,
    Renew,
    StillWriting,
)
from kvferry.handoff.wire.bootstrap import BootstrapQueries
from kvferry.integrations.vllm.engine_core import ROLES, end_former_epoch
from kvferry.integrations.vllm.scheduler.blocks import KeptBlocks

from ..waits import wait_until
from .flows import to_decode
from .handoff_engine import make_engine
from .scheduler_requests import FULL, PROMPT, allocated, handle_of, kept, next_step, request, run_prefill
from .vllm_caches import full

__all__ = ["make_engine"]
BLOCKS, OTHERS = [5, 4, 3, 2, 1], [11, 12, 13, 14, 15]
RANK = RankEntry(0, 0, b"", {}, EndPoint("127.0.0.1", 1, 1))


class Core:
    """vLLM's engine core, as far as a reset needs it: calls every worker, and knows the version of the weights."""

    def __init__(self, role: Any) -> None:
        self.role = role
        self.version = "default"
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.calls: list[tuple[Any, ...]] = []
        self.kept_at_call: list[list[int]] = []

    def get_weight_version(self) -> str:
        return self.version

    def collective_rpc(self, function: Any, timeout: float | None, arguments: tuple[Any, ...]) -> None:
        assert function is end_former_epoch
        self.calls.append(arguments)
        self.kept_at_call.append(sorted(kept(self.role)))


def with_core(role: Any) -> Core:
    core = role._engine._core = Core(role)
    role._engine.can_wake = True
    return core


def test_hole_7_a_reset_ends_all_holds_and_the_ranks_know_before_a_block_is_free(make_role: Any) -> None:
    role = make_role(FULL)
    core = with_core(role)
    role.publish([RANK])
    params = run_prefill(role, PROMPT, BLOCKS)
    computing = request(PROMPT, {"do_remote_decode": True}, "computing")
    role.update_state_after_alloc(computing, allocated(OTHERS), 0)
    assert params is not None
    epoch, handle = params["kvferry"]["epoch"], handle_of(params)
    assert role.reset_cache() is True
    assert core.calls == [(role._state.epoch, "default")]
    assert core.kept_at_call == [[1, 2, 3, 4, 5]], "freed before the writes were ended"
    assert kept(role) == []
    for ask in (Renew(epoch, (handle,)), Release(epoch, (handle,))):
        with pytest.raises(HandoffError) as refused:
            role._answer(ask)
        assert refused.value.reason is Reason.PEER_CHANGED
    assert role._answer(DirectoryRequest(PROTOCOL_VERSION, PROTOCOL_VERSION, "d")).epoch != epoch
    # A request that was under way has blocks of both epochs: its answer names no hold.
    assert role.request_finished(computing, (OTHERS,), is_complete=True) == (False, None)
    again = run_prefill(role, PROMPT, BLOCKS)
    assert again is not None
    assert again["kvferry"]["epoch"] not in (epoch, None)
    assert role._answer(Renew(again["kvferry"]["epoch"], (handle_of(again),))).lost == ()


def test_parameters_of_before_a_reset_are_refused_by_name(make_role: Any) -> None:
    role = make_role(FULL)
    role.publish([RANK])
    params = run_prefill(role, PROMPT, BLOCKS)
    assert params is not None
    where = params["remote_host"], params["remote_port"], "d"
    fetch_directory(*where, params["kvferry"]["epoch"], role._identity, 10.0, "default")
    role.reset_cache()
    with pytest.raises(HandoffError, match="its cache was reset") as refused:
        fetch_directory(*where, params["kvferry"]["epoch"], role._identity, 10.0, "default")
    assert refused.value.reason is Reason.PEER_CHANGED


def test_hole_7_new_weights_without_a_reset_are_noticed_by_their_version(make_role: Any) -> None:
    """``set_weight_version`` names weights; vLLM tells no connector of it."""
    role = make_role(FULL)
    core = with_core(role)
    role.publish([RANK])
    run_prefill(role, PROMPT, BLOCKS)
    next_step(role)
    assert (core.calls, role.has_pending_work()) == ([], False)
    core.version = "step-12"
    assert role.has_pending_work(), "an idle engine steps for it"
    next_step(role)
    assert [version for _, version in core.calls] == ["step-12"]
    assert kept(role) == []
    assert not role.has_pending_work()
    state = role._state
    with pytest.raises(HandoffError, match="prefill has 'step-12', decode has 'step-11'") as refused:
        fetch_directory("127.0.0.1", state.answers_at.port, "d", state.epoch, role._identity, 10.0, "step-11")
    assert refused.value.reason is Reason.MODEL_MISMATCH


def test_a_decode_engine_that_is_reset_loads_no_prompt_of_before(make_role: Any) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    loading, waiting = (
        request(PROMPT, run_prefill(prefill, PROMPT, blocks, request_id=name) or {}, name)
        for name, blocks in (("loading", BLOCKS), ("waiting", OTHERS))
    )
    for each in (loading, waiting):
        decode.on_new_request(each)
    decode.update_state_after_alloc(loading, allocated(BLOCKS), len(PROMPT))
    assert next_step(decode).loads[0].error is None
    decode.reset_cache()
    assert next_step(decode).outdated == ["loading"]
    assert decode._state.leases.num_requests == 1, "sources may still write for the one that loads"
    decode.update_state_after_alloc(waiting, allocated(OTHERS), len(PROMPT))
    [order] = next_step(decode).loads
    assert order.error.reason is Reason.WEIGHTS_CHANGED


def test_a_rank_s_report_of_before_a_reset_still_counts(make_role: Any) -> None:
    """Else the blocks that a peer may still write would be freed."""
    role = make_role(FULL)
    former = role._state.epoch
    role.reset_cache()
    role._answer(StillWriting(former, role._secret, 0, 1, ("r",)))
    assert role._quarantine.has_news


class LoadingEngines:
    """Two engines of vLLM's own scheduler, and a request of the second one that loads a prompt of the first one."""

    def __init__(self, make_engine: Any, asynchronous: bool) -> None:
        self.prefill = make_engine({"l.0": full(1), "l.1": full(1)})
        self.decode = decode = make_engine({"l.0": full(1), "l.1": full(1)}, asynchronous=asynchronous)
        params = self.prefill.ask("p", PROMPT, {"do_remote_decode": True}, max_tokens=1).params
        core = decode.connector._scheduler._engine._core
        core.scheduler, core.collective_rpc = decode.scheduler, lambda call, _, arguments: call(None, *arguments)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        decode._tokens["d"] = list(PROMPT)
        decode.scheduler.add_request(Request("d", list(PROMPT), sampling, None, block_hasher=decode._hasher))

    def step_until_landed(self) -> tuple[Any, Any]:
        """Return the step in which the worker reports the load, not yet processed."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            output = self.decode.scheduler.schedule()
            done = self.decode._execute(output)
            if done.kv_connector_output and done.kv_connector_output.finished_recving:
                assert not done.kv_connector_output.failed_recving
                return output, done
            self.decode.scheduler.update_from_output(output, done)
        raise AssertionError("nothing was loaded")

    def num_computed(self) -> int:
        """Run the request to its end; return how many of its tokens were computed."""
        count, deadline = 0, time.monotonic() + 20
        while self.decode.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline, "the request does not end"
            output = self.decode.scheduler.schedule()
            count += output.num_scheduled_tokens.get("d", 0)
            answers = self.decode.scheduler.update_from_output(output, self.decode._execute(output))
            ended = [each for outputs in answers.values() for each in outputs.outputs if each.finish_reason is not None]
            assert all(each.finish_reason is not FinishReason.ERROR for each in ended)
        return count


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("reset", ["never", "before the scheduler knows", "before the next step"])
def test_a_load_that_has_landed_is_not_believed_after_a_reset(reset: str, asynchronous: bool, make_engine: Any) -> None:
    """Its blocks are of the weights of before: the prompt is computed anew, and nothing of it is cached."""
    engines = LoadingEngines(make_engine, asynchronous)
    decode = engines.decode
    landed = engines.step_until_landed()
    if reset == "before the scheduler knows":
        assert decode.connector.reset_cache()
    decode.scheduler.update_from_output(*landed)
    if reset == "before the next step":
        assert decode.connector.reset_cache()
    num_computed = engines.num_computed()
    assert num_computed == 1 if reset == "never" else num_computed >= len(PROMPT)
    assert decode.connector._scheduler._outdated == set()


def test_a_reset_fails_open_writes_and_refuses_announcements_of_before(make_engine: Any) -> None:
    """Else a destination would get what the new weights compute, under a prompt that it announced before."""
    prefill, decode = (make_engine({"l.0": full(1), "l.1": full(1)}) for _ in range(2))
    prefill.ask("before", [1, 2, 3], {})  # the ranks learn of their engine with its steps
    worker, core = prefill.worker._worker, prefill.connector._scheduler._engine._core
    core.collective_rpc = lambda call, _, arguments: worker.end_former_epoch(*arguments)
    writer, announced = worker._source.writer, list[Announce]()
    answer = writer.answer

    def record(question: Any) -> Any:
        if isinstance(question, Announce):
            announced.append(question)
        return answer(question)

    writer.answer = record
    params = to_decode("concurrent", prefill, None)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
    decode._tokens["d"] = list(PROMPT)
    decode.scheduler.add_request(Request("d", list(PROMPT), sampling, None, block_hasher=decode._hasher))
    reasons: list[FinishReason] = []

    def step() -> None:
        output = decode.scheduler.schedule()
        for outputs in decode.scheduler.update_from_output(output, decode._execute(output)).values():
            reasons.extend(each.finish_reason for each in outputs.outputs if each.finish_reason is not None)

    wait_until(lambda: writer._writes.num_open == 1, "nothing is announced", each=step)
    former = prefill.connector._scheduler._state.epoch
    assert announced[0].engine_epoch == former
    assert prefill.connector.reset_cache()
    assert writer._writes.num_open == 0
    wait_until(lambda: bool(reasons), "the load does not end", each=step)
    assert reasons == [FinishReason.ERROR]
    assert [*decode.worker.get_kv_connector_stats().data["failures"]] == [Reason.WEIGHTS_CHANGED.value]
    prefill.ask("after", [1, 2, 3], {})
    for epoch in (former, former ^ 1):
        key = msgspec.structs.replace(announced[0].key, number=announced[0].key.number + 1)
        again = msgspec.structs.replace(announced[0], key=key, engine_epoch=epoch)
        with pytest.raises(HandoffError) as refused:
            answer(again)
        assert refused.value.reason is Reason.PEER_CHANGED
    assert writer._writes.num_open == 0


def test_a_reset_waits_for_no_rank_for_ever(make_role: Any) -> None:
    """VLLM would take the answer that comes later for that of another call, so the engine ends."""
    role = make_role(FULL)
    core = with_core(role)
    waited = []

    def hang(function: Any, timeout: float | None, arguments: tuple[Any, ...]) -> None:
        waited.append(timeout)
        raise TimeoutError

    core.collective_rpc = hang  # type: ignore[method-assign]
    with pytest.raises(KVFerryError) as raised:
        role.reset_cache()
    assert raised.value.reason is Reason.DEADLINE_EXCEEDED
    assert waited == [envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS]
    assert core.input_queue.get_nowait()[0] is EngineCoreRequestType.EXECUTOR_FAILED


def test_bootstrap_queries_are_answered_with_the_new_epoch(make_role: Any) -> None:
    role = make_role(FULL)
    role.publish([RANK])
    role.update_state_after_alloc(request(PROMPT, {"do_remote_decode": True, "transfer_id": "x"}), allocated(BLOCKS), 0)
    address = f"http://127.0.0.1:{role._source.bootstrap.port}"

    def offered() -> Any:
        queries = BootstrapQueries()
        engine_id = f"{role._state.engine_id}@{role._state.epoch:x}"
        while (offer := queries.get(address, engine_id)) is None:
            time.sleep(0.01)
        return offer

    former = offered()
    role.reset_cache()
    assert offered().control.epoch not in (former.control.epoch, 0)
    assert next_step(role).ended_transfers == ["x"]
    assert role._answer(Renew(role._state.epoch, (handle_of_transfer("x"),))).lost == (handle_of_transfer("x"),)


def test_a_prefix_cache_is_reset_beside_held_blocks_which_stay() -> None:
    pool = BlockPool(8, True, 16)
    kept_blocks = KeptBlocks()
    kept_blocks.bind(pool)
    held, used = pool.get_new_blocks(3), pool.get_new_blocks(1)
    kept_blocks.keep("a", ([block.block_id for block in held],))
    pool.free_blocks(held)  # the request has ended
    kept_blocks.keep("b", ([held[0].block_id],))
    assert not pool.reset_prefix_cache(), "vLLM refuses by itself"
    kept_blocks.allow_resets()
    assert not pool.reset_prefix_cache(), "a request has a block"
    pool.free_blocks(used)
    assert pool.reset_prefix_cache()
    assert [block.ref_cnt for block in held] == [2, 1, 1]
    others = {block.block_id for block in pool.get_new_blocks(4)}
    assert not others & {block.block_id for block in held}, "a held block was given away"
    kept_blocks.free("a")
    kept_blocks.free("b")
    assert pool.get_num_free_blocks() == 3


def test_every_role_of_a_process_is_told() -> None:
    told: list[Any] = []

    class Role:
        def end_former_epoch(self, *arguments: Any) -> None:
            told.append(arguments)

    role = Role()
    ROLES.add(role)
    end_former_epoch(SimpleNamespace(), 7, "step-12")
    ROLES.discard(role)
    assert (7, "step-12") in told


def test_a_decode_rank_compares_every_engine_anew() -> None:
    engines = SourceEngines.__new__(SourceEngines)
    engines._engines, engines._suspects = {("p", 1, 7): object()}, queue.SimpleQueue()  # type: ignore[dict-item]
    engines.forget_all("step-12")
    engines._drop_suspects()
    assert (engines._engines, engines._weights_version) == ({}, "step-12")
