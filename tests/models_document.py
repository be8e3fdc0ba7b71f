"""Writes docs/models.md from the tests' results in a folder: ``python -m tests.models_document FOLDER``.

Nothing here knows a result: a use whose test did not run is written as not run.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .host.vllm.families import PROMPTS
from .matrix_document import first_line, runs, table
from .matrix_results import REPOSITORY, Results
from .small_models.weights import CONFIGS, names

DOCUMENT = REPOSITORY / "docs" / "models.md"
USES = ("planner", "identity", "views", "alone", "sequential", "concurrent", "offload")
"""The columns of a published model: what its tests try, in this order."""
COLUMNS = ("model", *USES)
WORKS = ("yes", "equal")
MOST_CHARACTERS = 51
FAMILY = re.compile(r"(?<=^refused: )family '\w+' (.*?)(, which kvf.*)?$")
"""The family is that of the model in the row."""
VALIDATION = re.compile(r": \d+ validation errors? for .*")
COMPARED = re.compile(r"TP \d+(, made small)?")

TEXT = """# Published models

Written by `make test-models` from what its tests measured; not to be edited. A row is the public `config.json` of a
model (`tests/model_configs`, whose `sources.json` says where each was found), or one that was put together: {composed}.
The engines are vLLM's on a CPU. They run a small model (`tests/small_models`): the numbers that make a model large
are made small, and every other field stays. Its weights are random, in the format of the model's quantisation.

* *planner*: `kvferry plan --model` on the whole configuration has the groups, layers, heads, sizes and bytes that
  vLLM's own classes make of it, at TP 1, TP 2 and more ranks than KV heads, and so has the small model (*equal*, and
  what vLLM refuses); or the planner refuses the configuration (*refused*).
* *identity*: two engines of this configuration agree. They refuse each other when one field differs that changes what a
  cache means: base and scaling of positions, windows, epsilons, multipliers. The number is that of the fields tried.
* *views*: labelled bytes of the small model's caches, as vLLM's own classes specify, group and view them, move from
  TP 2 to TP 1 and from TP 1 to TP 2, and are compared there. This needs no engine and no kernel, so models are tried
  too that no engine on a CPU runs.
* *alone*: an engine without a connector runs the small model; or why not.
* *sequential*: {num_prompts} prompts at once, from a prefill engine of TP 2 to a decode engine of TP 1.
* *concurrent*: the same, sent to both engines at once.
* *offload*: an engine with offload ends, and the next one loads the prompts' blocks from the disk.

In the last three columns *yes* means that the tokens equal those of *alone*. In every column *no* has the reason of
vLLM or kvferry, cut to {most} characters; *failed* is a test that failed; *not run* has no result. An engine in
bfloat16 or with quantised weights computes other tokens at another TP and in another batch, and so does Gemma 4 in
float32: such an engine is compared at TP 1, and gets one prompt after the other. Where vLLM's CPU build does not run a
model's quantisation, the last three columns are of the model without it.

Of {num_models} models {counts}.

What ran:

{runs}

{models}
"""


def in_short(outcome: str) -> str:
    """Return an outcome of the planner without the sizes that every model is compared at.

    >>> in_short("equal: TP 1; TP 2; TP 16; TP 1, made small"), in_short("equal: TP 1; vLLM refuses TP 64: a reason")
    ('equal', 'equal: vLLM refuses TP 64: a reason')
    >>> in_short("refused: family 'llama4' attends by chunks, which kvferry cannot plan. Another remedy.")
    'refused: attends by chunks'
    """
    verdict, _, sizes = outcome.partition(": ")
    if verdict != "equal":
        return FAMILY.sub(r"\1", outcome)
    others = [size for size in sizes.split("; ") if not COMPARED.fullmatch(size)]
    return f"equal: {'; '.join(others)}" if others else "equal"


def cut(reason: str) -> str:
    """Return the beginning of a reason that is long: its first clause, or as many of its words as there is room for.

    >>> cut("yes (2 fields)"), cut("no: unsupported: the model has states; only attention is offloaded")
    ('yes (2)', 'no: unsupported: the model has states')
    >>> cut("no: NotImplementedError: No WNA16 MoE backend supports the deployment configuration")
    'no: NotImplementedError: No WNA16 MoE backend'
    """
    line = VALIDATION.sub("", first_line(reason)).replace(" fields)", ")")
    if len(line) > MOST_CHARACTERS:
        line = line.partition("; ")[0]
    if len(line) > MOST_CHARACTERS:
        line = line[: MOST_CHARACTERS + 1].rpartition(" ")[0] or line[:MOST_CHARACTERS]
    return line.rstrip(",:. ")


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a model."""
    outcomes = dict(found.get("outcomes", {}))
    outcomes["planner"] = in_short(outcomes.get("planner", "not run"))
    return name, *(cut(outcomes.get(use, "not run")) for use in USES)


def document(results: Results) -> str:
    """Return the text of docs/models.md."""
    found = {name: results.model(name) for name in names()}
    rows = [row(name, each) for name, each in found.items()]
    works = Counter(use for cells in rows for use, cell in zip(USES, cells[1:], strict=True) if cell.startswith(WORKS))
    sources = json.loads((CONFIGS / "sources.json").read_text())
    return TEXT.format(
        composed=", ".join(name for name, each in sources.items() if not each["as_published"]),
        num_prompts=len(PROMPTS),
        most=MOST_CHARACTERS,
        num_models=len(rows),
        counts=", ".join(f"{works[use]} pass *{use}*" for use in USES),
        runs="\n".join(runs(list(found.values()))) or "Nothing has run.",
        models=table(COLUMNS, rows),
    )


def main(folder: str) -> None:
    """Write the document from the results in ``folder``."""
    DOCUMENT.write_text(document(Results(REPOSITORY / Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1])
