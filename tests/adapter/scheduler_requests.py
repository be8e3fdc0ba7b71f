"""vLLM's requests and the scheduler's roles, without an engine."""

from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from kvferry.handoff.holds import transfer_of
from kvferry.handoff.messages import FIRST_WEIGHTS, EndPoint, Handle, Identity, RankEntry
from kvferry.integrations.vllm.scheduler import role as scheduler_role
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.settings import Settings
from kvferry.layout.shard import CacheKind

FULL = GroupShape(CacheKind.ATTENTION, 16)
WINDOW = GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)
STATE = GroupShape(CacheKind.STATE, 1)
PROMPT = list(range(100, 180))
A_RANK = RankEntry(0, 0, b"", {}, EndPoint("127.0.0.1", 1, 0))
IDENTITY = Identity("m", "w", "a", "float32", 2, 2, 8, "none", "float32")


def scheduler_roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give a function that makes a role for a model of these cache groups, and end the roles afterwards.

    ``clears_untold`` makes an engine of vLLM's second model runner that clears new blocks.
    """
    roles: list[scheduler_role.SchedulerRole] = []

    def make(
        *groups: GroupShape,
        dp_rank: int = 0,
        kv_role: str = "kv_both",
        prefix_caching: bool = True,
        num_ranks: int = 1,
        num_stages: int = 1,
        num_dp_ranks: int = 1,
        num_hosts: int = 1,
        executor: Any = "mp",
        drafts: Any = None,
        clears_untold: bool = False,
        failure_policy: str = "fail",
        **settings: Any,
    ) -> scheduler_role.SchedulerRole:
        parallel = SimpleNamespace(
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=num_stages,
            data_parallel_index=dp_rank,
            data_parallel_size=num_dp_ranks,
            use_ubatching=False,
            nnodes_within_dp=num_hosts,
            distributed_executor_backend=executor,
        )
        engine_id, given = f"engine-{len(roles)}", Settings(**settings)
        transfer = SimpleNamespace(
            engine_id=engine_id,
            kv_role=kv_role,
            kv_load_failure_policy=failure_policy,
            is_kv_producer=kv_role != "kv_consumer",
            is_kv_consumer=kv_role != "kv_producer",
        )
        config: Any = SimpleNamespace(
            parallel_config=parallel,
            kv_transfer_config=transfer,
            cache_config=SimpleNamespace(
                enable_prefix_caching=prefix_caching, get_resolved_kv_cache_layout=lambda: KVCacheLayout.BHLNC
            ),
            use_v2_model_runner=clears_untold,
            speculative_config=drafts,
            lora_config=None,
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
        caches: Any = SimpleNamespace(needs_kv_cache_zeroing=clears_untold)
        monkeypatch.setattr(scheduler_role, "identity_of", lambda *_: IDENTITY)
        monkeypatch.setattr(scheduler_role, "group_shapes", lambda *_: groups)
        role: Any = scheduler_role.SchedulerRole(config, caches, engine_id, given)
        role.bind_block_pool(BlockPool())
        roles.append(role)
        return role

    yield make
    for role in roles:
        role.shutdown()


class BlockPool:
    """Counts the references to blocks as vLLM's pool does."""

    def __init__(self) -> None:
        self.blocks = list(range(64))
        self.held: list[int] = []

    def reset_prefix_cache(self) -> bool:
        return not self.held

    def touch(self, blocks: list[int]) -> None:
        self.held += blocks

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.held.remove(block)


def request(prompt: list[int], params: dict[str, Any], request_id: str = "r", **sampling: Any) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": 1, **sampling}, extra_args={"kv_transfer_params": params})
    return Request(request_id, prompt, sampling_params, None)


def allocated(*groups: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: groups)


def run_prefill(
    role: Any, prompt: list[int], *groups: list[int], request_id: str = "r", lora: Any = None, **sampling: Any
) -> dict[str, Any] | None:
    """Run a request on the prefill engine, with the adapter ``lora``; return the engine's answer."""
    ours = request(prompt, {"do_remote_decode": True}, request_id, **sampling)
    ours.lora_request = lora
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(*groups), 0)
    role.build_connector_meta(scheduled({ours.request_id: ours.num_prompt_tokens}, {ours.request_id: groups}))
    ours.num_computed_tokens = ours.num_prompt_tokens
    held, answer = role.request_finished(ours, groups, is_complete=True)
    assert held is False
    return answer  # type: ignore[no-any-return]


def handle_of(params: dict[str, Any]) -> Handle:
    """Return the handle of the hold that a prefill engine's answer names."""
    return Handle(params["remote_request_id"], int(params["kvferry"]["generation"], 16))


def transfer_id_of(params: dict[str, Any]) -> str:
    """Return the name that ranks have for the hold that a prefill engine's answer names."""
    return transfer_of(handle_of(params))


def let_sleep(role: Any) -> None:
    """Let the role believe that the engine's core can be woken, so that holds do not keep the engine stepping."""
    role._engine.can_wake = True
    role._engine._core = SimpleNamespace(
        shutdown_state=EngineShutdownState.RUNNING,
        vllm_config=SimpleNamespace(shutdown_timeout=0),
        input_queue=SimpleQueue(),
        get_weight_version=lambda: FIRST_WEIGHTS,
    )


def scheduled(
    num_tokens: dict[str, int],
    block_ids: dict[str, tuple[list[int], ...]] | None = None,
    preempted: Any = (),
    num_computed: dict[str, int] | None = None,
) -> Any:
    """Return the output of vLLM's scheduler for a step that computes so many tokens of each request, after so many of
    each that is new.
    """
    state = SimpleNamespace(get_block_ids=(block_ids or {}).get)
    new = [SimpleNamespace(req_id=name, num_computed_tokens=number) for name, number in (num_computed or {}).items()]
    return SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        preempted_req_ids=preempted,
        kv_connector_block_state=state,
        scheduled_new_reqs=new,
    )


def next_step(role: Any, *request_ids: str) -> Any:
    """Return the orders of a step that computes these requests."""
    return role.build_connector_meta(scheduled(dict.fromkeys(request_ids, 1)))


def kept(role: Any) -> list[int]:
    """Return the blocks that the role keeps."""
    return role._state.kept_blocks._pool.held  # type: ignore[no-any-return]
