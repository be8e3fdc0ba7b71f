"""The benchmark of running requests beside arriving prompts, on engines that only answer."""

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.cli.bench_connectors import NIXL, Contestant
from kvferry.cli.bench_report import KVFERRY
from kvferry.errors import Reason, TransportError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNNING, STEP, STALL = 4, 0.01, 0.1


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vllm_decode")


def engines(name: str, stall: float = STEP, refused: str = "", computes: int = 0) -> Contestant:
    """Return engines whose running requests end with the next prompt that comes when all run; one that is handed over
    makes one step of each take ``stall`` seconds. The decode engine ``computes`` so many tokens of each of these.
    """
    came = threading.Condition()
    arrived: list[tuple[str, int]] = []
    running: list[int] = []
    ended_by: dict[int, str] = {}

    class Engines(Contestant):
        seen = arrived

        def complete(self, server: Any, prompt: Any, max_tokens: int, seconds: float) -> dict[str, Any]:
            if server == "decode":
                assert (len(prompt), max_tokens) == (64, 2)
                return {}
            return self.arrive("computed", prompt)

        def counted(self) -> dict[str, float]:
            return {}

        def moved_since(self, before: Any, num_loads: int) -> Any:
            return SimpleNamespace(computed_tokens=64 * RUNNING + computes * num_loads)

        def request(self, prompt: Any, seconds: float) -> Any:
            answer = self.arrive("handed over", prompt)
            if refused:
                raise TransportError(Reason.TRANSFER_FAILED, refused)
            return answer

        def arrive(self, how: str, prompt: Any) -> dict[str, Any]:
            with came:
                arrived.append((how, len(prompt)))
                if len(running) % RUNNING == 0:
                    ended_by.setdefault(len(running) // RUNNING, how)
                came.notify_all()
            return {}

        def load(self, prompt: Any, params: Any, request_id: str, seconds: float) -> list[tuple[float, int]]:
            with came:
                phase = len(running) // RUNNING + 1
                running.append(phase)
                assert came.wait_for(lambda: phase in ended_by, 20)
                slow = stall if ended_by[phase] == "handed over" else STEP
            gaps = [0.0, *[STEP] * (self.output_tokens - 2), slow]
            return [(when, 0) for when in np.cumsum(gaps).tolist()]

    return Engines(name, "decode", "prefill", 1000, 7)  # type: ignore[arg-type]


def test_steps_that_wait_for_a_transfer_are_seen_and_others_are_not_blamed(bench: Any) -> None:
    contestants = [engines(KVFERRY), engines(NIXL, STALL)]
    found = bench.compare(contestants, bench.Load(running=RUNNING, answer_tokens=20, tokens=300, per_second=100.0), 1)
    assert found[KVFERRY].verdict == "1.00 (met)"
    assert found[NIXL].verdict == "10.00 (not met)"
    assert f"{KVFERRY} 1.00 (met), {NIXL} 10.00 (not met)" in bench.summary(found)
    for contestant in contestants:
        gaps = found[contestant.name]
        for phase, how in ((bench.COMPUTED, "computed"), (bench.HANDED_OVER, "handed over")):
            assert len(gaps.seconds[phase]) == RUNNING * 19
            # Each phase has run twice, the first time uncounted.
            assert 0 < gaps.arrived[phase] < contestant.seen.count((how, 300))  # type: ignore[attr-defined]
        assert gaps.to_json()["met"] == (contestant.name == KVFERRY)


def test_only_gaps_count_in_which_all_requests_run(bench: Any) -> None:
    early, late = np.array([0.0, 9.0, 10.0, 12.0]), np.array([5.0, 6.0, 13.0, 99.0])
    # From 5 to 12: of the first 9 to 10 and 10 to 12, of the second 5 to 6.
    assert bench.gaps_between([early, late]).tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(TransportError, match="--answer-tokens"):
        bench.gaps_between([early, early + 20.0])


def test_the_ratio_is_that_of_the_99th_percentiles(bench: Any) -> None:
    gaps = bench.Gaps({bench.COMPUTED: [0.01] * 99 + [0.02], bench.HANDED_OVER: [0.01] * 97 + [0.1] * 3})
    assert gaps.ratio == pytest.approx(0.1 / 0.0101)
    assert not gaps.to_json()["met"]


def test_a_connector_that_fails_has_its_reason_and_the_other_its_figures(bench: Any) -> None:
    contestants = [engines(KVFERRY), engines(NIXL, refused="the engine has ended.")]
    found = bench.compare(contestants, bench.Load(RUNNING, 20, 80, 100.0), 1)
    assert not found[KVFERRY].problem
    assert found[NIXL].to_json() == {"problem": found[NIXL].problem}
    assert "handed over: the engine has ended." in bench.summary(found)


def test_prompts_that_the_decode_engine_computed_are_not_taken_for_moved(bench: Any) -> None:
    found = bench.compare(
        [engines(KVFERRY, computes=1), engines(NIXL, computes=80)], bench.Load(RUNNING, 20, 80, 100.0), 1
    )
    assert not found[KVFERRY].problem
    assert "were computed, not moved" in found[NIXL].problem
