"""``kvferry doctor --kernels``: the KV cache layouts that vLLM's kernels read and write correctly on this machine."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import open_console, progress
from kvferry.harness.child_process import error_of
from kvferry.integrations.vllm.kernels.check import Outcome, Verdict
from kvferry.layout.named_layouts import NamedLayout

MEASURING_SECONDS = 1800.0
# The layouts that the connector requests by default; it requests none for MLA on a CPU.
REQUESTED_BY_DEFAULT = (NamedLayout.BHLNC, NamedLayout.BLHNC)
MLA_ON_A_CPU = ("CPU_MLA", "AMX_MLA")


@dataclass(frozen=True, slots=True)
class Measured:
    """The verdicts, and the error of the kernels' process where it failed."""

    verdicts: tuple[Verdict, ...]
    error: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether all layouts work that the connector requests by default."""
        return not self.error and not any(is_requested(verdict) and verdict.fails for verdict in self.verdicts)


def is_requested(verdict: Verdict) -> bool:
    """Return whether the connector requests the verdict's layout by default."""
    return verdict.layout in REQUESTED_BY_DEFAULT and verdict.case.backend not in MLA_ON_A_CPU


def report_kernels(model: str | None, json_output: bool) -> int:
    """Measure, print, and return the exit code."""
    with progress("checking vLLM's kernels on every layout, which takes minutes"):
        measured = measure_in_child(model)
    if json_output:
        print(json.dumps(_as_json(measured), indent=2))
    else:
        _print_table(measured)
    return 0 if measured.is_healthy else 1


def measure_in_child(model: str | None) -> Measured:
    """Run the kernels in a child process, on one core, so that a crash of a kernel does not end the report."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        path = Path(folder, "verdicts")
        path.touch()
        command = [sys.executable, "-m", "kvferry.integrations.vllm.kernels.samples", str(path)]
        environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        error = error_of(
            *command, *([model] if model else []), environment=environment, timeout_seconds=MEASURING_SECONDS
        )
        lines = path.read_bytes().splitlines()
    return Measured(tuple(msgspec.json.decode(line, type=Verdict) for line in lines), error or "")


def _as_json(measured: Measured) -> dict[str, object]:
    rows = [{**msgspec.to_builtins(verdict), "requested": is_requested(verdict)} for verdict in measured.verdicts]
    return {"healthy": measured.is_healthy, "error": measured.error, "verdicts": rows}


def _print_table(measured: Measured) -> None:
    console = open_console()
    console.print(_table(measured.verdicts))
    for verdicts in _by_difference(measured.verdicts).values():
        layouts = ", ".join(dict.fromkeys(verdict.layout for verdict in verdicts))
        console.print(f"{verdicts[0].case.backend} on {layouts}: {verdicts[0].found}", highlight=False, markup=False)
    if measured.error:
        console.print(f"[red]The kernels' process failed after the last row: {escape(measured.error)}[/]")
    if not measured.is_healthy:
        console.print("A layout marked * fails: set 'layout' to another one.")


def _by_difference(verdicts: Sequence[Verdict]) -> dict[tuple[str, str], list[Verdict]]:
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.found:
            groups.setdefault((verdict.case.backend, verdict.found), []).append(verdict)
    return groups


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("back end", "dtype", "head", "block", "layout", "verdict", "difference")
    for verdict in verdicts:
        case = verdict.case
        layout = f"{verdict.layout} *" if is_requested(verdict) else str(verdict.layout)
        colour = {Outcome.PASSES: "green", Outcome.NOT_CHECKED: "yellow"}.get(
            verdict.outcome, "red" if is_requested(verdict) else "yellow"
        )
        sizes = (str(case.head_size), str(case.block_size))
        outcome = f"[{colour}]{verdict.outcome}[/]"
        table.add_row(case.backend, case.dtype, *sizes, layout, outcome, f"{verdict.difference:.3g}")
    table.caption = "* requested by default. Differences are from the results on the per-layer layout LBHNC."
    return table
