"""The report of the offload demo: one line per pass, and problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MOST_COMPUTED = 0.1
"""The part of the prompt tokens that a pass may compute whose blocks are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLine:
    """All prompts through one engine once; tokens as the engine counts them.

    ``computed``, ``own_cache`` and ``loaded`` add up to ``prompt_tokens``; ``from_host`` and ``from_disk`` are the
    loaded tokens by tier.
    """

    name: str
    prompt_tokens: int
    computed: int
    own_cache: int
    loaded: int
    from_host: int
    from_disk: int
    seconds: float
    requests: int
    identical: int
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """The whole run. ``lines``: without offload, first pass, second pass, pass after the restart."""

    lines: tuple[PassLine, ...]
    block_size: int
    blocks_on_disk: int
    cache_usage: float
    processes_left: int
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "mode": "offload",
            "block_size": self.block_size,
            "blocks_on_disk": self.blocks_on_disk,
            "passes": [asdict(line) for line in self.lines],
            "leaks": {"cache_usage": self.cache_usage, "processes_left": self.processes_left},
            "problems": list(self.problems),
        }


def find_offload_problems(report: OffloadReport) -> list[str]:
    """Return a sentence about each problem of a run."""
    problems = [f"{line.name}: {error}" for line in report.lines for error in line.errors]
    for line in report.lines:
        if line.identical != line.requests:
            differing = line.requests - line.identical
            problems.append(
                f"{line.name}: {differing} of {line.requests} answers differ from the engine without offload"
            )
        if line.computed + line.own_cache + line.loaded != line.prompt_tokens:
            problems.append(f"{line.name}: the engine's counts do not add up to {line.prompt_tokens} prompt tokens")
    _, _, second, restarted = report.lines
    for line in (second, restarted):
        if line.computed >= MOST_COMPUTED * line.prompt_tokens:
            problems.append(f"{line.name}: {line.computed} of {line.prompt_tokens} prompt tokens were computed")
    if not restarted.from_disk:
        problems.append(f"{restarted.name}: nothing came from the disk tier")
    if report.cache_usage:
        problems.append(f"cache blocks are still in use: {report.cache_usage:.3f} of the engine's cache")
    if report.processes_left:
        problems.append(f"{report.processes_left} processes are left")
    return problems


def print_offload_report(report: OffloadReport, console: Console) -> None:
    """Print a line per pass and the problems."""
    title = f"Prompt tokens by origin, as vLLM counts them; blocks of {report.block_size} tokens"
    table = Table(title=title)
    table.add_column("pass")
    for column in ("prompt tokens", "computed", "own cache", "host memory", "disk", "seconds", "identical"):
        table.add_column(column, justify="right")
    for line in report.lines:
        table.add_row(line.name, *_cells(line))
    console.print(table)
    console.print(f"{report.blocks_on_disk} blocks were on disk when the engine was killed.", highlight=False)
    for problem in report.problems:
        console.print(f"[red]problem:[/red] {escape(problem)}")


def _cells(line: PassLine) -> Sequence[str]:
    counts = (line.prompt_tokens, line.computed, line.own_cache, line.from_host, line.from_disk)
    return (*(f"{count:,}" for count in counts), f"{line.seconds:.1f}", f"{line.identical} of {line.requests}")
