"""``kvferry demo --mode offload``: a vLLM engine whose own cache is too small for its prompts, and tiers behind it.

The first pass stores, the second loads from host memory. Then the engine is killed and started again, under another
tensor-parallel size and in the same folder, and the third pass loads from disk.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from kvferry.cli.console import Announce
from kvferry.cli.demo import Answer, send_prompts, vocabulary_size
from kvferry.cli.demo_report import OffloadReport, PassLine
from kvferry.errors import KVFerryError
from kvferry.harness.launch import (
    EngineSettings,
    Role,
    Server,
    cache_block_size,
    cache_usage,
    cached_tokens,
    gpu_memory_arguments,
    prompt_tokens,
    spread_over_cores,
    start_engine,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import make_tiny_model
from kvferry.models.families import model_caches, uniform_cache
from kvferry.tiers.disk.inspection import existing_directory, inspect

CONNECTOR = "KVFerryOffloadConnector"
DTYPE = "float32"  # as the engines are started
NUM_DOCUMENTS = 4
DOCUMENT_TOKENS, QUESTION_TOKENS = 1536, 100
MAX_MODEL_LEN = 2048
CACHE_TOKENS = 3072
"""What an engine's own cache holds: two of the documents."""
DISK_BYTES = 1 << 30
DISK_SECONDS, FREE_SECONDS = 30.0, 2.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """The options. The engine that stores has ``first_tp`` ranks, the engine after the restart ``second_tp``."""

    first_tp: int
    second_tp: int
    layout: str | None
    num_prompts: int
    block_size: int | None
    gpu_memory: float | None = None


@dataclass(frozen=True, slots=True)
class OffloadDemo:
    """The options, with the model and the folder of one run."""

    model: Path
    folder: Path
    options: OffloadOptions

    @property
    def disk_path(self) -> Path:
        """The folder of the disk tier."""
        return self.folder / "disk"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches of all layers, over all ranks."""
        caches = model_caches(self.model, DTYPE)
        return len(caches.layers) * uniform_cache(caches).page_bytes(1, tp_size=1)

    def check(self) -> None:
        """Raise :class:`SettingsError` where the ranks cannot split the heads."""
        for tp_size in (self.options.first_tp, self.options.second_tp):
            uniform_cache(model_caches(self.model, DTYPE)).heads(0, tp_size)

    def engine(self, tp_size: int, *, offloads: bool) -> EngineSettings:
        """Return the settings of an engine with a small cache of its own."""
        options = self.options
        stored_tokens = NUM_DOCUMENTS * DOCUMENT_TOKENS + options.num_prompts * (MAX_MODEL_LEN - DOCUMENT_TOKENS)
        settings: dict[str, str | int] = {
            "host_bytes": 2 * stored_tokens * self.token_bytes,
            "disk_path": str(self.disk_path),
            "disk_bytes": DISK_BYTES,
            # The demo shows what is found; a model as small as these is often quicker to compute.
            "loads": "always",
        }
        if options.layout is not None:
            settings["layout"] = options.layout
        caches = model_caches(self.model, DTYPE)
        cache_bytes = CACHE_TOKENS * len(caches.layers) * uniform_cache(caches).page_bytes(1, tp_size)
        role: Role | None = "kv_both" if offloads else None
        return EngineSettings(
            self.model,
            role=role,
            tensor_parallel_size=tp_size,
            connector=CONNECTOR,
            connector_settings=settings if offloads else {},
            max_model_len=MAX_MODEL_LEN,
            block_size=options.block_size,
            kv_cache_bytes=cache_bytes,
            cores=spread_over_cores(tp_size, from_last=not offloads),
            arguments=("--prefix-caching-hash-algo", "sha256_cbor", *gpu_memory_arguments(options.gpu_memory)),
        )


def run_offload_demo(model: str, folder: Path, options: OffloadOptions, console: Console) -> OffloadReport:
    """Run all passes in ``folder`` and return what they measured. Raises :class:`KVFerryError`."""
    with console.status("making the model") as status:
        path = Path(model) if Path(model).is_dir() else make_tiny_model(model, folder)
        demo = OffloadDemo(path, folder, options)
        demo.check()
        prompts = make_documents(options.num_prompts, vocabulary_size(path))
        began_at = time.monotonic()
        report = _run_passes(demo, prompts, status.update)
        console.print(f"The whole run took {time.monotonic() - began_at:.0f} s.")
        return report


def make_documents(num_prompts: int, vocabulary_size: int) -> list[list[int]]:
    """Return prompts of random tokens: a question of its own behind one of four documents, which take turns.

    >>> prompts = make_documents(6, vocabulary_size=100)
    >>> prompts[0][:DOCUMENT_TOKENS] == prompts[4][:DOCUMENT_TOKENS], prompts[0] == prompts[4], len(prompts[0])
    (True, False, 1636)
    """
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, vocabulary_size, DOCUMENT_TOKENS).tolist() for _ in range(NUM_DOCUMENTS)]
    questions = [generator.integers(0, vocabulary_size, QUESTION_TOKENS).tolist() for _ in range(num_prompts)]
    return [documents[index % NUM_DOCUMENTS] + question for index, question in enumerate(questions)]


def _run_passes(demo: OffloadDemo, prompts: Sequence[list[int]], announce: Announce) -> OffloadReport:
    starting = (("alone", demo.options.second_tp, False), ("first", demo.options.first_tp, True))
    with _engines(demo, starting, announce) as (alone, first):
        reference, answers = _send_pass(f"no offload, TP {demo.options.second_tp}", alone, prompts, None, announce)
        alone.stop()
        lines = [reference]
        for name in ("nothing stored", "stored"):
            line, _ = _send_pass(f"{name}, TP {demo.options.first_tp}", first, prompts, answers, announce)
            lines.append(line)
        block_size = cache_block_size(first.url)
        num_stored = _wait_until_on_disk(demo.disk_path, _num_blocks(prompts, block_size), announce)
        announce("killing the engine")
        first.process.kill()
        left = len(first.process.process_ids())
    with _engines(demo, (("second", demo.options.second_tp, True),), announce) as (second,):
        line, _ = _send_pass(f"after SIGKILL, TP {demo.options.second_tp}", second, prompts, answers, announce)
        usage = _wait_until_free(second)
    left += len(second.process.process_ids())
    return OffloadReport((*lines, line), block_size, num_stored, usage, left)


@contextmanager
def _engines(
    demo: OffloadDemo, names: Sequence[tuple[str, int, bool]], announce: Announce
) -> Iterator[tuple[Server, ...]]:
    """Start engines together (name, tensor-parallel size, whether it offloads) and end them on every exit."""
    servers: list[Server] = []
    try:
        for name, tp_size, offloads in names:
            servers.append(start_engine(name, demo.engine(tp_size, offloads=offloads), demo.folder))
        wait_until_ready(servers, on_progress=lambda name, age: announce(f"{name}: starting, {age:.0f} s"))
        yield tuple(servers)
    finally:
        announce("stopping the engines")
        stop_servers(servers)


def _send_pass(
    name: str, engine: Server, prompts: Sequence[list[int]], expected: Sequence[Answer] | None, announce: Announce
) -> tuple[PassLine, list[Answer]]:
    """Send all prompts; compare the tokens with ``expected``, or with themselves where this pass is the reference."""
    before = engine.metrics()
    began_at = time.monotonic()
    answers = send_prompts(engine.url, prompts, on_answer=lambda count: announce(f"{name}: {count} answers"))
    seconds, after = time.monotonic() - began_at, engine.metrics()
    moved = prompt_tokens(after) - prompt_tokens(before)
    by_tier = {tier: count - cached_tokens(before)[tier] for tier, count in cached_tokens(after).items()}
    same = [
        bool(answer.token_ids) and answer.token_ids == wanted.token_ids
        for answer, wanted in zip(answers, expected or answers, strict=True)
    ]
    line = PassLine(
        name=name,
        prompt_tokens=sum(map(len, prompts)),
        computed=moved.computed,
        own_cache=moved.cached,
        loaded=moved.received,
        from_host=by_tier.get("host", 0),
        from_disk=by_tier.get("disk", 0),
        seconds=seconds,
        requests=len(prompts),
        identical=sum(same),
        errors=tuple(answer.error for answer in answers if answer.error is not None),
    )
    return line, answers


def _num_blocks(prompts: Sequence[list[int]], block_size: int) -> int:
    """Return how many different full blocks the prompts have; a block is one with all that is before it."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(block_size, len(prompt) + 1, block_size)})


def _wait_until_on_disk(path: Path, num_blocks: int, announce: Announce) -> int:
    """Wait until the disk tier holds ``num_blocks``; return the number it holds, fewer after ``DISK_SECONDS``."""
    deadline = time.monotonic() + DISK_SECONDS
    while True:
        held = _blocks_on_disk(path)
        announce(f"disk: {held} of {num_blocks} blocks")
        if held >= num_blocks or time.monotonic() > deadline:
            return held
        time.sleep(POLL_SECONDS)


def _blocks_on_disk(path: Path) -> int:
    try:
        directory = existing_directory(path)
    except KVFerryError:
        return 0
    try:
        return sum(len(report.headers) for report in inspect(directory))
    finally:
        directory.close()


def _wait_until_free(engine: Server) -> float:
    """Return the used part of the engine's own cache, which all requests have left."""
    deadline = time.monotonic() + FREE_SECONDS
    while (usage := cache_usage(engine.metrics())) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return usage
