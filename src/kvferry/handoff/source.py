"""Writes as the source rank decides them: which tokens are computed, announced, in flight and landed.

Pure: the engine's progress, messages and the time are inputs. A :class:`SourceWrite` is one write. Its tokens lie in
*spans*: all layers of one cache group, or the layers that a write sends together. The engine says up to which token
each span is final; the next batch takes all tokens that are final, announced and not sent, so that a source that falls
behind sends fewer and larger batches, and no queue grows. One batch is in flight at a time: after a preemption two
batches never write the same bytes.

:class:`SourceWrites` has all writes of one rank, and joins prompts and announcements by their transfer ids. A router
gives its id to both engines, and either may come first. The id of a hold of this engine
(:func:`kvferry.handoff.holds.transfer_of`) is known to those whom the engine has told it: the prompt is here already,
or comes with the engine's next step. The first batch of a late announcement takes all tokens computed so far. Not
thread-safe: the caller holds a lock.

:class:`Part` turns the batches of one write into descriptors; both ranks derive it from the same plan.
"""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.handshake import NO_ADAPTER, Adapter, compare_adapters
from kvferry.handoff.holds import is_of_hold
from kvferry.handoff.messages import AnnouncedBlocks, Bounded, WriteKey
from kvferry.layout.shard import CacheGroup, CacheKind
from kvferry.plan.match import SAME_LAYERS, GroupBlocks
from kvferry.plan.planner import NOTHING, GroupPlan, PairPlan, Span, SpanPlans

END = 1 << 62
"""Progress of a span whose prompt has been computed to its end, partly filled last block and state included."""
NEVER = 1 << 61
"""A ``multiple_of`` larger than any token: for a state, final only with its prompt, and for a part sent whole."""
MAX_REMEMBERED = 1 << 16
"""Ended transfers and writes that are remembered, so that a late message cannot begin them again."""
MAX_REVOKED = 1 << 15
"""Writes that are remembered as revoked and that nobody has announced."""
REVOKED_SECONDS = 600.0
"""How long the announcement of a write may come after its revocation, and how long no other revocation takes its room:
revocations of writes that nobody has announced cost a stranger nothing."""
MOST_KEPT_TEXT = 200
"""Characters of a refusal that are remembered: a stranger may have :data:`MAX_REMEMBERED` announcements refused."""
MOST_NAMES = 500
"""Characters of a peer's names in an error."""
CHECK_PARAMETERS = (
    "Check that the router copies the prefill engine's kv_transfer_params unchanged into the request of the same "
    "prompt, and that no client sets them."
)
NOTHING_CHANGED: Mapping[str, int] = MappingProxyType({})


class Need(msgspec.Struct, frozen=True):
    """The announced tokens of a span, half-open. Each batch but the last ends at a multiple of ``multiple_of``.

    A state is token 0 to 1, final only when the prompt has ended: its ``multiple_of`` is larger than any token.
    """

    first_token: int
    end_token: int
    multiple_of: int


class Cut(NamedTuple):
    """The tokens of a span in one batch."""

    span: Span
    first_token: int
    end_token: int


Batch = tuple[Cut, ...]


class WriteState(Enum):
    """Where a write stands."""

    OPEN = "writing"
    STOPPING = "waiting for the batch in flight"
    OVER = "over"


class SourceWrite:
    """One write; ``error`` is None while the write is open and once it is complete. Bytes of a batch that failed
    ``may_land`` even once the write is over.

    >>> span = Span("full")
    >>> write = SourceWrite("r", {span: Need(0, 40, 16)}, deadline=30.0)
    >>> write.take({span: 39}), write.take({span: END}), write.landed(), write.take({span: END})
    ((Cut(span=Span(group='full', number=0), first_token=0, end_token=32),), (), True, \
(Cut(span=Span(group='full', number=0), first_token=32, end_token=40),))
    >>> write.landed(), write.state.value, write.error
    (True, 'over', None)
    """

    def __init__(self, transfer_id: str, needs: Mapping[Span, Need], deadline: float) -> None:
        self._transfer_id = transfer_id
        self._needs = dict(needs)
        self._deadline = deadline
        self._reached = {span: need.first_token for span, need in needs.items()}
        self._in_flight: Batch = ()
        self._is_void = False
        self.state = WriteState.OPEN
        self.error: KVFerryError | None = None
        self.may_land = False
        self._settle()

    @property
    def is_writing(self) -> bool:
        return bool(self._in_flight)

    def take(self, final: Mapping[Span, int]) -> Batch:
        """Return the next batch, which is in flight from now on; empty while another one is or none is final."""
        if self.state is not WriteState.OPEN or self._in_flight:
            return ()
        cuts = [Cut(span, begin, self._ready(span, final.get(span, 0))) for span, begin in self._reached.items()]
        self._in_flight = tuple(cut for cut in cuts if cut.end_token > cut.first_token)
        self._is_void = False
        return self._in_flight

    def landed(self, changed: Mapping[str, int] = NOTHING_CHANGED) -> bool:
        """The batch in flight has landed; return whether it counts: not if :meth:`void` was called since.

        Of the groups that have ``changed`` meanwhile, the tokens from these on do not count: they are sent again.
        """
        batch, self._in_flight = self._in_flight, ()
        if not self._is_void:
            for cut in batch:
                end = min(cut.end_token, changed.get(cut.span.group, cut.end_token))
                self._reached[cut.span] = max(cut.first_token, end)
        self._settle()
        return not self._is_void

    def stopped(self, error: KVFerryError | None, *, may_land: bool = False) -> None:
        """The batch in flight has ended without landing whole; no byte of it is written any more.

        Bytes that were written into a connection that broke ``may_land`` nevertheless.
        """
        self._in_flight = ()
        self.may_land |= may_land
        if error is not None:
            self.fail(error)
        self._settle()

    def void(self) -> None:
        """The engine may overwrite the blocks of the batch in flight: send the batch again."""
        self._is_void = True

    def fail(self, error: KVFerryError) -> None:
        """Give up; the first error stays. The write is over once no batch is in flight."""
        if self.state is not WriteState.OVER:
            self.error = self.error or error.without_traceback()
            self.state = WriteState.STOPPING
            self._settle()

    def tick(self, now: float) -> None:
        """Give up once the deadline has passed."""
        if self.state is WriteState.OPEN and now >= self._deadline:
            self.fail(_late(self._transfer_id))

    def _ready(self, span: Span, final: int) -> int:
        need = self._needs[span]
        if final >= END:
            return need.end_token
        return max(self._reached[span], min(final, need.end_token) // need.multiple_of * need.multiple_of)

    def _settle(self) -> None:
        is_complete = all(self._reached[span] == need.end_token for span, need in self._needs.items())
        if not self._in_flight if self.state is WriteState.STOPPING else is_complete:
            self.state = WriteState.OVER


class BlockList(msgspec.Struct, frozen=True):
    """An engine's blocks of one prompt in one cache group; the first block begins at ``first_token``."""

    first_token: int
    block_ids: Sequence[int]


class Prompt(msgspec.Struct, frozen=True):
    """How far an engine has computed one prompt: its blocks by cache group, and the tokens final in every layer.

    ``num_final`` is :data:`END` once the prompt has been computed to its end.
    """

    num_tokens: int
    digest: str
    blocks: Mapping[str, BlockList]
    num_final: int
    adapter: Adapter = NO_ADAPTER


class WriteRequest(msgspec.Struct, frozen=True):
    """The announcement of one destination rank. ``deadline`` is on this rank's clock."""

    key: WriteKey
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    needs: Mapping[Span, Need]
    deadline: float
    adapter: str = ""
    known_by: float | None = None
    """When the prompt of a hold of this engine must be known here, on this rank's clock; None for a router's transfer,
    which may become known until the deadline."""


class Outcome(msgspec.Struct, frozen=True):
    """How a write ended: ``error``, without a traceback, and ``may_land`` are those of :class:`SourceWrite`."""

    error: KVFerryError | None
    may_land: bool = False


class SourceWrites:
    """All writes of one rank.

    >>> writes, key, span = SourceWrites(), WriteKey("d/0", 7, 1), Span("0")
    >>> writes.announce(WriteRequest(key, "x", 32, "p", {span: Need(0, 32, 16)}, deadline=9.0), now=0.0)
    True
    >>> writes.take(key), writes.compute("x", Prompt(32, "p", {}, num_final=16))
    ((), None)
    >>> [cut.end_token for cut in writes.take(key)], writes.landed(key), writes.outcome(key)
    ([16], True, None)
    >>> writes.end("x", HandoffError(Reason.ABORTED, "x was aborted.")), writes.outcome(key).error.reason.value
    (None, 'aborted')
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._running: dict[str, Prompt] = {}
        self._done_spans: set[Span] = set()
        self._wanted_spans: set[Span] = set()
        self._open: dict[WriteKey, SourceWrite] = {}
        self._requests: dict[WriteKey, WriteRequest] = {}
        self._requests_of: dict[str, set[WriteKey]] = {}
        self._ended: Bounded[str, KVFerryError] = Bounded(MAX_REMEMBERED)
        # Apart, since writes that a stranger announces and revokes fill the first and must not let others be forgotten.
        self._outcomes: Bounded[WriteKey, Outcome] = Bounded(MAX_REMEMBERED)
        self._may_land: Bounded[WriteKey, Outcome] = Bounded(MAX_REMEMBERED)
        self._revoked: OrderedDict[WriteKey, float] = OrderedDict()
        """When writes were revoked that were never announced, the oldest first."""

    @property
    def num_open(self) -> int:
        """Writes that are not over."""
        return len(self._open)

    # The engine's prompts.

    def begin_step(self, prompts: Mapping[str, Prompt]) -> None:
        """The engine begins a step that computes these prompts, layer by layer.

        Only tokens that earlier steps computed here are final so far. Tokens from the engine's prefix cache are not:
        another prompt of this same step may compute their blocks.
        """
        self._done_spans.clear()
        self._wanted_spans.clear()
        self._running = {tid: prompt for tid, prompt in prompts.items() if tid not in self._ended}
        for transfer_id, prompt in self._running.items():
            known = self._prompts.get(transfer_id)
            num_final = 0 if known is None else known.num_final
            self._prompts[transfer_id] = msgspec.structs.replace(prompt, num_final=num_final)
            for key in self._keys_of(transfer_id):
                self._wanted_spans |= self._requests[key].needs.keys()
                self._check_prompt(key)

    def reach(self, span: Span) -> bool:
        """The layers of a span have run in this step, for every prompt; return whether a write needs the span."""
        self._done_spans.add(span)
        return span in self._wanted_spans

    def compute(self, transfer_id: str, prompt: Prompt) -> None:
        """The engine has computed ``prompt.num_final`` tokens of a prompt, in every layer."""
        if transfer_id in self._ended:
            return
        self._running.pop(transfer_id, None)
        self._prompts[transfer_id] = prompt
        for key in self._keys_of(transfer_id):
            self._check_prompt(key)

    def preempt(self, transfer_id: str) -> None:
        """The engine takes the prompt's blocks back and computes the prompt again: batches in flight are void."""
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        for key in self._keys_of(transfer_id):
            self._open[key].void()

    def end(self, transfer_id: str, error: KVFerryError) -> None:
        """The engine frees the prompt's blocks: writes that still need them fail with ``error``, and so do later
        announcements.
        """
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        self._ended.setdefault(transfer_id, error.without_traceback())
        self._fail_writes(transfer_id, error)

    def fail_all(self, error: KVFerryError) -> None:
        """The engine's cache was reset: every known prompt ends, and every write fails that waits for another one.

        A router's transfer whose prompt is not known may still begin.
        """
        for transfer_id in list(self._prompts):
            self.end(transfer_id, error)
        for transfer_id in list(self._requests_of):
            self._fail_writes(transfer_id, error)

    # Messages of destinations.

    def announce(self, request: WriteRequest, now: float) -> bool:
        """Begin a write; return False, and do nothing, for an announcement that is known.

        Raises the :class:`KVFerryError` with which the write or the prompt has ended, such as an earlier revocation's,
        and wrong-parameters for a hold that should be known by now and is not.
        """
        key = request.key
        if key in self._open:
            return False
        if (over := self.outcome(key)) is not None:
            if over.error is not None:
                raise over.error.without_traceback()
            return False
        if (ended := self._ended.get(request.transfer_id)) is not None:
            raise ended.without_traceback()
        if self._lacks_prompt(request, now):
            raise wrong_parameters("it holds none of the generation that they name")
        self._requests[key] = request
        self._requests_of.setdefault(request.transfer_id, set()).add(key)
        self._wanted_spans |= request.needs.keys()
        self._open[key] = SourceWrite(request.transfer_id, request.needs, request.deadline)
        self._check_prompt(key)
        self._record_outcome(key)
        return True

    def refuse(self, key: WriteKey, error: KVFerryError) -> None:
        """An announcement was refused with ``error``: it never begins, and its revocation is one of a known write."""
        if key not in self._open and self.outcome(key) is None:
            kept = HandoffError(error.reason, error.message[:MOST_KEPT_TEXT], error.remedy[:MOST_KEPT_TEXT])
            self._outcomes[key] = Outcome(kept)

    def revoke(self, key: WriteKey, now: float) -> bool:
        """Stop a write; return whether no byte of it lands any more: no batch is in flight, and none has failed in a
        connection that may still deliver it.

        A write that was never announced is refused from now on; where too many such were revoked lately, this one is
        not, and counts as in flight.
        """
        if (write := self._open.get(key)) is not None:
            write.fail(_revoked())
            self._record_outcome(key)
        elif self.outcome(key) is None:
            if len(self._revoked) >= MAX_REVOKED:
                if now - next(iter(self._revoked.values())) < REVOKED_SECONDS:
                    return False
                self._revoked.popitem(last=False)
            self._revoked[key] = now
        over = self.outcome(key)
        return over is not None and not over.may_land

    # The job that writes.

    def take(self, key: WriteKey) -> Batch:
        """As :meth:`SourceWrite.take`, of the spans whose layers have run in this step too."""
        write, prompt = self._open.get(key), self.prompt_of(key)
        if write is None or prompt is None:
            return ()
        request = self._requests[key]
        final = dict.fromkeys(request.needs, prompt.num_final)
        if (running := self._running.get(request.transfer_id)) is not None:
            final |= dict.fromkeys(self._done_spans & final.keys(), running.num_final)
        return write.take(final)

    def is_computed(self, transfer_id: str) -> bool:
        prompt = self._prompts.get(transfer_id)
        return prompt is not None and prompt.num_final >= END

    def prompt_of(self, key: WriteKey) -> Prompt | None:
        """Return how far the write's prompt has been computed."""
        request = self._requests.get(key)
        return None if request is None else self._prompts.get(request.transfer_id)

    def awaits_prompt(self, key: WriteKey) -> bool:
        """Return whether an open write has nothing to write, since its prompt is not known."""
        write = self._open.get(key)
        return write is not None and not write.is_writing and self.prompt_of(key) is None

    def landed(self, key: WriteKey, changed: Mapping[str, int] = NOTHING_CHANGED) -> bool:
        """As :meth:`SourceWrite.landed`."""
        write = self._open.get(key)
        counts = write is not None and write.landed(changed)
        self._record_outcome(key)
        return counts

    def stopped(self, key: WriteKey, error: KVFerryError | None, *, may_land: bool = False) -> None:
        """As :meth:`SourceWrite.stopped`."""
        if write := self._open.get(key):
            write.stopped(error, may_land=may_land)
            self._record_outcome(key)

    def fail(self, key: WriteKey, error: KVFerryError) -> None:
        if write := self._open.get(key):
            write.fail(error)
            self._record_outcome(key)

    def tick(self, key: WriteKey, now: float) -> None:
        """Give the write up once its deadline has passed, or the time in which its prompt must have become known."""
        if write := self._open.get(key):
            if self._lacks_prompt(self._requests[key], now):
                write.fail(not_held())
            write.tick(now)
            self._record_outcome(key)

    def is_stopping(self, key: WriteKey) -> bool:
        """Return whether the batch in flight must be cancelled."""
        write = self._open.get(key)
        return write is not None and write.state is WriteState.STOPPING

    def outcome(self, key: WriteKey) -> Outcome | None:
        """Return how the write ended, once it is over."""
        if key in self._revoked:
            return Outcome(_revoked())
        return self._may_land.get(key) or self._outcomes.get(key)

    def _lacks_prompt(self, request: WriteRequest, now: float) -> bool:
        """Return whether the prompt should be known by now and is not."""
        return request.known_by is not None and now >= request.known_by and request.transfer_id not in self._prompts

    def _fail_writes(self, transfer_id: str, error: KVFerryError) -> None:
        for key in self._keys_of(transfer_id):
            self._open[key].void()
            self._open[key].fail(error)
            self._record_outcome(key)

    def _keys_of(self, transfer_id: str) -> list[WriteKey]:
        return list(self._requests_of.get(transfer_id, ()))

    def _check_prompt(self, key: WriteKey) -> None:
        request = self._requests[key]
        prompt = self._prompts.get(request.transfer_id)
        if prompt is None:
            return
        try:
            _compare_prompts(prompt, request)
        except HandoffError as error:
            self._open[key].fail(error)
            self._record_outcome(key)

    def _record_outcome(self, key: WriteKey) -> None:
        write = self._open.get(key)
        if write is not None and write.state is WriteState.OVER:
            del self._open[key]
            transfer_id = self._requests.pop(key).transfer_id
            self._requests_of[transfer_id].discard(key)
            if not self._requests_of[transfer_id]:
                del self._requests_of[transfer_id]
            kept = self._may_land if write.may_land else self._outcomes
            kept[key] = Outcome(write.error, write.may_land)


def _compare_prompts(prompt: Prompt, request: WriteRequest) -> None:
    """Refuse an announcement for another prompt, or for another adapter. Raises :class:`HandoffError`."""
    if (prompt.num_tokens, prompt.digest) != (request.num_tokens, request.prompt_digest):
        if is_of_hold(request.transfer_id):
            different = f"it holds another prompt, of {prompt.num_tokens} tokens; this one has {request.num_tokens}"
            raise wrong_parameters(different)
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"{request.key.receiver} announced blocks for {request.num_tokens} tokens of {request.transfer_id}, which "
            f"is another prompt here, of {prompt.num_tokens} tokens.",
            "Send the same prompt, template, images and adapter to both engines.",
        )
    compare_adapters(prompt.adapter.name, prompt.adapter.digest, request.adapter)


class HeldCut(msgspec.Struct, frozen=True):
    """Tokens of some layers of a cache group, half-open, and the blocks of one rank that hold these tokens."""

    group: str
    layers: frozenset[str]
    first_token: int
    end_token: int
    blocks: BlockList


class Part:
    """The part of one request that a source rank of a plan writes.

    ``announced`` are the destination's blocks of the groups that this source serves, in the plan's order.
    """

    def __init__(self, plan: PairPlan, announced: Sequence[AnnouncedBlocks]) -> None:
        self._plan = plan
        self._spans: SpanPlans = {}
        self._is_whole = False
        by_group = {blocks.group: blocks for blocks in announced}
        if by_group.keys() != plan.groups.keys() or len(by_group) < len(announced):
            raise HandoffError(
                Reason.GROUP_MISMATCH,
                f"blocks of cache groups {', '.join(by_group)[:MOST_NAMES]} were announced to a rank that sends "
                f"{', '.join(plan.groups)}.",
                SAME_LAYERS,
            )
        self.announced = tuple(by_group[group] for group in plan.groups)
        for blocks in self.announced:
            _check_ids(blocks, plan.groups[blocks.group].destination_group)
        encoded = msgspec.msgpack.encode((plan.digest, self.announced))
        self.digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()

    def in_spans(self, spans: SpanPlans) -> "Part":
        """Return this part, its groups that ``spans`` has sent a span of layers at a time; the destination need not
        know.
        """
        part = copy.copy(self)
        part._spans = spans
        return part

    def as_whole(self) -> "Part":
        """Return this part, sent at once when the prompt has been computed."""
        part = copy.copy(self)
        part._is_whole = True
        return part

    @property
    def needs(self) -> dict[Span, Need]:
        """The tokens that each span needs; a group without spans is one span of all its layers."""
        found: dict[Span, Need] = {}
        for blocks in self.announced:
            source = self._plan.groups[blocks.group].source_group
            goes_at_end = self._is_whole or source.kind is CacheKind.STATE
            need = Need(blocks.first_token, blocks.end_token, NEVER if goes_at_end else source.tokens_per_position)
            found |= {Span(blocks.group, number): need for number in self._spans.get(blocks.group) or (0,)}
        return found

    def lower(self, batch: Batch, held: Mapping[str, BlockList]) -> Descriptors:
        """Return the descriptors that write a batch out of the blocks that the source holds.

        Raises :class:`HandoffError` (invalid-request) where the source does not hold a block, :class:`PlanError` where
        blocks do not fit.
        """
        announced = {blocks.group: blocks for blocks in self.announced}
        rows = [NOTHING]
        for (group, first_token, end_token), numbers in _spans_by_tokens(batch).items():
            blocks = self._group_blocks(Cut(Span(group), first_token, end_token), announced[group], held[group])
            rows += [part.view(np.uint64) for plan in self._plans(group, numbers) for part in plan.lower([blocks])]
        return np.concatenate(rows)

    def cuts(self, batch: Batch, held: Mapping[str, BlockList]) -> list[HeldCut]:
        """Return what a batch writes out of the blocks that the source holds. Raises as :meth:`lower`."""
        return [
            HeldCut(
                group,
                frozenset().union(*(plan.source_group.layers for plan in self._plans(group, numbers))),
                first_token,
                end_token,
                self._held_blocks(Cut(Span(group), first_token, end_token), held[group]),
            )
            for (group, first_token, end_token), numbers in _spans_by_tokens(batch).items()
        ]

    def _plans(self, group: str, numbers: Sequence[int]) -> list[GroupPlan]:
        """Return the plans of these spans; for all spans the plan of the whole group, whose runs are longer."""
        known = self._spans.get(group, {})
        return [self._plan.groups[group]] if len(numbers) >= len(known) else [known[number] for number in numbers]

    def _group_blocks(self, cut: Cut, announced: AnnouncedBlocks, held: BlockList) -> GroupBlocks:
        source = self._held_blocks(cut, held)
        covers = self._plan.groups[cut.span.group].destination_group.tokens_per_position
        destination = _blocks_covering(announced.block_token, announced.block_ids, covers, cut)
        return GroupBlocks(
            group=cut.span.group,
            first_token=cut.first_token,
            last_token=cut.end_token,
            source_block_ids=source.block_ids,
            source_first_token=source.first_token,
            destination_block_ids=destination.block_ids,
            destination_first_token=destination.first_token,
        )

    def _held_blocks(self, cut: Cut, held: BlockList) -> BlockList:
        covers = self._plan.groups[cut.span.group].source_group.tokens_per_position
        return _blocks_covering(held.first_token, held.block_ids, covers, cut)


def announced_blocks(plan: PairPlan, requests: Sequence[GroupBlocks]) -> tuple[AnnouncedBlocks, ...]:
    """Return the destination's blocks of the groups that a source serves."""
    return tuple(
        AnnouncedBlocks(
            group=blocks.group,
            first_token=blocks.first_token,
            end_token=blocks.last_token,
            block_token=blocks.destination_first_token,
            block_ids=tuple(blocks.destination_ids.tolist()),
        )
        for blocks in requests
        if blocks.group in plan.groups
    )


def _check_ids(blocks: AnnouncedBlocks, group: CacheGroup) -> None:
    """Raise :class:`HandoffError` (invalid-request) for blocks that a cache does not have, or has once, and for tokens
    that end before they begin: such a write would never end.
    """
    num_before = max(0, blocks.first_token - blocks.block_token) // group.tokens_per_position
    listed = blocks.block_ids[num_before:]
    ids = set(listed)
    largest = max(ids, default=0)
    if blocks.first_token > blocks.end_token:
        announced = f"tokens {blocks.first_token} to {blocks.end_token} were announced"
    elif len(ids) < len(listed) or largest >= group.num_blocks:
        announced = f"{len(listed)} blocks were announced, {len(ids)} of them distinct, up to number {largest}, of a "
        announced += f"cache of {group.num_blocks}"
    else:
        return
    problem = f"cache group {blocks.group!r}: {announced}."
    raise HandoffError(Reason.INVALID_REQUEST, problem, "Run the same kvferry version on both sides.")


def _spans_by_tokens(batch: Batch) -> dict[tuple[str, int, int], list[int]]:
    found: dict[tuple[str, int, int], list[int]] = {}
    for cut in batch:
        found.setdefault((cut.span.group, cut.first_token, cut.end_token), []).append(cut.span.number)
    return found


def _blocks_covering(first_token: int, block_ids: Sequence[int], covers: int, cut: Cut) -> BlockList:
    """Return the blocks of a list that hold the tokens of ``cut``. Raises :class:`HandoffError` (invalid-request)."""
    first, end = (cut.first_token - first_token) // covers, -(-(cut.end_token - first_token) // covers)
    if first < 0 or end > len(block_ids):
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"cache group {cut.span.group!r}: tokens {cut.first_token} to {cut.end_token} were asked of "
            f"{len(block_ids)} blocks of {covers} tokens from token {first_token} on.",
            "Let the prefill engine generate one token only (max_tokens 1): blocks that leave a window are freed.",
        )
    return BlockList(first_token + first * covers, block_ids[first:end])


def wrong_parameters(different: str) -> HandoffError:
    """Return the error of an announcement whose parameters are not those of its prompt; ``different`` names what is."""
    return HandoffError(
        Reason.WRONG_PARAMETERS,
        "the kv_transfer_params of an announced prompt are not those of a prompt that the prefill engine holds: "
        f"{different}.",
        f"{CHECK_PARAMETERS} Then send the prompt again.",
    )


def not_held() -> HandoffError:
    """Return the error of an announced prompt that is not held: its parameters are wrong, or its hold has ended."""
    return HandoffError(
        Reason.SOURCE_CHANGED,
        "the prefill engine holds nothing under the kv_transfer_params of an announced prompt: they are not those of a "
        "prompt that it holds, or that prompt's hold was released or has expired.",
        f"{CHECK_PARAMETERS} Send the prompt again; if unchanged parameters of first loads fail so, raise "
        "lease_seconds on the prefill side.",
    )


def no_longer_held(transfer_id: str) -> HandoffError:
    """Return the error of a write of a prompt whose hold has ended."""
    return HandoffError(
        Reason.LEASE_EXPIRED,
        f"the prefill engine no longer holds the blocks of {transfer_id}: the request was aborted or released, or its "
        "lease ended.",
        "Send the prompt again, from a router with a transfer id of its own. If this repeats under load, raise "
        "lease_seconds on the prefill side.",
    )


def _revoked() -> HandoffError:
    return HandoffError(
        Reason.ABORTED,
        "the destination revoked its blocks.",
        "The decode engine's log says why it gave the load up.",
    )


def _late(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the prompt of {transfer_id} was not written within the time that the destination gave.",
        "load_timeout_seconds on the decode side sets the limit.",
    )
