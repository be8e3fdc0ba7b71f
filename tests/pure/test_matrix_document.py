"""The document of the matrix has exactly the content of the results."""

from pathlib import Path

import pytest

from ..host.vllm.handoffs import CONCURRENT_PAIRS, PAIRS
from ..host.vllm.offloads import MOVED_AND_KEPT, OFFLOADS, SHARED
from ..matrix_document import (
    BOTH_CHECKS,
    BYTES_ONLY,
    CHECKS,
    CHECKS_OF_BYTES,
    CONCURRENT_CHECKS,
    OFFLOAD_CHECKS,
    SHARED_CHECKS,
    TOKENS,
    document,
    shape_of,
)
from ..matrix_refusals import REFUSALS
from ..matrix_results import Results

PAIR, REFUSAL = PAIRS[0].name, REFUSALS[0]
ALL = (*PAIRS, *CONCURRENT_PAIRS, *OFFLOADS, *SHARED, MOVED_AND_KEPT)
TRAFFIC = {"requests": 40, "identical": 39, "received": 1234, "computed": 3}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path)


def rows(results: Results) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in document(results).splitlines() if line.startswith("|")]
    return {cells[0]: [cell.strip() for cell in cells] for cells in lines}


def add(results: Results, checks: list[str], outcome: str = "passed", **measured: object) -> None:
    for check in checks:
        message = "" if outcome == "passed" else "tokens differ | for 2\nand more"
        results.add_check(PAIR, check, outcome=outcome, message=message, measured=measured)


def test_what_did_not_run_is_said_not_to_have_run(results: Results) -> None:
    found = rows(results)
    assert {found[pair.name][-1] for pair in ALL} == {"not run"}
    assert {found[refusal.combination][-1] for refusal in REFUSALS} == {"not run"}
    assert "Nothing has run." in document(results)
    add(results, [*CHECKS], "skipped")
    assert rows(results)[PAIR][-1] == "not run"


def test_a_pair_passes_when_all_of_its_checks_have(results: Results) -> None:
    add(results, [*CHECKS][:-1], descriptors=12345, layouts=["LBHNC", "BHLNC"], block_sizes=[64, 64], traffic=TRAFFIC)
    row = rows(results)[PAIR]
    assert row[-1] == "in part: swapped labels seen not run"
    assert row[4:] == ["64", "LBHNC to BHLNC", "", "12,345", "39/40", "1,234/3", row[-1]]
    add(results, [*CHECKS][-1:])
    assert rows(results)[PAIR][-1] == "passed"
    assert f"Of {len(PAIRS)} combinations 1 passed" in document(results)


def test_a_pair_whose_tokens_no_engine_alone_has_passes_by_its_labels(results: Results) -> None:
    uncompared = [pair.name for pair in PAIRS if not pair.is_compared]
    assert uncompared == ["qwennext-1-2", "qwennext-2-1"]
    for check in CHECKS_OF_BYTES:
        assert rows(results)[uncompared[0]][-1] != BYTES_ONLY
        results.add_check(uncompared[0], check, outcome="passed", message="", measured={})
    assert rows(results)[uncompared[0]][-1] == BYTES_ONLY
    assert f"Of {len(PAIRS)} combinations 1 passed" in document(results)
    results.add_check(uncompared[0], next(iter(CHECKS_OF_BYTES)), outcome="failed", message="", measured={})
    assert rows(results)[uncompared[0]][-1].startswith("**failed**")


def test_one_failed_check_fails_the_pair(results: Results) -> None:
    add(results, [*CHECKS])
    add(results, [TOKENS], "failed")
    assert rows(results)[PAIR][-1] == "**failed**: tokens (tokens differ for 2)"
    add(results, [TOKENS])
    add(results, ["test_beyond_the_list"], "failed")
    assert rows(results)[PAIR][-1].startswith("**failed**: test_beyond_the_list")


def test_a_concurrent_pair_passes_by_checks_of_its_own_and_names_what_else_it_showed(results: Results) -> None:
    [pair] = [pair for pair in CONCURRENT_PAIRS if pair.name == "concurrent-layers"]
    besides = ["test_prefix_hits_on_the_prefill_side", "test_the_client_goes_away[0]", "test_the_client_goes_away[3]"]
    for check in (*besides, *CONCURRENT_CHECKS):
        assert rows(results)[pair.name][-1] != "passed"
        results.add_check(pair.name, check, outcome="passed", message="", measured={})
    found = rows(results)[pair.name]
    assert found[4:] == [
        "cma",
        "prefix hits on the prefill side; the client goes away",
        "passed",
    ]
    assert f"of {len(CONCURRENT_PAIRS)} behind a concurrent router 1, of" in document(results)


def test_an_offload_shows_what_its_engines_computed(results: Results) -> None:
    pair = OFFLOADS[0]
    second = {"requests": 12, "identical": 12, "tokens": 1000, "computed": 40, "host": 960, "disk": 0}
    third = {**second, "identical": 11, "computed": 41, "disk": 333}
    measured = {"block_size": 128, "layout": "BHLNC", "second": second, "third": third}
    for check in OFFLOAD_CHECKS:
        assert rows(results)[pair.name][-1] != "passed"
        results.add_check(pair.name, check, outcome="passed", message="", measured=measured)
    found = rows(results)[pair.name]
    assert found[2:] == ["TP 1", "TP 2", "128", "BHLNC", "23/24", "0.040", "0.041", "0.333", "passed"]
    assert f"of {len(OFFLOADS)} offloads 1, of {len(SHARED)} through a pool 0;" in document(results)


def test_a_pool_shows_what_the_second_engine_computed_and_found(results: Results) -> None:
    pair = SHARED[1]
    second = {"requests": 12, "identical": 11, "tokens": 1000, "computed": 40, "host": 600, "disk": 0, "pool": 360}
    damaged = {"computed": 130, "tokens": 131}
    measured = {"block_size": 128, "layout": "BHLNC", "second": second, "damaged": damaged}
    for check in SHARED_CHECKS:
        assert rows(results)[pair.name][-1] != "passed"
        results.add_check(pair.name, check, outcome="passed", message="", measured=measured)
    found = rows(results)[pair.name]
    assert found[2:] == ["TP 1", "TP 2", "128", "BHLNC", "11/12", "0.040", "0.360", "0.992", "passed"]
    assert f"through a pool 1; of {len(REFUSALS)}" in document(results)


def test_two_connectors_show_what_each_engine_did(results: Results) -> None:
    many = {"seconds": 77, "handed over": 437, "given up while loading": 20, "given up while decoding": 3}
    measured = {
        "many": {**many, "answered": 500},
        "identical": 499,
        "prefill_tokens": {"computed": 1000, "host": 2000, "cached": 3},
        "decode_tokens": {"computed": 500, "received": 7, "cached": 8, "evicted": 9},
    }
    for check in BOTH_CHECKS:
        assert rows(results)[MOVED_AND_KEPT.name][-1] != "passed"
        results.add_check(MOVED_AND_KEPT.name, check, outcome="passed", message="", measured=measured)
    found = rows(results)[MOVED_AND_KEPT.name]
    assert found[4:7] == ["499/500", "23", "77"]
    assert found[7:] == ["1,000/2,000/3", "500/7/8", "0/9", "passed"]


def test_a_refusal_counts_with_its_code_only(results: Results) -> None:
    results.add_refusal(REFUSAL.name, "nothing refused it", "")
    assert rows(results)[REFUSAL.combination][-2:] == [f"`{REFUSAL.reason}`", "**failed**: `nothing refused it`"]
    results.add_refusal(REFUSAL.name, REFUSAL.reason.value, "why")
    assert rows(results)[REFUSAL.combination][-1] == "refused"
    assert "with their code" in document(results)


def test_names_are_unique() -> None:
    for names in (
        [pair.name for pair in ALL],
        [each.name for each in REFUSALS],
        [e.combination for e in REFUSALS],
    ):
        assert len(set(names)) == len(names)


def test_the_usual_tests_run_a_few_pairs_of_every_kind() -> None:
    """The others run in ``make test-matrix``, which takes too long for every change."""
    usual = [pair for pair in PAIRS if not pair.in_matrix]
    assert len(usual) == 11
    assert {pair.model for pair in usual} == {"gqa", "mla", "gemma", "granite"}
    assert {pair.transport for pair in usual} == {"cma", "nixl"}
    shapes = {shape_of(engine) for pair in usual for engine in (pair.prefill, pair.decode)}
    assert shapes >= {"TP 1", "TP 2", "PP 2 x TP 1"}
