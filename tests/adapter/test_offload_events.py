"""KV events of stored blocks, read as a router reads them: from the bytes that vLLM publishes."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvferry.integrations.vllm.scheduler import offload_events
from kvferry.layout.shard import Region
from kvferry.tiers.host_memory import Change
from kvferry.tiers.lower_copies import MAX_RAISED
from kvferry.tiers.protocol import BlockKey, Load, Slots

from ..support.dictionary_tier import DictionaryTier
from .model_files import CONFIG
from .offload_engine import BLOCK_SIZE, Engine, group_and_hash, make_config, prompt_of


class Router:
    """Knows which prefixes an engine has in which medium, from events alone, as routers do.

    A block is found by the hash of its tokens and of the block before it. An event whose parent is unknown, a second
    copy in one place, and the removal of what is not there are errors.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[Any, tuple[int, ...]], Any] = {}
        """By parent and tokens: the hash."""
        self.places: defaultdict[Any, set[tuple[str | None, str | None]]] = defaultdict(set)
        self.removed = Counter[str | None]()
        self.num_events = 0

    def read(self, published: bytes) -> None:
        for event in msgspec.msgpack.decode(published, type=KVEventBatch).events:
            if isinstance(event, BlockStored) and event.medium != "GPU":
                self.store(event)
            elif isinstance(event, BlockRemoved) and event.medium != "GPU":
                self.removed[event.medium] += len(event.block_hashes)
                for block_hash in event.block_hashes:
                    self.places[event.group_idx, block_hash].remove((event.medium, event.ownership))
            else:
                continue
            self.num_events += 1

    def store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or (event.group_idx, parent) in self.places, "the parent is unknown"
        for number, block_hash in enumerate(event.block_hashes):
            place = (event.medium, event.ownership)
            assert place not in self.places[event.group_idx, block_hash], "stored twice"
            self.places[event.group_idx, block_hash].add(place)
            self.blocks[parent, tuple(event.token_ids[number * size : (number + 1) * size])] = block_hash
            parent = block_hash

    def hit(self, tokens: list[int], medium: str) -> int:
        """Return how many tokens of a prompt can be had, by the router's knowledge."""
        parent, found = None, 0
        for at in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = self.blocks.get((parent, tuple(tokens[at : at + BLOCK_SIZE])))
            if parent is None or medium not in {place[0] for place in self.places[0, parent]}:
                return found
            found += BLOCK_SIZE
        return found


class PublishingEngine(Engine):
    """Gives the router what the engine publishes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.router = Router()
        super().__init__(*args, **named)
        publisher = self.scheduler.kv_event_publisher
        encoder = msgspec.msgpack.Encoder()
        publisher.publish = lambda batch: self.router.read(encoder.encode(batch))  # type: ignore[method-assign]

    def check_router(self) -> None:
        """What the router knows of host memory is what is visible there."""
        tiers = self.role._start.tiers
        assert tiers is not None
        host = tiers.stack._host
        keys = [key for key, slot in host._slot_of.items() if host._presences[slot] == 1]
        found = [group_and_hash(tiers.names, key) for key in keys]
        visible = {(group, maybe_convert_block_hash(BlockHash(hash_))) for group, hash_ in found}
        known = {(group, hash_) for (group, hash_), places in self.router.places.items() if ("CPU", None) in places}
        assert len(known) == sum(self.ranks.tokens[str(group)] // BLOCK_SIZE for group, _ in visible)
        assert known >= visible


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., PublishingEngine]]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made: list[PublishingEngine] = []

    def make(*, enables: bool = True, **arguments: Any) -> PublishingEngine:
        events = {"enable_kv_cache_events": enables, "publisher": "null"}
        made.append(PublishingEngine(make_config(tmp_path, kv_events_config=events), **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.role.shutdown()


def serve(engine: Engine, *parts: int) -> None:
    for part in parts:
        engine.add(f"{part} {len(engine.finished)}", prompt_of(part, -part))
        engine.run()
        engine.step(is_forced=True)


def engine_above_a_tier(
    make_engine: Callable[..., PublishingEngine], name: str
) -> tuple[PublishingEngine, DictionaryTier]:
    """Return an engine that has written seven prompts down to a tier, and evicted the first from host memory."""
    made: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        made.append(DictionaryTier(region, 1 << 20, name=name))
        return made[-1]

    engine = make_engine(host_blocks=14, lower=lower)
    serve(engine, *range(1, 8))
    for _ in range(20):
        engine.step(is_forced=True)
    return engine, made[0]


@pytest.mark.parametrize(("windows", "block_size"), [((0,), 0), ((0, 0), 32), ((0, 40), 0)])
def test_a_router_knows_what_host_memory_has(
    windows: tuple[int, ...], block_size: int, make_engine: Callable[..., PublishingEngine]
) -> None:
    engine = make_engine(windows=windows, block_size=block_size, host_blocks=40)
    serve(engine, 1, 2)
    engine.check_router()
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 96
    assert engine.router.hit(prompt_of(1, -2), "CPU") == 48
    assert engine.router.hit(prompt_of(3), "CPU") == 0


def test_what_is_evicted_is_removed(make_engine: Callable[..., PublishingEngine]) -> None:
    engine = make_engine(host_blocks=14)
    serve(engine, *range(1, 8))
    engine.check_router()
    assert engine.router.hit(prompt_of(7, -7), "CPU") == 96
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 0


def test_nothing_is_announced_before_it_is_visible(make_engine: Callable[..., PublishingEngine]) -> None:
    engine = make_engine(host_blocks=40)
    engine.add("a", prompt_of(1, -1), max_tokens=8)
    for _ in range(5):
        engine.step(ends_copies=False)
    assert engine.router.num_events == 0
    engine.end_copies(fails=True)
    engine.run()
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 0
    engine.check_router()


def test_a_reset_removes_all(make_engine: Callable[..., PublishingEngine]) -> None:
    engine = make_engine(host_blocks=40)
    serve(engine, 1, 2)
    assert engine.role.reset_cache()
    engine.step(is_forced=True)
    assert not any(engine.router.places.values())
    serve(engine, 1)
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 96


@pytest.mark.parametrize("tier", ["local_disk", "remote_pool"])
def test_lower_tiers_are_storage(tier: str, make_engine: Callable[..., PublishingEngine]) -> None:
    engine, _ = engine_above_a_tier(make_engine, tier)
    assert engine.router.hit(prompt_of(1, -1), "STORAGE") == 96
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 0
    serve(engine, 1)
    assert engine.router.hit(prompt_of(1, -1), "CPU") == 96
    assert {place[1] for places in engine.router.places.values() for place in places} == {None, tier}
    engine.check_router()


def test_a_damaged_block_of_a_lower_tier_is_removed(
    make_engine: Callable[..., PublishingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tier = engine_above_a_tier(make_engine, "local_disk")
    begins_load = tier.prepare_load

    def forgets(keys: Sequence[BlockKey], slots: Slots) -> Load:
        tier.blocks.clear()  # as after checksums that differ
        return begins_load(keys, slots)

    monkeypatch.setattr(tier, "prepare_load", forgets)
    assert engine.router.hit(prompt_of(1, -1), "STORAGE") == 96
    engine.add("again", prompt_of(1, -1))
    engine.step()
    engine.run()
    assert engine.router.removed["STORAGE"] >= 6
    engine.check_router()


def test_a_tier_that_is_closed_for_good_is_removed(
    make_engine: Callable[..., PublishingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else routers keep its blocks in their view, and send requests here that find nothing."""
    engine, tier = engine_above_a_tier(make_engine, "local_disk")
    assert engine.router.hit(prompt_of(1, -1), "STORAGE") == 96

    def fails() -> Any:
        raise OSError("stale file handle")

    monkeypatch.setattr(tier, "poll", fails)
    for _ in range(2 * MAX_RAISED):
        engine.now += 200.0
        engine.step(is_forced=True)
    assert tier._is_closed
    places = {place for places in engine.router.places.values() for place in places}
    assert places == {("CPU", None)}
    engine.check_router()
    num_removed = engine.router.removed["STORAGE"]
    serve(engine, 9)
    assert engine.router.removed["STORAGE"] == num_removed


def pooled(make_engine: Callable[..., PublishingEngine]) -> tuple[PublishingEngine, DictionaryTier]:
    """Return an engine whose blocks all lie in a pool, those of the last two prompts in host memory too."""
    made: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        made.append(DictionaryTier(region, 1 << 20, name="remote_pool"))
        return made[-1]

    engine = make_engine(host_blocks=14, lower=lower)
    serve(engine, *range(1, 8))
    for _ in range(20):
        engine.step(is_forced=True)
    assert engine.router.hit(prompt_of(1, -1), "STORAGE") == 96
    return engine, made[0]


def test_blocks_of_a_pool_whose_master_was_started_again_are_removed(
    make_engine: Callable[..., PublishingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else routers keep them in their view for ever. A step announces a bounded number, children before parents."""
    monkeypatch.setattr(offload_events, "MAX_WITHDRAWN", 4)
    engine, pool = pooled(make_engine)
    num_blocks = len(pool.blocks)
    pool.lose_all()
    hits = [engine.router.hit(prompt_of(1, -1), "STORAGE")]
    for number in range(1, -(-num_blocks // 4) + 1):
        engine.step(is_forced=True)
        assert engine.router.removed["STORAGE"] == min(4 * number, num_blocks)
        hits.append(engine.router.hit(prompt_of(1, -1), "STORAGE"))
    assert (hits[0], hits[-2], hits[-1]) == (96, 2 * BLOCK_SIZE, 0)
    assert {place for places in engine.router.places.values() for place in places} == {("CPU", None)}
    engine.step(is_forced=True)
    assert engine.router.removed["STORAGE"] == num_blocks, "each once"
    engine.check_router()
    serve(engine, 9)
    for _ in range(20):
        engine.step(is_forced=True)
    assert engine.router.hit(prompt_of(9, -9), "STORAGE") == 96


def test_what_an_emptied_pool_has_got_again_is_not_removed(
    make_engine: Callable[..., PublishingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back before the removal of all that the pool had has been announced."""
    monkeypatch.setattr(offload_events, "MAX_WITHDRAWN", 1)
    engine, pool = pooled(make_engine)
    num_blocks = len(pool.blocks)
    pool.lose_all()
    engine.step(is_forced=True)
    serve(engine, 1)
    for _ in range(num_blocks + 20):
        engine.step(is_forced=True)
    assert len(pool.blocks) == 6
    assert engine.router.hit(prompt_of(1, -1), "STORAGE") == 96
    assert sum(("STORAGE", "remote_pool") in places for places in engine.router.places.values()) == 6
    engine.check_router()


def test_a_block_that_a_pool_took_just_before_it_was_emptied_is_not_announced(
    make_engine: Callable[..., PublishingEngine],
) -> None:
    """Its store has ended and is not completed when the tier notices the loss."""
    engine, pool = pooled(make_engine)
    tier_poll, has_lost = pool.poll, []

    def poll() -> Any:
        ended = tier_poll()
        if ended and not has_lost:
            has_lost.append(pool.lose_all())
        return ended

    pool.poll = poll  # type: ignore[method-assign]
    engine.add("late", prompt_of(9, -9))
    engine.run()
    for _ in range(30):
        engine.step(is_forced=True)
    assert has_lost
    known = {hash_ for hash_, places in engine.router.places.items() if ("STORAGE", "remote_pool") in places}
    tiers = engine.role._start.tiers
    assert tiers is not None
    found = [group_and_hash(tiers.names, key) for key in pool.blocks]
    assert known == {(group, maybe_convert_block_hash(BlockHash(each))) for group, each in found}


def test_without_vllm_s_setting_there_are_no_events(make_engine: Callable[..., PublishingEngine]) -> None:
    engine = make_engine(enables=False, host_blocks=14)
    serve(engine, *range(1, 8))
    assert engine.router.num_events == 0
    assert list(engine.role.take_events()) == []
    assert engine.role._start.tiers.stack.journal.take() == []  # type: ignore[union-attr]


def test_an_adapter_and_a_salt_are_named(make_engine: Callable[..., PublishingEngine]) -> None:
    from vllm.lora.request import LoRARequest

    engine = make_engine(host_blocks=40)
    events: list[Any] = []
    take = engine.role.take_events
    engine.scheduler.connector.take_events = lambda: events.extend(found := take()) or found  # type: ignore
    engine.add("a", prompt_of(1, -1), lora_request=LoRARequest("an adapter", 7, "/path"), cache_salt="salt")
    engine.run()
    engine.step(is_forced=True)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert {(event.lora_name, event.lora_id) for event in stored} == {("an adapter", 7)}
    assert stored[0].extra_keys is not None
    assert "salt" in stored[0].extra_keys[0]
    assert stored[1].extra_keys is not None
    assert "salt" not in stored[1].extra_keys[0]


def described(make_engine: Callable[..., PublishingEngine], **arguments: Any) -> tuple[Any, list[BlockKey], list[Any]]:
    """Return events that know the blocks of a prompt, which no tier holds; their keys and their hashes in events."""
    engine = make_engine(host_blocks=40, **arguments)
    request = engine.add("a", prompt_of(1, -1))
    engine.run()
    events, tiers = engine.role._events, engine.role._start.tiers
    assert events is not None
    assert tiers is not None
    events.reset()
    events.take()
    group = engine.role._groups[0]
    keys = tiers.names.keys(0, request.block_hashes)
    events.learn(request, group, range(len(keys)), keys)
    return events, keys, [maybe_convert_block_hash(each) for each in request.block_hashes]


def test_parents_are_announced_first_whatever_the_order_of_the_tiers(
    make_engine: Callable[..., PublishingEngine],
) -> None:
    events, keys, hashes = described(make_engine)
    events.note([Change("host_memory", keys[::-1], is_visible=True)])
    assert [event.parent_block_hash for event in events.take()] == [None, *hashes[:-1]]


def test_a_child_that_comes_before_its_parent_waits_for_it(make_engine: Callable[..., PublishingEngine]) -> None:
    """A lower tier brings blocks in chunks, several at a time."""
    events, keys, hashes = described(make_engine)

    def announced(*changes: Change) -> list[Any]:
        events.note(changes)
        return [(type(event).__name__, *event.block_hashes) for event in events.take()]

    host, disk = "host_memory", "local_disk"
    assert announced(Change(host, keys[3:5], is_visible=True)) == []
    assert announced(Change(host, keys[1:2], is_visible=True), Change(disk, keys[4:5], is_visible=True)) == []
    assert announced(Change(host, keys[:1], is_visible=True)) == [
        ("BlockStored", hashes[0]),
        ("BlockStored", hashes[1]),
    ]
    assert announced(Change(host, keys[4:5], is_visible=False)) == [], "it was never announced there"
    assert announced(Change(disk, keys[2:3], is_visible=True)) == [
        ("BlockStored", hashes[2]),
        ("BlockStored", hashes[3]),
        ("BlockStored", hashes[4]),
    ]
    assert announced(Change(disk, keys[4:5], is_visible=False)) == [("BlockRemoved", hashes[4])]
    assert not events._orphans


def test_a_child_whose_parent_is_gone_is_not_announced(make_engine: Callable[..., PublishingEngine]) -> None:
    events, keys, _ = described(make_engine)
    events.note([Change("host_memory", keys[:1], is_visible=True), Change("host_memory", keys[:1], is_visible=False)])
    assert len(events.take()) == 2
    events.note([Change("host_memory", keys[1:2], is_visible=True)])
    assert events.take() == []
    events.reset()
    assert not events._orphans
    assert not events._announced


def test_blocks_of_a_window_wait_for_no_parent(make_engine: Callable[..., PublishingEngine]) -> None:
    """Most of their parents are in no tier."""
    events, keys, hashes = described(make_engine, windows=(40,))
    events.note([Change("host_memory", keys[3:4], is_visible=True)])
    assert [event.block_hashes for event in events.take()] == [[hashes[3]]]
