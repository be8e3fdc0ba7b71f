"""``kvferry bench``: kvferry beside vLLM's own connectors, and beside none, on this machine.

Each connector has a prefill and a decode engine with the same model, flags and cores. Fresh prompts go to the
connectors in turns, in an order that rotates, so that what disturbs the machine for a while disturbs all.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.cli.bench_connectors import (
    CONNECTORS,
    HANDING_OVER,
    IN_TREE_OFFLOAD,
    NIXL,
    NONE,
    OFFLOADING,
    REQUEST_SECONDS,
    Contestant,
    cause_of_end,
    engine_needs,
)
from kvferry.cli.bench_report import BenchReport, Cell, Row, Turn, check_plot
from kvferry.cli.console import Announce, AsJson, open_console, refused
from kvferry.cli.demo import folder_for, interrupted_by_signals, running_servers
from kvferry.errors import KVFerryError, Reason, SettingsError, did_you_mean
from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import (
    EngineSettings,
    Role,
    Server,
    free_port,
    spread_over_cores,
    start_engine,
    stop_servers,
    visible_devices,
    wait_until_ready,
    words_of,
)
from kvferry.harness.tiny_models import TINY_MODELS, make_tiny_model
from kvferry.integrations.vllm.versions import installed_version
from kvferry.models.families import model_caches
from kvferry.models.groups import AttentionCache
from kvferry.tiers.slab_memory import available_bytes
from kvferry.units import format_bytes, parse_bytes

TIER = 2
"""What is offloaded may take as many times the bytes of an engine's cache."""
LONGEST = "longest"
SLOWEST, LEAST_SECONDS = 10.0, 60.0
"""An engine of a cell may be silent for as many times the seconds of kvferry's turn, and for so many at least."""
CACHE_MARGIN = 1.25
PART_OF_MEMORY = 0.5
"""Of the memory that is available, the most that all engines' caches take together."""
PART_OF_GPU = 0.9
SHORTEST = 2
"""Tokens of a prompt, at least: the last one is always computed by the decode engine."""
NUMBERS = "Write numbers with commas: 100,1000."
FAILURES = (OSError, HTTPException, ValueError, LookupError, KVFerryError)
"""What a peer's engines may do to a client: end, break a stream, or answer with anything."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options. ``tokens`` are prompt lengths, in ascending order; None stands for the longest that fits."""

    model: Path
    connectors: tuple[str, ...]
    tokens: tuple[int | None, ...]
    at_once: tuple[int, ...]
    turns: int
    seconds: float
    output_tokens: int
    prefill_tp: int
    decode_tp: int
    dtype: str
    max_model_len: int
    cache_bytes: int
    devices: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @property
    def tp_sizes(self) -> list[int]:
        """The tensor parallel sizes of all engines, in the order of their start."""
        return _tp_sizes(self.connectors, self.prefill_tp, self.decode_tp)

    @property
    def num_engines(self) -> int:
        """The engines of all connectors: without one, the decode engine computes."""
        return len(self.tp_sizes)

    def token_bytes(self) -> int:
        """Return the bytes that a token adds to the caches of all layers with attention, over the ranks of an engine.

        Of the prefill and the decode engine the one with more: ranks may hold the same heads, or all the latent.
        Raises :class:`LayoutError` where the ranks cannot split the heads.
        """
        layers = model_caches(self.model, self.dtype).layers
        caches = [cache for layer in layers for cache in layer if isinstance(cache, AttentionCache)]
        sizes = (self.prefill_tp, self.decode_tp)
        return max(tp_size * sum(cache.page_bytes(1, tp_size) for cache in caches) for tp_size in sizes)

    def tokens_in_cache(self) -> int:
        """Return the tokens that an engine's cache has room for, with a margin."""
        return int(self.cache_bytes / self.token_bytes() / CACHE_MARGIN)

    def cells(self) -> tuple[list[Cell], dict[Cell, str]]:
        """Return the cells to measure, and why others are left out."""
        token_bytes, fits = self.token_bytes(), self.tokens_in_cache()
        longest = min(self.max_model_len, fits) - self.output_tokens
        lengths = sorted({longest if tokens is None else tokens for tokens in self.tokens})
        measured, left_out = [], {}
        for tokens in lengths:
            for at_once in self.at_once:
                cell = Cell(max(tokens, 0), at_once)
                if tokens < SHORTEST:
                    room = f"an engine takes {self.max_model_len} tokens (--max-model-len), its cache {fits} (--cache)"
                    left_out[cell] = f"left out: {room}, answers have {self.output_tokens} (--output-tokens)."
                elif tokens + self.output_tokens > self.max_model_len:
                    left_out[cell] = f"left out: the engines take {self.max_model_len} tokens (--max-model-len)."
                elif (tokens + self.output_tokens) * at_once > fits:
                    needed = format_bytes((tokens + self.output_tokens) * at_once * token_bytes * CACHE_MARGIN)
                    has = format_bytes(self.cache_bytes)
                    left_out[cell] = f"left out: it needs {needed} of cache, an engine has {has} (--cache)."
                else:
                    measured.append(cell)
        return measured, left_out

    def engine(self, connector: str, role: Role, ranks_before: int, port: int) -> EngineSettings:
        """Return the settings of an engine, before which engines with so many ranks were started; ``port`` is for its
        bootstrap server.
        """
        tp_size = self.prefill_tp if role == "kv_producer" else self.decode_tp
        extra, variables = engine_needs(connector, role, port, TIER * self.cache_bytes)
        if self.devices:
            used = [self.devices[(ranks_before + rank) % len(self.devices)] for rank in range(tp_size)]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(used)
        return EngineSettings(
            self.model,
            role=None if connector == NONE else role,
            connector=CONNECTORS[connector].vllm_name,
            connector_settings=extra,
            tensor_parallel_size=tp_size,
            dtype=self.dtype,
            max_model_len=min(self.max_model_len, self.tokens_in_cache()),  # vLLM starts with no smaller cache
            kv_cache_bytes=self.cache_bytes // tp_size,
            gpu_memory=self._gpu_memory(),
            cores=None if self.devices else spread_over_cores(tp_size, from_last=role == "kv_consumer"),
            compiled=bool(self.devices),
            arguments=self.arguments,
            variables=variables,
        )

    def _gpu_memory(self) -> float | None:
        if not self.devices:
            return None
        return PART_OF_GPU / max(map(len, _ranks_by_device(self.tp_sizes, len(self.devices))))


def bench(
    model: Annotated[
        str, typer.Option(help="A folder, a public model's name, or a random one; kv-heavy has an 8B model's cache.")
    ] = "kv-heavy",
    against: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(HANDING_OVER[1:])}; {NIXL} by default.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help=f"Compare kvferry's offload connector, with {IN_TREE_OFFLOAD} or none.")
    ] = False,
    tokens: Annotated[str, typer.Option(help="Prompt lengths; longest is the longest that fits.")] = (
        "100,1000,8000,longest"
    ),
    at_once: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "1,8",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each connector in each row, at most.")] = 5,
    minutes: Annotated[float, typer.Option(min=0.5, help="No turn begins later after the engines are ready.")] = 10.0,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 16,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the prefill engines.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the decode engines.")] = 1,
    dtype: Annotated[str, typer.Option(help="As vLLM's.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(min=128, help="As vLLM's.")] = 8192,
    cache: Annotated[str | None, typer.Option(help="Bytes of one engine's cache: 4GiB. Chosen by default.")] = None,
    engine_arguments: Annotated[str, typer.Option(help="Further arguments of all engines, as one text.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this SVG or PNG.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the model and the logs.")] = False,
    json_output: AsJson = False,
) -> None:
    """Compare kvferry with vLLM's connectors, or with none (each engine computes its prompts), on this machine.

    MooncakeConnector, NixlPushConnector and kvferry-concurrent get both requests at once; the other connectors' decode
    engine gets its request after the prefill engine's answer. Where a connector fails, its rows say why. With
    --offload, one engine of each connector answers each prompt twice, and forgets its own cache in between.

    All engines are up at once, with the same model and flags; on GPUs each gets its share of a device. Prompts are
    fresh and go to the connectors in turns. On 2 cores the default takes about 15 minutes.

    Exit code 1: a connector has no figure in some row, other than where it was left out for want of memory or time, or
    the plot cannot be written.

    Try:

    kvferry bench

    kvferry bench --against NixlConnector,none --tokens 1000,longest --plot bench.svg

    kvferry bench --against kvferry-concurrent,NixlPushConnector,MooncakeConnector --minutes 20

    kvferry bench --offload --against OffloadingConnector,none

    kvferry bench --model Qwen/Qwen3-0.6B --at-once 1,8,32 --json
    """
    console = open_console(stderr=json_output)
    with refused(json_output):
        if plot is not None:
            check_plot(plot)
        connectors = _connectors(against, OFFLOADING if offload else HANDING_OVER)
        if offload and prefill_tp > 1:
            problem = f"--prefill-tp {prefill_tp} with --offload: there is no prefill engine."
            raise SettingsError(Reason.INVALID_SETTING, problem, "Use --decode-tp.")
        lengths = tuple(
            None if text == LONGEST else _whole(text, "--tokens", SHORTEST) for text in _some(tokens, "--tokens")
        )
        counts = tuple(dict.fromkeys(_whole(text, "--at-once", 1) for text in _some(at_once, "--at-once")))
        devices = visible_devices()
        for option, tp_size in (("--prefill-tp", prefill_tp), ("--decode-tp", decode_tp)):
            if devices and tp_size > len(devices):
                problem = f"{option} {tp_size}: an engine would have more ranks than GPUs ({', '.join(devices)})."
                raise SettingsError(Reason.INVALID_SETTING, problem, f"Use {len(devices)} at most.")
        sizes = _tp_sizes(connectors, prefill_tp, decode_tp)
        num_tiers = sum(name in OFFLOADING and name != NONE for name in connectors)
        cache_bytes = share_of_memory(cache, sizes, TIER * num_tiers, len(devices))
        arguments = words_of(engine_arguments)
        with interrupted_by_signals(), folder_for(keep, console) as folder:
            with console.status("making the model") as status:
                settings = BenchSettings(
                    _model(model, folder),
                    connectors,
                    lengths,
                    counts,
                    turns,
                    60 * minutes,
                    output_tokens,
                    prefill_tp,
                    decode_tp,
                    dtype,
                    max_model_len,
                    cache_bytes,
                    devices,
                    arguments,
                )
                report = run(settings, model, folder, status.update)
            report.print(console)
            if json_output:
                print(json.dumps(report.to_json(), indent=2))
            failed = any(row.problem and not row.problem.startswith("left out") for row in report.rows)
            if plot is not None:
                try:
                    report.plot(plot)
                    console.print(f"The plot is {plot}.")
                except OSError as error:  # not raised: standard output has its JSON already
                    failed = True
                    console.print(f"The plot {plot} cannot be written: {error.strerror or error}.", markup=False)
            if failed:  # within the folder, which stays then: the problems name its logs
                raise typer.Exit(1)


def run(settings: BenchSettings, model: str, folder: Path, announce: Announce) -> BenchReport:
    """Start the engines, measure all cells and end the engines. Raises :class:`KVFerryError` where kvferry's own
    engines do not start.
    """
    cells, left_out = settings.cells()
    conditions = _conditions(settings, model)  # before the engines start: what fails here loses no figures
    rows = {
        (name, cell): Row(name, cell, problem=why) for cell, why in left_out.items() for name in settings.connectors
    }
    found: dict[tuple[str, Cell], list[Turn]] = {(name, cell): [] for cell in cells for name in settings.connectors}
    with running_servers(announce) as servers, ExitStack() as resumed:
        contestants, problems = start_contestants(settings, folder, servers, announce) if cells else ([], {})
        for contestant in contestants:
            resumed.callback(contestant.resume)
        is_paused = len(os.sched_getaffinity(0)) < 2 * settings.num_engines
        until = time.monotonic() + settings.seconds
        took: dict[Cell, float] = {}
        own: dict[Cell, float] = {}
        stopped: dict[str, str] = {}
        failed: dict[tuple[str, Cell], list[str]] = {}
        # The first turn of each cell warms it up: its connections, its pages, and what vLLM compiles at first.
        for turn in range(settings.turns + 1):
            for cell in cells:
                for place in range(len(contestants)):
                    contestant = contestants[(turn + place) % len(contestants)]
                    key = contestant.name, cell
                    if contestant.name in stopped or time.monotonic() + took.get(cell, 0.0) > until:
                        continue
                    announce(f"{contestant.name}: {cell.tokens} tokens, {cell.at_once} at once, turn {turn}")
                    if is_paused:
                        for other in contestants:
                            other.resume() if other is contestant else other.pause()
                    patience = max(LEAST_SECONDS, SLOWEST * own[cell]) if cell in own else REQUEST_SECONDS
                    began_at = time.monotonic()
                    try:
                        measured = contestant.turn(cell, patience)
                    except FAILURES as error:
                        ended = cause_of_end(contestant.servers)
                        failed[key] = [*failed.get(key, []), ended or str(error) or repr(error)]
                        if ended:
                            stopped[contestant.name] = "no turn after an engine ended"
                        elif (waited := time.monotonic() - began_at) >= patience:
                            stopped[contestant.name] = f"no turn after one that failed after {waited:.0f} s"
                        continue
                    took[cell] = time.monotonic() - began_at
                    if contestant.name == settings.connectors[0]:
                        own[cell] = took[cell]
                    if turn:
                        found[key].append(measured)
        for contestant in contestants:
            contestant.resume()
    for (name, cell), turns in found.items():
        if name in problems:
            rows[name, cell] = Row(name, cell, problem=problems[name])
        elif (name, cell) in failed:
            told = failed[name, cell]
            rows[name, cell] = Row(name, cell, problem=f"{len(told)} turns failed, the last one so: {told[-1]}")
        elif turns:
            rows[name, cell] = Row.of(name, cell, turns)
        elif name in stopped:
            rows[name, cell] = Row(name, cell, problem=f"{stopped[name]}, in another row.")
        else:
            over = f"left out: {settings.seconds / 60:g} minutes were over (--minutes)."
            rows[name, cell] = Row(name, cell, problem=over)
    order = sorted(rows, key=lambda key: (key[1].tokens, key[1].at_once, settings.connectors.index(key[0])))
    return BenchReport(tuple(rows[key] for key in order), conditions, settings.connectors[0])


def start_contestants(
    settings: BenchSettings, folder: Path, servers: list[Server], announce: Announce
) -> tuple[list[Contestant], dict[str, str]]:
    """Start all engines at once; return the contestants that run, and why others do not."""
    from transformers import AutoConfig

    pairs: dict[str, list[Server]] = {}
    num_ranks = 0
    ports = {name: free_port() for name in settings.connectors}
    for name in settings.connectors:
        for role in CONNECTORS[name].roles:
            engine = settings.engine(name, role, num_ranks, ports[name])
            num_ranks += engine.tensor_parallel_size
            server = start_engine(f"{name}-{'prefill' if role == 'kv_producer' else 'decode'}", engine, folder)
            servers.append(server)
            pairs.setdefault(name, []).append(server)
    contestants, problems = [], {}
    config = AutoConfig.from_pretrained(settings.model)  # nosec B615 # a folder: nothing is downloaded
    vocabulary_size = int(config.get_text_config().vocab_size)
    for name, pair in pairs.items():
        prefill = pair[0] if len(pair) == 2 else None
        contestant = Contestant(name, pair[-1], prefill, vocabulary_size, settings.output_tokens, ports[name])
        try:
            wait_until_ready(pair, on_progress=lambda server, age: announce(f"{server}: starting, {age:.0f} s"))
            contestant.warm_up()
        except FAILURES as error:
            told = cause_of_end(pair) or str(error)[-600:] or repr(error)
            if name == settings.connectors[0]:
                if isinstance(error, LaunchError):
                    raise
                problem = f"{name}: its engines do not answer: {told}"
                raise LaunchError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.") from error
            problems[name] = f"its engines do not {'start' if isinstance(error, LaunchError) else 'answer'}: {told}"
            stop_servers(pair)
            continue
        contestants.append(contestant)
    return contestants, problems


def _conditions(settings: BenchSettings, model: str) -> dict[str, Any]:
    one_engine_each = settings.num_engines == len(settings.connectors)
    where = f"{len(settings.devices)} GPUs" if settings.devices else f"{len(os.sched_getaffinity(0))} cores"
    return {
        "model": model,
        "TP": str(settings.decode_tp) if one_engine_each else f"{settings.prefill_tp} to {settings.decode_tp}",
        "dtype": settings.dtype,
        "vllm": installed_version(),
        "kvferry": version("kvferry"),
        "on": where,
    }


def _model(name: str, folder: Path) -> Path:
    """Return the folder of a model: the given one, a random one that is made, or a public one that is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    if name in TINY_MODELS:
        return make_tiny_model(name, folder)
    if "/" not in name:
        remedy = did_you_mean(name, list(TINY_MODELS), "Name a folder, or a public model such as Qwen/Qwen3-0.6B.")
        raise SettingsError(Reason.INVALID_SETTING, f"--model {name!r} is no folder and no random model.", remedy)
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]  # no code
        return Path(snapshot_download(name, allow_patterns=wanted))  # nosec B615 # the user's own choice
    except Exception as error:
        problem = f"--model {name}: it cannot be downloaded: {type(error).__name__}: {str(error)[:300]}"
        raise SettingsError(Reason.INVALID_SETTING, problem, "Download it, and name its folder.") from error


def _connectors(against: str | None, comparable: Sequence[str]) -> tuple[str, ...]:
    """Return kvferry's connector, which is the first of ``comparable``, and those that ``against`` names."""
    own, *others = comparable
    named = [NIXL if NIXL in others else IN_TREE_OFFLOAD] if against is None else _parts(against)
    for name in named:
        if name not in others:
            problem = f"--against {name!r}: it cannot be compared with {own}."
            remedy = f"Use {', '.join(others)}."
            if name not in CONNECTORS:
                remedy = did_you_mean(name, others, remedy)
            raise SettingsError(Reason.INVALID_SETTING, problem, remedy)
    return (own, *dict.fromkeys(named))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _some(text: str, option: str) -> list[str]:
    if not (parts := _parts(text)):
        raise SettingsError(Reason.INVALID_SETTING, f"{option} {text!r} has no number.", NUMBERS)
    return parts


def _whole(text: str, option: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) < 1 << 24:
        raise SettingsError(Reason.INVALID_SETTING, f"{option} {text!r} is no number from {least} on.", NUMBERS)
    return int(text)


def _tp_sizes(connectors: Sequence[str], prefill_tp: int, decode_tp: int) -> list[int]:
    roles = [role for name in connectors for role in CONNECTORS[name].roles]
    return [prefill_tp if role == "kv_producer" else decode_tp for role in roles]


def _ranks_by_device(tp_sizes: Sequence[int], num_devices: int) -> list[list[int]]:
    """Return the ranks of each device, which engines' ranks get in turns, each by the tensor parallel size of its
    engine.

    >>> _ranks_by_device([2, 1, 2, 1], 4)
    [[2, 2], [2, 1], [1], [2]]
    """
    ranks = [tp_size for tp_size in tp_sizes for _ in range(tp_size)]
    return [ranks[device::num_devices] for device in range(num_devices)]


def share_of_memory(given: str | None, tp_sizes: Sequence[int], num_tiers: int, num_devices: int) -> int:
    """Return the bytes of an engine's cache: those given, or its share of half of the memory that is available.

    On CPUs ``num_tiers`` more caches are of what is offloaded.
    """
    if given is not None:
        try:
            return parse_bytes(given)
        except ValueError as error:
            raise SettingsError(Reason.INVALID_SETTING, f"--cache: {error}.", "Write 4GiB, or bytes.") from error
    if num_devices:
        import torch

        free, _ = torch.cuda.mem_get_info()
        caches = max(sum(1 / tp_size for tp_size in ranks) for ranks in _ranks_by_device(tp_sizes, num_devices))
        return int(PART_OF_MEMORY * free / caches)
    return int(PART_OF_MEMORY * available_bytes() / (len(tp_sizes) + num_tiers))
