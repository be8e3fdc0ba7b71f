"""Who uses which block: requests, held answers and resets in any order, in vLLM's own block pool.

A request that has ended keeps its blocks for some steps where a step with it is in flight, and shares a prefix with
others. Whatever happens, an engine without work sleeps, and holds only what a request has not given up.
"""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from .scheduler_requests import FULL, let_sleep, next_step, request, scheduler_roles

NUM_BLOCKS, BLOCK_SIZE, PREFIX_BLOCKS, TURN_SECONDS = 14, 16, 2, 60.0
FLAGS = strategies.booleans()
STEPS_OF_NEWS = 2
"""After so many steps an idle engine has told its ranks all that there was to tell."""


class Blocks(RuleBasedStateMachine):
    """One decode engine. ``users`` are the requests that have not given their blocks up, and these blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.roles = scheduler_roles(self.patch)
        self.role: Any = next(self.roles)(FULL, turn_seconds=TURN_SECONDS)
        let_sleep(self.role)
        self.role._engine._core.collective_rpc = lambda *_: None
        self.pool = BlockPool(NUM_BLOCKS, True, BLOCK_SIZE)
        self.role.bind_block_pool(self.pool)
        self.users: dict[str, list[int]] = {}
        self.running: dict[str, Any] = {}
        self.num_begun = 0

    def teardown(self) -> None:
        next(self.roles, None)
        self.patch.undo()

    @rule(number=strategies.integers(1, 3), num_own=strategies.integers(0, 1), is_full=FLAGS)
    def begin(self, number: int, num_own: int, is_full: bool) -> None:
        """Requests compute their prompts behind one prefix; ``is_full`` ones end with a whole block."""
        for _ in range(number):
            self._begin(num_own, is_full=is_full)

    def _begin(self, num_own: int, *, is_full: bool) -> None:
        name = f"r{self.num_begun}"
        hashes: list[Any] = [f"prefix-{place}".encode() for place in range(PREFIX_BLOCKS)]
        hashes += [f"{name}-{place}".encode() for place in range(num_own)]
        hits: list[Any] = []
        for each in hashes:
            if (found := self.pool.get_cached_block(each, [0])) is None:
                break
            hits += found
        num_new = len(hashes) - len(hits) + (not is_full)
        if num_new > self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits):
            return
        self.num_begun += 1
        self.pool.touch(hits)
        blocks = hits + self.pool.get_new_blocks(num_new)
        computed: Any = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(computed, blocks, len(hits), len(hashes), BLOCK_SIZE, 0)
        num_tokens = len(hashes) * BLOCK_SIZE + (0 if is_full else 3)
        ours = request(list(range(num_tokens)), {"do_remote_prefill": False}, name, max_tokens=2)
        ours.append_output_token_ids([7])
        ours.num_computed_tokens = num_tokens
        self.running[name], self.users[name] = ours, [block.block_id for block in blocks]

    @rule(data=strategies.data(), is_complete=FLAGS, is_late=FLAGS)
    def end(self, data: Any, is_complete: bool, is_late: bool) -> None:
        """Requests end in one step; another step with them is in flight where that ``is_late``."""
        for name in [name for name in self.running if data.draw(FLAGS)]:
            self._end(name, is_complete=is_complete, is_late=is_late)

    @rule(resets=FLAGS)
    def end_all(self, resets: bool) -> None:
        """All requests end in one step, and perhaps the prefix cache is reset before the next one."""
        for name in list(self.running):
            self._end(name, is_complete=True, is_late=False)
        if resets:
            self.reset()

    def _end(self, name: str, *, is_complete: bool, is_late: bool) -> None:
        self.role.request_finished(self.running.pop(name), (self.users[name],), is_complete=is_complete)
        if not is_late:
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        self.pool.free_blocks(self.pool.blocks[each] for each in reversed(self.users.pop(name)))

    @rule()
    def give_up(self) -> None:
        """No step with a request that has ended is in flight any more."""
        for name in sorted(self.users.keys() - self.running):
            self._give_up(name)

    @rule()
    def step(self) -> None:
        next_step(self.role, *self.running)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.users)

    @rule()
    def reset_connector(self) -> None:
        assert self.role.reset_cache()
        assert not self._holds()

    @rule()
    def fill(self) -> None:
        """A large request takes all free blocks: the holds that have lent them end in its step."""
        lent = self.role._state.kept_blocks._lent
        lenders = {name for name, blocks in lent.items() if any(block.ref_cnt == 0 for block in blocks)}
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        next_step(self.role, "large")
        assert not self._holds() & lenders
        self.pool.free_blocks(blocks)

    @precondition(lambda self: self._holds())
    @rule(data=strategies.data())
    def release(self, data: Any) -> None:
        holds = self.role._state.holds
        hold = holds._holds[data.draw(strategies.sampled_from(sorted(self._holds())))]
        holds.release(self.role._state.epoch, [hold.handle])

    @rule()
    def turn_seconds_pass(self) -> None:
        self.role._state.holds.expire(time.monotonic() + TURN_SECONDS)
        next_step(self.role)
        assert self._holds() == self._kept() == set()
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(self._used())

    @rule()
    def idle(self) -> None:
        """The engine has no request that computes, and steps only where the role asks for it."""
        for _ in range(STEPS_OF_NEWS):
            if not self.role.has_pending_work():
                break
            next_step(self.role)
        assert not self.role.has_pending_work(), "the engine steps, and nothing changes"

    @invariant()
    def what_nobody_uses_is_free_or_about_to_be(self) -> None:
        if self.role.has_pending_work():
            return
        for name, blocks in self._blocks_kept().items():
            assert blocks[-1] in self._used(), f"nobody uses the last block of {name}, and the hold cannot yield"
        waiting = {each for blocks in self._blocks_kept().values() for each in blocks}
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(self._used() | waiting)

    @invariant()
    def every_reference_has_a_user(self) -> None:
        ours = Counter(each for blocks in self._blocks_kept().values() for each in blocks)
        counted = self.role._state.kept_blocks._num_references
        assert {block_id: number for block_id, number in enumerate(counted.tolist()) if number} == ours
        counts = ours + Counter(each for blocks in self.users.values() for each in blocks)
        assert {block.block_id: block.ref_cnt for block in self.pool.blocks[1:] if block.ref_cnt} == counts
        assert self.role._state.holds.num_holds <= self.num_begun

    def _holds(self) -> set[str]:
        return set(self.role._state.holds._holds)

    def _kept(self) -> set[str]:
        """Return the holds whose blocks are not lent."""
        return set(self._blocks_kept())

    def _blocks_kept(self) -> dict[str, list[int]]:
        kept = self.role._state.kept_blocks._kept
        return {name: [block.block_id for block in each.blocks] for name, each in kept.items()}

    def _used(self) -> set[int]:
        return {each for blocks in self.users.values() for each in blocks}


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
