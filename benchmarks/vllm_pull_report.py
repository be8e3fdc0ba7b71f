"""The results of the pull benchmark: medians, ratios with intervals, targets met and missed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_pull_engines import Case, Sample

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median, over pairs of requests, of kvferry's figure divided by the in-tree figure, and its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Result:
    """One case with or without huge pages; ``kvferry[i]`` and ``in_tree[i]`` ran one after the other."""

    case: Case
    thp: bool
    kvferry: list[Sample]
    in_tree: list[Sample]

    @property
    def target(self) -> float:
        """The largest ratio of the stopwatch's medians that meets the target."""
        return self.case.target_huge_pages if self.thp else self.case.target_small_pages

    def ratio(self, field: str) -> Ratio:
        """Return the ratio of one figure."""
        return median_ratio([getattr(s, field) for s in self.kvferry], [getattr(s, field) for s in self.in_tree])

    def medians_ratio(self, field: str) -> float:
        """Return the quotient of the medians, to which the targets apply."""
        ours, theirs = (np.median([getattr(s, field) for s in samples]) for samples in (self.kvferry, self.in_tree))
        return float(ours / theirs)

    def checks(self) -> dict[str, dict[str, float | bool]]:
        """Return each target with the measured ratio."""
        found = {
            "stopwatch": (self.medians_ratio("stopwatch_seconds"), self.target),
            "client": (self.medians_ratio("client_seconds"), 1.0),
        }
        return {
            name: {"ratio": ratio, "target": target, "met": ratio <= target} for name, (ratio, target) in found.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return the results with all samples."""
        return {
            "case": asdict(self.case),
            "thp_mem_alloc_enable": self.thp,
            "ratios": {name: asdict(self.ratio(name)) for name in RATIO_FIELDS},
            "checks": self.checks(),
            "kvferry": summary(self.kvferry),
            "in_tree": summary(self.in_tree),
            "samples": {
                "kvferry": [asdict(sample) for sample in self.kvferry],
                "in_tree": [asdict(sample) for sample in self.in_tree],
            },
        }


COLUMNS = ("case", "THP", "connector", "MB", "descriptors", "stopwatch", "GB/s", "own metric", "client", "target")
RATIO_FIELDS = ("stopwatch_seconds", "transfer_seconds", "client_seconds")


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median of the pairs' quotients, and two of their order statistics as its interval.

    The interval is that of the sign test: it contains the true median with at least 95 % for any distribution.

    >>> str(median_ratio([1, 2, 3, 4, 5, 6, 7, 8, 9], [10] * 9))
    '0.50 [0.20, 0.80]'
    """
    quotients = np.sort(np.asarray(numerators, float) / np.asarray(denominators, float))
    rank = interval_rank(len(quotients))
    return Ratio(float(np.median(quotients)), float(quotients[rank]), float(quotients[-1 - rank]))


def interval_rank(num_samples: int) -> int:
    """Return the number of samples to omit at each end so that the others enclose the median with 95 %.

    >>> interval_rank(9), interval_rank(15)
    (1, 3)
    """
    rank, tail = 0, 1
    while 2 * (tail + comb(num_samples, rank + 1)) <= (1 - CONFIDENCE) * 2**num_samples:
        tail += comb(num_samples, rank + 1)
        rank += 1
    return rank


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the medians, and for descriptors also the smallest and the largest number."""
    descriptors = [sample.num_descriptors for sample in samples]
    median = {
        name: float(np.median([getattr(sample, name) for sample in samples]))
        for name in (*RATIO_FIELDS, "start_call_seconds", "num_polls", "num_bytes")
    }
    return {
        **median,
        "descriptors": {
            "smallest": min(descriptors),
            "median": float(np.median(descriptors)),
            "largest": max(descriptors),
        },
        "stopwatch_gb_per_second": median["num_bytes"] / median["stopwatch_seconds"] / 1e9,
        "transfer_gb_per_second": median["num_bytes"] / max(median["transfer_seconds"], 1e-9) / 1e9,
        "same_first_tokens": sum(sample.same_token for sample in samples),
        "samples": len(samples),
    }


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print one row per connector and case, one per ratio, and the result of each target."""
    table = Table(title="pull on real vLLM engines; medians, times in ms")
    for column in (
        "case",
        "THP",
        "connector",
        "MB",
        "descriptors",
        "stopwatch",
        "GB/s",
        "own metric",
        "client",
        "target",
    ):
        table.add_column(column, justify="left" if column in ("case", "connector") else "right")
    for result in results:
        thp = "on" if result.thp else "off"
        for name, samples in (("kvferry", result.kvferry), ("NixlConnector", result.in_tree)):
            table.add_row(f"({result.case.name}) {result.case.title}", thp, name, *cells(summary(samples)), "")
        ratios = [str(result.ratio(field)) for field in RATIO_FIELDS]
        met = "met" if all(check["met"] for check in result.checks().values()) else "MISSED"
        table.add_row(
            "", "", "ratio", "", "", ratios[0], "", ratios[1], ratios[2], f"{met}: {result.target:g}", end_section=True
        )
    console.print(table)
    for result in results:
        for name, check in result.checks().items():
            verdict = "met" if check["met"] else "MISSED"
            thp = "on" if result.thp else "off"
            console.print(
                f"({result.case.name}) THP {thp}: {name} medians' ratio {check['ratio']:.3f}, "
                f"target at most {check['target']:g}: {verdict}",
                highlight=False,
            )


def cells(figures: dict[str, Any]) -> list[str]:
    """Return one connector's row."""
    descriptors = figures["descriptors"]
    return [
        f"{figures['num_bytes'] / 1e6:.0f}",
        f"{descriptors['smallest']} / {descriptors['median']:.0f} / {descriptors['largest']}",
        f"{figures['stopwatch_seconds'] * 1e3:.1f}",
        f"{figures['stopwatch_gb_per_second']:.1f}",
        f"{figures['transfer_seconds'] * 1e3:.1f}",
        f"{figures['client_seconds'] * 1e3:.1f}",
    ]
