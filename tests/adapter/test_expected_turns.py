"""Which turns a prefill engine loads from a decode engine, and when it computes them instead."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.handoff.wire.trust import make_keys
from kvferry.integrations.vllm.scheduler import destination
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.step import FailedTurns
from kvferry.layout.shard import CacheKind

from ..waits import wait_until
from .scheduler_requests import FULL, PROMPT, WINDOW, allocated, handle_of, let_sleep, next_step, request, run_prefill
from .test_held_answers import NUM_TOKENS, Decode

SAID = [*PROMPT, 7, 8, *range(9)]
"""The conversation with the answer, and what is new: the decode engine has 81 tokens of these."""
BLOCKS = [11, 12, 13, 14, 15, 16]


class Turn:
    """A decode engine's role that holds an answer, and a prefill engine's role that may load it."""

    def __init__(self, make_role: Any, groups: Sequence[GroupShape] = (FULL,), **settings: Any) -> None:
        self.decode = Decode(make_role(*groups, turn_seconds=60.0, lease_seconds=500.0, **settings))
        answer = self.decode.finish()
        assert answer is not None
        self.params = answer
        next_step(self.decode.role)
        self.prefill = make_role(*groups, lease_seconds=500.0, **settings)
        let_sleep(self.prefill)
        self.requests: dict[str, Request] = {}
        self.anew: set[str] = set()
        core = self.prefill._engine._core
        core.scheduler = SimpleNamespace(
            requests=self.requests, failed_recving_kv_req_ids=self.anew, finished_recving_kv_req_ids=set()
        )
        core.collective_rpc = lambda *_: None

    def ask(self, tokens: Sequence[int] = SAID, name: str = "t", **more: Any) -> Request:
        ours = request(list(tokens), {**self.params, "do_remote_decode": True, **more}, name)
        self.requests[name] = ours
        self.prefill.on_new_request(ours)
        return ours

    def ask_for_prompt(self, make_role: Any) -> Request:
        """Ask for 40 tokens that another prefill engine holds."""
        prompt = [*range(40)]
        ours = request(prompt, run_prefill(make_role(FULL, lease_seconds=500.0), prompt, [3, 2, 1]) or {}, "t")
        self.requests["t"] = ours
        self.prefill.on_new_request(ours)
        return ours

    def is_expected(self, name: str = "t") -> bool:
        return bool(self.prefill._destination.is_expected(name))

    def found(self, ours: Request, num_computed: int = 0) -> tuple[int, bool]:
        """Return what the engine is told to load, as soon as the decode engine has answered."""

        def told() -> tuple[int, bool] | None:
            self.prefill._state.leases.keep()
            answer = self.prefill.get_num_new_matched_tokens(ours, num_computed)
            return None if answer[0] is None else answer

        return wait_until(told)

    def load(self, ours: Request, num_tokens: int = NUM_TOKENS) -> Any:
        self.prefill.update_state_after_alloc(ours, allocated(BLOCKS), num_tokens)
        ours.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        [order] = next_step(self.prefill).loads
        return order

    def report(self, *failed_turns: str, finished: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        """Take what all ranks have reported with a step."""
        told = FailedTurns(frozenset(failed_turns)) if failed_turns else None
        output = KVConnectorOutput(
            finished_recving=set(finished), failed_recving=set(failed), kv_connector_worker_meta=told
        )
        self.prefill.update_connector_output(output)


@pytest.fixture
def make_turn(make_role: Any) -> Callable[..., Turn]:
    return lambda *arguments, **settings: Turn(make_role, *arguments, **settings)


@pytest.mark.parametrize(
    ("num_cached", "num_loaded"), [(0, 81), (32, 49), (79, 2), (80, 0), (81, 0)], ids=lambda value: str(value)
)
def test_a_turn_loads_what_is_held_and_not_cached(
    num_cached: int, num_loaded: int, make_turn: Callable[..., Turn]
) -> None:
    """One token alone is not worth a load."""
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours, num_cached) == (num_loaded, num_loaded > 0)
    turn.prefill.update_state_after_alloc(ours, allocated(BLOCKS), num_loaded)
    loads = next_step(turn.prefill).loads
    late, seconds = destination.LATE_SECONDS, destination.TURN_SECONDS
    assert [(each.num_tokens, each.is_optional, each.late_seconds, each.timeout_seconds) for each in loads] == (
        [(num_loaded, True, late, seconds)] if num_loaded else []
    )
    assert turn.prefill._state.leases.num_requests == len(loads), "the hold is released where nothing is loaded"


def test_the_parameters_of_a_held_answer_say_how_long_it_is_held(make_turn: Callable[..., Turn]) -> None:
    assert make_turn().params["kvferry"]["lease_seconds"] == 60.0


@pytest.mark.parametrize("tokens", [SAID[:NUM_TOKENS], SAID[:40], [0, *SAID[1:]]], ids=["all", "fewer", "other"])
def test_a_prompt_that_does_not_go_on_from_what_is_held_is_computed(
    tokens: Sequence[int], make_turn: Callable[..., Turn]
) -> None:
    """Without asking the decode engine: the engine must compute at least one token of any prompt."""
    turn = make_turn()
    ours = turn.ask(tokens)
    assert not turn.is_expected()
    assert turn.prefill.get_num_new_matched_tokens(ours, 0) == (0, False)
    assert turn.prefill._state.leases.num_requests == 0


def test_windows_that_a_load_would_fill_in_part_are_computed(make_turn: Callable[..., Turn], make_role: Any) -> None:
    turn = make_turn((FULL, WINDOW))
    assert turn.found(turn.ask()) == (NUM_TOKENS, True)
    longer = GroupShape(CacheKind.SLIDING_WINDOW, 32, 40)
    turn.prefill._state.groups = (FULL, longer)
    assert turn.prefill.get_num_new_matched_tokens(turn.ask(name="u"), 0) == (0, False)
    assert not turn.is_expected("u")


def test_a_turn_that_nobody_has_signed_is_computed(make_turn: Callable[..., Turn], tmp_path: Any) -> None:
    """A client may write any parameters: they must not lead an engine with keys to another host."""
    make_keys(tmp_path / "keys")
    turn = make_turn(keys=str(tmp_path / "keys"))
    assert turn.found(turn.ask()) == (NUM_TOKENS, True)
    for number, forged in enumerate(({"signature": ""}, {"num_tokens": NUM_TOKENS - 1})):
        turn.ask(name=f"forged {number}", kvferry=turn.params["kvferry"] | forged)
        assert not turn.is_expected(f"forged {number}")


def test_an_engine_that_cannot_compute_anew_expects_no_turn(make_turn: Callable[..., Turn]) -> None:
    """A load that fails would fail the request."""
    turn = make_turn()
    turn.prefill._engine._core.scheduler = None
    turn.ask()
    assert not turn.is_expected()


def test_a_turn_whose_hold_has_ended_is_computed_at_once(
    make_turn: Callable[..., Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "TURN_ANSWER_SECONDS", 3600.0)
    turn = make_turn()
    state = turn.decode.role._state
    state.holds.release(state.epoch, [handle_of(turn.params)])
    assert turn.found(turn.ask()) == (0, False)


def test_a_turn_whose_hold_ends_after_an_answer_is_computed(make_turn: Callable[..., Turn]) -> None:
    """Since the engine has no room for it, say."""
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours) == (NUM_TOKENS, True)
    leases, state = turn.prefill._state.leases, turn.decode.role._state
    state.holds.release(state.epoch, [handle_of(turn.params)])
    leases._holds._renew_at = dict.fromkeys(leases._holds._renew_at, 0.0)
    wait_until(lambda: leases.is_lost("t"), each=leases.keep)
    assert turn.prefill.get_num_new_matched_tokens(ours, 0) == (0, False)


def test_a_decode_engine_that_does_not_answer_is_waited_for_only_so_long(
    make_turn: Callable[..., Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "TURN_ANSWER_SECONDS", 1.0)
    turn = make_turn()
    turn.decode.role.shutdown()
    ours = turn.ask()
    assert turn.prefill.get_num_new_matched_tokens(ours, 0) == (None, False)
    assert turn.found(ours) == (0, False)


def test_a_reset_lets_a_turn_that_waits_be_computed(make_turn: Callable[..., Turn]) -> None:
    """What is held was computed with weights that this engine may no longer have."""
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours) == (NUM_TOKENS, True)
    turn.prefill.reset_cache()
    assert turn.prefill.get_num_new_matched_tokens(ours, 0) == (0, False)
    turn.prefill.update_state_after_alloc(ours, allocated(BLOCKS), 0)
    assert next_step(turn.prefill).loads == []


def test_a_request_after_a_turn_of_its_id_loads_its_own_tokens(make_turn: Callable[..., Turn], make_role: Any) -> None:
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours) == (NUM_TOKENS, True)
    turn.load(ours)
    turn.report(finished=["t"])
    turn.prefill.request_finished(ours, (BLOCKS,), is_complete=False)
    again = turn.ask_for_prompt(make_role)
    assert turn.found(again) == (40, True)
    assert not turn.load(again, 40).is_optional


def test_a_turn_that_one_rank_could_not_load_is_computed(make_turn: Callable[..., Turn], make_role: Any) -> None:
    """Whichever rank was the last: vLLM believes the load once all ranks have reported it."""
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours) == (NUM_TOKENS, True)
    turn.load(ours)
    ours.num_computed_tokens = NUM_TOKENS
    turn.report("t")
    assert (turn.anew, ours.num_computed_tokens) == (set(), NUM_TOKENS), "another rank may still write its blocks"
    turn.report(finished=["t"])
    assert (turn.anew, ours.num_computed_tokens) == ({"t"}, 0)
    assert turn.prefill._state.leases.num_requests == 0
    turn.anew.clear()
    again = turn.ask_for_prompt(make_role)
    assert turn.found(again) == (40, True)
    turn.load(again, 40)
    turn.report(finished=["t"])
    assert turn.anew == set(), "the failure was of the former request of this id"


def test_a_load_that_fails_after_a_reset_is_left_to_vllm(make_turn: Callable[..., Turn]) -> None:
    """VLLM fails it or computes it, as ``kv_load_failure_policy`` says."""
    turn = make_turn()
    ours = turn.ask()
    assert turn.found(ours) == (NUM_TOKENS, True)
    turn.load(ours)
    turn.prefill.reset_cache()
    turn.anew.clear()
    turn.report(finished=["t"], failed=["t"])
    assert turn.anew == set()
