"""The source's side of a gather: whose a part is and until when, and what is never packed. Time is an input."""

from dataclasses import asdict, dataclass, field

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution import packing_side as module
from kvferry.execution.guard_words import GuardWords
from kvferry.execution.pack_copies import as_message, from_message
from kvferry.execution.packing_side import LEASE_SECONDS, PLACE_SECONDS, PackingSide
from kvferry.execution.stage import Stage
from kvferry.handoff.messages import Answer, Busy, Pack, PackCopy, Packed, Release, Unpack, Unpacked
from kvferry.layout.shard import Region
from kvferry.plan.staging.scatter import Merge

EPOCH, GENERATION, SLOT = 7, 3, 1
NUM_BLOCKS, RUNS, RUN = 8, 4, 16
PART_BYTES = 2 * RUNS * RUN
STAGE_BYTES = 3 * PART_BYTES


@dataclass
class Rank:
    """A cache of blocks of runs with gaps, its words, and a stage that has room for three parts of two blocks."""

    cache: np.ndarray = field(
        default_factory=lambda: np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, RUNS, 2, RUN), np.uint8)
    )
    holds: GuardWords = field(default_factory=lambda: GuardWords(4))
    stage: Stage = field(default_factory=lambda: Stage(STAGE_BYTES, huge_pages=False))

    def __post_init__(self) -> None:
        self.holds.set(SLOT, EPOCH, GENERATION)
        self.side = PackingSide(self.stage, self.holds, [Region(self.cache.ctypes.data, self.cache.nbytes)])

    def question(self, reader: str = "a", number: int = 0, **changes: object) -> Pack:
        """Ask for the first half of every pair of runs of blocks 5 and 2."""
        copy = PackCopy(0, RUNS * RUN, self.cache.ctypes.data, RUNS * 2 * RUN, 0, RUN, ((RUNS, RUN, 2 * RUN),))
        pack = Pack(reader, number, 0, SLOT, EPOCH, GENERATION, PART_BYTES, ((5, 2),), (copy,))
        return msgspec.structs.replace(pack, **changes)

    def copy(self, **changes: object) -> Pack:
        """Ask for a copy that is changed."""
        return self.question(copies=(msgspec.structs.replace(self.question().copies[0], **changes),))

    def ask(self, now: float = 0.0, reader: str = "a", number: int = 0, **changes: object) -> Answer:
        return self.side.answer(self.question(reader, number, **changes), now)

    def content(self, packed: Answer) -> bytes:
        assert isinstance(packed, Packed)
        begin = packed.address - self.stage.region.base_address
        return bytes(self.stage.memory[begin : begin + PART_BYTES])

    def word(self, packed: Answer) -> bytes:
        assert isinstance(packed, Packed)
        slot = (packed.word_address - self.side.regions[1].base_address) // 16
        return bytes(self.side._words.array[slot].tobytes())

    @property
    def is_free(self) -> bool:
        begin = self.stage.take("probe", STAGE_BYTES)
        self.stage.give_back("probe")
        return begin == 0 and self.side.num_parts == 0


def refusal(rank: Rank, question: Pack) -> HandoffError:
    with pytest.raises(HandoffError) as caught:
        rank.side.answer(question, 0.0)
    assert rank.is_free
    return caught.value


def test_a_part_is_packed_in_the_order_asked_for_and_has_a_word_of_its_own() -> None:
    rank = Rank()
    packed = rank.ask()
    assert rank.content(packed) == rank.cache[[5, 2], :, 0].tobytes()
    assert isinstance(packed, Packed)
    assert rank.word(packed) == packed.word != bytes(16)


def test_asked_again_a_part_is_answered_as_before() -> None:
    rank = Rank()
    first = rank.ask()
    rank.cache[:] = 0
    assert rank.ask() == first
    assert rank.content(first) != bytes(PART_BYTES)
    assert rank.side.num_parts == 1


def test_a_reader_gives_its_parts_back_as_it_goes_and_none_has_a_word_that_was_anothers() -> None:
    rank = Rank()
    words = set()
    for number in range(20):
        packed = rank.ask(0.0, "a", number, num_done=number)
        words.add(rank.word(packed))
        assert rank.side.num_parts == 1
    assert len(words) == 20
    assert rank.side.answer(Unpack("a"), 0.0) == Unpacked()
    assert rank.is_free
    assert rank.word(packed) == bytes(16), "whoever still reads it finds out"
    assert rank.side.answer(Unpack("a"), 0.0) == Unpacked(), "twice is fine"


def test_a_dead_readers_parts_come_back_when_the_lease_is_over() -> None:
    rank = Rank()
    packed = rank.ask(0.0)
    rank.side.expire(LEASE_SECONDS - 0.01)
    assert rank.side.num_parts == 1
    rank.side.expire(LEASE_SECONDS)
    assert rank.is_free
    assert rank.word(packed) == bytes(16)


def test_a_reader_that_goes_on_keeps_what_it_still_reads() -> None:
    rank = Rank()
    first = rank.ask(0.0, number=0)
    rank.ask(LEASE_SECONDS - 0.01, number=1)
    rank.side.expire(2 * LEASE_SECONDS - 0.02)
    assert rank.side.num_parts == 2
    assert rank.word(first) != bytes(16)
    rank.side.expire(2 * LEASE_SECONDS - 0.01)
    assert rank.is_free


def test_a_reader_has_two_parts_at_most() -> None:
    rank = Rank()
    rank.ask(number=0)
    rank.ask(number=1)
    with pytest.raises(HandoffError, match="at most 2") as caught:
        rank.ask(number=2)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert isinstance(rank.ask(number=2, num_done=1), Packed)


def test_readers_wait_for_room_in_the_order_in_which_they_came() -> None:
    rank = Rank()
    for number, reader in enumerate(("a", "a", "b")):
        assert isinstance(rank.ask(0.0, reader, number), Packed)
    assert rank.ask(0.1, "c") == rank.ask(0.2, "d") == Busy()
    rank.side.answer(Unpack("b"), 0.3)
    assert rank.ask(0.3, "d") == Busy(), "the other came first"
    assert isinstance(rank.ask(0.4, "c"), Packed)
    rank.side.answer(Unpack("a"), 0.5)
    assert isinstance(rank.ask(0.5, "d"), Packed)


def test_who_asks_no_more_loses_the_place_in_the_queue() -> None:
    rank = Rank()
    for number, reader in enumerate(("a", "a", "b")):
        rank.ask(0.0, reader, number)
    rank.ask(0.0, "dead")
    rank.ask(0.1, "c")
    rank.side.answer(Unpack("b"), 0.2)
    assert rank.ask(PLACE_SECONDS - 0.01, "c") == Busy()
    assert isinstance(rank.ask(PLACE_SECONDS, "c"), Packed)
    rank.ask(PLACE_SECONDS, "d")
    rank.side.answer(Unpack("d"), PLACE_SECONDS)
    rank.side.answer(Unpack("c"), PLACE_SECONDS)
    assert isinstance(rank.ask(PLACE_SECONDS, "e"), Packed), "one that gave up does not wait either"


def test_there_are_so_many_words_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PARTS", 2)
    rank = Rank()
    assert isinstance(rank.ask(reader="a"), Packed)
    assert isinstance(rank.ask(reader="b"), Packed)
    assert rank.ask(reader="c") == Busy()
    rank.side.answer(Unpack("a"), 0.0)
    assert isinstance(rank.ask(reader="c"), Packed)


@pytest.mark.parametrize("word", [(0, 0), (EPOCH + 1, GENERATION), (EPOCH, GENERATION + 1)])
def test_a_hold_that_has_ended_is_not_packed(word: tuple[int, int]) -> None:
    rank = Rank()
    rank.holds.set(SLOT, *word)
    assert refusal(rank, rank.question()).reason is Reason.SOURCE_CHANGED


def test_a_hold_that_ends_while_it_is_packed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    pack = rank.stage.pack

    def pack_and_end(copies: object) -> object:
        rank.holds.clear(SLOT)
        return pack(copies)  # type: ignore[arg-type]

    monkeypatch.setattr(rank.stage, "pack", pack_and_end)
    assert refusal(rank, rank.question()).reason is Reason.SOURCE_CHANGED


def test_what_began_to_be_written_while_it_was_packed_is_to_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    pack = rank.stage.pack

    def pack_and_write(copies: object) -> object:
        rank.holds.set(SLOT, EPOCH, GENERATION, being_written=True)
        return pack(copies)  # type: ignore[arg-type]

    monkeypatch.setattr(rank.stage, "pack", pack_and_write)
    assert rank.ask() == Busy()
    assert rank.is_free


def test_blocks_that_are_being_written_are_to_be_asked_for_again() -> None:
    rank = Rank()
    rank.holds.set(SLOT, EPOCH, GENERATION, being_written=True)
    assert rank.ask() == Busy()
    rank.holds.set(SLOT, EPOCH, GENERATION)
    assert isinstance(rank.ask(), Packed)


OUTSIDE: dict[str, dict[str, object]] = {
    "before the cache": {"address": 0},
    "a byte beyond the cache": {"run_bytes": RUN + 1, "blocks": 0, "loops": ((1, 0, 0),), "address": 1},
    "a run beyond the cache": {"loops": ((RUNS, RUN, 2 * RUN * NUM_BLOCKS * RUNS),)},
    "backwards out of the cache": {"loops": ((RUNS, RUN, -2 * RUN * NUM_BLOCKS * RUNS),)},
    "blocks beyond the cache": {"block_stride": NUM_BLOCKS * RUNS * 2 * RUN},
    "beyond the part": {"stage_offset": 1},
    "blocks beyond the part": {"stage_block_stride": PART_BYTES},
    "backwards out of the part": {"loops": ((RUNS, -RUN, 2 * RUN),)},
    "a list that is not there": {"blocks": 1},
    "more bytes than the part": {"stage_block_stride": 0, "loops": ((RUNS, RUN, 2 * RUN), (3, 0, 0))},
}


@pytest.mark.parametrize("changes", OUTSIDE.values(), ids=OUTSIDE)
def test_nothing_outside_the_cache_is_packed_and_nothing_outside_the_part_written(changes: dict[str, object]) -> None:
    rank = Rank()
    if changes.get("address") == 1:
        changes = {**changes, "address": rank.cache.ctypes.data + rank.cache.nbytes - 5 * RUNS * 2 * RUN - RUN}
    assert refusal(rank, rank.copy(**changes)).reason is Reason.INVALID_REQUEST


def test_the_last_bytes_of_the_cache_and_of_the_part_can_be_packed() -> None:
    rank = Rank()
    last = {"address": rank.cache.ctypes.data + RUN, "loops": ((RUNS, RUN, 2 * RUN),)}
    question = msgspec.structs.replace(rank.copy(**last), blocks=((7, 0),))
    packed = rank.side.answer(question, 0.0)
    assert rank.content(packed) == rank.cache[[7, 0], :, 1].tobytes()


def test_other_mistakes_of_a_reader_are_refused() -> None:
    rank = Rank()
    assert refusal(rank, rank.question(slot=4)).reason is Reason.INVALID_REQUEST
    with pytest.raises(PlanError) as large:
        rank.side.answer(rank.question(num_bytes=STAGE_BYTES + 1), 0.0)
    assert large.value.reason is Reason.UNSUPPORTED
    with pytest.raises(HandoffError) as other:
        rank.side.answer(Release(EPOCH, ()), 0.0)
    assert other.value.reason is Reason.UNSUPPORTED
    assert rank.is_free


def test_copies_come_out_of_a_message_as_they_went_in() -> None:
    """No two numbers are equal, so that none can be taken for another; two copies share their blocks."""
    first, second = np.array([5, 3]), np.array([8])
    packs = [
        Merge(11, 12, 13, 14, first, 15, ((2, 16, 17), (3, 18, 19))),
        Merge(21, 22, 23, 24, second, 25, ()),
        Merge(31, 32, 33, 34, first.copy(), 35, ((4, 36, 37),)),
    ]
    blocks, copies = as_message(packs)
    assert blocks == ((5, 3), (8,))
    question = msgspec.structs.replace(Rank().question(), blocks=blocks, copies=copies)
    found = from_message(msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Pack))
    for merge, pack in zip(found, packs, strict=True):
        sent, arrived = (
            {**asdict(each), "destination_blocks": each.destination_blocks.tolist()} for each in (pack, merge)
        )
        assert arrived == sent
