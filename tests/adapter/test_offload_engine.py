"""``KVFerryOffloadConnector`` between vLLM's own scheduler and real bytes: what comes back decides the next tokens."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvferry.integrations.vllm.scheduler.offload_tiers import Tiers
from kvferry.integrations.vllm.worker import offload as worker_offload

from ..support.offload_state import role_state
from .label_engine import BLOCK_SIZE, LabelEngine
from .model_files import write_model
from .test_offload_names import LAYERS, attention, window
from .vllm_caches import CacheRank

UNIFORM = dict.fromkeys(LAYERS, attention())
HYBRID = {name: window() if index % 2 else attention() for index, name in enumerate(LAYERS)}
LENGTH = 90
PROMPT = [(7 * index + 3) % 500 for index in range(LENGTH)]
PROMPTS = {f"p{index}": [index, *PROMPT[index:], *range(index)] for index in range(5)}
BLOCK_BYTES = len(LAYERS) * 2 * 4 * 8 * 4 * BLOCK_SIZE
"""Of keys and values of all layers, four heads of 8 numbers in float32."""


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LabelEngine]]:
    """Return a function that makes an engine of one rank whose tiers are open."""
    model = write_model(tmp_path / "model")
    made: list[LabelEngine] = []

    def make(
        specs: dict[str, Any] = UNIFORM,
        layout: str = "BHLNC",
        *,
        asynchronous: bool = False,
        host_blocks: int = 40,
        **given: Any,
    ) -> LabelEngine:
        # Two prompts at a time do not fit.
        rank = CacheRank(specs, layout, num_blocks=12 if specs is UNIFORM else 18)
        for name, value in (
            ("get_tensor_model_parallel_rank", 0),
            ("get_pp_group", SimpleNamespace(rank_in_group=0)),
            ("register_caches", rank.shard),
        ):
            monkeypatch.setattr(worker_offload, name, lambda *_, value=value: value)
        extra = {"host_bytes": host_blocks * BLOCK_BYTES, "loads": "always", **given}
        transfer = {"kv_connector": "KVFerryOffloadConnector", "kv_connector_extra_config": extra}
        engine = LabelEngine(rank, model, transfer, asynchronous=asynchronous, layout=layout)
        made.append(engine)
        engine.run(opens=[499] * 3)
        engine.num_computed = 0
        return engine

    yield make
    for engine in made:
        engine.shutdown()


CASES: dict[str, dict[str, Any]] = {
    "rows by head": {},
    "rows by layer": {"layout": "BLHNC"},
    "no rows": {"layout": "LBHNC"},
    "two blocks a stored block": {"block_size": 32},
    "two blocks a stored block, no rows": {"block_size": 32, "layout": "LBHNC"},
    "windows": {"specs": HYBRID, "layout": "LBHNC"},
    "windows in rows": {"specs": HYBRID, "layout": "BLHNC"},
}


def tiers_of(engine: LabelEngine) -> Tiers:
    tiers = engine.scheduler.connector._scheduler._start.tiers
    assert isinstance(tiers, Tiers)
    return tiers


def one_by_one(engine: LabelEngine, suffix: str = "") -> dict[str, list[int]]:
    """Run the prompts one after the other, each with an empty prefix cache of the engine."""
    found = {}
    for name, prompt in PROMPTS.items():
        engine.forget()
        found[name] = engine.run(**{name + suffix: prompt})[name + suffix]
    return found


def true_tokens(engine: LabelEngine, prompt: list[int]) -> list[int]:
    """Return the tokens of a request that an engine computes on its own, without vLLM's scheduler or a connector."""
    return engine.tokens_without_cache(prompt, 8)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_the_second_pass_loads_and_gives_the_same_tokens(
    name: str, asynchronous: bool, make_engine: Callable[..., LabelEngine]
) -> None:
    engine = make_engine(asynchronous=asynchronous, **CASES[name])
    first = one_by_one(engine)
    in_first = engine.num_computed
    assert in_first >= 5 * LENGTH
    assert first == {name: true_tokens(engine, prompt) for name, prompt in PROMPTS.items()}
    assert one_by_one(engine, "-again") == first
    # A prompt of 90 or 91 tokens has 5 whole blocks or 2 of 32 tokens; 7 of 8 new tokens are computed.
    rest = LENGTH + 1 - (80 if "block_size" not in CASES[name] else 64)
    assert engine.num_computed - in_first <= 5 * (rest + 8)


def test_a_byte_that_changes_in_host_memory_changes_the_tokens(make_engine: Callable[..., LabelEngine]) -> None:
    """The control of the test before: the second pass reads host memory."""
    engine = make_engine()
    first = one_by_one(engine)
    memory = tiers_of(engine).memory.region
    held = np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(memory.base_address))
    held.view(np.float32)[:] += 1
    assert one_by_one(engine, "-again") != first


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_requests_at_a_time_preempt_one_another(asynchronous: bool, make_engine: Callable[..., LabelEngine]) -> None:
    """Three prompts of 6 blocks meet 11 blocks of the engine and 8 of host memory: blocks are reused under stores."""
    engine = make_engine(asynchronous=asynchronous, host_blocks=8)
    expected = {name: true_tokens(engine, prompt) for name, prompt in PROMPTS.items()}
    for turn in range(4):
        found = engine.run(**{f"{name}-{turn}": prompt for name, prompt in PROMPTS.items()})
        assert {name.split("-")[0]: tokens for name, tokens in found.items()} == expected
    state = role_state(engine.scheduler.connector._scheduler)
    assert (state["promised"], state["loads"], state["stores"], state["kept_blocks"]) == (0, [], 0, 0), state


def test_a_reset_forgets_what_was_stored(make_engine: Callable[..., LabelEngine]) -> None:
    """The weights may have changed: nothing of before is loaded."""
    engine = make_engine()
    one_by_one(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = engine.num_computed
    one_by_one(engine, "-again")
    assert engine.num_computed - before >= 5 * LENGTH


def test_a_longer_prompt_than_host_memory_is_stored_as_far_as_it_fits(make_engine: Callable[..., LabelEngine]) -> None:
    """Its first blocks, without which the others are of no use."""
    engine = make_engine(host_blocks=3)
    engine.add("one", PROMPT, max_tokens=4)  # no block behind the prompt's own becomes full
    engine.run()
    engine.forget()
    before = engine.num_computed
    engine.run(again=PROMPT)
    assert engine.num_computed - before == LENGTH - 3 * BLOCK_SIZE + 7
