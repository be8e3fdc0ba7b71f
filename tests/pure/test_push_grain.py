"""The choice of a push's grain: what is predicted, and that nothing predicted slower than the whole is chosen."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError, Reason
from kvferry.handoff.grains import ChosenGrain, Grains, ModelLayers
from kvferry.handoff.messages import AnnouncedBlocks
from kvferry.handoff.push.sending import Lane
from kvferry.handoff.push_measures import NUM_KEPT, PACKED, TYPICAL_BATCH_SECONDS, Measures
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.push_grain import (
    Amount,
    Candidate,
    Computing,
    Grain,
    Span,
    Wire,
    amount_of,
    choose_grain,
    exposed_seconds,
)
from kvferry.plan.staging.staged_plan import GatherPlan
from kvferry.plan.staging.strategy import TYPICAL_COSTS

seconds = st.floats(0, 1e-2)
wires = st.builds(Wire, st.floats(0, 1e-4), st.floats(0, 1e-8), seconds)
computings = st.builds(Computing, st.integers(1, 40), seconds, st.integers(1, 12))
amounts = st.builds(Amount, st.integers(0, 10**5), st.integers(1, 10**9))


def cut(total: Amount, computing: Computing, at_end: Amount, rows: bool) -> list[Candidate]:
    """Return every grain of a prompt of one group; with ``rows`` a span has as many descriptors as the whole."""
    num_layers, num_chunks = computing.num_layers, computing.num_chunks
    found = [
        Candidate(Grain.WHOLE, at_end=total + at_end),
        Candidate(Grain.CHUNKS, (Span(num_layers, total, num_chunks),), at_end),
    ]
    for size in range(1, num_layers + 1):
        ends = [min(begin + size, num_layers) for begin in range(0, num_layers, size)]
        spans = []
        for begin, end in zip(range(0, num_layers, size), ends, strict=True):
            part = total.scaled((end - begin) / num_layers)
            spans.append(Span(end, Amount(total.num_descriptors, part.num_bytes) if rows else part, num_chunks))
        found.append(Candidate(Grain.LAYERS, tuple(spans), at_end, size))
    return found


def slowly(candidate: Candidate, computing: Computing, wire: Wire) -> float:
    """Play a push through, batch after batch."""
    step = computing.num_layers * computing.seconds_per_layer
    end = computing.num_chunks * step
    batches = [
        (
            chunk * step + span.end_layer * computing.seconds_per_layer,
            wire.seconds(span.amount.scaled(1 / span.num_chunks)),
        )
        for span in candidate.spans
        for chunk in range(computing.num_chunks - span.num_chunks, computing.num_chunks)
    ]
    if candidate.at_end.num_bytes:
        batches.append((end, wire.seconds(candidate.at_end)))
    now = 0.0
    for final_at, takes in sorted(batches, key=lambda batch: batch[0]):
        now = max(now, final_at) + takes
    return now - end


@settings(deadline=None)
@given(amounts, amounts | st.just(Amount(0, 0)), computings, wires, st.booleans())
def test_what_is_predicted_is_what_playing_it_through_gives(
    total: Amount, at_end: Amount, computing: Computing, wire: Wire, rows: bool
) -> None:
    for candidate in cut(total, computing, at_end, rows)[:4]:
        assert exposed_seconds(candidate, computing, wire) == pytest.approx(
            slowly(candidate, computing, wire), abs=1e-9
        )


@settings(deadline=None)
@given(amounts, amounts | st.just(Amount(0, 0)), computings, wires, st.booleans(), st.randoms())
def test_nothing_is_chosen_that_is_predicted_slower_than_the_whole(
    total: Amount, at_end: Amount, computing: Computing, wire: Wire, rows: bool, random: object
) -> None:
    candidates = cut(total, computing, at_end, rows)
    random.shuffle(candidates)  # type: ignore[attr-defined]
    choice = choose_grain(candidates, computing, wire)
    assert choice.seconds <= choice.predictions["whole"]
    assert choice.seconds == choice.predictions[choice.chosen.name]
    assert choice.seconds <= min(choice.predictions.values()) + max(
        0.05 * choice.predictions["whole"], wire.seconds_per_batch
    )


@settings(deadline=None)
@given(amounts, computings, wires)
def test_one_span_of_all_layers_is_the_whole_in_one_chunk_and_chunks_in_several(
    total: Amount, computing: Computing, wire: Wire
) -> None:
    whole, chunks, *_, all_layers = [
        exposed_seconds(each, computing, wire) for each in cut(total, computing, Amount(0, 0), rows=True)
    ]
    assert all_layers == pytest.approx(chunks, rel=1e-9, abs=1e-12)
    if computing.num_chunks == 1:
        assert all_layers == pytest.approx(whole, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(amounts, amounts, computings, wires, st.booleans(), st.floats(1, 10))
def test_a_slower_wire_and_quicker_layers_never_leave_less(
    total: Amount, at_end: Amount, computing: Computing, wire: Wire, rows: bool, factor: float
) -> None:
    slower = Wire(
        *(factor * each for each in (wire.seconds_per_descriptor, wire.seconds_per_byte, wire.seconds_per_batch))
    )
    quicker = Computing(computing.num_layers, computing.seconds_per_layer / factor, computing.num_chunks)
    for candidate in cut(total, computing, at_end, rows)[:4]:
        found = exposed_seconds(candidate, computing, wire)
        assert exposed_seconds(candidate, computing, slower) >= found - 1e-9
        assert exposed_seconds(candidate, quicker, wire) >= found - 1e-9


def test_a_finer_grain_must_save_more_than_a_batch_takes() -> None:
    """Of 20 ms whole, spans of 4 layers leave 2.7, of 2 1.6 and of 1 1.1: so little is not worth it."""
    computing, wire = Computing(36, 1e-2), Wire(0.0, 1e-10, 0.5e-3)
    candidates = cut(Amount(16, 200_000_000), computing, Amount(0, 0), rows=False)
    powers = [each for each in candidates if each.layers_per_span in (0, 1, 2, 4)]
    choice = choose_grain(powers, computing, wire)
    assert choice.chosen.name == "layers(2)"
    assert choice_of(powers, Wire(0.0, 1e-10, 20e-3)) == "whole"
    [chunks] = [each for each in powers if each.grain is Grain.CHUNKS]
    assert choice_of([powers[0], chunks], Wire(0.0, 1e-10, 0.0)) == "whole"


def choice_of(candidates: Sequence[Candidate], wire: Wire) -> str:
    return choose_grain(candidates, Computing(36, 1e-2), wire).chosen.name


def test_a_choice_without_the_whole_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        choose_grain([Candidate(Grain.CHUNKS)], Computing(1, 0.0), Wire(0, 0, 0))
    assert refused.value.reason is Reason.INVALID_REQUEST


LAYERS = [f"{index:02}" for index in range(8)]
TOKENS = 1024


def pair(layout: NamedLayout) -> PairPlan:
    sizes = {"num_kv_heads": 4, "head_size": 64, "itemsize": 2, "block_size": 16, "num_blocks": 64}
    source, target = (shard_for(layers=LAYERS, layout=layout, base_address=base << 40, **sizes) for base in (1, 2))
    return Planner([source], target).plans(0)[0]


def grains(wish: Grain | None = None, chunk_tokens: int = TOKENS, size: int = 1) -> Grains:
    made = Grains(wish, ModelLayers({"full": LAYERS}, LAYERS, chunk_tokens), size)
    made.has_hooks = True
    return made


def chosen(made: Grains, plan: PairPlan, **more: bool) -> ChosenGrain:
    announced = AnnouncedBlocks("full", 0, TOKENS, 0, tuple(range(TOKENS // 16)))
    return made.choose(plan, [announced], TOKENS, "cma", **more)


def test_spans_of_every_length_are_at_hand_and_numbered_apart() -> None:
    made = grains()
    assert sorted(map(len, made.layers_of.values())) == [1] * 8 + [2] * 4 + [4] * 2
    assert Lane("full") not in made.layers_of
    for layer in LAYERS:
        assert set(made.lanes_of[layer]) == {lane for lane, layers in made.layers_of.items() if layer in layers}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("layout", [NamedLayout.BHLNC, NamedLayout.BLHNC, NamedLayout.LBHNC])
def test_spans_are_counted_as_they_are_planned(layout: NamedLayout, is_packed: bool) -> None:
    made, plan = grains(), pair(layout)
    way = GatherPlan(plan) if is_packed else None
    whole = amount_of(plan.groups["full"], TOKENS, way)
    found = {each.name: each for each in made._candidates(plan, [AnnouncedBlocks("full", 0, TOKENS, 0, ())], way)}
    assert found["whole"].at_end == whole
    for size in (1, 2, 4):
        planned = [amount_of(span, TOKENS, way) for span in made.span_plans(plan, size)["full"].values()]
        assert [span.amount for span in found[f"layers({size})"].spans] == planned
        assert sum(each.num_bytes for each in planned) == whole.num_bytes


def test_the_grain_that_was_set_is_taken() -> None:
    plan = pair(NamedLayout.BLHNC)
    for wish, size in ((Grain.WHOLE, 0), (Grain.CHUNKS, 0), (Grain.LAYERS, 3)):
        found = chosen(grains(wish, size=3), plan)
        assert (found.grain, found.layers_per_span, found.choice) == (wish, size, None)
    made = grains(Grain.LAYERS, size=3)
    assert {group: len(spans) for group, spans in made.span_plans(plan, 3).items()} == {"full": 3}
    assert made.span_plans(plan, 0) == {}


def test_chunks_before_anything_was_measured_and_the_whole_when_nothing_is_left_to_compute() -> None:
    made, plan = grains(), pair(NamedLayout.BLHNC)
    assert chosen(made, plan).grain is Grain.CHUNKS
    made.measures.note_batch("cma", Amount(1, 10**9), 10.0)
    made.note_step(TOKENS, seconds=1.0, num_hooks=len(LAYERS))
    assert chosen(made, plan).grain is Grain.LAYERS
    assert chosen(made, plan, is_computed=True).grain is Grain.WHOLE


def test_spans_only_where_layers_tell_of_themselves() -> None:
    """As in a step that a whole graph replays."""
    plan = pair(NamedLayout.BLHNC)
    for num_hooks, grain in ((len(LAYERS), Grain.LAYERS), (len(LAYERS) - 1, Grain.CHUNKS), (0, Grain.CHUNKS)):
        made = grains(chunk_tokens=TOKENS // 8)
        # A wire on which bytes count, so that chunks are worth their while.
        made.measures.note_batch("cma", Amount(1, 10**9), 10.0)
        made.note_step(TOKENS // 8, seconds=1.0, num_hooks=num_hooks)
        assert chosen(made, plan).grain is grain


def test_short_runs_are_not_cut_shorter() -> None:
    """Each span of a head's row is a descriptor of its own: where these are dear, the whole goes at once."""
    made, plan = grains(), pair(NamedLayout.BHLNC)
    made.note_step(TOKENS, seconds=1e-3, num_hooks=len(LAYERS))
    made.measures.wire = lambda _: Wire(1e-3, 0.0, 1e-6)  # type: ignore[method-assign]
    found = chosen(made, plan)
    assert found.grain is Grain.WHOLE
    assert found.choice is not None
    assert found.choice.predictions["layers(1)"] > found.choice.predictions["whole"]


def test_medians_of_steps_by_their_size() -> None:
    measures = Measures()
    assert measures.seconds_per_layer(100) is None
    for value in (1.0, 9.0, 2.0):
        measures.note_step(100, value)
    measures.note_step(5000, 50.0)
    measures.note_step(0, 1e9)
    assert [measures.seconds_per_layer(each) for each in (1, 70, 3000, 10**6)] == [2.0, 2.0, 50.0, 50.0]
    for _ in range(NUM_KEPT):
        measures.note_step(100, 3.0)
    assert measures.seconds_per_layer(100) == 3.0


def test_what_a_wire_takes_is_measured_beside_what_is_typical_of_it() -> None:
    measures, typical = Measures(), TYPICAL_COSTS["cma"]
    much, little = Amount(1000, 10**9), Amount(1, 1000)
    assert measures.wire("cma") == Wire(0.6e-6, 1 / 15e9, TYPICAL_BATCH_SECONDS)
    takes = 1000 * typical.seconds_apart + 1e9 / typical.bytes_per_second
    measures.note_batch("cma", much, TYPICAL_BATCH_SECONDS + 3 * takes)
    found = measures.wire("cma")
    assert found.seconds_per_descriptor == pytest.approx(3 * typical.seconds_apart)
    assert found.seconds_per_byte == pytest.approx(3 / typical.bytes_per_second)
    measures.note_batch("cma", little, 2e-3)
    assert measures.wire("cma").seconds_per_batch == pytest.approx(2e-3, rel=0.01)
    assert measures.wire("nixl").seconds_per_descriptor == TYPICAL_COSTS["nixl"].seconds_per_descriptor
    assert measures.wire("mooncake") == measures.wire("nixl")


def test_what_is_packed_first_takes_the_copy_too_and_is_measured_apart() -> None:
    measures, typical = Measures(), TYPICAL_COSTS["nixl"]
    packed = measures.wire("nixl" + PACKED)
    assert packed.seconds_per_byte == 1 / typical.bytes_per_second + 1 / typical.copy_bytes_per_second
    assert packed.seconds_per_descriptor == typical.seconds_per_descriptor
    measures.note_batch("nixl" + PACKED, Amount(1, 10**9), 10.0)
    assert measures.wire("nixl" + PACKED).seconds_per_byte > 10 * packed.seconds_per_byte
    assert measures.wire("nixl").seconds_per_byte == 1 / typical.bytes_per_second
