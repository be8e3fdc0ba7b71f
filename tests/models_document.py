"""Writes docs/models.md from the tests' results in a folder: ``python -m tests.models_document FOLDER``.

Nothing here knows a result: a use whose test did not run is written as not run.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .host.vllm.families import PROMPTS
from .matrix_document import first_line, runs, table
from .matrix_results import REPOSITORY, Results
from .small_models.weights import CONFIGS, names

DOCUMENT = REPOSITORY / "docs" / "models.md"
USES = ("planner", "identity", "alone", "handed over", "pushed", "kept")
"""The columns of a published model: what its tests try, in this order."""
COLUMNS = ("model", *USES)
WORKS = ("yes", "equal")

TEXT = """# Published models

Written by `make test-models` from what its tests measured; not to be edited. A row is the public `config.json` of a
model (`tests/model_configs`, whose `sources.json` says where each was found). For engines only the numbers are made
small that make a model large (`tests/small_models`): every other field is as published. Weights are random, packed as
the model's quantisation says; engines are vLLM's on a CPU.

* *planner*: `kvferry plan --model` on the whole configuration has the groups, layers, heads, sizes and bytes that
  vLLM's own classes make of it, at TP 1, TP 2 and more ranks than KV heads; or refuses it by name.
* *identity*: two engines of this configuration agree, and refuse each other when they differ in one field that changes
  what a cache means (the number in brackets): base and scaling of positions, windows, epsilons, multipliers.
* *alone*: an engine without a connector runs the small model; or why not.
* *handed over*: {num_prompts} prompts, at once, from an engine of TP 2 to one of TP 1 that asks when prefill has ended.
* *pushed*: the same while prefill computes.
* *kept*: an engine with offload is ended, and the next finds the prompts' blocks on the disk.

The tokens are those of the engine alone. Engines in bfloat16, and of quantised weights, have other tokens at another
TP and in another batch: they are compared at TP 1, with prompts that are sent one by one. Of a model whose quantisation
vLLM's CPU build does not run, the last three columns are of weights that are not quantised.

Of {num_models} models {counts}.

What ran:

{runs}

{models}

Not as published, but written from documented values:

{written}
"""


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a model."""
    outcomes = found.get("outcomes", {})
    return name, *(first_line(outcomes.get(use, "not run")) for use in USES)


def document(results: Results) -> str:
    """Return the text of docs/models.md."""
    found = {name: results.model(name) for name in names()}
    rows = [row(name, each) for name, each in found.items()]
    works = Counter(use for cells in rows for use, cell in zip(USES, cells[1:], strict=True) if cell.startswith(WORKS))
    sources = json.loads((CONFIGS / "sources.json").read_text())
    written = [f"* {name}: {each['found_in']}" for name, each in sources.items() if not each["as_published"]]
    return TEXT.format(
        num_prompts=len(PROMPTS),
        num_models=len(rows),
        counts=", ".join(f"{works[use]} pass *{use}*" for use in USES),
        runs="\n".join(runs(list(found.values()))) or "Nothing has run.",
        models=table(COLUMNS, rows),
        written="\n".join(written),
    )


def main(folder: str) -> None:
    """Write the document from the results in ``folder``."""
    DOCUMENT.write_text(document(Results(REPOSITORY / Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1])
