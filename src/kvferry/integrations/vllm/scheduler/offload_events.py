"""KV events of stored blocks, for routers: what became visible in which tier, and what is gone.

An event names blocks as the engine's own events do: by vLLM's hashes, one for each of the engine's blocks, with their
tokens and the hash before them, so that a router knows one tree of prefixes whatever the medium. Tokens are known only
while a request is: they are learned when its blocks are stored, or asked of a lower tier, and kept while a tier holds
the block. A block of which no request has told the tokens, such as one of an earlier process, has no event.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvferry.integrations.vllm.offload_step import HOST_MEMORY
from kvferry.integrations.vllm.scheduler.stored_blocks import StoredGroup
from kvferry.layout.shard import CacheKind
from kvferry.tiers.host_memory import Change, Emptied
from kvferry.tiers.protocol import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

REMOTE = frozenset({"remote_pool"})
MAX_WITHDRAWN = 4096
"""Most blocks of an emptied tier whose removal one step announces, so that no step waits for all of them."""
MAX_UNSEEN = 1 << 16
"""Most blocks of which the tokens are known although no tier has announced them; the oldest are forgotten."""


@dataclass(slots=True, eq=False)
class _Described:
    """A stored block as events describe it, and the tiers that hold it and in which it was announced."""

    number: int
    group: int
    hashes: "Sequence[ExternalBlockHash]"
    parent: "ExternalBlockHash | None"
    event: BlockStored
    """Without the tier."""
    tiers: set[str] = field(default_factory=set)
    """The tiers that hold it."""
    announced: set[str] = field(default_factory=set)

    @property
    def last(self) -> "tuple[int, ExternalBlockHash]":
        """What names the block's end in the tree of prefixes: the group and the last hash."""
        return self.group, self.hashes[-1]


class BlockEvents:
    """Makes events of the changes of the tiers."""

    def __init__(self, groups: Sequence[StoredGroup], kv_cache_config: "KVCacheConfig") -> None:
        self._groups = groups
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._numbers = count()
        self._unseen: dict[BlockKey, _Described] = {}
        self._seen: dict[BlockKey, _Described] = {}
        self._announced: Counter[tuple[int, ExternalBlockHash]] = Counter()
        """By group and last hash: in how many tiers a block is announced."""
        self._orphans: defaultdict[tuple[int, ExternalBlockHash], list[tuple[_Described, str]]] = defaultdict(list)
        """Blocks that a tier holds, by the parent that no tier has announced."""
        self._emptied: dict[str, dict[BlockKey, None]] = {}
        """By tier: the blocks that it has lost and whose removal has not been announced, parents first."""
        self._events: list[KVCacheEvent] = []

    def learn(self, request: "Request", group: StoredGroup, places: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Learn the tokens of stored blocks of a request: the blocks at these places of a group, in ascending order."""
        for place, key in zip(places, keys, strict=True):
            if key not in self._seen and key not in self._unseen:
                self._unseen[key] = self._described(request, group, place)
        while len(self._unseen) > MAX_UNSEEN:
            del self._unseen[next(iter(self._unseen))]

    def note(self, changes: Iterable[Change | Emptied]) -> None:
        """Take changes of the tiers, in the order in which they happened."""
        appeared: list[tuple[_Described, str]] = []
        for change in changes:
            if isinstance(change, Change) and (lost := self._emptied.get(change.tier)):
                # The last word on its blocks: a tier that was emptied may have got some of them again.
                for key in change.keys:
                    lost.pop(key, None)
            if isinstance(change, Change) and change.is_visible:
                for key in change.keys:
                    described = self._seen.get(key) or self._unseen.pop(key, None)
                    if described is not None and change.tier not in described.tiers:
                        self._seen[key] = described
                        described.tiers.add(change.tier)
                        appeared.append((described, change.tier))
                continue
            self._store(appeared)
            appeared = []
            if isinstance(change, Change):
                self._remove(change.tier, change.keys)
            else:
                held = (key for key, described in self._seen.items() if change.tier in described.tiers)
                self._emptied[change.tier] = dict.fromkeys(held)
        self._store(appeared)

    def reset(self) -> None:
        """No block that was stored before will be found again: all of them are removed."""
        for tier in {tier for described in self._seen.values() for tier in described.tiers}:
            self._remove(tier, list(reversed(self._seen)))
        self._unseen.clear()
        self._orphans.clear()
        self._emptied.clear()

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, and some of the removals of blocks of a tier that has lost all."""
        for tier, keys in list(self._emptied.items()):
            self._remove(tier, [keys.popitem()[0] for _ in range(min(len(keys), MAX_WITHDRAWN))])
            if not keys:
                del self._emptied[tier]
        events, self._events = self._events, []
        return events

    def _described(self, request: "Request", group: StoredGroup, place: int) -> _Described:
        size = group.shape.block_size
        begin, end = place * group.tokens, (place + 1) * group.tokens
        per_block = size // group.tokens_per_hash
        hashes = request.block_hashes
        first = begin // group.tokens_per_hash
        ends = range(first + per_block - 1, end // group.tokens_per_hash, per_block)
        extra = [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in range(begin, end, size)]
        lora = request.lora_request
        spec = self._specs[group.index]
        named = [maybe_convert_block_hash(hashes[at]) for at in ends]
        parent = maybe_convert_block_hash(hashes[first - 1]) if first else None
        event = BlockStored(
            block_hashes=named,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[begin:end]),
            block_size=size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=None,
            lora_name=None if lora is None else lora.name,
            extra_keys=kv_cache_utils.to_event_extra_keys(extra),
            group_idx=group.index,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        )
        return _Described(next(self._numbers), group.index, named, parent, event)

    def _store(self, appeared: Sequence[tuple[_Described, str]]) -> None:
        """Announce blocks, parents before their children; a child without its parent waits for it.

        A lower tier may bring a child first.
        """
        to_announce = deque(sorted(appeared, key=lambda each: each[0].number))
        while to_announce:
            described, tier = to_announce.popleft()
            parent = described.parent
            # Most parents in sliding windows are in no tier, so none is waited for.
            waits = self._groups[described.group].shape.kind is not CacheKind.SLIDING_WINDOW
            if parent is not None and waits and (described.group, parent) not in self._announced:
                self._orphans[described.group, parent].append((described, tier))
                continue
            described.announced.add(tier)
            last = described.last
            self._announced[last] += 1
            self._events.append(msgspec.structs.replace(described.event, **_place(tier)))
            to_announce.extendleft(reversed(self._orphans.pop(last, ())))

    def _remove(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """Announce that a tier holds these blocks no more, children before their parents."""
        hashes: dict[int, list[ExternalBlockHash]] = {}
        for key in keys:
            described = self._seen.get(key)
            if described is None or tier not in described.tiers:
                continue
            described.tiers.remove(tier)
            if tier in described.announced:
                described.announced.remove(tier)
                self._announced[described.last] -= 1
                if not self._announced[described.last]:
                    del self._announced[described.last]
                hashes.setdefault(described.group, []).extend(reversed(described.hashes))
            else:
                self._forget_orphan(described, tier)
            if not described.tiers:
                del self._seen[key]
        for group, gone in hashes.items():
            self._events.append(BlockRemoved(block_hashes=gone, group_idx=group, **_place(tier)))

    def _forget_orphan(self, described: _Described, tier: str) -> None:
        assert described.parent is not None, "a block without a parent is announced at once"
        place = described.group, described.parent
        self._orphans[place] = [each for each in self._orphans[place] if each != (described, tier)]
        if not self._orphans[place]:
            del self._orphans[place]


def _place(tier: str) -> dict[str, str | None]:
    """Return the fields of an event that say where a block is, and in which of several tiers of one medium."""
    is_host = tier == HOST_MEMORY
    return {
        "medium": MEDIUM_CPU if is_host else MEDIUM_STORAGE,
        "locality": "REMOTE" if tier in REMOTE else "LOCAL",
        "ownership": None if is_host else tier,
    }
