"""Which finished requests a decode engine holds for the next turn, and when the engine may use their blocks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvferry.handoff.holds import transfer_of
from kvferry.handoff.source import END
from kvferry.integrations.vllm.scheduler.blocks import KeptBlocks
from kvferry.integrations.vllm.scheduler.source import HeldAnswers

from .scheduler_requests import FULL, PROMPT, STATE, WINDOW, handle_of, let_sleep, next_step, request

NUM_TOKENS = len(PROMPT) + 1
"""Of a request whose second new token ended it: the cache of that token is not computed."""


class Decode:
    """A decode engine's role, vLLM's block pool, and a request that has just ended."""

    def __init__(self, role: Any) -> None:
        self.role, self.pool = role, BlockPool(64, True, 16)
        role.bind_block_pool(self.pool)
        let_sleep(role)
        self.request = request(list(PROMPT), {"do_remote_prefill": False}, max_tokens=2)
        self.request.append_output_token_ids([7, 8])
        self.request.num_computed_tokens = NUM_TOKENS
        self.blocks = [self.taken(6) for _ in role._state.groups]

    def taken(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def finish(self, *, is_complete: bool = True) -> dict[str, Any] | None:
        _, answer = self.role.request_finished(self.request, self.blocks, is_complete=is_complete)
        return answer  # type: ignore[no-any-return]

    def give_up(self) -> None:
        """Do as vLLM does after the end of a request."""
        ids = [block_id for group in self.blocks for block_id in group if block_id]
        self.pool.free_blocks(self.pool.blocks[each] for each in reversed(ids))

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()


@pytest.fixture
def make_decode(make_role: Any) -> Callable[..., Decode]:
    return lambda *groups: Decode(make_role(*groups, turn_seconds=60.0))


def replace_by_embeddings(decode: Decode) -> None:
    ours = decode.request
    decode.request = Request(
        "r", None, ours.sampling_params, None, prompt_embeds=torch.ones(len(PROMPT), 8), prompt_is_token_ids=None
    )
    decode.request.append_output_token_ids([7, 8])
    decode.request.num_computed_tokens = NUM_TOKENS


def take_drafts(decode: Decode) -> None:
    decode.role._answers = HeldAnswers(decode.role._state, drafts=True, may_be_written_untold=False)


NOT_HELD: dict[str, tuple[tuple[Any, ...], Callable[[Decode], object]]] = {
    "one of several samples": ((FULL,), lambda decode: setattr(decode.request, "request_id", "0_r")),
    "embeddings": ((FULL,), replace_by_embeddings),
    "an adapter": ((FULL,), lambda decode: setattr(decode.request, "lora_request", LoRARequest("sql", 1, "/sql"))),
    "nothing is computed": ((FULL,), lambda decode: setattr(decode.request, "num_computed_tokens", 0)),
    "too few blocks": ((FULL,), lambda decode: decode.blocks[0].pop()),
    "a block of its window is gone": ((WINDOW,), lambda decode: decode.blocks[0].__setitem__(3, 0)),
    "a state that has gone on": (
        (FULL, STATE),
        lambda decode: setattr(decode.request, "num_computed_tokens", NUM_TOKENS + 2),
    ),
    "a state behind drafts": ((FULL, STATE), take_drafts),
    "a state that is gone": ((FULL, STATE), lambda decode: decode.blocks[1].__setitem__(-1, 0)),
}


@pytest.mark.parametrize("why", NOT_HELD)
def test_what_the_next_turn_could_not_load_is_not_held(why: str, make_decode: Callable[..., Decode]) -> None:
    """The same request without the change is held: nothing else refuses it."""
    groups, change = NOT_HELD[why]
    control, decode = make_decode(*groups), make_decode(*groups)
    answer = control.finish()
    assert answer is not None
    assert answer["remote_num_tokens"] == answer["kvferry"]["num_tokens"] == NUM_TOKENS
    change(decode)
    assert decode.finish() is None
    assert (decode.role._state.holds.num_holds, decode.role._state.kept_blocks.num_kept) == (0, 0)


def test_nothing_is_held_where_a_step_writes_blocks_before_the_workers_hear_of_it(make_role: Any) -> None:
    """A block of an answer that has yielded may be cleared while it is written to a prefill engine."""
    assert Decode(make_role(FULL, turn_seconds=60.0)).finish() is not None
    decode = Decode(make_role(FULL, turn_seconds=60.0, clears_untold=True))
    assert decode.finish() is None
    assert (decode.role._state.holds.num_holds, decode.role._state.kept_blocks.num_kept) == (0, 0)


def test_an_aborted_answer_is_not_held(make_decode: Callable[..., Decode]) -> None:
    decode = make_decode(FULL)
    assert decode.finish(is_complete=False) is None
    assert decode.role._state.holds.num_holds == 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_what_an_asynchronous_engine_computes_behind_the_last_token_is_not_held(
    groups: tuple[Any, ...], make_decode: Callable[..., Decode]
) -> None:
    """It has begun steps for tokens that the end of the request made void."""
    decode = make_decode(*groups)
    decode.request.num_computed_tokens = len(PROMPT) + 4
    answer = decode.finish()
    assert answer is not None
    assert answer["remote_num_tokens"] == len(PROMPT) + 2 == decode.request.num_tokens


def test_a_window_that_has_moved_on_is_held(make_decode: Callable[..., Decode]) -> None:
    """Of 81 tokens the next one attends to the last 39, so the first two blocks may be gone."""
    decode = make_decode(FULL, WINDOW)
    for gone in decode.blocks[1][:2]:
        decode.pool.free_blocks([decode.pool.blocks[gone]])
    decode.blocks[1][:2] = [0, 0]
    answer = decode.finish()
    assert answer is not None
    assert answer["remote_block_ids"] == [decode.blocks[0], decode.blocks[1]]


def test_an_engine_steps_until_the_workers_know_and_the_blocks_are_lent(
    make_decode: Callable[..., Decode],
) -> None:
    """Though it has no request: a turn that comes first would be written late, and other requests fewer blocks."""
    decode = make_decode(FULL)
    free = decode.num_free
    assert not decode.role.has_pending_work()
    answer = decode.finish()
    assert answer is not None
    assert decode.role.has_pending_work()
    [(transfer_id, prompt)] = next_step(decode.role).held
    assert transfer_id == transfer_of(handle_of(answer))
    assert (prompt.num_tokens, prompt.num_final, prompt.digest) == (NUM_TOKENS, END, answer["kvferry"]["prompt_digest"])
    assert not decode.role.has_pending_work(), "vLLM itself steps until the request has given its blocks up"
    decode.give_up()
    assert decode.num_free == free
    assert decode.role.has_pending_work()
    next_step(decode.role)
    assert decode.num_free == free + 6
    assert not decode.role.has_pending_work()


@pytest.mark.parametrize("given_up", [False, True])
def test_a_hold_that_ends_before_its_blocks_are_lent_is_forgotten(
    given_up: bool, make_decode: Callable[..., Decode]
) -> None:
    decode = make_decode(FULL)
    free = decode.num_free
    answer = decode.finish()
    assert answer is not None
    if given_up:
        decode.give_up()
    decode.role._state.holds.drain()
    orders = next_step(decode.role)
    assert orders.held == [], "blocks that are free"
    assert orders.ended_transfers == [transfer_of(handle_of(answer))]
    if not given_up:
        decode.give_up()
    assert decode.num_free == free + 6
    assert not decode.role.has_pending_work()


def test_the_step_that_gives_a_lent_block_away_ends_its_writes(make_decode: Callable[..., Decode]) -> None:
    decode = make_decode(FULL)
    free = decode.num_free
    answer = decode.finish()
    assert answer is not None
    decode.give_up()
    assert next_step(decode.role).ended_transfers == []
    ours = decode.taken(decode.num_free - 5)
    orders = next_step(decode.role)
    assert orders.ended_transfers == [transfer_of(handle_of(answer))]
    assert decode.role._state.holds.num_holds == 0
    decode.pool.free_blocks(decode.pool.blocks[each] for each in ours)
    assert decode.num_free == free + 6


def test_held_answers_do_not_keep_an_engine_stepping_that_cannot_be_woken(
    make_decode: Callable[..., Decode],
) -> None:
    """Nor one that ends when its requests have: the engine that gets the next turn can compute the conversation."""
    decode = make_decode(FULL)
    decode.role._engine.can_wake = False
    assert decode.finish() is not None
    decode.give_up()
    next_step(decode.role)
    assert decode.role._state.holds.num_holds == 1
    assert not decode.role.has_pending_work()


# Blocks that are lent.


class Kept:
    """Kept blocks of a pool of seven."""

    def __init__(self) -> None:
        self.pool, self.kept = BlockPool(8, True, 16), KeptBlocks()
        self.kept.bind(self.pool)

    def lend(self, name: str, *block_ids: int) -> None:
        """Lend blocks that their request has given up."""
        self.kept.keep(name, [block_ids])
        self.pool.free_blocks(self.pool.blocks[each] for each in block_ids)
        self.kept.lend(name)


def test_of_a_held_answer_the_tail_is_used_first() -> None:
    """A prefix is what other conversations share."""
    ours = Kept()
    held = [block.block_id for block in ours.pool.get_new_blocks(3)]
    ours.lend("a", *held)
    assert [block.block_id for block in ours.pool.get_new_blocks(7)][-3:] == held[::-1]
    assert ours.kept.take_used() == {"a"}


def test_a_name_whose_loan_has_ended_is_no_longer_used() -> None:
    """Else the hold of a later request of that name would end with a block of the earlier one."""
    ours = Kept()
    first, second = ([block.block_id for block in ours.pool.get_new_blocks(2)] for _ in range(2))
    ours.lend("a", *first)
    ours.kept.free("a")
    ours.lend("a", *second)
    assert {block.block_id for block in ours.pool.get_new_blocks(5)} >= set(first)
    assert ours.kept.take_used() == set()
    ours.pool.get_new_blocks(1)
    ours.kept.free("a")
    assert ours.kept.take_used() == set(), "the use was noted before the loan ended"


def test_a_block_that_two_answers_share_ends_both_when_it_is_used() -> None:
    """VLLM's pool remembers one call for each block."""
    ours = Kept()
    held = [block.block_id for block in ours.pool.get_new_blocks(2)]
    ours.pool.touch([ours.pool.blocks[held[0]]])  # of the second request
    ours.lend("a", *held)
    ours.lend("b", held[0])
    ours.pool.get_new_blocks(7)
    assert ours.kept.take_used() == {"a", "b"}
    assert ours.kept.take_used() == set()


@pytest.mark.parametrize("has_hashes", [True, False])
def test_blocks_of_a_prefix_that_others_share_do_not_keep_an_answer_from_being_lent(has_hashes: bool) -> None:
    ours = Kept()
    shared, own = ours.pool.get_new_blocks(2)
    if has_hashes:
        shared._block_hash = own._block_hash = SimpleNamespace()  # type: ignore[assignment]
    ours.pool.touch([shared])  # of another request
    ours.kept.keep("a", [[shared.block_id, own.block_id]])
    assert not ours.kept.are_given_up("a"), "its request has both"
    ours.pool.free_blocks([own, shared])
    assert ours.kept.are_given_up("a"), "another request has the first one"


def test_answers_that_share_a_block_do_not_wait_for_one_another() -> None:
    """A reset of the prefix cache takes the hash of that block away."""
    ours = Kept()
    shared, *own = ours.pool.get_new_blocks(3)
    ours.pool.touch([shared])  # of the second request
    for name, block in zip("ab", own, strict=True):
        ours.kept.keep(name, [[shared.block_id, block.block_id]])
    ours.pool.free_blocks([own[0], shared])
    assert [ours.kept.are_given_up(name) for name in "ab"] == [True, False]
    ours.pool.free_blocks([own[1], shared])
    assert [ours.kept.are_given_up(name) for name in "ab"] == [True, True]
    ours.kept.lend("a")
    assert ours.kept.are_given_up("b"), "the first one's reference is gone, and counts no more"
    ours.kept.free("b")
    assert ours.pool.get_num_free_blocks() == 7


def test_blocks_that_two_stores_keep_will_be_free() -> None:
    """So that vLLM waits for them and preempts no request."""
    ours = Kept()
    [block] = ours.pool.get_new_blocks(1)
    for name in "ab":
        ours.kept.keep(name, [[block.block_id]])
    assert not ours.kept.keeps_alone, "a request uses it"
    ours.pool.free_blocks([block])
    assert ours.kept.keeps_alone
