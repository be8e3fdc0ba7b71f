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
from rich.status import Status

from kvferry.cli.console import Announce
from kvferry.cli.demo import Answer, DemoModel, DemoSettings, poll, running_servers, send_prompts, wait_for
from kvferry.cli.demo_report import OffloadReport, PassLine
from kvferry.errors import KVFerryError
from kvferry.harness.launch import (
    EngineSettings,
    Role,
    Server,
    cache_block_size,
    cache_usage,
    cached_tokens,
    prompt_tokens,
    spread_over_cores,
    start_engine,
)
from kvferry.tiers.disk.inspection import existing_directory, inspect

CONNECTOR = "KVFerryOffloadConnector"
NUM_DOCUMENTS = 4
DOCUMENT_TOKENS, QUESTION_TOKENS = 1536, 100
MAX_MODEL_LEN = 2048
CACHE_TOKENS = 3072
"""What an engine's own cache holds: two of the documents."""
DISK_BYTES = 1 << 30
DISK_SECONDS, FREE_SECONDS = 30.0, 2.0


@dataclass(frozen=True, slots=True)
class OffloadDemo:
    """The model, the folder and the options of one run; ``decode_tp`` are the ranks after the restart."""

    model: DemoModel
    folder: Path
    options: DemoSettings

    @property
    def disk_path(self) -> Path:
        """The folder of the disk tier."""
        return self.folder / "disk"

    def engine(self, tp_size: int, *, offloads: bool) -> EngineSettings:
        """Return the settings of an engine with a small cache of its own."""
        options, num_layers, cache = self.options, self.model.num_layers, self.model.cache
        stored_tokens = NUM_DOCUMENTS * DOCUMENT_TOKENS + options.num_prompts * (MAX_MODEL_LEN - DOCUMENT_TOKENS)
        settings: dict[str, str | int] = {
            "host_bytes": 2 * stored_tokens * num_layers * cache.page_bytes(1, tp_size=1),
            "disk_path": str(self.disk_path),
            "disk_bytes": DISK_BYTES,
            # The demo shows what is found; a model as small as these is often quicker to compute.
            "loads": "always",
        }
        cache_bytes = CACHE_TOKENS * num_layers * cache.page_bytes(1, tp_size)
        role: Role | None = "kv_both" if offloads else None
        return EngineSettings(
            self.model.path,
            role=role,
            tensor_parallel_size=tp_size,
            connector=CONNECTOR,
            connector_settings=settings if offloads else {},
            max_model_len=MAX_MODEL_LEN,
            block_size=options.block_size,
            kv_cache_bytes=cache_bytes,
            cores=spread_over_cores(tp_size, from_last=not offloads),
            gpu_memory=options.gpu_memory,
            layout=options.layout if offloads else None,
            compiled=options.compiled,
            arguments=("--prefix-caching-hash-algo", "sha256_cbor", *options.engine_arguments),
        )


def run_offload(settings: DemoSettings, model: DemoModel, folder: Path, status: Status) -> OffloadReport:
    """Run all passes in ``folder`` and return what they measured. Raises :class:`KVFerryError`."""
    prompts = make_documents(settings.num_prompts, model.vocabulary_size)
    return _run_passes(OffloadDemo(model, folder, settings), prompts, status.update)


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
    starting = (("alone", demo.options.decode_tp, False), ("first", demo.options.prefill_tp, True))
    with _engines(demo, starting, announce) as (alone, first):
        reference, answers = _send_pass(
            demo.options, f"no offload, TP {demo.options.decode_tp}", alone, prompts, None, announce
        )
        alone.stop()
        lines = [reference]
        for name in ("nothing stored", "stored"):
            line, _ = _send_pass(
                demo.options, f"{name}, TP {demo.options.prefill_tp}", first, prompts, answers, announce
            )
            lines.append(line)
        block_size = cache_block_size(first.url)
        num_stored = _wait_until_on_disk(demo.disk_path, _num_blocks(prompts, block_size), announce)
        announce("killing the engine")
        first.process.kill()
        left = len(first.process.process_ids())
    with _engines(demo, (("second", demo.options.decode_tp, True),), announce) as (second,):
        line, _ = _send_pass(
            demo.options, f"after SIGKILL, TP {demo.options.decode_tp}", second, prompts, answers, announce
        )
        usage = poll(lambda: cache_usage(second.metrics()), lambda used: not used, FREE_SECONDS)
    left += len(second.process.process_ids())
    return OffloadReport((*lines, line), block_size, num_stored, usage, left)


@contextmanager
def _engines(
    demo: OffloadDemo, names: Sequence[tuple[str, int, bool]], announce: Announce
) -> Iterator[tuple[Server, ...]]:
    """Start engines together (name, tensor-parallel size, whether it offloads) and end them on every exit."""
    with running_servers(announce) as servers:
        for name, tp_size, offloads in names:
            servers.append(start_engine(name, demo.engine(tp_size, offloads=offloads), demo.folder))
        wait_for(servers, announce)
        yield tuple(servers)


def _send_pass(
    options: DemoSettings,
    name: str,
    engine: Server,
    prompts: Sequence[list[int]],
    expected: Sequence[Answer] | None,
    announce: Announce,
) -> tuple[PassLine, list[Answer]]:
    """Send all prompts; compare the tokens with ``expected``, or with themselves where this pass is the reference."""
    before = engine.metrics()
    began_at = time.monotonic()
    answers = send_prompts(options, engine.url, prompts, on_answer=lambda count: announce(f"{name}: {count} answers"))
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

    def held() -> int:
        found = _blocks_on_disk(path)
        announce(f"disk: {found} of {num_blocks} blocks")
        return found

    return poll(held, lambda found: found >= num_blocks, DISK_SECONDS)


def _blocks_on_disk(path: Path) -> int:
    try:
        directory = existing_directory(path)
    except KVFerryError:
        return 0
    try:
        return sum(len(report.headers) for report in inspect(directory))
    finally:
        directory.close()
