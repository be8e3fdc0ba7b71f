"""Load, wait or compute inside vLLM's real scheduler: what is measured, decided, counted, and said about hits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import json
from importlib.util import find_spec

from vllm.v1.metrics.stats import PrefixCacheStats

from kvferry.arrays import Integers
from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStatistics
from kvferry.integrations.vllm.scheduler import offload_loads
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.offload_loads import Hit
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, longest_hit, stored_groups
from kvferry.integrations.vllm.versions import cache_hit_source
from kvferry.layout.shard import CacheKind, Region
from kvferry.tiers.load_rule import CopyTimes

from ..support.dictionary_tier import DictionaryTier
from .model_files import CONFIG
from .offload_engine import Engine, make_config, prompt_of

STEP, TOKEN, IDLE_STEP = 0.004, 0.001, 0.002
PROMPT_TOKENS = 96


class TimedEngine(Engine):
    """An engine whose clock moves while it computes and loads."""

    def __init__(self, *args: Any, block_seconds: float, **named: Any) -> None:
        self.block_seconds = block_seconds
        self.loading_seconds = 0.0
        self.statistics = OffloadStatistics()
        self.sources = Counter[Any]()
        super().__init__(*args, loads="when-quicker", **named)
        self.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        connector: Any = self.scheduler.connector
        connector.get_kv_connector_stats = self.take_statistics
        connector.get_external_cache_hit_sources = self.take_sources
        ends_copy = self.ranks.end

        def end(number: int, *, fails: bool = False) -> None:
            order = self.ranks.copies[number].order
            ends_copy(number, fails=fails)
            if isinstance(order, LoadOrder):
                seconds = 0.001 + self.block_seconds * sum(len(blocks.source_ids) for blocks in order.blocks)
                self.loading_seconds += seconds

        self.ranks.end = end  # type: ignore[method-assign]

    def take_statistics(self) -> OffloadStatistics | None:
        taken = self.role.take_statistics()
        if taken is not None:
            self.statistics.aggregate(taken)
        return taken

    def take_sources(self, request: Any, num_tokens: int) -> Any:
        sources = self.role.get_external_cache_hit_sources(request, num_tokens)
        assert sum(sources.values()) == num_tokens
        self.sources.update(sources)
        return sources

    def process(self) -> None:
        tokens = self.scheduled[0].output.total_num_scheduled_tokens
        loading, self.loading_seconds = getattr(self, "loading_seconds", 0.0), 0.0
        self.now += max(STEP + TOKEN * tokens, loading) if tokens else IDLE_STEP + loading
        super().process()

    def run(self, max_steps: int = 300) -> None:
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.scheduled or self.ranks.copies):
                return
            self.step()
        raise AssertionError(self.state())

    def serve(self, *parts: int, max_tokens: int = 3) -> None:
        """Serve prompts of two parts, one after another."""
        for part in parts:
            self.add(f"{part} {len(self.finished)}", prompt_of(part, -part), max_tokens=max_tokens)
            self.run()

    def serve_and_write(self, *parts: int) -> None:
        """Serve prompts, and wait after each until its blocks are written through."""
        for part in parts:
            self.serve(part, max_tokens=1)
            for _ in range(6):
                self.step(is_forced=True)

    def decisions(self) -> dict[str, int]:
        found: dict[str, int] = self.statistics.data["decisions"]
        return found


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., TimedEngine]]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made: list[TimedEngine] = []

    def make(**arguments: Any) -> TimedEngine:
        made.append(TimedEngine(make_config(tmp_path), host_blocks=arguments.pop("host_blocks", 200), **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.role.shutdown()


PARTS = (1, 2, 3, 4, 5)
"""Together more blocks than the engine has, so that each is gone when it comes again."""


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_speed_of_prefills_is_measured(runs_ahead: bool, make_engine: Callable[..., TimedEngine]) -> None:
    engine = make_engine(block_seconds=0.0001, runs_ahead=runs_ahead)
    engine.serve(*range(1, 20))
    for length in (20, 40, 60, 33):
        engine.add(f"short {length}", prompt_of(length)[:length])
        engine.run()
    steps = engine.role._rule.steps
    assert steps.seconds(60) == pytest.approx(STEP + 60 * TOKEN, rel=0.1)


def test_the_speed_of_loads_is_measured_with_the_steps_that_they_cost(make_engine: Callable[..., TimedEngine]) -> None:
    engine = make_engine(block_seconds=0.001)
    engine.serve(*PARTS * 4)
    size = 6 * 16 * 2 * 8 * 4 * 2  # six blocks of 16 tokens, K and V of two heads of 8 numbers
    # The step in which the load is ordered, and the one in which its end is seen.
    assert engine.role._rule.loads.seconds(size) == pytest.approx(0.007 + 2 * IDLE_STEP, rel=0.1)


@pytest.mark.parametrize(("block_seconds", "chosen"), [(0.0001, "load"), (0.1, "compute")])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_what_is_quicker_is_chosen(
    block_seconds: float, chosen: str, runs_ahead: bool, make_engine: Callable[..., TimedEngine]
) -> None:
    engine = make_engine(block_seconds=block_seconds, runs_ahead=runs_ahead)
    engine.serve(*PARTS * 2)
    before = Counter(engine.decisions())
    assert before["load,unmeasured"] >= 3
    loaded = engine.loaded.total()
    engine.serve(*PARTS)
    after = Counter(engine.decisions()) - before
    assert after == {f"{chosen},quickest": len(PARTS)}
    assert engine.loaded.total() - loaded == (len(PARTS) * PROMPT_TOKENS if chosen == "load" else 0)
    engine.check_at_rest()


def test_a_request_that_waits_for_room_is_decided_once(make_engine: Callable[..., TimedEngine]) -> None:
    engine = make_engine(block_seconds=0.0001)
    engine.serve(*PARTS)
    engine.add("long", prompt_of(50, 51, 52, 53), max_tokens=40)  # takes most blocks
    engine.step()
    num_decisions = sum(engine.decisions().values())
    for part in PARTS[:3]:
        engine.add(f"again {part}", prompt_of(part, -part))
    engine.run()
    assert sum(engine.decisions().values()) - num_decisions <= 3 * 2  # once more when it has become a local hit


def test_the_decision_can_be_read(make_engine: Callable[..., TimedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(offload_loads.logger, "debug", lambda text, *values: said.append(text % values))
    engine = make_engine(block_seconds=0.0001)
    engine.serve(*PARTS * 3)
    assert len(said) == 2 * len(PARTS)
    assert "96 tokens: load 96 (unmeasured; expected: unknown, computing all: " in said[0]
    assert "kvferry: request 5 14, 96 tokens: load 96 (quickest; expected: " in said[-1]


with_sources = pytest.mark.skipif(
    find_spec("vllm.v1.metrics.cache_hit_source") is None, reason="vLLM counts the sources of hits since 0.32"
)


@with_sources
@pytest.mark.parametrize(
    ("tier", "source"),
    [("local_disk", cache_hit_source("DISK")), ("remote_pool", cache_hit_source("EXTERNAL_UNSPECIFIED"))],
)
def test_vllm_hears_which_tier_a_hit_came_from(tier: str, source: Any, make_engine: Callable[..., TimedEngine]) -> None:
    def lower(region: Region) -> DictionaryTier:
        return DictionaryTier(region, 1 << 20, name=tier)

    engine = make_engine(block_seconds=0.0001, lower=lower, num_blocks=14, host_blocks=26)
    engine.serve_and_write(1, 2, 3, 4, 5, 6, 7)
    assert not engine.sources
    engine.serve_and_write(1)  # only below by now
    assert engine.sources == {source: PROMPT_TOKENS}
    engine.serve_and_write(5)  # in host memory still, but not in the engine's cache
    assert engine.sources == {source: PROMPT_TOKENS, cache_hit_source("HOST"): PROMPT_TOKENS}
    data = engine.statistics.data
    assert data["hit_tokens"] == {tier: PROMPT_TOKENS, "host_memory": PROMPT_TOKENS}
    assert data["tier_bytes"][f"{tier},up"] == data["hit_bytes"][tier] == data["hit_bytes"]["host_memory"] > 0
    assert data["stored_blocks"] == {"host_memory": 7 * 6, tier: 7 * 6}
    assert data["tier_bytes"][f"{tier},down"] == 7 * data["hit_bytes"][tier]
    assert data["evicted_blocks"]["host_memory"] == 8 * 6 - 26
    assert data["tier_seconds"][f"{tier},up"]
    assert data["ask_seconds"]


@with_sources
def test_a_hit_of_two_tiers_is_split(make_engine: Callable[..., TimedEngine]) -> None:
    def lower(region: Region) -> DictionaryTier:
        return DictionaryTier(region, 1 << 20, name="local_disk")

    engine = make_engine(block_seconds=0.0001, lower=lower, num_blocks=14, host_blocks=26)
    engine.serve_and_write(1, 2, 3, 4, 5, 6, 7)
    engine.add("half", prompt_of(1, -1)[:48])
    engine.run()
    assert engine.sources == {cache_hit_source("DISK"): 48}
    engine.serve_and_write(12, 13, 14)
    engine.serve_and_write(1)
    assert engine.sources == {cache_hit_source("DISK"): 48 + 48, cache_hit_source("HOST"): 48}


def test_failures_and_refusals_are_counted_by_reason(make_engine: Callable[..., TimedEngine]) -> None:
    tiers: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        tiers.append(DictionaryTier(region, 1 << 20, name="local_disk"))
        return tiers[-1]

    engine = make_engine(block_seconds=0.0001, lower=lower, host_blocks=4)
    tiers[0].faults.fails = True
    engine.serve(1, max_tokens=1)
    for _ in range(5):
        engine.step(is_forced=True)
    data = engine.statistics.data
    assert data["refused_blocks"]["host_memory,tier-full"] == 2
    assert data["failures"]["local_disk,tier-failed"] >= 1
    assert data["tier_up"] == {"host_memory": 1, "local_disk": 0}


def test_blocks_that_find_no_room_in_a_tier_are_counted(make_engine: Callable[..., TimedEngine]) -> None:
    engine = make_engine(block_seconds=0.0001, lower=lambda region: DictionaryTier(region, 0, name="local_disk"))
    engine.serve_and_write(1)
    data = engine.statistics.data
    assert data["refused_blocks"] == {"local_disk,tier-full": data["stored_blocks"]["host_memory"]}
    assert data["failures"] == {}


def test_bytes_of_tiers_are_told_as_they_are_after_the_last_step(make_engine: Callable[..., TimedEngine]) -> None:
    tiers: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        tiers.append(DictionaryTier(region, 1 << 20, name="local_disk"))
        return tiers[-1]

    engine = make_engine(block_seconds=0.0001, lower=lower, host_blocks=26)
    host = engine.role._stack._host
    for served in (range(1, 3), range(3, 7)):
        engine.serve_and_write(*served)
        engine.step(is_forced=True)
        data = engine.statistics.data
        assert data["tier_capacity_bytes"] == {"host_memory": 26 * host.slot_bytes["0"], "local_disk": 1 << 20}
        assert data["tier_used_bytes"] == {
            "host_memory": min(6 * (served.stop - 1), 26) * host.slot_bytes["0"],
            "local_disk": 6 * (served.stop - 1) * host.slot_bytes["0"],
        }
        assert not engine.role.has_pending_work()


def test_tokens_that_a_tier_holds_and_does_not_bring_are_counted(make_engine: Callable[..., TimedEngine]) -> None:
    tiers: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        tiers.append(DictionaryTier(region, 1 << 20, name="local_disk"))
        return tiers[-1]

    engine = make_engine(block_seconds=0.0001, lower=lower, num_blocks=14, host_blocks=26)
    engine.serve_and_write(1, 2, 3, 4, 5, 6, 7)
    assert engine.statistics.data["computed_tokens"] == {}
    tiers[0].faults.fails = True
    engine.serve(1)
    assert engine.statistics.data["computed_tokens"] == {"not-brought": 96}


def test_blocks_of_a_request_that_ends_while_stores_keep_their_share_are_counted(
    make_engine: Callable[..., TimedEngine],
) -> None:
    engine = make_engine(block_seconds=0.0001, host_blocks=60)
    engine.role._stores.max_kept = 2
    engine.add("first", prompt_of(1, 2), max_tokens=1)
    for _ in range(4):
        engine.step(ends_copies=False)
    assert engine.state()["kept_blocks"] == 2
    assert engine.statistics.data["refused_blocks"] == {"host_memory,stores-behind": 4}
    engine.run()


class Places:
    """Stands for a stack: says where the blocks of each group are, ``nowhere`` as 2."""

    def __init__(self, places: Sequence[Integers], keys: Sequence[Sequence[bytes]]) -> None:
        self.slot_bytes = {"0": 100, "1": 7}
        self.promotion_times = {"local_disk": CopyTimes()}
        self._places = dict(zip(chain(*keys), chain(*places), strict=True))

    def locate(self, keys: Sequence[bytes], now: float) -> Integers:
        return np.array([self._places[key] for key in keys], np.int64)


@pytest.mark.parametrize("first_token", [0, 32])
@pytest.mark.parametrize("seed", range(8))
def test_options_are_prefixes_that_can_be_loaded_and_what_each_takes(seed: int, first_token: int) -> None:
    """Against each prefix alone: whether it is a hit, and which blocks of which tier it needs."""
    random = np.random.default_rng(seed)
    groups = stored_groups([GroupShape(CacheKind.ATTENTION, 16), GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)], 0, 16)
    blocks = RequestBlocks(groups, BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(40)])
    disk_from, gone = int(random.integers(0, 40)), int(random.integers(20, 45))
    places = [np.where(np.arange(40) < disk_from, 0, 1), random.choice(3, 40, p=(0.6, 0.3, 0.1))]
    places[0][gone:] = 2
    stack: Any = Places(places, blocks.keys)
    found = Hit.of(blocks, stack, first_token, 635, 0.0)
    held = [where[first_token // 16 :] != 2 for where in places]
    hits = {longest_hit(blocks, held, first_token, end) for end in range(first_token, 636)} - {first_token}
    assert found.boundary == max(hits, default=first_token)
    options = {option.num_tokens + first_token: option for option in found.options(stack, is_whole=False)}
    near = longest_hit(blocks, [where[first_token // 16 :] == 0 for where in places], first_token, 635)
    assert list(options) == sorted({near, found.boundary} - {first_token})
    for end, option in options.items():
        of_disk = bytes_of(blocks, places, first_token, end, 1)
        assert option.lower_bytes == ({"local_disk": of_disk} if of_disk else {})
        assert option.num_bytes == of_disk + bytes_of(blocks, places, first_token, end, 0)
    assert [option.num_tokens for option in found.options(stack, is_whole=True)] == [
        end - first_token for end in {found.boundary} - {first_token}
    ]


def bytes_of(blocks: RequestBlocks, places: Sequence[Integers], first_token: int, end: int, place: int) -> int:
    """Return the bytes that a load of these tokens takes from a place."""
    needed = blocks.needed(first_token, end)
    counts = [int((where[slice(*each)] == place).sum()) for where, each in zip(places, needed, strict=True)]
    return 100 * counts[0] + 7 * counts[1]
