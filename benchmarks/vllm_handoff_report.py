"""The results of the handoff benchmark: medians, ratios with intervals, targets met and missed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_handoff_engines import KVFERRY, Case, Sample

CONFIDENCE = 0.95
TARGET_BETWEEN_HOSTS = 0.4
"""The largest ratio of the stopwatch's medians between two hosts."""
TARGET_OF_PLAIN_TCP = 0.7
"""The least part of the rate of a plain TCP connection."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median, over pairs of requests, of kvferry's figure divided by the peer's, and its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Link:
    """The network between two hosts: its longest packet in bytes, and the rates of plain TCP over it, in GB/s.

    The rates are those before the engines start and after their end.
    """

    mtu: int
    plain_tcp: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One case of one run with or without huge pages. ``samples[name][i]`` of all contestants ran one after the other.

    ``retaken`` are requests that were measured again, since the machine stood still in their time. ``link`` is the
    network between the engines where they stand on two hosts.
    """

    case: Case
    thp: bool
    samples: dict[str, list[Sample]]
    retaken: list[tuple[str, Sample]] = field(default_factory=list)
    link: Link | None = None

    @property
    def title(self) -> str:
        """The case and the pages that it was measured with."""
        place = "" if self.link is None else f", two hosts, MTU {self.link.mtu}"
        return f"({self.case.name}) {self.case.title}, huge pages {'on' if self.thp else 'off'}{place}"

    @property
    def peers(self) -> list[str]:
        """The contestants beside this kvferry."""
        return [name for name in self.samples if name != KVFERRY.name]

    def target(self, peer: str) -> float | None:
        """Return the largest ratio of the stopwatch's medians that meets the target, None where there is none."""
        if peer != "NixlConnector":
            return None
        if self.link is not None:
            return TARGET_BETWEEN_HOSTS
        return self.case.target_huge_pages if self.thp else self.case.target_small_pages

    def values(self, name: str, figure: str) -> list[float]:
        """Return one figure of one contestant, turn by turn."""
        return [getattr(sample, figure) for sample in self.samples[name]]

    def ratio(self, peer: str, figure: str) -> Ratio:
        """Return the ratio of one figure, kvferry to a peer."""
        return median_ratio(self.values(KVFERRY.name, figure), self.values(peer, figure))

    def medians_ratio(self, peer: str, figure: str) -> float:
        """Return the quotient of the medians, to which the targets apply."""
        return float(np.median(self.values(KVFERRY.name, figure)) / np.median(self.values(peer, figure)))

    def part_of_plain_tcp(self, name: str) -> float | None:
        """Return a contestant's rate by the stopwatch, as a part of plain TCP's; None on one host."""
        if self.link is None:
            return None
        return float(summary(self.samples[name])["stopwatch_gb_per_second"] / np.mean(self.link.plain_tcp))

    def as_json(self) -> dict[str, Any]:
        """Return the results with all samples."""
        return {
            "case": asdict(self.case),
            "thp_mem_alloc_enable": self.thp,
            "link": None if self.link is None else asdict(self.link),
            "parts_of_plain_tcp": {name: self.part_of_plain_tcp(name) for name in self.samples},
            "ratios": {
                peer: {figure: asdict(self.ratio(peer, figure)) for figure in RATIO_FIGURES} for peer in self.peers
            },
            "medians": {name: summary(samples) for name, samples in self.samples.items()},
            "samples": {name: [asdict(sample) for sample in samples] for name, samples in self.samples.items()},
            "retaken": [{"contestant": name, **asdict(sample)} for name, sample in self.retaken],
        }


COLUMNS = ("case", "connector", "MB", "descriptors", "stopwatch", "GB/s", "own metric", "step waits", "client")
RATIO_FIGURES = ("stopwatch_seconds", "transfer_seconds", "client_seconds")


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
        for name in (*RATIO_FIGURES, "start_call_seconds", "num_polls", "num_bytes")
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
    """Print one row per contestant, case and run, one per ratio, and the ratios over all runs with their targets."""
    table = Table(
        title="handoffs on real vLLM engines; medians, times in ms; step waits: the decode step for the connector"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for result in results:
        for name, samples in result.samples.items():
            table.add_row(result.title, name, *cells(summary(samples)))
        for peer in result.peers:
            stopwatch, own, client = (str(result.ratio(peer, figure)) for figure in RATIO_FIGURES)
            table.add_row("", f"ratio to {peer}", "", "", stopwatch, "", own, "", client)
        table.add_section()
    console.print(table)
    for result in {result.title: result for result in results}.values():
        runs = [each for each in results if each.title == result.title]
        for peer in result.peers:
            for figure in ("stopwatch_seconds", "client_seconds"):
                target = result.target(peer) if figure == "stopwatch_seconds" else None
                found = over_runs([run.medians_ratio(peer, figure) for run in runs])
                verdict = "" if target is None else f", target at most {target:g}: {met(found[0], target)}"
                console.print(
                    f"{result.title}: {figure} of {peer}'s: {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}], "
                    f"median and range of {len(runs)} runs{verdict}",
                    highlight=False,
                )
        print_parts_of_plain_tcp(runs, console)
        retaken = sum(len(run.retaken) for run in runs)
        console.print(
            f"{result.title}: {retaken} requests were measured again: the machine stood still", highlight=False
        )


def print_parts_of_plain_tcp(runs: Sequence[Result], console: Console) -> None:
    """Print the contestants' rates beside those of plain TCP, where engines stand on two hosts."""
    links = [run.link for run in runs if run.link is not None]
    if not links:
        return
    rates = ", ".join(f"{rate:.2f}" for link in links for rate in link.plain_tcp)
    console.print(f"{runs[0].title}: plain TCP {rates} GB/s", highlight=False)
    for name in runs[0].samples:
        parts = [part for run in runs if (part := run.part_of_plain_tcp(name)) is not None]
        found = over_runs(parts)
        verdict = ""
        if name == KVFERRY.name:
            is_met = "met" if found[0] >= TARGET_OF_PLAIN_TCP else "MISSED"
            verdict = f", target at least {TARGET_OF_PLAIN_TCP:g}: {is_met}"
        console.print(
            f"{runs[0].title}: {name} moves at {found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}] of plain TCP{verdict}",
            highlight=False,
        )


def over_runs(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the smallest and the largest of the runs' ratios.

    >>> over_runs([0.3, 0.2, 0.4])
    (0.3, 0.2, 0.4)
    """
    return float(np.median(ratios)), min(ratios), max(ratios)


def met(ratio: float, target: float) -> str:
    """Return whether a ratio meets its target."""
    return "met" if ratio <= target else "MISSED"


def cells(figures: dict[str, Any]) -> list[str]:
    """Return one contestant's row."""
    descriptors = figures["descriptors"]
    return [
        f"{figures['num_bytes'] / 1e6:.0f}",
        f"{descriptors['smallest']} / {descriptors['median']:.0f} / {descriptors['largest']}",
        f"{figures['stopwatch_seconds'] * 1e3:.1f}",
        f"{figures['stopwatch_gb_per_second']:.1f}",
        f"{figures['transfer_seconds'] * 1e3:.1f}",
        f"{figures['start_call_seconds'] * 1e3:.2f}",
        f"{figures['client_seconds'] * 1e3:.1f}",
    ]
