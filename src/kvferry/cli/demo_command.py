"""``kvferry demo``: prefill on one vLLM engine, decode on another, and compare with one engine alone."""

import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from kvferry.cli.console import open_console
from kvferry.cli.demo_engines import TRANSFER_LOG, DemoEngines, DemoSettings, running_engines
from kvferry.cli.demo_prompts import Answer, make_prompts, send_prompts
from kvferry.cli.demo_report import (
    CacheShape,
    DemoReport,
    MovedCache,
    RequestLine,
    find_problems,
    read_complaints,
    read_failures,
    read_transfer_log,
)
from kvferry.cli.demo_table import print_report
from kvferry.errors import Reason, SettingsError
from kvferry.harness.child_process import LaunchError
from kvferry.harness.engine_metrics import cache_block_size, prompt_tokens
from kvferry.harness.tiny_models import make_tiny_model
from kvferry.layout.group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.shapes import ModelShapes, read_model_shapes
from kvferry.transport.registry import check_setting

FREE_SECONDS = 2.0
FEWEST_PROMPTS = 2


def demo(
    model: Annotated[str, typer.Option(help="A tiny model's name, or the folder of a model.")] = "qwen3-tiny",
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the prefill engine.")] = 2,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the decode engine.")] = 1,
    layout: Annotated[str | None, typer.Option(help="KV cache layout; the connector chooses by default.")] = None,
    transport: Annotated[str, typer.Option(help="auto, cma or nixl.")] = "auto",
    prompts: Annotated[int, typer.Option(min=FEWEST_PROMPTS, help="How many prompts to send.")] = 16,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block; the engine chooses by default.")] = None,
    mode: Annotated[str, typer.Option(help="How caches move: pull, or push.")] = "pull",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the model and the logs.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Prefill on one vLLM engine, decode on another, and compare each answer with one engine alone.

    Exit code 1: a token differs, the decode engine computed what it should have received, or something leaked.
    """
    if mode not in ("pull", "push"):
        raise SettingsError(Reason.INVALID_SETTING, f"mode {mode!r} does not exist.", "Use: pull, push.")
    if layout is not None:
        NamedLayout.parse(layout)
    if transport != "auto":
        check_setting(transport)
    settings = DemoSettings(prefill_tp, decode_tp, layout, transport, mode, prompts, block_size)
    console = open_console(stderr=json_output)
    with _interrupted_by_signals(), _folder(keep, console) as folder:
        report = _run(model, settings, folder, console)
        report = replace(report, problems=tuple(find_problems(report)))
        print_report(report, console)
        if json_output:
            print(json.dumps(report.to_json(), indent=2))
        if report.problems:
            for complaint in read_complaints(sorted(folder.glob("*.log"))):
                console.print(complaint, markup=False, highlight=False, style="dim")
            raise typer.Exit(1)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Treat a request to end like Ctrl-C, so that everything is cleaned up either way."""

    def interrupt(_number: int, _frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _folder(keep: bool, console: Console) -> Iterator[Path]:
    """Yield a temporary folder for the model and the logs; it is kept when asked for and when something failed."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")  # importing torch makes it
    try:
        yield folder
    except (LaunchError, typer.Exit):
        keep = True
        raise
    finally:
        if keep:
            console.print(f"The model and the logs are in {folder}.")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(model: str, settings: DemoSettings, folder: Path, console: Console) -> DemoReport:
    with console.status("making the model") as status:
        path = Path(model) if Path(model).is_dir() else make_tiny_model(model, folder)
        shapes = read_model_shapes(path)
        _check_tensor_parallel_sizes(shapes, settings)
        prompts = make_prompts(settings.num_prompts, _vocabulary_size(path))
        started_at = time.monotonic()
        with running_engines(settings, path, folder, lambda name, what: status.update(f"{name}: {what}")) as engines:
            console.print(f"Engines ready after {time.monotonic() - started_at:.0f} s.")
            shape = CacheShape(shapes, cache_block_size(engines.decode.url), settings.prefill_tp, settings.decode_tp)
            report = _measure(engines, prompts, shape, folder / TRANSFER_LOG, status)
        console.print(f"The whole run took {time.monotonic() - started_at:.0f} s.")
        return replace(report, mode=settings.mode, processes_left=engines.remaining_processes())


def _check_tensor_parallel_sizes(shapes: ModelShapes, settings: DemoSettings) -> None:
    for name, tp_size in (("prefill", settings.prefill_tp), ("decode", settings.decode_tp)):
        if shapes.kind is CacheKind.ATTENTION and shapes.num_kv_heads % tp_size and tp_size % shapes.num_kv_heads:
            raise SettingsError(
                Reason.INDIVISIBLE_HEADS,
                f"{shapes.num_kv_heads} KV heads cannot be shared out over {tp_size} {name} ranks.",
                "Use a size that divides the heads or is a multiple of them.",
            )


def _vocabulary_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def _measure(
    engines: DemoEngines, prompts: Sequence[Sequence[int]], shape: CacheShape, log: Path, status: Status
) -> DemoReport:
    at_start = prompt_tokens(engines.decode.metrics())
    answers = send_prompts(
        engines.router.url, prompts, on_answer=lambda count: status.update(f"through the router: {count} answers")
    )
    usages, seconds = _wait_until_free(engines)
    after_router = prompt_tokens(engines.decode.metrics())
    alone = send_prompts(
        engines.decode.url,
        prompts,
        cache_salt=uuid.uuid4().hex,
        on_answer=lambda count: status.update(f"decode engine alone: {count} answers"),
    )
    after_alone = prompt_tokens(engines.decode.metrics())
    moved = read_transfer_log(log)
    lines = [_line(*parts, moved) for parts in zip(prompts, answers, alone, strict=True)]
    return DemoReport(
        lines=tuple(lines),
        shape=shape,
        layout="+".join(sorted({cache.layout for cache in moved.values()})) or "-",
        received=after_router - at_start,
        reference=after_alone - after_router,
        cache_usages=usages,
        seconds_until_free=seconds,
        failures=read_failures(log),
    )


def _wait_until_free(engines: DemoEngines) -> tuple[dict[str, float], float]:
    """Return both engines' cache usage once it is zero, or after two seconds, and how long that took."""
    began_at = time.monotonic()
    while True:
        usages, seconds = engines.cache_usages(), time.monotonic() - began_at
        if not any(usages.values()) or seconds > FREE_SECONDS:
            return usages, seconds
        time.sleep(0.05)


def _line(prompt: Sequence[int], answer: Answer, alone: Answer, moved: dict[str, MovedCache]) -> RequestLine:
    found = [
        cache for request_id, cache in moved.items() if answer.request_id and request_id.startswith(answer.request_id)
    ]
    cache = found[0] if len(found) == 1 else MovedCache(0, 0, 0, 0.0, 0.0, "-", "-")
    return RequestLine(
        prompt_tokens=len(prompt),
        received_tokens=cache.num_tokens,
        computed_tokens=len(prompt) - cache.num_tokens,
        bytes=cache.bytes,
        descriptors=cache.descriptors,
        wait_seconds=cache.wait_seconds,
        transfer_seconds=cache.transfer_seconds,
        transport=cache.transport,
        identical=bool(answer.token_ids) and answer.token_ids == alone.token_ids,
        error=answer.error or alone.error,
    )
