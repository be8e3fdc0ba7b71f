"""Counts wrong hits: one thing differs between two engines, and the second looks for what the first has stored.

    python benchmarks/wrong_hits.py --json wrong_hits.json

Both engines are vLLM's own configurations, cache groups and buffers; no model runs. vLLM's file-system tier
(``vllm/v1/kv_offload/tiering/fs``) needs a worker, and vLLM's runs on GPUs only: a small one here copies each rank's
pages to the tier's primary memory as vLLM's does, and the tier itself stores, looks up and loads. For kvferry the names
of the blocks are compared. A hit is wrong where the second engine would have computed other bytes than it finds: of the
changes above the line by what was changed, below the line by comparing bytes. The changes are those of
``tests/adapter/test_offload_names.py``.
"""

import json
import mmap
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import CanonicalKVCaches, LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from kvferry.arrays import Bytes
from kvferry.cli.console import open_console, progress
from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.plan.match import GroupBlocks
from tests.adapter import test_offload_names as names
from tests.adapter.model_files import write_model
from tests.adapter.test_offload_names import CHANGES, Edit, Engine, together
from tests.adapter.vllm_caches import CacheRank

BLOCK = 1
SECONDS = 10.0
SAME_HASH = b"tokens-of-the-block".ljust(32, b"\0")


class Found(StrEnum):
    """What the second engine finds."""

    MISS = "miss"
    REFUSED = "refused"
    HIT = "hit"
    WRONG_HIT = "WRONG HIT"


@dataclass(frozen=True)
class Row:
    """``change`` makes the second engine; ``prepare`` is how the first differs from a plain one."""

    change: Edit
    prepare: Edit | None = None
    must_hit: bool = False
    hashes: tuple[bytes, bytes] = (SAME_HASH, SAME_HASH)


def model(**fields: Any) -> Edit:
    """Set fields of the model's configuration, as its files do."""

    def edit(engine: Engine) -> None:
        path = engine.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def request(parts: str) -> bytes:
    """Return vLLM's hash of a block of one of the requests of the tests."""
    first, given = names.REQUESTS[parts]
    return names.block_hashes(**given)[first]


def hash_of(algorithm: str, seed: str = "") -> bytes:
    """Return vLLM's hash of the first block of a prompt, as a process with this seed makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", seed) if seed else patch.delenv("PYTHONHASHSEED", raising=False)
        function = get_hash_fn_by_name(algorithm)
        init_none_hash(function)
        hasher = get_request_block_hasher(16, function)
        return bytes(Request("r", names.PROMPT, SamplingParams(), None, block_hasher=hasher).block_hashes[0])


# Changes of the tests after which the second engine computes other bytes, or arranges them otherwise. Left out are
# those that only may: other kernels, other options without a use here. kvferry tells these apart too.
TAKEN = (
    "weights of one layer",
    "weights of a small tensor",
    "a tensor more",
    "a file of weights more",
    "commit of a hub's model",
    "RoPE base",
    "RoPE scaling",
    "RoPE scaling's factor",
    "norm epsilon",
    "window in the configuration",
    "size of the window",
    "architecture",
    "class of an architecture",
    "revision of the code",
    "own code",
    "image processor",
    "scales of an image encoder",
    "quantisation's parameters",
    "quantisation while loading",
    "layers not quantised",
    "compute dtype",
    "cache dtype",
    "kind of fp8",
    "scales of the cache",
    "planes or packed pages",
    "packing of a page",
    "tokens of a packed page",
    "tokens of a block",
    "name of a layer",
    "order of the layers",
    "a layer more",
    "kind of half of the layers",
    "groups in another order",
    "attention to later tokens",
    "made-up routes",
    "weights of the drafter",
    "weights of an adapter, in its place",
    "scale of an adapter, in its place",
)


def sized(**changes: Any) -> Edit:
    """Let the caches and the model's configuration have other heads."""
    in_config = {"num_kv_heads": "num_key_value_heads", "head_size": "head_dim"}
    return together(
        names.store(specs=dict.fromkeys(names.LAYERS, names.attention(**changes))),
        model(**{in_config[name]: value for name, value in changes.items()}),
    )


REQUESTS = (
    ("plain", "salt"),
    ("salt", "another salt"),
    ("plain", "adapter"),
    ("adapter", "adapter of another name"),
    ("adapter", "adapter of another path"),
    ("image", "another image"),
    ("image", "image elsewhere"),
    ("embeddings", "other embeddings"),
)
NUMBERED_IMAGES = together(names.see(mm_processor_cache_gb=0), names.set_argument("enable_prefix_caching", False))


def rows() -> dict[str, Row]:
    """Return all rows of the table."""
    cbor = hash_of("sha256_cbor")
    return {
        **{name: Row(change, prepare) for name, (_, change, prepare) in CHANGES.items() if name in TAKEN},
        "number of heads": Row(sized(num_kv_heads=2)),
        "head size": Row(sized(head_size=16), model(head_dim=8)),
        "hash algorithm": Row(CHANGES["hash algorithm"][1], hashes=(hash_of("sha256"), cbor)),
        "hash seed": Row(CHANGES["hash seed"][1], hashes=(cbor, hash_of("sha256_cbor", "7"))),
        # vLLM numbers images then, and both engines' first image has number 1.
        "an image where vLLM hashes none": Row(NUMBERED_IMAGES, NUMBERED_IMAGES),
        **{f"{one} / {other}": Row(nothing, hashes=(request(one), request(other))) for one, other in REQUESTS},
        "nothing": Row(nothing, must_hit=True),
        "the model's folder": Row(names.move_folder, must_hit=True),
        "memory": Row(names.set_argument("gpu_memory_utilization", 0.5), must_hit=True),
        "TP 1 stores, TP 2 loads": Row(two_ranks, must_hit=True),
        "TP 2 stores, TP 1 loads": Row(nothing, two_ranks, must_hit=True),
        "PP 1 stores, PP 2 loads": Row(two_stages, must_hit=True),
    }


def nothing(engine: Engine) -> None:
    """Change nothing."""


def two_ranks(engine: Engine) -> None:
    """Split the heads over two ranks."""
    engine.stored = {"tp_size": 2}
    engine.arguments["tensor_parallel_size"] = 2


def two_stages(engine: Engine) -> None:
    """Split the layers over two stages."""
    engine.stored = {"stages": (names.LAYERS[:2], names.LAYERS[2:])}
    engine.arguments["pipeline_parallel_size"] = 2


def pages(rank: CacheRank, config: Any) -> torch.Tensor:
    """Return the bytes of one labelled block of a rank, in the order in which vLLM registers its pages."""
    rank.label(
        GroupBlocks(
            group=str(group),
            first_token=0,
            last_token=16,
            source_block_ids=[BLOCK],
            destination_block_ids=[BLOCK],
        )
        for group in range(len(rank.groups()))
    )
    seen: list[CanonicalKVCaches] = []
    offloading = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
    spec: Any = SimpleNamespace(replicated_layout=False, config=offloading, get_worker=seen.append)
    OffloadingConnectorWorker(spec, config, rank.config).register_kv_caches(rank.caches)
    (caches,) = seen
    return torch.cat([cache.tensor[BLOCK, : cache.page_size_bytes] for cache in caches.tensors])


class InTree:
    """vLLM's file-system tier of one engine, and primary memory of two chunks: one to store from, one to load into."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        config = engine.config()
        settings = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
        )
        ranks = names.ranks(**{"layout": "LBHNC", **engine.stored})
        config.cache_config.block_size = ranks[0].config.kv_cache_groups[0].kv_cache_spec.block_size
        spec = TieringOffloadingSpec(build_offloading_config(config, ranks[0].config))
        # Pages, as O_DIRECT needs.
        memory = mmap.mmap(-1, 2 * spec.kv_bytes_per_chunk)
        self._memory: Bytes = np.frombuffer(memory, np.uint8).reshape(2, spec.kv_bytes_per_chunk)
        for number, rank in enumerate(ranks):
            found = pages(rank, config).numpy().view(np.uint8)
            begin = number * spec.cpu_page_size_per_worker
            self._memory[0, begin : begin + len(found)] = found
        self._tier = FileSystemTierManager(spec, self._memory.data, "fs", str(folder), 1, 1)
        self._request = ReqContext("r")

    def store(self, block_hash: bytes) -> None:
        """Store the labelled block."""
        assert self._run(block_hash, 0, self._tier.submit_store), "the tier did not store the block"

    def find(self, block_hash: bytes) -> Bytes | None:
        """Return what the tier loads for a block; None for a miss, and for a load that fails."""
        self._tier.on_new_request(self._request)
        key = make_offload_key(block_hash, 0)
        until = time.monotonic() + SECONDS
        while (answer := self._tier.lookup(key, self._request)) is LookupResult.RETRY:
            assert time.monotonic() < until, "the look-up does not end"
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.001)
        is_loaded = answer is LookupResult.HIT and self._run(block_hash, 1, self._tier.submit_load)
        return self._memory[1] if is_loaded else None

    @property
    def own(self) -> Bytes:
        """The bytes of the block as this engine writes them."""
        found: Bytes = self._memory[0]
        return found

    def close(self) -> None:
        self._tier.shutdown()

    def _run(self, block_hash: bytes, chunk: int, submit: Callable[[TransferJob], None]) -> bool:
        key = make_offload_key(block_hash, 0)
        submit(TransferJob(chunk, [key], np.array([chunk]), is_promotion=chunk == 1, req_context=self._request))
        self._tier.drain_jobs()
        until = time.monotonic() + SECONDS
        while not (ended := list(self._tier.get_finished_jobs())):
            assert time.monotonic() < until, "the copy does not end"
        return bool(ended[0].success)


def try_row(row: Row, folder: Path) -> dict[str, Found]:
    """Return what the second engine finds with each; both engines' models lie at the same path, one after the other."""
    place = folder / "host" / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        first = Engine(write_model(place), patch)
        if row.prepare is not None:
            row.prepare(first)
        ours = first.names()
        theirs = InTree(first, folder / "stored")
        theirs.store(row.hashes[0])
        theirs.close()
    shutil.rmtree(place.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        second = Engine(write_model(place), patch)
        row.change(second)
        found = InTree(second, folder / "stored")
        loaded = found.find(row.hashes[1])
        found.close()
        return {"in_tree": _judge(row, found.own, loaded), "kvferry": _ours(row, ours, second.names())}


def _judge(row: Row, own: Bytes, loaded: Bytes | None) -> Found:
    if loaded is None:
        return Found.MISS
    return Found.HIT if row.must_hit and np.array_equal(own, loaded) else Found.WRONG_HIT


def _ours(row: Row, first: BlockNames, second: BlockNames) -> Found:
    if first.private or second.private:
        return Found.REFUSED
    if first.keys(0, row.hashes[:1]) != second.keys(0, row.hashes[1:]):
        return Found.MISS
    return Found.HIT if row.must_hit else Found.WRONG_HIT


def print_table(found: dict[str, dict[str, Found]], table_of: dict[str, Row]) -> Table:
    """Return the table; what must hit stands below a line."""
    table = Table(title="one change between the engine that stores and the engine that loads")
    for column in ("change", "vLLM's fs tier", "kvferry"):
        table.add_column(column)
    last_wrong = [name for name in found if not table_of[name].must_hit][-1:]
    for name, answers in found.items():
        shown = [f"[bold red]{each}" if each is Found.WRONG_HIT else str(each) for each in answers.values()]
        table.add_row(name, *shown, end_section=[name] == last_wrong)
    return table


def main(
    only: Annotated[str, typer.Option(help="A part of the names of the rows to try; all without it.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table to this file too.")] = None,
) -> None:
    """Print the table. Exit status 1 where kvferry has a wrong hit, or misses what must hit."""
    console = open_console()
    chosen = {name: row for name, row in rows().items() if only in name}
    found: dict[str, dict[str, Found]] = {}
    with tempfile.TemporaryDirectory() as folder, progress("starting vLLM's configurations") as announce:
        for number, (name, row) in enumerate(chosen.items()):
            announce(f"{number + 1} of {len(chosen)}: {name}")
            found[name] = try_row(row, Path(folder) / str(number))
    console.print(print_table(found, chosen))
    counts = {
        side: {each.value: [answers[side] for answers in found.values()].count(each) for each in Found}
        for side in ("in_tree", "kvferry")
    }
    console.print(counts)
    if json_path is not None:
        json_path.write_text(json.dumps({"rows": found, "counts": counts}, indent=1))
    missed = [name for name, row in chosen.items() if row.must_hit and found[name]["kvferry"] is not Found.HIT]
    if missed or counts["kvferry"][Found.WRONG_HIT.value]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
