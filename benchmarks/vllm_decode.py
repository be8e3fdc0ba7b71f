"""Measures how prompts that arrive disturb running requests: the time between two tokens of a decode engine.

    python benchmarks/vllm_decode.py --json decode.json

Each connector has a prefill and a decode engine. ``--running`` requests run on the decode engine while prompts of
``--tokens`` tokens come, ``--per-second`` of them: first each prompt is only computed, by the prefill engine, then each
is also handed over. Both phases take turns. Times are those of the client, the same one in both phases, from the moment
at which all running requests have a token to the moment at which the first of them has all of its own.

The aim: the 99th percentile with transfers is at most 1.05 of that without. Exit code 1: a connector has no figure.
"""

import json
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.table import Table

from kvferry.cli.bench import BenchSettings, share_of_memory, start_contestants
from kvferry.cli.bench_connectors import NIXL, Contestant
from kvferry.cli.bench_report import KVFERRY
from kvferry.cli.console import open_console
from kvferry.cli.demo import folder_for, interrupted_by_signals, running_servers
from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.harness.launch import visible_devices
from kvferry.harness.tiny_models import make_tiny_model

AIM = 1.05
RUNNING_TOKENS = 64
"""Tokens of the prompt of a running request."""
ARRIVED_TOKENS = 2
"""Tokens of the answer to a prompt that arrives."""
REQUEST_SECONDS = 120.0
COMPUTED, HANDED_OVER = PHASES = ("only computed", "handed over")


@dataclass(frozen=True, slots=True)
class Load:
    """What runs and what arrives: ``running`` requests of ``answer_tokens`` tokens, and prompts of ``tokens`` tokens,
    ``per_second`` of them.
    """

    running: int
    answer_tokens: int
    tokens: int
    per_second: float


@dataclass(slots=True)
class Gaps:
    """Seconds between two tokens of one running request, of both phases of one connector, and how many prompts came."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    arrived: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    problem: str = ""

    def percentile(self, phase: str, percent: float) -> float:
        """Return a percentile of the seconds of one phase."""
        return float(np.percentile(self.seconds[phase], percent))

    @property
    def ratio(self) -> float:
        """The 99th percentile with transfers, as a multiple of that without."""
        return self.percentile(HANDED_OVER, 99) / self.percentile(COMPUTED, 99)

    @property
    def verdict(self) -> str:
        """The ratio, and whether it is as small as wanted."""
        return f"{self.ratio:.2f} ({'met' if self.ratio <= AIM else 'not met'})"

    def to_json(self) -> dict[str, Any]:
        """Return the figures; the problem alone where there is one."""
        if self.problem:
            return {"problem": self.problem}
        quantiles = {
            phase: {str(percent): self.percentile(phase, percent) for percent in (50, 99, 100)} for phase in PHASES
        }
        return {"seconds": quantiles, "arrived": self.arrived, "ratio": self.ratio, "met": self.ratio <= AIM}


def measure(contestant: Contestant, load: Load, phase: str, gaps: Gaps) -> None:
    """Run one phase and add its gaps. Raises :class:`TransportError` where a request fails."""
    assert contestant.prefill is not None
    running = replace(contestant, output_tokens=load.answer_tokens)
    arriving = replace(contestant, output_tokens=ARRIVED_TOKENS)
    draw = contestant.generator.integers
    before, num_arrived = contestant.counted(), 0
    prompts = draw(0, contestant.vocabulary_size, (load.running, RUNNING_TOKENS)).tolist()
    with ThreadPoolExecutor(load.running) as pool, ThreadPoolExecutor(load.running) as arrivals:
        answers = [pool.submit(running.load, prompt, None, str(uuid.uuid4()), REQUEST_SECONDS) for prompt in prompts]
        sent: list[Future[Any]] = []
        next_at = time.perf_counter()
        while not (sent and any(answer.done() for answer in answers)):
            prompt = draw(0, contestant.vocabulary_size, load.tokens).tolist()
            if phase == COMPUTED:
                sent.append(arrivals.submit(arriving.complete, contestant.prefill, prompt, 1, REQUEST_SECONDS))
                # The decode engine answers as many requests as with transfers.
                few = prompt[:RUNNING_TOKENS]
                sent.append(arrivals.submit(arriving.complete, contestant.decode, few, ARRIVED_TOKENS, REQUEST_SECONDS))
            else:
                sent.append(arrivals.submit(arriving.request, prompt, REQUEST_SECONDS))
            num_arrived += 1
            next_at += 1 / load.per_second
            time.sleep(max(0.0, next_at - time.perf_counter()))
        times = [np.array([when for when, _ in answer.result()]) for answer in answers]
        for arrived in sent:
            arrived.result()
    if phase == HANDED_OVER:
        computed = contestant.moved_since(before, num_arrived).computed_tokens - load.running * RUNNING_TOKENS
        if computed >= num_arrived * load.tokens / 2:
            problem = f"{contestant.name}: {computed:g} tokens of the {num_arrived} prompts were computed, not moved."
            raise TransportError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.")
    gaps.seconds[phase] += gaps_between(times).tolist()
    gaps.arrived[phase] += num_arrived


def gaps_between(times: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the seconds between tokens of each request that lie where all requests run.

    >>> gaps_between([np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.5, 1.5, 3.5, 4.5])]).tolist()
    [1.0, 1.0, 1.0]

    Raises :class:`TransportError` where the first request ends before the last has begun.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    found = [np.diff(each)[(each[:-1] >= begin) & (each[1:] <= end)] for each in times]
    gaps: npt.NDArray[np.float64] = np.concatenate(found)
    if not len(gaps):
        problem = "a running request had all of its tokens before another had its first."
        raise TransportError(Reason.INVALID_REQUEST, problem, "Use a larger --answer-tokens.")
    return gaps


def compare(contestants: Sequence[Contestant], load: Load, turns: int) -> dict[str, Gaps]:
    """Measure both phases of each in turns; the first turn does not count. Where one fails, its problem says why."""
    found = {contestant.name: Gaps() for contestant in contestants}
    for turn, contestant in product(range(turns + 1), contestants):
        gaps = found[contestant.name]
        for phase in PHASES if turn % 2 else PHASES[::-1]:
            if gaps.problem:
                continue
            try:
                measure(contestant, load, phase, gaps if turn else Gaps())
            except (OSError, ValueError, LookupError, KVFerryError) as error:
                gaps.problem = f"{phase}: {error}"
    return found


def summary(found: dict[str, Gaps]) -> str:
    """Return one line with the ratio of each connector."""
    told = [f"{name} {gaps.problem or gaps.verdict}" for name, gaps in found.items()]
    return f"99 % of the gaps, of those without transfers (aim {AIM:g}): {', '.join(told)}"


def main(
    running: Annotated[int, typer.Option(min=1, help="Requests that run on the decode engine.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=3, help="Tokens of each of their answers.")] = 1024,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a prompt that arrives.")] = 7900,
    per_second: Annotated[float, typer.Option(min=0.1, help="Prompts that arrive in a second.")] = 2.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of both phases of each connector.")] = 3,
    model: Annotated[str, typer.Option(help="A random model's name.")] = "kv-heavy",
    dtype: Annotated[str, typer.Option(help="As vLLM's.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Start the engines, measure and print the table."""
    console = open_console()
    connectors, load = (KVFERRY, NIXL), Load(running, answer_tokens, tokens, per_second)
    with interrupted_by_signals(), folder_for(False, console) as folder, ExitStack() as stack:
        devices = visible_devices()
        cache_bytes = share_of_memory(None, [1] * 2 * len(connectors), 0, len(devices))
        settings = BenchSettings(
            make_tiny_model(model, folder),
            connectors,
            tokens=(tokens,),
            at_once=(1,),
            turns=turns,
            seconds=0.0,
            output_tokens=ARRIVED_TOKENS,
            prefill_tp=1,
            decode_tp=1,
            dtype=dtype,
            max_model_len=max(tokens, RUNNING_TOKENS + answer_tokens) + 64,
            cache_bytes=cache_bytes,
            devices=devices,
        )
        servers = stack.enter_context(running_servers(lambda _: None))
        contestants, problems = start_contestants(settings, folder, servers, lambda _: None)
        found = {name: Gaps(problem=problem) for name, problem in problems.items()}
        found = compare(contestants, load, turns) | found
    table = Table(
        title=f"{running} running requests, ms between tokens; {tokens} tokens come {per_second:g} times a second"
    )
    for column in ("connector", "prompts are", "prompts", "50 %", "99 %", "longest"):
        table.add_column(column, justify="left" if column in ("connector", "prompts are") else "right")
    for name, phase in product(found, PHASES):
        gaps = found[name]
        if not gaps.problem:
            figures = (f"{1e3 * gaps.percentile(phase, percent):.1f}" for percent in (50, 99, 100))
            table.add_row(name, phase, str(gaps.arrived[phase]), *figures)
    console.print(table)
    console.print(summary(found), markup=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps({name: gaps.to_json() for name, gaps in found.items()}, indent=2) + "\n")
    if any(gaps.problem for gaps in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
