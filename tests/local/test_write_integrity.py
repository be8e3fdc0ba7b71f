"""Pushes whose bytes are compared with the sender's digests: real messages and writes, and bytes that change."""

import time
from typing import Any

import numpy as np
import pytest

from kvferry.errors import Reason
from kvferry.execution import destination, digests
from kvferry.execution.destination import Compares
from kvferry.execution.digests import Integrity
from kvferry.handoff.messages import Written
from kvferry.handoff.source import END
from kvferry.layout.named_layouts import NamedLayout

from ..support.faults import FaultPlan
from .engines_in_process import BLOCK_SIZE, HEADS, LAYERS, ROW_BYTES
from .engines_that_write import Batches, Pairs, ReceivingRank, SendingEngine, check_arrived, engines

__all__ = ["engines"]

FULL, SAMPLE = Integrity.FULL, Integrity.SAMPLE
SOURCE_IDS, TARGET_IDS = [5, 1, 4], [0, 3, 2]


def push(
    sender: SendingEngine, receivers: list[ReceivingRank], name: str = "x", steps: tuple[int, ...] = ()
) -> list[Any]:
    """Push a prompt in these steps; return each receiver's result."""
    for receiver in receivers:
        receiver.receive(sender.hold(), TARGET_IDS, name)
    for num_final in (*steps, END):
        sender.compute(num_final, SOURCE_IDS, name)
    return [receiver.result() for receiver in receivers]


class Damage:
    """Changes bytes of a receiver between the last write of source rank ``of`` and the comparison."""

    of = 0

    def __init__(self, patch: pytest.MonkeyPatch, receiver: ReceivingRank) -> None:
        self.flips: list[tuple[int, int, int]] = []
        note = destination.AwaitedLoad._note_written

        def damage(push: Any, receiving: Any, event: Written) -> None:
            if event.source_index == self.of:
                for row, column, bit in self.flips:
                    receiver.rank.cache[row, column] ^= np.uint8(1 << bit)
                self.flips = []
            note(push, receiving, event)

        patch.setattr(destination.AwaitedLoad, "_note_written", damage)


@pytest.mark.parametrize("batches", Batches)
@pytest.mark.parametrize("wanted", [SAMPLE, FULL])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2), (8, 1)])
def test_a_right_push_is_compared_and_commits(
    source_tp: int, target_tp: int, wanted: Integrity, batches: Batches, engines: Pairs
) -> None:
    more = {"kept": FULL, "compares": Compares(wanted), "target_layout": NamedLayout.LBNHC}
    sender, receivers = engines.open(source_tp, target_tp, batches=batches, **more)  # type: ignore[arg-type]
    for number in range(3):
        for receiver, result in zip(receivers, push(sender, receivers, f"x{number}", (5, 9)), strict=True):
            assert result.error is None
            whole = receiver.rank.cache[:3].nbytes
            assert result.num_bytes == whole
            assert result.num_compared_bytes == whole if wanted is FULL else 0 < result.num_compared_bytes < whole


@pytest.mark.parametrize("layout", [NamedLayout.BHLNC, NamedLayout.LBNHC])
@pytest.mark.parametrize("batches", Batches)
@pytest.mark.parametrize("source_tp", [1, 2])
def test_a_bit_that_changes_on_the_way_fails_the_push_and_says_where(
    source_tp: int, batches: Batches, layout: NamedLayout, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"kept": FULL, "compares": Compares(FULL), "layout": layout, "target_layout": NamedLayout.BHLNC}
    sender, [receiver] = engines.open(source_tp, batches=batches, **more)  # type: ignore[arg-type]
    damage = Damage(monkeypatch, receiver)
    generator = np.random.default_rng(source_tp)
    columns = receiver.rank.cache.shape[1]
    for number in range(12):
        flip = int(generator.choice(TARGET_IDS)), int(generator.integers(columns)), int(generator.integers(8))
        head, layer = divmod(flip[1] // (ROW_BYTES // HEADS // len(LAYERS)), len(LAYERS))
        damage.flips, damage.of = [flip], head * source_tp // HEADS
        [result] = push(sender, [receiver], f"x{number}", (5, 9))
        assert result.error is not None
        assert (result.error.reason, result.num_bytes) == (Reason.INTEGRITY_MISMATCH, 0)
        first = TARGET_IDS.index(flip[0]) * BLOCK_SIZE
        where = f"layer '{layer}', heads {head}:{head + 1}, tokens {first} to {first + BLOCK_SIZE} in block {flip[0]}:"
        assert f"group 'full', component 'kv', {where}" in result.error.message
        assert f"not those of rank tp {damage.of}/{source_tp}" in result.error.message
    [result] = push(sender, [receiver], "right")
    assert result.error is None


def test_a_mismatch_of_one_source_stops_the_others(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks come back although another source has not written its part, and never will."""
    sender, [receiver] = engines.open(2, 1, kept=FULL, compares=Compares(FULL))
    damage = Damage(monkeypatch, receiver)
    receiver.receive(sender.hold(), TARGET_IDS)
    assert receiver.is_waiting()
    damage.flips = [(0, 0, 3)]
    sender.compute(8, SOURCE_IDS)
    sender.ranks, others = sender.ranks[:1], sender.ranks[1:]
    sender.compute(END, SOURCE_IDS)
    error = receiver.result(5.0).error
    sender.ranks += others
    assert error is not None
    assert error.reason is Reason.INTEGRITY_MISMATCH


def test_a_sample_finds_a_block_that_never_arrived(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, [receiver] = engines.open(kept=SAMPLE, compares=Compares(SAMPLE), batches=Batches.SPANS)
    damage = Damage(monkeypatch, receiver)
    for number in range(20):
        damage.flips = [(3, column, 1) for column in range(receiver.rank.cache.shape[1])]
        [result] = push(sender, [receiver], f"x{number}")
        assert result.error is not None
        assert result.error.reason is Reason.INTEGRITY_MISMATCH


@pytest.mark.parametrize("batches", Batches)
def test_a_preempted_prompt_is_sent_again_with_other_digests(batches: Batches, engines: Pairs) -> None:
    """What was summed before the preemption does not count: the engine computes the prompt again in other blocks."""
    sender, [receiver] = engines.open(
        batches=batches, kept=FULL, compares=Compares(FULL), faults=FaultPlan(delay_seconds=0.1)
    )
    receiver.receive(sender.hold(), TARGET_IDS)
    sender.compute(9, [2, 3, 1])
    time.sleep(0.05)
    for rank in sender.ranks:
        rank.writer.preempt(["x"])
        rank.rank.cache[[2, 3]] = 7
    sender.compute(END, SOURCE_IDS)
    assert receiver.result().error is None
    check_arrived(sender, [receiver], SOURCE_IDS, TARGET_IDS)


@pytest.mark.parametrize(("kept", "wanted"), [(Integrity.OFF, SAMPLE), (SAMPLE, FULL)])
def test_an_engine_that_has_fewer_digests_is_refused_before_a_byte_moves(
    kept: Integrity, wanted: Integrity, engines: Pairs
) -> None:
    sender, [receiver] = engines.open(kept=kept, compares=Compares(wanted))
    sender.compute(END, SOURCE_IDS)
    receiver.receive(sender.hold(), TARGET_IDS)
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert f'"integrity": "{wanted}"' in error.message
    assert f'"{kept}"' in error.message
    assert not receiver.rank.cache.any()
    assert not sender.ranks[0].writer.destinations.known, "the directory says it before anything is asked"


def test_a_source_refuses_a_destination_that_asks_for_more_than_it_has(engines: Pairs) -> None:
    """Even where the destination has not looked at the directory."""
    sender, [receiver] = engines.open(kept=SAMPLE, compares=Compares(SAMPLE))
    sender.ranks[0].writer._computes = Integrity.OFF
    receiver.receive(sender.hold(), TARGET_IDS)
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert '"sample", the prefill engine "off"' in error.message


def test_an_engine_without_digests_is_believed_where_none_are_required(engines: Pairs) -> None:
    """As one whose cache is not comparable, where the decode engine's setting is the default."""
    sender, [receiver] = engines.open(compares=Compares(SAMPLE, is_required=False))
    [result] = push(sender, [receiver])
    assert (result.error, result.num_compared_bytes) == (None, 0)


def test_a_destination_that_asks_for_none_gets_no_digests(engines: Pairs) -> None:
    sender, [receiver] = engines.open(kept=FULL)
    [result] = push(sender, [receiver])
    assert (result.error, result.num_compared_bytes) == (None, 0)
    assert sender.written(1)[0].num_compared_bytes == 0


def test_digests_that_belong_to_another_push_are_refused(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, [receiver] = engines.open(kept=FULL, compares=Compares(FULL))
    monkeypatch.setattr(digests.WrittenDigests, "encoded", lambda _: bytes(8))
    [result] = push(sender, [receiver])
    assert result.error is not None
    assert result.error.reason is Reason.PROTOCOL_MISMATCH


@pytest.mark.parametrize("wanted", [SAMPLE, FULL])
def test_digests_of_long_pushes_are_folded_and_still_find_a_bit(
    wanted: Integrity, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message has room for fewer digests than the prompt has cells."""
    monkeypatch.setattr(digests, "MAX_WORDS", 20 if wanted is FULL else 3)
    sender, [receiver] = engines.open(kept=FULL, compares=Compares(wanted), batches=Batches.SPANS)
    damage = Damage(monkeypatch, receiver)
    found = 0
    for number in range(24):
        damage_at = TARGET_IDS[number % 3], 97 * number % receiver.rank.cache.shape[1], number % 8
        damage.flips = [damage_at]
        [result] = push(sender, [receiver], f"x{number}", (5, 9))
        found += result.error is not None
        if result.error is not None:
            assert result.error.reason is Reason.INTEGRITY_MISMATCH
            begin = TARGET_IDS.index(damage_at[0]) // 2 * 2 * BLOCK_SIZE
            assert f"tokens {begin} to {min(begin + 2 * BLOCK_SIZE, 3 * BLOCK_SIZE)} in block" in result.error.message
    assert found == 24 if wanted is FULL else found < 24
    [result] = push(sender, [receiver], "right")
    assert result.error is None


def test_other_jobs_go_on_between_two_sums(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a comparison ends after so many bytes, at the source and at the destination."""
    for module in (digests, destination):
        monkeypatch.setattr(module, "PER_ADVANCE", 1)
    monkeypatch.setattr(digests, "MOST_BYTES", 1)
    sender, [receiver] = engines.open(kept=FULL, compares=Compares(FULL))
    turns = []
    compare = destination.AwaitedLoad._compare

    def counted(push: Any, receiving: Any) -> bool:
        moved = compare(push, receiving)
        turns.append(moved)
        return moved

    monkeypatch.setattr(destination.AwaitedLoad, "_compare", counted)
    [result] = push(sender, [receiver])
    assert result.error is None
    # 3 blocks of 4 tokens, 2 layers, 4 heads; and one turn that notices the end.
    assert sum(turns) == 3 * 2 * 4 + 1


def test_a_push_that_ends_while_it_is_compared_gives_its_blocks_back(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, [receiver] = engines.open(kept=FULL, compares=Compares(FULL))
    monkeypatch.setattr(destination.AwaitedLoad, "_compare", lambda *_: False)
    receiver.receive(sender.hold(), TARGET_IDS, seconds=0.5)
    sender.compute(END, SOURCE_IDS)
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert "by the prefill ranks at" in error.message
