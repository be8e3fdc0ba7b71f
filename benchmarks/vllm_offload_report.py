"""The results of the offload benchmark: medians, ratios with intervals, targets met and missed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_handoff_report import Ratio, median_ratio, over_runs
from vllm_offload_engines import Refused, Sample


@dataclass(slots=True)
class Comparison:
    """Two figures of one case of one run, sampled in turns. ``target`` is the largest ratio that is wanted, if any.

    ``retaken`` counts measurements that were taken again, since the machine stood still in their time.
    """

    case: str
    title: str
    numerator: str
    denominator: str
    target: float | None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    retaken: int = 0

    @property
    def ratio(self) -> Ratio:
        """The median of the turns' quotients and its interval."""
        return median_ratio(self.seconds(self.numerator), self.seconds(self.denominator))

    @property
    def medians_ratio(self) -> float:
        """The quotient of the medians, to which the target applies."""
        return float(np.median(self.seconds(self.numerator)) / np.median(self.seconds(self.denominator)))

    def seconds(self, name: str) -> list[float]:
        """Return one contestant's seconds, turn by turn."""
        return [sample.seconds for sample in self.samples[name]]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison with all samples."""
        return {
            "case": self.case,
            "title": self.title,
            "ratio": {"of": self.numerator, "to": self.denominator, **asdict(self.ratio), "target": self.target},
            "samples": {name: [asdict(sample) for sample in taken] for name, taken in self.samples.items()},
            "retaken": self.retaken,
        }


def print_results(comparisons: Sequence[Comparison], refused: Sequence[Refused], console: Console) -> None:
    """Print a row per comparison and run, then each ratio over all runs with its target, then who was refused."""
    table = Table(title="offload on real vLLM engines; medians in ms, tokens as the engine counts them")
    for column in ("case", "what", "ms", "computed", "loaded", "compared with", "ms", "ratio"):
        table.add_column(column, justify="left" if column in ("case", "what", "compared with") else "right")
    for each in comparisons:
        above, below = each.samples[each.numerator], each.samples[each.denominator]
        table.add_row(
            each.title,
            each.numerator,
            *_cells(above),
            each.denominator,
            _cells(below)[0],
            str(each.ratio),
        )
    console.print(table)
    for title in dict.fromkeys((each.title, each.numerator, each.denominator) for each in comparisons):
        runs = [each for each in comparisons if (each.title, each.numerator, each.denominator) == title]
        console.print(verdict(runs), highlight=False)
    for contestant in {each.name: each for each in refused}.values():
        console.print(f"{contestant.name} was not measured, its engine ended: {contestant.message}", highlight=False)


def verdict(runs: Sequence[Comparison]) -> str:
    """Return a sentence about one comparison over all runs.

    >>> taken = {"a": [Sample(1.0, 0, 0)], "b": [Sample(10.0, 0, 0)]}
    >>> verdict([Comparison("c", "first token", "a", "b", 0.1, taken)])
    'first token: a to b: 0.100 [0.100, 0.100], median and range of 1 runs, target at most 0.1: met; 0 taken again'
    """
    first = runs[0]
    median, low, high = over_runs([run.medians_ratio for run in runs])
    wanted = ""
    if first.target is not None:
        wanted = f", target at most {first.target:g}: {'met' if median <= first.target else 'MISSED'}"
    found = f"{first.title}: {first.numerator} to {first.denominator}: {median:.3f} [{low:.3f}, {high:.3f}]"
    retaken = sum(run.retaken for run in runs)
    return f"{found}, median and range of {len(runs)} runs{wanted}; {retaken} taken again"


def _cells(samples: Sequence[Sample]) -> tuple[str, str, str]:
    median = 1e3 * float(np.median([sample.seconds for sample in samples]))
    counts = (int(np.median([getattr(sample, name) for sample in samples])) for name in ("computed", "loaded"))
    return (f"{median:.1f}", *(f"{count:,}" for count in counts))  # type: ignore[return-value]
