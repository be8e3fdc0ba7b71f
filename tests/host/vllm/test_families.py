"""Small models of published configurations on engines: both flows of routers, and offload; tokens as alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ...matrix_results import Results, results_folder
from ...small_models.trial import NO_ANSWER
from ...small_models.weights import names
from .families import (
    MAX_TOKENS,
    STEP,
    Family,
    Place,
    ask,
    hand_over,
    hand_over_at_once,
    has_states,
    runs_unquantised,
    tried,
)
from .forked_engines import EngineFailed, ForkedEngine, prepare, running

pytestmark = pytest.mark.vllm
IN_EVERY_RUN = ("Falcon-H1-0.5B-Instruct",)
"""Its class changes its configuration while it is built, as DeepSeek's does, whose engines take two minutes."""
FLOWS = ("sequential", "concurrent")
NO_STATES = "unsupported: the model has states; only attention is offloaded"
CHUNKS = "unsupported: is a ChunkedLocalAttentionSpec"
SHORT_CONVOLUTIONS = "unsupported: holds states of SHORT_CONV"
REFUSED: dict[str, dict[str, str]] = {
    **{name: {"offload": NO_STATES} for name in names() if has_states(name)},
    **{
        name: {**dict.fromkeys(FLOWS, SHORT_CONVOLUTIONS), "offload": NO_STATES}
        for name in ("LFM2-1.2B", "LFM2-8B-A1B")
    },
    **{
        name: dict.fromkeys((*FLOWS, "offload"), CHUNKS)
        for name in ("Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")
    },
}
"""For each model the uses that kvferry refuses, and the reason: a code, and words of the message."""
MOST_WORDS = 60
VARIABLES = {
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "KVFERRY_SLEEPING_WORKERS": "1",
}


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        prepare()
        yield


class Uses:
    """The uses of one model: each works, or is refused with the words that are written above."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._refused = REFUSED.get(name, {}) | ({"alone": why} if (why := tried(name)[1]) else {})
        folder = results_folder()
        self._results = None if folder is None else Results(folder)

    def is_too_slow(self) -> bool:
        """Return whether an engine alone is not to be waited for, and note why."""
        if is_slow := (why := tried(self._name)[1]).startswith(NO_ANSWER):
            self._note("alone", f"not run: {why}")
        return is_slow

    @contextmanager
    def of(self, use: str, *besides: str) -> Iterator[None]:
        """Note how the block ends. A use that must be refused, and is not, fails like one that does not work."""
        self._note(use, "**failed**")
        words = self._refused.get(use)
        try:
            yield
        except (EngineFailed, NotImplementedError) as error:
            told = f"{error}\n{getattr(error, 'log', '')}"
            if words is None or words.partition(": ")[2][:MOST_WORDS] not in told:
                raise
            self._note(use, f"no: {words}")
            return
        assert words is None, f"{use} is no longer refused"
        self._note(use, ", ".join(["yes", *besides]))

    def _note(self, use: str, outcome: str) -> None:
        if self._results is not None:
            self._results.add_model(self._name, use, outcome)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.matrix) for name in names()]
)
def test_a_published_model(name: str, tmp_path: Path, engine_pool: Any) -> None:
    uses, place, expected = Uses(name), Place(tmp_path), list[list[int]]()
    if not uses.is_too_slow():
        with uses.of("alone"):
            family = Family.of(name, engine_pool.models)
            family, expected = alone(family, place)
    besides = []
    if not expected:
        if not runs_unquantised(name):
            return
        family = Family.of(name, engine_pool.models, is_quantised=False)
        (family, expected), besides = alone(family, place), ["not quantised"]
    by = ["TP 1"] * (family.tp == 1) + besides
    for flow, send in zip(FLOWS, (hand_over, hand_over_at_once), strict=True):
        with uses.of(flow, *by):
            prefill = place.moving(family, f"prefill-{flow}", family.tp)
            decode = place.moving(family, f"decode-{flow}")
            with running([prefill, decode]):
                assert send(prefill, decode, family.waves) == expected
            check_loads(place.loads(f"decode-{flow}"), len(expected))
    with uses.of("offload", *besides):
        with running([keeps := place.keeping(family, "keeps")]):
            assert computed(family, keeps)[1] == expected
        with running([keeps := place.keeping(family, "keeps-again")]):
            assert [answer.tokens for answer in ask(keeps, family.waves)] == expected
        assert keeps.num_loaded > 0


def alone(family: Family, place: Place) -> tuple[Family, list[list[int]]]:
    """Return :func:`computed` of an engine without a connector."""
    with running([engine := place.engine(family, "alone")]):
        family, found = computed(family, engine)
    assert len(set(map(tuple, found))) == len(found), "the tokens do not depend on the prompt"
    return family, found


def computed(family: Family, engine: ForkedEngine) -> tuple[Family, list[list[int]]]:
    """Return the tokens of an engine that loads nothing, and the family with the prompts that it was asked.

    A decode engine computes the last token of a rounded prompt in a step of its own. An engine that computes prompts
    whole does so only with a token that it has generated: such a prompt ends with one.
    """
    if not family.computes_prompts_whole:
        return family, [answer.tokens for answer in ask(engine, family.waves)]
    begun = [prompt[:STEP] for prompt in family.rounded_prompts]
    found = [answer.tokens for answer in ask(engine, [[prompt] for prompt in begun], MAX_TOKENS + 1)]
    prompts = [[*prompt, tokens[0]] for prompt, tokens in zip(begun, found, strict=True)]
    return replace(family, rounded_prompts=prompts), [tokens[1:] for tokens in found]


def check_loads(loads: list[dict[str, Any]], count: int) -> None:
    """Check that each prompt was loaded, and not computed."""
    assert [load["error"] for load in loads] == [None] * count
    assert all(load["bytes"] for load in loads)
