"""Steps in which only lower tiers copy: how long they wait, and that no other step does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import json

from kvferry.integrations.vllm.engine_core import LEAST_SECONDS, MOST_SECONDS, SHARE
from kvferry.layout.shard import Region
from kvferry.tiers.lower_copies import CopySettings

from ..support.dictionary_tier import DictionaryTier
from .model_files import CONFIG
from .offload_engine import Engine, make_config, prompt_of


class EngineWithTier(Engine):
    """Host memory of 26 blocks above a tier; prompts of six blocks have been written down, the first ones evicted."""

    def __init__(self, folder: Path) -> None:
        def lower(region: Region) -> DictionaryTier:
            self.tier = DictionaryTier(region, 1 << 20)
            return self.tier

        super().__init__(make_config(folder), num_blocks=14, host_blocks=26, lower=lower)
        for part in range(1, 8):
            self.add(f"first {part}", prompt_of(part, -part))
            self.run()
        while self.role.has_pending_work():
            self.step(is_forced=True)

    def wait(self, seconds_later: float = 0.0) -> float:
        """Plan and process a step; return how long it waits."""
        self.now += seconds_later
        orders = self.schedule().output.kv_connector_metadata
        self.process()
        self.end_copies()
        return float(orders.wait_seconds)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[[], EngineWithTier]]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made: list[EngineWithTier] = []

    def make() -> EngineWithTier:
        made.append(EngineWithTier(tmp_path))
        return made[-1]

    yield make
    for engine in made:
        engine.role.shutdown()


def test_a_step_waits_while_only_a_lower_tier_copies(make_engine: Callable[[], EngineWithTier]) -> None:
    engine = make_engine()
    stack: Any = engine.role._start.tiers.stack
    stack._settings = CopySettings(chunk_bytes=2 * stack.slot_bytes["0"])
    engine.tier.faults.hangs = True
    engine.add("below", prompt_of(1, -1))
    waits = [engine.wait(seconds) for seconds in (0.0, 0.0, 0.04, 0.2)]
    assert waits == pytest.approx([LEAST_SECONDS, LEAST_SECONDS, SHARE * 0.04, MOST_SECONDS])
    engine.tier.faults.hangs = False
    engine.tier._blocks_per_poll = 1
    # A step polls twice, so the first of three copies ends in the first of these steps.
    assert [engine.wait(), engine.wait()] == [MOST_SECONDS, LEAST_SECONDS]


def test_no_other_step_waits(make_engine: Callable[[], EngineWithTier]) -> None:
    engine = make_engine()
    engine.tier.faults.hangs = True
    engine.add("below", prompt_of(1, -1))
    assert [engine.wait(0.1) for _ in range(2)] == [LEAST_SECONDS, MOST_SECONDS]
    engine.add("computes", prompt_of(100), max_tokens=3)
    waits = []
    while "computes" not in engine.finished:
        waits.append(engine.wait(0.1))
    assert len(waits) >= 3
    assert not any(waits)
    # Now the tier alone has something to do: from the start again.
    assert [engine.wait(0.1) for _ in range(2)] == [LEAST_SECONDS, MOST_SECONDS]
    engine.tier.faults.hangs = False
    loads: list[Any] = []
    while not loads:
        orders: Any = engine.schedule().output.kv_connector_metadata
        engine.process()
        loads = orders.loads
    assert orders.wait_seconds == 0, "a rank copies, and waits for its copy"
    assert engine.wait() == 0, "a rank copies"
    engine.run()
    assert engine.loaded["below"] == 96
    engine.check_at_rest()


def test_a_step_does_not_wait_while_a_rank_loads(make_engine: Callable[[], EngineWithTier]) -> None:
    engine = make_engine()
    engine.tier.faults.hangs = True
    engine.add("below", prompt_of(1, -1))
    assert engine.wait() == LEAST_SECONDS
    engine.add("near", prompt_of(5, -5))  # in host memory
    ordered: Any = engine.schedule().output.kv_connector_metadata
    engine.process()
    later: Any = engine.schedule().output.kv_connector_metadata
    engine.process()
    assert [(bool(step.loads), step.computes, step.wait_seconds) for step in (ordered, later)] == [
        (True, False, 0),
        (False, False, 0),
    ]
    engine.end_copies()
    assert engine.wait() == 0
    engine.tier.faults.hangs = False
    engine.run()


def test_a_step_does_not_wait_while_a_rank_stores(make_engine: Callable[[], EngineWithTier]) -> None:
    engine = make_engine()
    engine.tier.faults.hangs = True
    engine.add("below", prompt_of(1, -1))
    engine.add("computes", prompt_of(100))
    waits = []
    for _ in range(4):
        orders: Any = engine.schedule().output.kv_connector_metadata
        engine.process()
        waits.append((orders.computes, orders.wait_seconds))
    assert engine.ranks.copies, "no rank has ended its copy"
    assert waits[-1] == (False, 0), "nothing but the store and the tier"
    engine.end_copies()
    assert [engine.wait() for _ in range(2)][-1] == LEAST_SECONDS
    engine.tier.faults.hangs = False
    engine.run()


def test_an_idle_engine_does_not_wait(make_engine: Callable[[], EngineWithTier]) -> None:
    engine = make_engine()
    assert [engine.wait(0.1) for _ in range(3)] == [0, 0, 0]
