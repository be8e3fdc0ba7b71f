"""Requests with any ``kv_transfer_params``, and peers with well-formed messages of any fields, against real roles.

:mod:`tests.fuzzed_messages` says how long these tests take.
"""

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kvferry.errors import KVFerryError
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Drain, Handle, Question, Release

from ..fuzzed_messages import ANYTHING, Fuzzer, run

pytest.importorskip("vllm")
from vllm.v1.outputs import KVConnectorOutput

from .flows import FLOWS, Flow, to_prefill
from .scheduler_requests import FULL, PROMPT, WINDOW, allocated, kept, next_step, request, run_prefill

GROUPS = (FULL, WINDOW)
BLOCKS = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]


@pytest.mark.parametrize("flow", FLOWS)
def test_a_scheduler_survives_well_formed_messages_with_random_fields(flow: Flow, make_role: Any) -> None:
    """It keeps no block that nobody holds, and frees none twice; afterwards it holds and releases as before."""
    role = make_role(*GROUPS)
    known = [role._state.epoch, "r", "x", 0, 1, 2, 3, protocol.PROTOCOL_VERSION]

    def case(fuzzer: Fuzzer) -> None:
        draw = fuzzer.random.random()
        if draw < 0.02:
            prefill(role, flow, fuzzer.random.choice(("r", "x")))
        elif draw < 0.1:
            next_step(role, "r")
        else:
            question = fuzzer.valid(Question)
            if isinstance(question, Drain):  # whoever may talk to an engine may drain it, for ever
                question = msgspec.structs.replace(question, begin=False)
            with suppress(KVFerryError):
                protocol.encode(role._answer(question))

    run(case, 0.05, known=known)
    with role._state.holds_lock:
        epoch, holds = role._state.epoch, role._state.holds
        handles = tuple(hold.handle for hold in holds._holds.values())
    role._answer(Release(epoch, handles))
    next_step(role)
    assert kept(role) == []
    prefill(role, flow, "after")
    assert sorted(kept(role)) == sorted(BLOCKS[0] + BLOCKS[1])
    [handle] = [hold.handle for hold in holds._holds.values()]
    role._answer(Release(epoch, (handle,)))
    next_step(role)
    assert kept(role) == []


def prefill(role: Any, flow: Flow, request_id: str) -> None:
    """Prefill a prompt that the role then holds, unless it holds one of this name."""
    ours = request(PROMPT, to_prefill(flow, request_id), request_id)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(*BLOCKS), 0)
    next_step(role, request_id)  # a request ends in the step after the one that admits it, at the earliest
    ours.num_computed_tokens = ours.num_prompt_tokens
    role.request_finished(ours, BLOCKS, is_complete=True)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_scheduler_survives_any_transfer_params(flow: Flow, make_role: Any) -> None:
    """A request at worst fails itself: no call raises, since that would end vLLM's engine."""
    prefill_role, decode = make_role(*GROUPS), make_role(*GROUPS)
    sound = run_prefill(prefill_role, PROMPT, *BLOCKS)
    of_router = {
        "do_remote_prefill": True,
        "transfer_id": "x",
        "remote_engine_id": "p",
        "remote_bootstrap_addr": "http://127.0.0.1:9",
    }
    number = 0

    def case(fuzzer: Fuzzer) -> None:
        nonlocal number
        number += 1
        changed = fuzzer.ill_formed(sound if flow == "sequential" else of_router)
        params = changed if isinstance(changed, dict) else {"do_remote_prefill": True, "kvferry": changed}
        if fuzzer.random.random() < 0.3:
            params = {**params, "do_remote_decode": fuzzer.random.choice(ANYTHING), "do_remote_prefill": True}
        fuzzer.last = repr(params).encode(errors="replace")
        ours = request(PROMPT, params, f"r{number}")
        decode.on_new_request(ours)
        loaded, _ = decode.get_num_new_matched_tokens(ours, 0)
        if loaded is not None:
            decode.update_state_after_alloc(ours, allocated(*BLOCKS), loaded)
            orders = next_step(decode, ours.request_id)
            assert len(orders.loads) <= 1
        decode.request_finished(ours, BLOCKS, is_complete=fuzzer.random.random() < 0.5)
        decode.update_connector_output(KVConnectorOutput(finished_recving={ours.request_id}))
        next_step(decode)

    run(case, 0.1)


def test_a_release_of_anything_ends_no_hold_of_another_generation(make_role: Any) -> None:
    """The fuzzed messages above guess generations only because the test tells them."""
    role = make_role(*GROUPS)
    prefill(role, "sequential", "r")
    [hold] = role._state.holds._holds.values()
    for generation in (hold.handle.generation + 1, max(0, hold.handle.generation - 1)):
        if generation != hold.handle.generation:
            role._answer(Release(role._state.epoch, (Handle("r", generation),)))
    next_step(role)
    assert sorted(kept(role)) == sorted(BLOCKS[0] + BLOCKS[1])
