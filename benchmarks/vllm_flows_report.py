"""The results of the benchmark of flows: medians with intervals, ratios of the flows, targets met and missed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_flows_engines import CONCURRENT, SEQUENTIAL, Case, Sample

RESAMPLES = 4000
CONFIDENCE = 0.95
TIMES = ("wait_seconds", "first_token_seconds", "prefill_seconds", "handoff_seconds")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval, from resampled rounds."""

    value: float
    low: float
    high: float

    def text(self, factor: float, digits: int) -> str:
        """Return figure and interval as text."""
        value, low, high = (f"{factor * each:.{digits}f}" for each in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


def median(values: Sequence[float]) -> Estimate:
    """Return the median and its bootstrap interval.

    >>> median([1.0, 1.0, 1.0])
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    array = np.asarray(values, float)
    return _estimate(float(np.median(array)), np.median(array[_resampled(len(array))], axis=1))


def medians_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the quotient of two medians. Each resampling takes the same rounds of both.

    >>> medians_ratio([1.0, 2.0, 1.0], [2.0, 4.0, 2.0])
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    rounds = _resampled(len(above))
    found = np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    return _estimate(float(np.median(above) / np.median(below)), found)


def _resampled(num_rounds: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, num_rounds, (RESAMPLES, num_rounds))


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Result:
    """One case: the samples of each flow, round by round."""

    case: Case
    samples: Mapping[str, Sequence[Sample]]

    @property
    def num_rounds(self) -> int:
        """The number of rounds with a sample of each flow."""
        return min(map(len, self.samples.values()))

    def values(self, flow: str, name: str) -> list[float]:
        """Return one figure of one flow, round by round."""
        return [getattr(sample, name) for sample in self.samples[flow][: self.num_rounds]]

    def ratio(self, name: str) -> Estimate:
        """Return the median of the concurrent figure divided by that of the sequential flow."""
        return medians_ratio(self.values(CONCURRENT, name), self.values(SEQUENTIAL, name))

    def ratios_to_others(self, name: str) -> dict[str, Estimate]:
        """Return the ratios of one figure of each flow to the same flow of another checkout, where there is one."""
        return {
            other: medians_ratio(self.values(other.partition(" (")[0], name), self.values(other, name))
            for other in self.samples
            if "(" in other
        }

    def check(self) -> dict[str, Any]:
        """Return the target of the concurrent flow with the measured ratio."""
        ratio = self.ratio(self.case.figure)
        return {"figure": self.case.figure, "ratio": asdict(ratio), "target": self.case.target, **self._met(ratio)}

    def _met(self, ratio: Estimate) -> dict[str, bool]:
        return {"met": ratio.value <= self.case.target}

    def as_json(self) -> dict[str, Any]:
        """Return the results with all samples."""
        return {
            "case": asdict(self.case),
            "rounds": self.num_rounds,
            "check": self.check(),
            "concurrent_to_sequential": {name: asdict(self.ratio(name)) for name in TIMES},
            "to_other_checkouts": {
                name: {other: asdict(ratio) for other, ratio in self.ratios_to_others(name).items()} for name in TIMES
            },
            "flows": {flow: self._flow(flow) for flow in self.samples},
        }

    def _flow(self, flow: str) -> dict[str, Any]:
        return {
            "medians": {name: asdict(median(self.values(flow, name))) for name in TIMES},
            "decode_cores": float(np.median(self.values(flow, "decode_cores"))),
            "same_first_tokens": sum(sample.same_token for sample in self.samples[flow]),
            "samples": [asdict(sample) for sample in self.samples[flow]],
        }


COUNTS = ("MB", "desc.", "batches")
COLUMNS = ("case", "by", *COUNTS, "wait", "ratio", "first token", "ratio", "handoff", "ratio", "cores")


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print a row per case and flow, and whether the targets are met."""
    table = Table(title="flows of routers on real vLLM engines; medians with 95 % intervals, times in ms")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "by") else "right")
    for result in results:
        title = f"{result.case.tokens} tokens, {result.case.title}, {result.num_rounds} rounds"
        for flow in result.samples:
            table.add_row(title if flow == SEQUENTIAL else "", *_cells(result, flow))
        table.add_section()
    console.print(table)
    for result in results:
        check = result.check()
        console.print(
            f"{result.case.name}: {check['figure']} of the concurrent flow {check['ratio']['value']:.3f} "
            f"[{check['ratio']['low']:.3f}, {check['ratio']['high']:.3f}] of the sequential one's, target at most "
            f"{check['target']:g}: {'met' if check['met'] else 'MISSED'}",
            highlight=False,
        )
        for name in TIMES:
            for other, ratio in result.ratios_to_others(name).items():
                console.print(f"{result.case.name}: {name} divided by {other}'s: {ratio.text(1, 2)}", highlight=False)


def _cells(result: Result, flow: str) -> list[str]:
    counts = [result.values(flow, name) for name in ("num_bytes", "num_descriptors", "num_batches", "decode_cores")]
    num_bytes, num_descriptors, num_batches, cores = (float(np.median(each)) for each in counts)
    shown = ("wait_seconds", 1), ("first_token_seconds", 0), ("handoff_seconds", 1)
    is_concurrent = flow.startswith(CONCURRENT)
    return [
        flow,
        f"{num_bytes / 1e6:.0f}",
        f"{num_descriptors:.0f}",
        f"{num_batches:.0f}" if is_concurrent else "",
        *(text for name, digits in shown for text in _time_and_ratio(result, flow, name, digits)),
        f"{cores:.2f}",
    ]


def _time_and_ratio(result: Result, flow: str, name: str, digits: int) -> tuple[str, str]:
    ratio = result.ratio(name).text(1, 2) if flow == CONCURRENT else ""
    return median(result.values(flow, name)).text(1e3, digits), ratio
