"""The scheduler's role without an engine: what it answers, holds and orders, request by request."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.errors import HandoffError, Reason, SettingsError
from kvferry.handoff.protocol import Identity
from kvferry.integrations.vllm import scheduler_role
from kvferry.integrations.vllm.block_lists import GroupShape
from kvferry.integrations.vllm.held_blocks import HeldBlocks
from kvferry.integrations.vllm.launch import free_port
from kvferry.integrations.vllm.settings import Settings
from kvferry.layout.cache_group import CacheKind

FULL = GroupShape(CacheKind.ATTENTION, 16)
WINDOW = GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)
STATE = GroupShape(CacheKind.STATE, 1)
PROMPT = list(range(100, 180))


@pytest.fixture
def make_role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a role for a model of these cache groups."""
    identity = Identity("m", "w", "a", "float32", 2, 2, 8)
    roles: list[scheduler_role.SchedulerRole] = []

    def make(*groups: GroupShape, port: int = 0, dp_rank: int = 0) -> scheduler_role.SchedulerRole:
        parallel = SimpleNamespace(tensor_parallel_size=1, data_parallel_index=dp_rank)
        config: Any = SimpleNamespace(parallel_config=parallel)
        monkeypatch.setattr(scheduler_role, "identity_of", lambda *_: identity)
        monkeypatch.setattr(scheduler_role, "group_shapes", lambda *_: groups)
        role: Any = scheduler_role.SchedulerRole(config, None, f"engine-{len(roles)}", Settings(port=port))  # type: ignore[arg-type]
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


def prefill(role: Any, prompt: list[int], *groups: list[int], **sampling: Any) -> dict[str, Any] | None:
    """Let a request run on the prefill side; return what it answers."""
    ours = request(prompt, {"do_remote_decode": True}, **sampling)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(*groups), 0)
    ours.num_computed_tokens = ours.num_prompt_tokens
    held, answer = role.request_finished(ours, groups, is_complete=True)
    assert held is False
    return answer  # type: ignore[no-any-return]


def test_a_state_is_computed_without_the_last_token_and_asked_for_without_it(make_role: Any) -> None:
    """Else the last token, which the decode engine runs for its logits, would advance the state twice."""
    sender, reader = make_role(FULL, STATE), make_role(FULL, STATE)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1], [9], max_tokens=20)
    assert params is not None
    assert params["kvferry"]["num_tokens"] == len(PROMPT) - 1
    ours = request(PROMPT, params, "d", max_tokens=8)
    reader.on_new_request(ours)
    assert reader.get_num_new_matched_tokens(ours, 0) == (len(PROMPT) - 1, True)
    reader.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [16]), len(PROMPT) - 1)
    [order] = reader.build_connector_meta().loads
    assert order.error is None
    assert [blocks.last_token for blocks in order.blocks] == [len(PROMPT) - 1, 1]
    assert [blocks.source_ids.tolist() for blocks in order.blocks] == [[5, 4, 3, 2, 1], [9]]


def test_the_prompt_is_cut_once_and_only_where_a_state_is_held(make_role: Any) -> None:
    sampled, plain = make_role(FULL, STATE), make_role(FULL, WINDOW)
    shared = list(PROMPT)
    samples = [request(shared, {"do_remote_decode": True}, f"{n}_r", max_tokens=9) for n in range(2)]
    for sample in samples:
        sampled.on_new_request(sample)
    assert [(each.num_prompt_tokens, each.num_tokens, each.max_tokens) for each in samples] == [(79, 79, 1)] * 2
    assert shared == PROMPT
    whole = [(sampled, PROMPT[:1], {}), (sampled, PROMPT, {"prompt_logprobs": 1}), (plain, PROMPT, {})]
    for role, prompt, sampling in whole:
        ours = request(list(prompt), {"do_remote_decode": True}, "whole", **sampling)
        role.on_new_request(ours)
        assert ours.num_prompt_tokens == len(prompt)


def test_a_state_that_went_past_the_prompt_is_not_exported(make_role: Any) -> None:
    role = make_role(FULL, STATE)
    ours = request(PROMPT, {"do_remote_decode": True})
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1], [2]), 0)
    ours.num_computed_tokens = ours.num_prompt_tokens + 1
    assert role.request_finished(ours, ([1], [2]), is_complete=True) == (False, None)
    assert role._prefill_side.num_held == 0


def test_a_state_of_the_whole_prompt_is_refused_by_the_reader(make_role: Any) -> None:
    """As where the prefill engine was asked for the prompt's log probabilities and the decode engine was not."""
    sender, reader = make_role(FULL, STATE), make_role(FULL, STATE)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1], [9], prompt_logprobs=1)
    assert params is not None
    ours = request(PROMPT, params, "d")
    reader.on_new_request(ours)
    reader.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [16]), len(PROMPT) - 1)
    [order] = reader.build_connector_meta().loads
    assert order.error is not None
    assert order.error.reason is Reason.INVALID_REQUEST


def test_blocks_that_left_the_window_are_neither_held_nor_loaded(make_role: Any) -> None:
    sender, reader = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1], [0, 0, 8, 7, 6])
    assert params is not None
    assert sorted(sender._held_blocks._pool.held) == [1, 2, 3, 4, 5, 6, 7, 8]
    ours = request(PROMPT, params, "d")
    reader.on_new_request(ours)
    assert reader.get_num_new_matched_tokens(ours, 0) == (len(PROMPT) - 1, True)
    reader.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), len(PROMPT) - 1)
    [order] = reader.build_connector_meta().loads
    assert [blocks.source_ids.tolist() for blocks in order.blocks] == [[5, 4, 3, 2, 1], [8, 7, 6]]
    assert [blocks.first_token for blocks in order.blocks] == [0, 32]


def test_a_window_that_the_prefill_engine_has_lost_is_refused_with_a_reason(make_role: Any) -> None:
    sender, reader = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1], [0, 0, 0, 7, 6])
    assert params is not None
    ours = request(PROMPT, params, "d")
    reader.on_new_request(ours)
    reader.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), len(PROMPT) - 1)
    [order] = reader.build_connector_meta().loads
    assert order.error is not None
    assert "prefill engine has no block number 2 of 5" in str(order.error)


def test_asking_again_has_no_effect_and_the_load_is_ordered_once(make_role: Any) -> None:
    """The engine asks again after a failed allocation, and after a preemption when the cache was received already."""
    sender, reader = make_role(FULL), make_role(FULL)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1])
    ours = request(PROMPT, params, "d")  # type: ignore[arg-type]
    reader.on_new_request(ours)
    assert {reader.get_num_new_matched_tokens(ours, 16) for _ in range(3)} == {(64, True)}
    reader.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 64)
    assert len(reader.build_connector_meta().loads) == 1
    assert reader.get_num_new_matched_tokens(ours, 0) == (0, False)
    reader.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 0)
    assert reader.build_connector_meta().loads == []


def test_an_answer_that_was_dropped_lets_the_remote_hold_go(make_role: Any) -> None:
    sender, reader = make_role(FULL), make_role(FULL)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1])
    ours = request(PROMPT, params, "d")  # type: ignore[arg-type]
    reader.on_new_request(ours)
    reader.get_num_new_matched_tokens(ours, 0)
    reader.update_state_after_alloc(ours, allocated([10, 11, 12, 13, 14]), 0)
    assert reader._decode_side.num_reading == 0
    assert reader.build_connector_meta().loads == []


def test_a_request_rejected_before_admission_lets_the_remote_hold_go(make_role: Any) -> None:
    """It arrives as one that is aborted at once, with the prompt ``[0]``."""
    sender, reader = make_role(FULL), make_role(FULL)
    params = prefill(sender, PROMPT, [5, 4, 3, 2, 1])
    ours = request([0], params, "d")  # type: ignore[arg-type]
    reader.on_new_request(ours)
    assert reader.request_finished(ours, ([],), is_complete=False) == (False, None)
    assert reader._decode_side.num_reading == 0


def test_references_are_dropped_tail_first_and_the_null_block_has_none() -> None:
    pool, held = BlockPool(), HeldBlocks()
    held.bind(pool)  # type: ignore[arg-type]
    held.hold("r", ([0, 0, 3], [4, 5]))
    assert pool.held == [3, 4, 5]
    held.free("r")
    assert pool.held == []


def test_each_data_parallel_rank_answers_with_an_end_point_of_its_own(make_role: Any) -> None:
    """A port that the settings name is that of rank 0; nobody computes the others': they come with the answers."""
    port = free_port()
    ranks = [make_role(FULL, port=port, dp_rank=rank) for rank in range(2)]
    answers = [prefill(rank, PROMPT, [5, 4, 3, 2, 1]) for rank in ranks]
    assert [answer["remote_port"] for answer in answers] == [port, port + 1]
    assert [answer["remote_engine_id"] for answer in answers] == ["engine-0", "engine-1"]
    with pytest.raises(HandoffError) as taken:
        make_role(FULL, port=port, dp_rank=1)
    assert taken.value.reason is Reason.PORT_IN_USE
    assert str(port + 1) in str(taken.value)
    free = [make_role(FULL, dp_rank=rank) for rank in range(2)]
    assert len({prefill(rank, PROMPT, [5, 4, 3, 2, 1])["remote_port"] for rank in free}) == 2


def test_a_port_that_leaves_none_for_the_rank_is_refused(make_role: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        make_role(FULL, port=65535, dp_rank=1)
    assert refused.value.reason is Reason.INVALID_SETTING
