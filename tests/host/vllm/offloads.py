"""Engines that keep blocks behind their cache: pairs of an engine that stores and one that loads, and their prompts.

Both engines of a pair have the disk tier in one folder, so one of them is dead while the other runs. Engines that share
a pool run together.
"""

import mmap
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.harness.launch import PromptTokens, cached_tokens
from kvferry.tiers.disk.inspection import existing_directory, inspect
from kvferry.tiers.disk.segments import RecordHeader, SegmentShape, cells_name

from .engine_pool import Engine, EnginePool, Reference, post, tokens_of
from .handoffs import Pair, over_pairs, random_prompt

MOST_COMPUTED = 0.1
"""The part of prompts that are stored which an engine may compute."""
AT_ONCE = 4
STILL_SECONDS, DISK_SECONDS, RESET_SECONDS, STORE_SECONDS = 1.5, 30.0, 10.0, 10.0
QUESTION_TOKENS, QUESTIONS = 49, 3
DOCUMENT_TOKENS = (1024, 1152, 1280, 1408)
"""Whole blocks of any size, with a question behind them whose blocks of 16 tokens leave one token."""
EDGES = (127, 128, 129, 255, 256, 257, 16, 17)
SOURCES = {"host": "host", "disk": "disk", "pool": "external_unspecified"}
"""vLLM's own names of what it counts as found in a tier."""


@dataclass(frozen=True)
class Offload:
    """An engine that stores and the engine that loads, by name: after the first was killed, or from a pool."""

    name: str
    stores: str
    loads: str
    in_matrix: bool = True

    @property
    def model(self) -> str:
        return self.stores.partition("-")[0]

    @property
    def salt(self) -> str:
        """Keeps the blocks of a pair apart from those of other pairs with the same folder."""
        return f"salt of {self.name}"

    def prompts(self) -> list[list[int]]:
        """Return questions of their own behind documents, which take turns: no cache of few blocks keeps a document."""
        seed = zlib.crc32(self.name.encode()) % 1_000_000
        documents = [random_prompt(seed + index, length) for index, length in enumerate(DOCUMENT_TOKENS)]
        questions = [random_prompt(seed + 100 + index, QUESTION_TOKENS) for index in range(QUESTIONS * len(documents))]
        return [documents[index % len(documents)] + question for index, question in enumerate(questions)]

    def edges(self) -> list[list[int]]:
        """Return prompts that end at a block's end, or a token before or after it."""
        seed = zlib.crc32(self.name.encode()) % 1_000_000
        return [random_prompt(seed + 200 + index, length) for index, length in enumerate(EDGES)]


OFFLOADS = (
    Offload("offload-1-2", "gqa-keeps-tp1", "gqa-keeps-tp2", in_matrix=False),
    Offload("offload-1-1", "gqa-keeps-tp1", "gqa-keeps-tp1-again"),
    Offload("offload-2-1", "gqa-keeps-tp2", "gqa-keeps-tp1"),
    Offload("offload-pp2-1", "gqa-keeps-pp2", "gqa-keeps-tp1"),
    Offload("offload-mqa-2-1", "mqa-keeps-tp2", "mqa-keeps-tp1"),
    Offload("offload-gemma-1-1", "gemma-keeps-tp1", "gemma-keeps-tp1-again"),
    Offload("offload-gemma-2-1", "gemma-keeps-tp2", "gemma-keeps-tp1"),
    Offload("offload-mla-1-1", "mla-keeps-tp1", "mla-keeps-tp1-again"),
    Offload("offload-mla-2-1", "mla-keeps-tp2", "mla-keeps-tp1"),
    Offload("offload-lora-2-1", "lora-keeps-tp2", "lora-keeps-tp1"),
)
SHARED = (
    Offload("pool-1-1", "gqa-shares-tp1", "gqa-shares-tp1-other"),
    Offload("pool-1-2", "gqa-shares-tp1", "gqa-shares-tp2"),
    Offload("pool-2-1", "gqa-shares-tp2", "gqa-shares-tp1-other"),
)
"""Pairs of engines that share a pool."""
MOVED_AND_KEPT = Pair("moves-and-keeps", "gqa-moves-and-keeps", "gqa-moves-and-keeps-other")
"""Two engines that have both connectors."""
NUM_ANSWERED = 500
"""The requests that this pair must answer."""
BYTES_OF_A_TOKEN = {"gqa": 8 * 4 * 128 * 4, "mqa": 8 * 128 * 4, "mla": 4 * 576 * 4}
"""What a token needs in a tier: layers, KV heads, keys and values of a head, float32. MLA has no heads."""


def for_offloads(*names: str) -> Any:
    """Parametrize a test over the pairs named, or over all; the argument is ``pair``.

    A test names the engine that stores only: it starts the other one itself when the first is dead.
    """
    named = [pair for pair in OFFLOADS if pair.name in names] if names else OFFLOADS
    assert not names or len(named) == len(names)
    return over_pairs(named, lambda pair: (pair.stores,))


def for_shared() -> Any:
    """Parametrize a test over the pairs that share a pool; the argument is ``pair``."""
    return pytest.mark.parametrize(
        "pair",
        [pytest.param(pair, id=pair.name, marks=pytest.mark.engines(pair.stores, pair.loads)) for pair in SHARED],
    )


@dataclass(frozen=True)
class Pass:
    """Prompts that went through an engine: the answers, and the engine's own counts."""

    answers: list[list[list[int]]]
    tokens: PromptTokens
    from_tiers: dict[str, int]
    num_tokens: int

    @property
    def computed_part(self) -> float:
        """The part of the prompt tokens that the engine computed."""
        return self.tokens.computed / self.num_tokens

    def counts(self) -> dict[str, int]:
        """Return the counts for the results of the matrix."""
        tiers = {name: self.from_tiers[source] for name, source in SOURCES.items()}
        return {"requests": len(self.answers), "tokens": self.num_tokens, "computed": self.tokens.computed, **tiers}


def send_pass(engine: Engine, prompts: Sequence[Sequence[int]], salt: str, at_once: int = AT_ONCE, **more: Any) -> Pass:
    """Send prompts, some at once. No request may fail, whatever the tiers do."""
    before, tiers = engine.prompt_tokens(), cached_tokens(engine.server.metrics())
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(lambda prompt: tokens_of(engine.complete(prompt, salt=salt, **more)), prompts))
    moved = engine.prompt_tokens() - before
    found = {name: count - tiers[name] for name, count in cached_tokens(engine.server.metrics()).items()}
    num_tokens = sum(map(len, prompts))
    assert moved.computed + moved.cached + moved.received == num_tokens
    return Pass(answers, moved, found, num_tokens)


def kill(engine: Engine, pool: EnginePool) -> None:
    """End an engine as the kernel does, without a last word."""
    engine.server.process.kill()
    del pool.running[engine.name]


def start(name: str, pool: EnginePool) -> Engine:
    """Start one more engine and wait for it; whoever needs other engines stops it."""
    pool.need([name])
    return pool.running[name]


def forget_own_cache(engine: Engine) -> None:
    """Let the engine forget what it has in its own cache, not what the tiers have."""
    deadline = time.monotonic() + RESET_SECONDS
    while True:
        if post(f"{engine.server.url}/reset_prefix_cache", {})["success"]:
            return
        # A block is referenced while it is being stored.
        assert time.monotonic() < deadline, "the engine keeps blocks in use"
        time.sleep(0.05)


def send_until_loaded(engine: Engine, prompt: Sequence[int], salt: str, num_tokens: int) -> list[list[int]]:
    """Send a prompt until ``num_tokens`` of it come from the tiers; its blocks are stored a moment after the answer."""
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        forget_own_cache(engine)
        sent = send_pass(engine, [prompt], salt)
        if sent.tokens.received == num_tokens:
            return sent.answers[0]
        assert time.monotonic() < deadline, f"{sent.tokens} where {num_tokens} tokens are stored"


def tier_bytes(engine: Engine, tier: str, direction: str) -> int:
    """Return how many bytes the engine has copied from (``up``) or to (``down``) a tier."""
    sample = f'kvferry:offload_tier_bytes_total{{direction="{direction}",tier="{tier}"}}'
    return int(engine.server.metrics().get(sample, 0))


def wait_for_tier_bytes(engine: Engine, tier: str, direction: str, num_bytes: int) -> None:
    """Wait until the engine has copied so many bytes since its start."""
    deadline = time.monotonic() + STORE_SECONDS
    while (found := tier_bytes(engine, tier, direction)) < num_bytes:
        assert time.monotonic() < deadline, f"{found} of {num_bytes} bytes were copied {direction}"
        time.sleep(0.05)


# the disk tier's folder

DiskPlace = tuple[str, RecordHeader, SegmentShape]


def on_disk(folder: Path) -> dict[bytes, DiskPlace]:
    """Return the segment, header and shape of each block in the folder of a disk tier, by the block's key."""
    if not (folder / "lock").exists():
        return {}
    directory = existing_directory(folder)
    try:
        reports = [report for report in inspect(directory) if report.shape is not None]
    finally:
        directory.close()
    return {
        header.key: (report.name, header, report.shape)
        for report in reports
        for header in report.headers
        if report.shape is not None
    }


def wait_until_on_disk(folder: Path) -> dict[bytes, DiskPlace]:
    """Wait until the disk tier has written everything; return what it has."""
    deadline, changed_at, held = time.monotonic() + DISK_SECONDS, time.monotonic(), on_disk(folder)
    while not held or time.monotonic() - changed_at < STILL_SECONDS:
        assert time.monotonic() < deadline, f"{len(held)} blocks on disk"
        time.sleep(0.1)
        if len(found := on_disk(folder)) != len(held):
            held, changed_at = found, time.monotonic()
    return held


def flip_byte_on_disk(folder: Path, place: DiskPlace) -> None:
    """Change one byte in the middle of a block, behind the back of the tier."""
    name, header, shape = place
    offset = shape.cell_offset(header.cell) + header.num_bytes // 2
    with (folder / cells_name(name)).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


# the pool

PoolPlace = tuple[int, int]
MAGIC, KEY_BYTES = b"kvferry1", 48
"""What ends the key behind each block in a pool; the block's length follows."""


def in_share(engine: Engine, share_bytes: int) -> dict[bytes, PoolPlace]:
    """Return the process and address of each block in the memory that an engine lends to the pool, by the block's key.

    Blocks that have left the pool are found too, until others overwrite them.
    """
    found: dict[bytes, PoolPlace] = {}
    for process_id in engine.server.process.process_ids():
        for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
            addresses, rights, *_ = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if end - begin >= share_bytes and rights.startswith("rw") and "kvferry-slab" not in line:
                found |= {key: (process_id, at) for key, at in _blocks_between(process_id, begin, end)}
    return found


def _blocks_between(process_id: int, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the key and address of each block with a trailer in this memory of a process."""
    with Path(f"/proc/{process_id}/mem").open("rb", buffering=0) as memory:
        memory.seek(begin)
        content = memory.read(end - begin)
    at = content.find(MAGIC, KEY_BYTES)
    while at != -1:
        behind = at + len(MAGIC)
        start = at - KEY_BYTES - int.from_bytes(content[behind : behind + 8], "little")
        if start >= 0:
            yield content[at - KEY_BYTES : at], begin + start
        at = content.find(MAGIC, behind)


def flip_byte_in_share(place: PoolPlace) -> None:
    """Change a byte of a block in the pool, behind the back of all engines."""
    process_id, address = place
    with Path(f"/proc/{process_id}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address + 1000)
        byte = memory.read(1)
        memory.seek(address + 1000)
        memory.write(bytes([byte[0] ^ 0xFF]))


# the slab


def slab_of(engine: Engine) -> NDArray[np.uint8]:
    """Return the bytes of the engine's slab, which can be written: the memfd as one of its processes has it open."""
    paths = [
        path
        for process_id in engine.server.process.process_ids()
        for path in Path(f"/proc/{process_id}/fd").glob("*")
        if os.path.islink(path) and "memfd:kvferry-slab" in os.readlink(path)
    ]
    assert paths, "no process of the engine has a slab"
    file_descriptor = os.open(paths[0], os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(file_descriptor, 0), np.uint8)
    finally:
        os.close(file_descriptor)


def place_of_a_value(before: NDArray[np.uint8], after: NDArray[np.uint8], page_bytes: int) -> int:
    """Return the offset of the highest byte of a float32 value, not a key, that was written between two looks.

    A page of one layer and head has its keys first, then its values. Keys can be changed without harm to the tokens:
    a key that no query likes is one that counts for nothing.
    """
    changed = np.flatnonzero((before != after).reshape(-1, 4).any(axis=1))
    values = changed[changed * 4 % page_bytes >= page_bytes // 2]
    magnitudes = np.abs(after.view(np.float32)[values])
    return int(values[int(np.flatnonzero(magnitudes > 0.1)[0])]) * 4 + 3


def check_identical(sent: Pass, pair: Offload, prompts: Sequence[Sequence[int]], reference: Reference) -> int:
    """Return how many answers are those of an engine without offload: all of them."""
    expected = reference.tokens(pair.model, prompts, len(sent.answers[0][0]))
    different = [
        len(prompt)
        for prompt, answer, tokens in zip(prompts, sent.answers, expected, strict=True)
        if answer != [tokens]
    ]
    assert not different, f"tokens differ for {len(different)} of {len(prompts)} prompts, of lengths {different}"
    return len(prompts)
