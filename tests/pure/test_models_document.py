"""The document of published models has exactly the content of the results."""

from pathlib import Path

import pytest

from ..matrix_results import Results
from ..models_document import USES, document
from ..small_models.weights import names

MODEL = "Qwen3-8B"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path)


def cells(results: Results, model: str = MODEL) -> list[str]:
    return next(line for line in document(results).splitlines() if line.startswith(f"| {model} |")).split(" | ")[1:]


def test_what_did_not_run_is_said_not_to_have_run(results: Results) -> None:
    assert "Nothing has run." in document(results)
    assert all(cells(results, name) == [*["not run"] * (len(USES) - 1), "not run |"] for name in names())


def test_outcomes_are_counted_and_shown(results: Results) -> None:
    results.add_model(MODEL, "planner", "equal: TP 1; TP 2")
    results.add_model(MODEL, "sequential", "yes")
    results.add_model(MODEL, "concurrent", "no: unsupported: states\nand a second line")
    results.add_model("gpt2", "sequential", "**failed**")
    assert cells(results) == [
        "equal",
        "not run",
        "not run",
        "not run",
        "yes",
        "no: unsupported: states",
        "not run |",
    ]
    passed = {"planner": 1, "sequential": 1}
    counts = ", ".join(f"{passed.get(use, 0)} pass *{use}*" for use in USES)
    assert f"Of {len(names())} models {counts}." in " ".join(document(results).split())


def test_a_model_that_was_not_published_so_is_named(results: Results) -> None:
    composed = " ".join(document(results).split()).partition("put together: ")[2].partition(". The engines")[0]
    assert " Qwen2.5-7B-Instruct-YaRN," in composed
    assert " DeepSeek-V3," not in composed
