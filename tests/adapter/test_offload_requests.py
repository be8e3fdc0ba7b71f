"""The offload connector in vLLM's scheduler, against vLLM's real scheduler and a model of ranks, caches and slab."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.request import RequestStatus

from kvferry.errors import Reason, SettingsError, TierError
from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.integrations.vllm.offload_step import OffloadStatistics, RankReport
from kvferry.integrations.vllm.scheduler import stored_blocks
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.offload_stores import Stores
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, longest_hit, stored_groups
from kvferry.layout.shard import CacheKind, Region

from ..support.dictionary_tier import DictionaryTier, TierFaults
from .model_files import CONFIG
from .offload_engine import BLOCK_SIZE, LATENT, Engine, make_config, prompt_of

FULL = GroupShape(CacheKind.ATTENTION, 16)
Configs = Callable[..., Any]
PROMPT = prompt_of(1, 2)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """Return a function that makes vLLM's configuration, once for equal arguments."""
    folder, made = tmp_path_factory.mktemp("model"), {}
    (folder / "config.json").write_text(json.dumps(CONFIG))

    def make(**arguments: Any) -> Any:
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            made[key] = make_config(folder, **arguments)
        return made[key]

    return make


@pytest.fixture
def make_engine(configs: Configs) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes an engine; ``config`` are arguments of vLLM."""
    made: list[Engine] = []

    def make(config: dict[str, Any] | None = None, **arguments: Any) -> Engine:
        made.append(Engine(configs(**(config or {})), **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.role.shutdown()


def crowd_out(engine: Engine) -> int:
    """Run other prompts of 6 blocks until the engine's own cache has nothing else; return how many."""
    number = -(-engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks // 6)
    for _ in range(number):
        part = len(engine.finished) + 100
        engine.add(f"other {part}", prompt_of(part, -part))
        engine.run()
    return number


def seen_before(engine: Engine, prompt: Sequence[int] = PROMPT, **fields: Any) -> None:
    """Run a request until its blocks are stored and the engine's own cache has other blocks."""
    engine.add("first", prompt, **fields)
    engine.run(3000)
    crowd_out(engine)


# Stores and hits.


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "windows", "block_size"), [(1, (0,), 0), (2, (0,), 0), (2, (0, 0), 0), (1, (0, 0), 32)]
)
def test_a_prompt_that_was_seen_before_is_loaded(
    num_ranks: int, windows: tuple[int, ...], block_size: int, runs_ahead: bool, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(
        num_ranks=num_ranks, windows=windows, runs_ahead=runs_ahead, host_blocks=60, block_size=block_size
    )
    prompt = prompt_of(1, 2)
    engine.add("first", prompt, max_tokens=20)
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt, max_tokens=20)
    engine.run()
    assert engine.computed["first"] == len(prompt) + 19
    assert engine.loaded["second"] == len(prompt)
    # The last token of the prompt is computed again: its logits are needed.
    assert engine.computed["second"] == 1 + 19
    engine.check_at_rest()


def engine_hashes(engine: Engine, prompt: list[int]) -> list[bytes]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return list(Request("hashes", prompt, SamplingParams(), None, block_hasher=engine.hasher).block_hashes)


def test_only_what_the_engine_lacks_is_loaded(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    engine.add("part", prompt_of(1))
    engine.run()
    engine.add("second", prompt_of(1, 2))
    engine.run()
    assert engine.state()["counts"]["loaded_tokens"] == 96
    engine.check_at_rest()


def test_requests_with_one_prefix_wait_for_one_load(make_engine: Callable[..., Engine]) -> None:
    """VLLM keeps the last block of a local hit out, so that a token is left to compute: that block is loaded."""
    for caches, tokens in ((True, 96 + 16 + 16), (False, 3 * 96)):
        engine = make_engine({"enable_prefix_caching": caches}, num_blocks=40, host_blocks=60)
        engine.add("first", prompt_of(1, 2))
        engine.run()
        crowd_out(engine)
        for number in range(3):
            engine.add(f"r{number}", prompt_of(1, 2))
        engine.run()
        assert engine.state()["counts"]["loaded_tokens"] == tokens
        assert [engine.computed[f"r{number}"] for number in range(3)] == [1, 1, 1]
        engine.check_at_rest()


# The start.


def test_nothing_is_offloaded_until_all_ranks_are_ready(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_ranks=2, host_blocks=60, starts=False)
    role, shards = engine.role, engine.ranks.report.shards
    assert role.has_pending_work()
    report, engine.ranks.report = engine.ranks.report, RankReport()
    engine.ranks.report.shards = {(0, 1): shards[0, 1]}
    engine.step()
    assert role._step.slab is None
    engine.ranks.report.shards = {(0, 0): shards[0, 0]}
    engine.step()
    order = role._step.slab
    assert order is not None
    assert order.ranks == tuple(report.shards[0, rank] for rank in range(2))
    assert order.num_blocks == {"0": 60}
    engine.add("early", prompt_of(1), max_tokens=20)
    engine.are_ready = False
    assert engine.schedule().output.kv_connector_metadata.slab == order
    engine.ranks.report.num_ready = 1
    engine.process()
    engine.step()
    assert role._start.tiers is None
    assert "stores" not in engine.state()["counts"]
    engine.ranks.report.num_ready = 1
    engine.run()
    assert not role.has_pending_work()
    engine.add("late", prompt_of(1))
    engine.run()
    # The early request was stored once the ranks were ready.
    assert engine.state()["counts"]["stores"] > 0
    engine.check_at_rest()


def test_an_engine_serves_without_tiers_that_a_rank_refuses(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_ranks=2, host_blocks=60, starts=False)
    engine.ranks.report.refused = "no memory"
    engine.add("first", prompt_of(1))
    engine.run()
    assert engine.finished.keys() == {"first"}
    assert not engine.role.has_pending_work()
    assert engine.state()["start"] == "refused"
    assert engine.role.reset_cache() is True


def test_a_slab_that_holds_no_block_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(host_blocks=0.5)
    assert engine.role._start.error.endswith("[tier-full]")
    engine.add("first", prompt_of(1))
    engine.run()


def test_more_memory_than_there_is_is_refused_when_the_engine_is_built(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(TierError) as refused:
        make_engine(host_blocks=1 << 40)
    assert refused.value.reason is Reason.TIER_FAILED


def test_a_block_size_that_does_not_fit_is_refused(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(SettingsError) as refused:
        make_engine(block_size=24)
    assert refused.value.reason is Reason.INVALID_SETTING


def test_an_interval_of_windows_is_refused_for_a_model_without_windows(make_engine: Callable[..., Engine]) -> None:
    for windows in ((0,), (LATENT,), (0, 0)):
        with pytest.raises(SettingsError, match="window_interval is 64; no cache group") as refused:
            make_engine(windows=windows, window_interval=64)
        assert refused.value.reason is Reason.INVALID_SETTING
    make_engine(num_blocks=40, windows=(0, 24), window_interval=64)


# Failures.


# Preemption, aborts, reset.


def test_the_engine_waits_for_blocks_that_a_store_is_about_to_free(make_engine: Callable[..., Engine]) -> None:
    """Instead of preempting: the reference of the store is the last one."""
    engine = make_engine(num_blocks=12, host_blocks=60)
    engine.add("one", prompt_of(1), max_tokens=2)
    running = engine.add("two", prompt_of(2, 3), max_tokens=60)
    for _ in range(12):
        engine.step(ends_copies=False)
    assert "one" in engine.finished
    assert engine.role.has_pending_block_frees()
    for _ in range(70):
        engine.step(ends_copies=False)
    assert running.num_preemptions == 0
    assert "two" not in engine.finished
    engine.run()
    assert running.num_preemptions == 0
    assert not engine.role.has_pending_block_frees()
    engine.check_at_rest()


def test_an_aborted_load_keeps_its_slots_until_every_rank_has_ended_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_ranks=2, host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt_of(1, 2))
    engine.step(ends_copies=False)
    engine.abort("second")
    engine.ranks.end(0)
    engine.step(ends_copies=False)
    assert engine.state()["tiers"]["host_memory"]["num_pinned"] == 6
    engine.run()
    engine.check_at_rest()


def test_after_a_reset_no_earlier_block_is_found_and_running_requests_store_nothing(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    engine.add("running", prompt_of(5), max_tokens=40)
    engine.step(ends_copies=False)
    engine.step(ends_copies=False)
    assert engine.scheduler.connector is not None
    assert engine.scheduler.connector.reset_cache() is True
    num_others = crowd_out(engine)
    num_blocks = engine.state()["tiers"]["host_memory"]["num_blocks"]
    assert num_blocks == 6 + 6 * num_others, "the first request's, and the others'"
    engine.add("again", prompt_of(1, 2))
    engine.add("running again", prompt_of(5))
    engine.run()
    assert engine.loaded["again"] == engine.loaded["running again"] == 0
    assert engine.role._start.opened.names.private is not None


def test_the_end_of_a_request_is_a_use_of_its_blocks_of_the_first_ones_last(make_engine: Callable[..., Engine]) -> None:
    """They were stored in several steps: the first ones would go first, and without them the others are of no use."""
    engine = make_engine(num_blocks=40, host_blocks=12)
    request = engine.add("first", PROMPT, max_tokens=70)
    engine.run()
    engine.add("other", prompt_of(7, 8))
    engine.run()
    tiers = engine.role._start.opened
    assert tiers is not None
    keys = tiers.names.keys(0, engine_hashes(engine, list(request.all_token_ids)))
    assert tiers.stack.is_missing(keys[:10]).tolist() == [False] * 6 + [True] * 4


def test_a_request_that_ends_without_blocks_stores_nothing(make_engine: Callable[..., Engine]) -> None:
    """VLLM has taken them back: the request was preempted in a step before its end was known."""
    engine = make_engine(host_blocks=60)
    request = engine.add("first", PROMPT, max_tokens=40)
    engine.role._stores.max_kept = 0
    for _ in range(3):
        engine.step()
    engine.role._stores.max_kept = 20
    request.status = RequestStatus.FINISHED_STOPPED
    assert engine.role.request_finished(request, [[]]) == (False, None)
    assert engine.state()["stores"] == 0


def test_stores_keep_no_more_than_their_share_of_the_engines_blocks(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_blocks=20, host_blocks=60)
    engine.add("first", prompt_of(1, 2), max_tokens=40)
    for _ in range(20):
        engine.step(ends_copies=False)
        assert engine.state()["kept_blocks"] <= 10
    engine.end_copies()
    engine.run()
    engine.role._stores.max_kept = 7
    engine.add("second", prompt_of(3, 4), max_tokens=40)
    engine.add("third", prompt_of(5, 6))
    for _ in range(4):  # twelve blocks in one step, and further offers while none of them has been copied
        engine.step(ends_copies=False)
        assert engine.state()["kept_blocks"] <= 7
    engine.run()
    assert engine.state()["counts"]["deferred_blocks"] > 0
    crowd_out(engine)
    engine.add("again", prompt_of(3, 4))
    engine.run()
    assert engine.loaded["again"] == 96, "what was deferred was stored later"
    engine.check_at_rest()


# Lower tiers.


def test_a_prompt_is_found_on_disk_by_a_later_engine(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_ranks": 2, "host_blocks": 8, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    engine = make_engine(**arguments)
    engine.add("first", prompt_of(1, 2))
    engine.run(3000)
    with pytest.raises(TierError) as refused:
        make_engine(**arguments)
    assert refused.value.reason is Reason.TIER_IN_USE
    engine.role.shutdown()
    later = make_engine(**arguments)
    later.now = 2000.0
    later.add("second", prompt_of(1, 2))
    later.run(3000)
    assert later.loaded["second"] == 96
    later.check_at_rest()


@pytest.fixture
def make_engine_with_tier(make_engine: Callable[..., Engine]) -> Callable[..., tuple[Engine, DictionaryTier]]:
    """Return a function that makes an engine with a lower tier that holds a prompt of two parts, and host memory not.

    The host tier is small, so that the other prompts drive the first one out.
    """

    def make(**arguments: Any) -> tuple[Engine, DictionaryTier]:
        made: list[DictionaryTier] = []

        def lower(region: Region) -> DictionaryTier:
            made.append(DictionaryTier(region, 1 << 20))
            return made[0]

        engine = make_engine(lower=lower, host_blocks=8, **arguments)
        engine.add("first", prompt_of(1, 2))
        engine.run()
        crowd_out(engine)
        return engine, made[0]

    return make


def test_requests_wait_for_one_promotion(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    engine, _ = make_engine_with_tier(num_blocks=40)
    before = engine.state()["tiers"]["lower"]["dictionary"]["blocks_up"]
    for number in range(3):
        engine.add(f"r{number}", prompt_of(1, 2))
    engine.run()
    assert engine.state()["tiers"]["lower"]["dictionary"]["blocks_up"] - before == 6
    assert [engine.computed[f"r{number}"] for number in range(3)] == [1, 1, 1]
    engine.check_at_rest()


@pytest.mark.parametrize("fault", ["hangs", "fails", "raises", "is_silent"])
def test_a_tier_that_does_not_answer_costs_a_wait_and_not_the_request(
    fault: str, make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]]
) -> None:
    engine, tier = make_engine_with_tier(load_wait_seconds=2.0)
    setattr(tier.faults, fault, True)
    begin = engine.now
    engine.add("second", prompt_of(1, 2))
    while "second" not in engine.finished:
        engine.now += 0.01
        engine.step()
    assert engine.computed["second"] == 96
    assert engine.now - begin < 2.2
    # The other request's blocks are still written, or left; nothing makes an idle engine spin.
    for _ in range(30):
        engine.now += 0.5
        engine.step()
    assert not engine.role.has_pending_work()
    setattr(tier.faults, fault, False)
    engine.now += 30
    engine.step(is_forced=True)
    engine.run()
    engine.check_at_rest()


def test_a_damaged_block_below_is_a_miss(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    engine, tier = make_engine_with_tier()
    names = engine.role._start.opened.names
    [key] = names.keys(0, [engine_hashes(engine, prompt_of(1, 2))[2]])
    content, expected = tier.blocks[key]
    tier.blocks[key] = bytes([content[0] ^ 1]) + content[1:], expected
    engine.add("second", prompt_of(1, 2))
    engine.run()
    assert engine.loaded["second"] == 2 * BLOCK_SIZE
    engine.check_at_rest()


def test_an_idle_engine_steps_until_its_blocks_are_below(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    engine, tier = make_engine_with_tier()
    keys = engine.role._start.opened.names.keys(0, engine_hashes(engine, prompt_of(7)))
    engine.add("last", prompt_of(7))
    while "last" not in engine.finished:
        engine.step(ends_copies=False)
    assert engine.role.has_pending_work()
    engine.run()
    assert set(keys) <= tier.blocks.keys()


def test_a_request_that_ends_while_it_waits_leaves_nothing(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    engine, tier = make_engine_with_tier()
    tier.faults.hangs = True
    engine.add("second", prompt_of(1, 2))
    engine.step()
    assert engine.state()["tiers"]["requests"].keys() == {"second"}
    engine.abort("second")
    tier.faults.hangs = False
    engine.run()
    engine.check_at_rest()
    assert engine.state()["tiers"]["requests"] == {}


def test_what_a_request_needs_is_brought_while_it_waits_in_the_queue(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    """VLLM asks for no hit of a request that it has no room for."""
    engine, _ = make_engine_with_tier(config={"max_num_seqs": 1})
    engine.add("long", prompt_of(50, 60), max_tokens=60)
    engine.step()
    engine.step()
    lower, missing = (
        engine.state()["tiers"]["lower"]["dictionary"],
        in_slab(engine, 0, prompt_of(1, 2)).count(False),
    )
    assert missing > 0
    request = engine.add("waits", prompt_of(1, 2))
    for _ in range(3):
        engine.step(ends_copies=False)
    assert request.num_computed_tokens == 0
    now = engine.state()["tiers"]
    assert now["lower"]["dictionary"]["blocks_up"] > lower["blocks_up"]
    assert now["requests"] == {}, "nobody has asked"
    engine.run()
    assert engine.loaded["waits"] == 96
    engine.check_at_rest()


def test_what_the_engine_has_itself_is_not_brought(
    make_engine_with_tier: Callable[..., tuple[Engine, DictionaryTier]],
) -> None:
    engine, _ = make_engine_with_tier(num_blocks=60)
    engine.add("again", prompt_of(1, 2))
    engine.run()
    before = engine.state()["tiers"]["lower"]["dictionary"]["blocks_up"]
    for number in range(4):
        engine.add(f"other {number}", prompt_of(200 + number, 210 + number))
        engine.run()
    assert not all(in_slab(engine, 0, prompt_of(1, 2)))
    engine.add("once more", prompt_of(1, 2))
    engine.run()
    # vLLM keeps the last block out of a local hit.
    assert engine.state()["tiers"]["lower"]["dictionary"]["blocks_up"] - before <= 1
    engine.check_at_rest()


# Sliding windows.


def in_slab(engine: Engine, group: int, prompt: list[int]) -> list[bool]:
    """Return which blocks of a prompt host memory holds."""
    tiers = engine.role._start.opened
    assert tiers is not None
    return [not missing for missing in tiers.stack.is_missing(tiers.names.keys(group, engine_hashes(engine, prompt)))]


def test_windows_are_stored_at_boundaries(make_engine: Callable[..., Engine]) -> None:
    """Windows of 24 tokens at each 64th token, and at the last boundary of prompt and request."""
    engine = make_engine(num_blocks=40, windows=(0, 24), host_blocks=400, window_interval=50)
    request = engine.add("first", prompt_of(1, 2, 3)[:135], max_tokens=25)
    engine.run()
    tokens = list(request.all_token_ids)
    assert len(tokens) == 160
    assert in_slab(engine, 0, tokens) == [True] * 9 + [False]
    # Boundaries 64, 128 (also the prompt's last) and 144 (the request's last): 24 tokens are two blocks.
    assert in_slab(engine, 1, tokens) == [False, False, True, True, False, False, True, True, True, False]
    crowd_out(engine)
    for name, length, loaded in (("at 64", 100, 64), ("at 128", 135, 128), ("at 144", 150, 144)):
        engine.add(name, tokens[:length])
        engine.run()
        crowd_out(engine)
        assert engine.loaded[name] == loaded
    engine.check_at_rest()


def test_a_hit_with_a_window_ends_where_the_window_is_whole() -> None:
    groups = stored_groups([FULL, GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)], 0, 16)
    blocks = RequestBlocks(groups, BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(8)])
    for marks, hit in (("00000111", 128), ("00011101", 96), ("11110110", 64), ("01001001", 0), ("10010110", 16)):
        held = [np.ones(8, np.bool_), np.array([mark == "1" for mark in marks])]
        assert longest_hit(blocks, held, 0, 128) == hit
    # Behind a local hit the engine has what the window needs before it.
    assert longest_hit(blocks, [np.ones(2, np.bool_), np.array([True, False])], 96, 128) == 112


def test_a_stored_block_of_which_a_part_has_left_its_window_is_not_stored() -> None:
    """The engine has its first half no more: in its place is the null block, with anybody's bytes."""
    groups = stored_groups([GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)], 32, 16)
    blocks = RequestBlocks(groups, BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(8)])
    stores = Stores(groups, 1, 0, count(1), Counter(), OffloadStatistics(), None)
    stores.max_kept = 100
    stack: Any = SimpleNamespace(is_missing=lambda keys: np.ones(len(keys), np.bool_))
    request: Any = SimpleNamespace(num_prompt_tokens=128)
    stores.offer(stack, request, blocks, 128, lambda: ([0, 5, 6, 7, 0, 0, 8, 9],))
    assert stores._offers.keys == {0: [blocks.keys[0][1], blocks.keys[0][3]]}
    assert [rows.tolist() for rows in stores._offers.rows[0]] == [[[6, 7], [8, 9]]]


def test_a_block_that_two_requests_of_a_step_fill_is_stored_once(make_engine: Callable[..., Engine]) -> None:
    """The blocks behind it must not take its place."""
    engine = make_engine({"enable_prefix_caching": False}, num_blocks=40, host_blocks=60)
    engine.add("one", prompt_of(1, 2, length=16))
    engine.add("two", prompt_of(1, 3, length=16))
    assert engine.schedule().output.total_num_scheduled_tokens == 64
    engine.process()
    engine.run()
    assert engine.state()["tiers"]["host_memory"]["num_blocks"] == 3
    engine.check_at_rest()


# A request's blocks.


def test_keys_follow_hashes_that_are_cut_and_go_on_otherwise() -> None:
    names = BlockNames(bytes(14), {})
    blocks = RequestBlocks(stored_groups([FULL, FULL], 32, 16), names)
    first = [bytes([number]) * 32 for number in range(1, 12)]
    blocks.update(first)
    assert blocks.keys == [names.keys(group, first[1::2]) for group in range(2)]
    blocks.num_offered = [5, 3]
    other = [*first[:5], *(bytes([200 + number]) * 32 for number in range(7))]
    for hashes, offered in ((first[:9], [4, 3]), (other, [2, 2]), ([], [0, 0]), (first, [0, 0])):
        blocks.update(hashes)
        assert blocks.keys == [names.keys(group, hashes[1::2]) for group in range(2)]
        assert blocks.num_offered == offered


def test_a_request_has_keys_up_to_where_every_group_has_them() -> None:
    groups = stored_groups([FULL, GroupShape(CacheKind.ATTENTION, 32)], 0, 16)
    blocks = RequestBlocks(groups, BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(3)])
    assert ([len(keys) for keys in blocks.keys], blocks.num_tokens) == ([3, 1], 32)


@pytest.mark.parametrize(
    ("held", "first_token", "end_token", "hit"),
    [
        (["1111"], 0, 64, 64),
        (["1111"], 0, 63, 48),
        (["1101"], 0, 64, 32),
        (["0111"], 0, 64, 0),
        (["11"], 32, 64, 64),
        (["1111", "1110"], 0, 64, 48),
        (["1111", "0111"], 0, 64, 0),
        ([""], 64, 80, 64),
    ],
)
def test_a_hit_is_what_all_groups_have(held: list[str], first_token: int, end_token: int, hit: int) -> None:
    blocks = RequestBlocks(stored_groups([FULL] * len(held), 0, 16), BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(4)])
    flags = [np.array([mark == "1" for mark in marks], np.bool_) for marks in held]
    assert longest_hit(blocks, flags, first_token, end_token) == hit


def test_a_hit_ends_at_whole_blocks_of_every_group() -> None:
    shapes = [FULL, GroupShape(CacheKind.ATTENTION, 48)]
    blocks = RequestBlocks(stored_groups(shapes, 0, 16), BlockNames(bytes(14), {}))
    blocks.update([bytes([number]) * 32 for number in range(10)])
    assert stored_blocks.alignment(blocks.groups) == 48
    assert [len(keys) for keys in blocks.keys] == [10, 3]
    assert longest_hit(blocks, [np.ones(10, np.bool_), np.ones(3, np.bool_)], 0, 160) == 144


# Everything at once.


class OffloadMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, aborts, preemptions, and copies that end late, out of order, or fail."""

    make_config: Configs

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.num_added = 0

    @initialize(
        caches_prefixes=st.booleans(),
        policy=st.sampled_from(["fail", "recompute"]),
        num_drafts=st.sampled_from([0, 0, 3]),
        lower_blocks=st.sampled_from([0, 0, 5, 40]),
        arguments=st.fixed_dictionaries(
            {
                "num_blocks": st.integers(12, 24),
                "windows": st.sampled_from([(0,), (0, 0), (0, 40), (24, 0), (40,)]),
                "window_interval": st.sampled_from([0, 0, 40]),
                "num_ranks": st.integers(1, 2),
                "host_blocks": st.integers(2, 20),
                "runs_ahead": st.booleans(),
                "block_size": st.sampled_from([0, 16, 32]),
            }
        ),
    )
    def start(
        self, caches_prefixes: bool, policy: str, num_drafts: int, lower_blocks: int, arguments: dict[str, Any]
    ) -> None:
        arguments["num_blocks"] *= len(arguments["windows"])
        if not any(arguments["windows"]):
            arguments["window_interval"] = 0
        named: dict[str, Any] = {}
        if num_drafts:
            named["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": num_drafts,
                "prompt_lookup_max": 3,
            }
            # The model of ranks does not know where a step begins whose predecessor may reject drafts.
            arguments["runs_ahead"] = False
        config = type(self).make_config(enable_prefix_caching=caches_prefixes, failure_policy=policy, **named)
        self.tier: DictionaryTier | None = None

        def lower(region: Region) -> DictionaryTier:
            self.tier = DictionaryTier(region, lower_blocks * 4096, blocks_per_poll=1)
            return self.tier

        self.engine = Engine(config, lower=lower if lower_blocks else None, **arguments)

    @rule(
        parts=st.lists(st.integers(0, 2), min_size=1, max_size=2),
        cut=st.integers(0, 47),
        max_tokens=st.integers(1, 40),
    )
    def add(self, parts: list[int], cut: int, max_tokens: int) -> None:
        prompt = prompt_of(*parts)
        self.num_added += 1
        self.engine.add(f"r{self.num_added}", prompt[: len(prompt) - cut], max_tokens)

    @rule(number=st.integers(1, 8))
    def step(self, number: int) -> None:
        for _ in range(number):
            self.engine.now += 0.01
            self.engine.step(ends_copies=False)

    @rule()
    def step_and_end_all_copies(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.engine.ranks.copies)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_a_copy(self, data: st.DataObject, fails: bool) -> None:
        self.engine.ranks.end(data.draw(st.integers(0, len(self.engine.ranks.copies) - 1)), fails=fails)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @precondition(lambda self: self.tier is not None)
    @rule(fault=st.sampled_from(["hangs", "fails", "is_silent", "raises"]), is_on=st.booleans())
    def change_the_tier(self, fault: str, is_on: bool) -> None:
        assert self.tier is not None
        setattr(self.tier.faults, fault, is_on)

    @rule()
    def reset(self) -> None:
        self.engine.role.reset_cache()

    @rule()
    def run(self) -> None:
        if self.tier is not None:
            self.tier.faults = TierFaults()
            self.engine.now += 30.0
            self.engine.step(is_forced=True)
        self.engine.run()
        self.engine.check_at_rest()

    @invariant()
    def nothing_stays_promised(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.state()["promised"] == 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run()
            unfinished = {f"r{number + 1}" for number in range(self.num_added)} - self.engine.finished.keys()
            assert unfinished <= self.engine.aborted
            self.engine.role.shutdown()


def test_no_interleaving_loads_a_wrong_block_or_leaves_anything_behind(configs: Configs) -> None:
    OffloadMachine.make_config = staticmethod(configs)  # type: ignore[method-assign]
    run_state_machine_as_test(
        OffloadMachine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
