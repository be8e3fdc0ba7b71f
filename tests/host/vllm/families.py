"""Engines of a small model of a published configuration: alone, and with kvferry in each of its uses."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...small_models.shrink import language_part, quantisation
from ...small_models.trial import STATES, engine_arguments, outcome_of
from ...small_models.weights import published, write_small_model
from .concurrent_flow import get_json, to_prefill
from .forked_engines import Answer, ForkedEngine
from .handoffs import random_prompt

MOVES, KEEPS = "KVFerryConnector", "KVFerryOffloadConnector"
MAX_TOKENS = 8
CACHE_BYTES = 448 << 20
PROMPTS = [random_prompt(29 + length, length) for length in (40, 129, 333, 513)]
"""All but the first are longer than the windows of the small models. 129 and 513 are whole blocks of 128 or 16 tokens
and one token more, which is what the CPU's kernel of MLA can compute after a load."""
STEP = 256
UNSTABLE = ("gemma-4-26B-A4B", "gemma-4-31B-it", "gemma-4-E4B-it")
"""Small models of which an engine alone computes other tokens at TP 2, and in other steps, in float32 too."""
ROUNDED_PROMPTS = [random_prompt(30 + index, STEP + 1) for index in range(2)]
"""For rounded models: an engine alone computes the last token in a step of its own, as a decode engine does."""


@dataclass(frozen=True)
class Family:
    """A published configuration, made small."""

    name: str
    path: Path
    arguments: Mapping[str, Any]
    is_quantised: bool
    rounded_prompts: Sequence[list[int]] = tuple(ROUNDED_PROMPTS)

    @property
    def is_rounded(self) -> bool:
        """Whether tokens depend on the number of ranks and on what shares a step: in bfloat16, and if quantised."""
        return self.arguments["dtype"] == "bfloat16" or self.is_quantised or self.name in UNSTABLE

    @property
    def tp(self) -> int:
        """The size of the prefill engine."""
        return 1 if self.is_rounded else 2

    @property
    def waves(self) -> list[list[list[int]]]:
        """The prompts: those of a wave are sent at once."""
        return [[prompt] for prompt in self.rounded_prompts] if self.is_rounded else [PROMPTS]

    @property
    def computes_prompts_whole(self) -> bool:
        """Whether an engine alone computes a rounded prompt in one step: vLLM's CPU build has no chunks with MLA."""
        return self.is_rounded and "attention_config" in self.arguments

    @classmethod
    def of(cls, name: str, models: Path, *, is_quantised: bool = True) -> "Family":
        """Write the model, and choose the arguments of its engines."""
        dtype = tried(name)[0] if is_quantised else "float32"
        path = write_small_model(name, models, quantised=is_quantised)
        has_scales = is_quantised and quantisation(published(name)) is not None
        family = cls(name, path, engine_arguments(name, dtype), has_scales)
        in_steps = {"max_num_batched_tokens": STEP} if family.is_rounded else {}
        return replace(family, arguments={**family.arguments, **in_steps})


def tried(name: str) -> tuple[str, str]:
    """Return the dtype in which vLLM's CPU build runs a small model, and no reason; or the last one tried, and why not.

    Both are what ``python -m tests.small_models --try`` has written.
    """
    found = outcome_of(name)
    return (found["dtype"], "") if found["runs"] else next(reversed(found["reasons"].items()))


def has_states(name: str) -> bool:
    """Return whether layers of a model keep states."""
    return any(field in language_part(published(name)) for field in STATES)


def runs_unquantised(name: str) -> bool:
    """Return whether vLLM's CPU build runs a model only where its weights are not quantised."""
    return bool(outcome_of(name).get("unquantised", {}).get("runs"))


@dataclass(frozen=True)
class Place:
    """Where the engines of one test put their files."""

    folder: Path

    def engine(self, family: Family, name: str, **more: Any) -> ForkedEngine:
        """Start an engine, which may not be ready yet."""
        ranks = int(more.get("tensor_parallel_size", 1))
        small = {"kv_cache_memory_bytes": CACHE_BYTES, "disable_log_stats": False}
        arguments = {**family.arguments, **small, "model": str(family.path), **more}
        cores = ("0|1" if ranks > 1 else "1") if name.startswith(("decode", "prefill")) else "0"
        return ForkedEngine(name, self.folder / f"{name}.log", arguments, {"VLLM_CPU_OMP_THREADS_BIND": cores})

    def moving(self, family: Family, name: str, tp: int = 1, **settings: Any) -> ForkedEngine:
        """Start an engine that hands prompts over."""
        settings = {"transport": "cma", "transfer_log": str(self.folder / f"{name}.loads"), **settings}
        return self.engine(family, name, tensor_parallel_size=tp, kv_transfer_config=transfer_config(MOVES, settings))

    def keeping(self, family: Family, name: str) -> ForkedEngine:
        """Start an engine that keeps blocks on the disk, in one folder for all engines of this place."""
        settings = {"host_bytes": 64 << 20, "disk_bytes": 256 << 20, "disk_path": str(self.folder / "disk")}
        config = transfer_config(KEEPS, {**settings, "loads": "always", "load_wait_seconds": 20.0})
        return self.engine(family, name, kv_transfer_config=config, prefix_caching_hash_algo="sha256_cbor")

    def loads(self, name: str) -> list[dict[str, Any]]:
        """Return what the ranks of an engine have loaded."""
        lines = [line for path in self.folder.glob(f"{name}.loads.rank*") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]


def transfer_config(connector: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(settings)}


def ask(engine: ForkedEngine, waves: Sequence[Sequence[list[int]]], max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """Send prompts without a connector's parameters."""
    answers = []
    for prompts in waves:
        engine.ask(prompts, max_tokens)
        answers += engine.answers()
    return answers


def hand_over(prefill: ForkedEngine, decode: ForkedEngine, waves: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Send prompts as a sequential router does: to the decode engine when prefill has answered."""
    answers = []
    for prompts in waves:
        prefill.ask(prompts, 1, [{"do_remote_decode": True, "do_remote_prefill": False}] * len(prompts))
        decode.ask(prompts, MAX_TOKENS, [answer.params for answer in prefill.answers()])
        answers += decode.answers()
    return [answer.tokens for answer in answers]


def hand_over_at_once(
    prefill: ForkedEngine, decode: ForkedEngine, waves: Sequence[Sequence[list[int]]]
) -> list[list[int]]:
    """Send prompts as a concurrent router does: to both engines at once."""
    address = re.findall(r"bootstrap queries are answered on (http://\S+:\d+)", prefill.log())[-1]
    entry = get_json(f"{address}/query")["0"]
    to_decode = {"do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": address}
    to_decode["remote_engine_id"] = entry["engine_id"]
    answers = []
    for prompts in waves:
        transfers = [f"xfer-{uuid.uuid4()}" for _ in prompts]
        decode.ask(prompts, MAX_TOKENS, [to_decode | {"transfer_id": each} for each in transfers])
        prefill.ask(prompts, 1, [to_prefill(each) for each in transfers])
        prefill.answers()
        answers += decode.answers()
    return [answer.tokens for answer in answers]
