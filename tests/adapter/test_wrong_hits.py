"""The benchmark of wrong hits: vLLM's file-system tier stores, looks up and loads, and its finds are judged."""

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("wrong_hits")


@pytest.mark.parametrize(
    ("name", "in_tree", "ours"),
    [
        ("weights of one layer", "WRONG HIT", "miss"),
        ("tokens of a block", "miss", "miss"),
        ("an image where vLLM hashes none", "WRONG HIT", "refused"),
        ("salt / another salt", "miss", "miss"),
        ("nothing", "hit", "hit"),
        ("TP 1 stores, TP 2 loads", "WRONG HIT", "hit"),
    ],
)
def test_what_the_second_engine_finds(name: str, in_tree: str, ours: str, benchmark: Any, tmp_path: Path) -> None:
    assert benchmark.try_row(benchmark.rows()[name], tmp_path) == {"in_tree": in_tree, "kvferry": ours}


def test_every_row_is_of_a_change_that_exists(benchmark: Any) -> None:
    rows = benchmark.rows()
    assert set(benchmark.TAKEN) <= rows.keys()
    assert sum(not row.must_hit for row in rows.values()) >= 24


def test_a_hit_is_right_where_the_bytes_are(benchmark: Any) -> None:
    import numpy as np

    must, must_not = benchmark.Row(benchmark.nothing, must_hit=True), benchmark.Row(benchmark.nothing)
    own, other = np.arange(4, dtype=np.uint8), np.ones(4, np.uint8)
    found = [benchmark._judge(row, own, loaded) for row in (must, must_not) for loaded in (own, other, None)]
    assert found == ["hit", "WRONG HIT", "miss", "WRONG HIT", "WRONG HIT", "miss"]
