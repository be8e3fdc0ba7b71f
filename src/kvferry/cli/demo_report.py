"""The report of the demo: one line per request, totals, and problems."""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.harness.launch import PromptTokens
from kvferry.models.groups import AttentionCache
from kvferry.units import format_bytes, format_rate

MAX_LOG_PROBLEMS = 20
MOST_COMPUTED = 0.1
"""The part of the prompt tokens that a pass may compute whose blocks are stored."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of the model's cache and of the engines, from which the bytes to move follow in closed form.

    ``cache`` is None where no closed form holds; the numbers that follow from one are then None.
    """

    num_layers: int
    cache: AttentionCache | None
    block_size: int
    prefill_tp: int
    decode_tp: int

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of ``num_tokens``."""
        return math.ceil(num_tokens / self.block_size)

    def expected_bytes(self, num_tokens: int) -> int | None:
        """Return the bytes that must move for ``num_tokens``: whole blocks, to every decode rank."""
        if self.cache is None:
            return None
        page = self.cache.page_bytes(self.block_size, self.decode_tp)
        return self.num_layers * self.decode_tp * self.num_blocks(num_tokens) * page

    def per_layer_descriptors(self, num_tokens: int) -> int | None:
        """Return the descriptors of a per-layer layout: one for each layer, block and pair of ranks."""
        if self.cache is None:
            return None
        prefill, decode = (len(self.cache.heads(0, tp_size)) for tp_size in (self.prefill_tp, self.decode_tp))
        return self.num_layers * self.num_blocks(num_tokens) * self.decode_tp * math.ceil(decode / prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedCache:
    """The sums over the decode ranks' logs for one request; times are those of the slowest rank."""

    received_tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    transport: str = "-"
    layout: str = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine(MovedCache):
    """One request: the bytes that moved, and whether its answer equals that of the decode engine alone."""

    prompt_tokens: int
    identical: bool
    error: str | None

    @property
    def computed_tokens(self) -> int:
        """The number of prompt tokens that the decode engine computed."""
        return self.prompt_tokens - self.received_tokens


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole run. ``received`` and ``reference`` are the decode engine's metrics with the router, and alone.

    Without ``is_exact`` other tokens are no problem: they depend on which requests share a step.
    """

    lines: tuple[RequestLine, ...]
    shape: CacheShape
    layout: str
    received: PromptTokens
    reference: PromptTokens
    cache_usages: Mapping[str, float]
    seconds_until_free: float
    mode: str = "sequential"
    num_hosts: int = 1
    processes_left: int = 0
    failures: tuple[str, ...] = ()
    is_exact: bool = True
    preemptions: int = 0

    def total(self, name: str) -> Any:
        """Return the sum of one column."""
        return sum(getattr(line, name) for line in self.lines)

    @property
    def expected_bytes(self) -> int | None:
        """The bytes of all requests by the closed form."""
        return _sum(self.shape.expected_bytes(line.prompt_tokens) for line in self.lines)

    @property
    def per_layer_descriptors(self) -> int | None:
        """The descriptors of all requests in a per-layer layout."""
        return _sum(self.shape.per_layer_descriptors(line.prompt_tokens) for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "requests": len(self.lines),
            "identical": self.total("identical"),
            "bytes": self.total("bytes"),
            "expected_bytes": self.expected_bytes,
            "descriptors": self.total("descriptors"),
            "per_layer_descriptors": self.per_layer_descriptors,
            "received_tokens": self.received.received,
            "computed_tokens": self.received.computed,
            "prompt_tokens": self.total("prompt_tokens"),
            "reference_computed_tokens": self.reference.computed,
            "mode": self.mode,
            "hosts": self.num_hosts,
            "prefill_tp": self.shape.prefill_tp,
            "decode_tp": self.shape.decode_tp,
            "block_size": self.shape.block_size,
            "layout": self.layout,
            "tokens_compared": self.is_exact,
            "preemptions": self.preemptions,
            "leaks": {
                "cache_usage": dict(self.cache_usages),
                "seconds_until_free": round(self.seconds_until_free, 3),
                "processes_left": self.processes_left,
            },
            "problems": self.problems,
            "per_request": [{**asdict(line), "computed_tokens": line.computed_tokens} for line in self.lines],
        }

    @property
    def problems(self) -> list[str]:
        """A sentence about each problem of the run."""
        lines = list(enumerate(self.lines))
        different = [index for index, line in lines if self.is_exact and not line.identical]
        recomputed = [index for index, line in lines if line.computed_tokens > 1]
        of_one_host = [index for index, line in lines if "cma" in line.transport]
        num_bytes, logged, received = self.total("bytes"), self.total("received_tokens"), self.received
        checks = [
            (different, f"requests {different} differ from the decode engine alone"),
            (recomputed, f"the decode engine computed more than one prompt token of requests {recomputed}"),
            (
                received.received != logged,
                f"the engine's metrics count {received.received} received tokens, the transfers {logged}",
            ),
            (received.computed > len(lines), f"the engine's metrics count {received.computed} computed tokens"),
            (
                self.expected_bytes not in (None, num_bytes),
                f"{num_bytes} bytes moved, the sizes of the caches give {self.expected_bytes}",
            ),
            (
                self.reference.computed != self.total("prompt_tokens"),
                "the decode engine did not compute all prompts of the reference",
            ),
            (any(self.cache_usages.values()), f"cache blocks are still in use: {dict(self.cache_usages)}"),
            (
                self.num_hosts > 1 and of_one_host,
                f"requests {of_one_host} moved by cma, which has no way between hosts",
            ),
            (self.processes_left, f"{self.processes_left} processes are left"),
        ]
        errors = [f"request {index}: {line.error}" for index, line in lines if line.error]
        return [*errors, *self.failures, *(problem for is_wrong, problem in checks if is_wrong)]

    def print(self, console: Console) -> None:
        """Print a line per request, the totals, the descriptors of a per-layer layout, and the problems."""
        shape, total, hosts = self.shape, self.total, f", {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        title = f"KV cache moved from prefill (TP {shape.prefill_tp}) to decode (TP {shape.decode_tp}), {self.mode}"
        title += f" router{hosts}, layout {self.layout}, blocks of {shape.block_size} tokens"
        table = Table(title=title, show_footer=True)
        columns = {
            "tokens": total("prompt_tokens"),
            "received": self.received.received,
            "computed": self.received.computed,
            "bytes": format_bytes(total("bytes")),
            "descriptors": total("descriptors"),
            "per layer": _known(self.per_layer_descriptors),
            "wait ms": "",
            "GB/s": _rate(total("bytes"), total("transfer_seconds")),
            "by": "",
            "identical": f"{total('identical')} of {len(self.lines)}",
        }
        for column, footer in columns.items():
            table.add_column(column, str(footer), justify="right")
        for line in self.lines:
            cells = [line.prompt_tokens, line.received_tokens, line.computed_tokens, format_bytes(line.bytes)]
            cells += [line.descriptors, _known(shape.per_layer_descriptors(line.prompt_tokens))]
            cells += [f"{line.wait_seconds * 1e3:.1f}", _rate(line.bytes, line.transfer_seconds), line.transport]
            table.add_row(*map(str, cells), "yes" if line.identical else "NO")
        console.print(table)
        if shape.cache is None:
            console.print(f"{total('descriptors')} descriptors, {total('bytes')} bytes; no closed form for the caches.")
        else:
            console.print(
                f"{total('descriptors')} descriptors; a per-layer layout would have needed "
                f"{self.per_layer_descriptors}, one for each layer, block and pair of ranks. "
                f"Expected bytes: {self.expected_bytes}, moved: {total('bytes')}."
            )
        if not self.is_exact:
            console.print("Tokens depend on rounding and are not compared; every byte was, where it arrived.")
        if self.preemptions:
            console.print(f"{self.preemptions} preemptions.")
        if self.mode == "concurrent":
            console.print("A wait begins when the decode engine has blocks, and may include the prefill.")
        else:
            console.print("A wait begins when the decode engine has blocks, and ends when it may use them.")
        console.print(f"Both caches were free {self.seconds_until_free:.2f} s after the last answer.")
        _print_problems(self.problems, console)


def _sum(numbers: Iterable[int | None]) -> int | None:
    found = [number for number in numbers if number is not None]
    return sum(found) if found else None


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def _rate(num_bytes: int, seconds: float) -> str:
    return format_rate(num_bytes, seconds).removesuffix(" GB/s")


def _print_problems(problems: Iterable[str], console: Console) -> None:
    for problem in problems:
        console.print(f"[red]problem:[/red] {escape(problem)}")


def read_transfer_log(path: Path) -> dict[str, MovedCache]:
    """Return the moved cache by request id from the decode ranks' logs ``path``.rank0, ``path``.rank1, ..."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in _logged(path):
        if not line["error"]:
            lines.setdefault(line["request_id"], []).append(line)
    return {request_id: _add_ranks(ranks) for request_id, ranks in lines.items()}


def read_failures(path: Path) -> tuple[str, ...]:
    """Return a sentence about each failed load in the decode ranks' logs."""
    failed = (line for line in _logged(path) if line["error"])
    return tuple(f"rank {line['rank']} did not load {line['request_id']}: {line['message']}" for line in failed)


def read_log_problems(logs: Sequence[Path]) -> tuple[str, ...]:
    """Return the last errors, and the last warnings of kvferry, in the engines' logs."""
    found = (
        f"{path.name}: {line.strip()}"
        for path in logs
        for line in path.read_text(errors="replace").splitlines()
        if "ERROR" in line or ("WARNING" in line and "kvferry" in line)
    )
    return tuple(deque(found, MAX_LOG_PROBLEMS))


def _logged(path: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(path.parent.glob(f"{path.name}.rank*")):
        yield from map(json.loads, file.read_text().splitlines())


def _add_ranks(ranks: Sequence[Mapping[str, Any]]) -> MovedCache:
    return MovedCache(
        received_tokens=min(rank["num_tokens"] for rank in ranks),
        bytes=sum(rank["bytes"] for rank in ranks),
        descriptors=sum(rank["descriptors"] for rank in ranks),
        wait_seconds=max(rank["wait_seconds"] for rank in ranks),
        transfer_seconds=max(rank["transfer_seconds"] for rank in ranks),
        transport="+".join(sorted({rank["transport"] for rank in ranks})),
        layout=ranks[0]["layout"],
    )


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

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "mode": "offload",
            "block_size": self.block_size,
            "blocks_on_disk": self.blocks_on_disk,
            "passes": [asdict(line) for line in self.lines],
            "leaks": {"cache_usage": self.cache_usage, "processes_left": self.processes_left},
            "problems": self.problems,
        }

    @property
    def problems(self) -> list[str]:
        """A sentence about each problem of the run."""
        _, _, second, restarted = self.lines
        checks: list[tuple[object, str]] = []
        for line in self.lines:
            wrong, tokens = line.requests - line.identical, line.prompt_tokens
            counted = line.computed + line.own_cache + line.loaded
            is_stored = line in (second, restarted)
            differ = f"{wrong} of {line.requests} answers differ from the engine without offload"
            checks += [
                (wrong, f"{line.name}: {differ}"),
                (counted != tokens, f"{line.name}: the engine's counts do not add up to {tokens} prompt tokens"),
                (
                    is_stored and line.computed >= MOST_COMPUTED * tokens,
                    f"{line.name}: {line.computed} of {tokens} prompt tokens were computed",
                ),
            ]
        checks += [
            (not restarted.from_disk, f"{restarted.name}: nothing came from the disk tier"),
            (self.cache_usage, f"cache blocks are still in use: {self.cache_usage:.3f} of the engine's cache"),
            (self.processes_left, f"{self.processes_left} processes are left"),
        ]
        errors = [f"{line.name}: {error}" for line in self.lines for error in line.errors]
        return [*errors, *(problem for is_wrong, problem in checks if is_wrong)]

    def print(self, console: Console) -> None:
        """Print a line per pass and the problems."""
        table = Table("pass", title=f"Prompt tokens by origin, as vLLM counts them; blocks of {self.block_size} tokens")
        for column in ("prompt tokens", "computed", "own cache", "host memory", "disk", "seconds", "identical"):
            table.add_column(column, justify="right")
        for line in self.lines:
            counts = (line.prompt_tokens, line.computed, line.own_cache, line.from_host, line.from_disk)
            cells = (*(f"{count:,}" for count in counts), f"{line.seconds:.1f}")
            table.add_row(line.name, *cells, f"{line.identical} of {line.requests}")
        console.print(table)
        console.print("Own cache: vLLM's. Host memory, disk: kvferry's tiers; after SIGKILL only the disk has blocks.")
        console.print(f"{self.blocks_on_disk} blocks were on disk when the engine was killed.", highlight=False)
        _print_problems(self.problems, console)
