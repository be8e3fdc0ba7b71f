"""An engine without a model: vLLM's scheduler, connector, cache groups and buffers; the test computes the "KV".

A token's KV is a label of the token and of all before it. The next token is a digest of every label that attention
would read, through the block table of the step: a wrong byte in a block that a request reads changes its tokens.
"""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .vllm_caches import CacheRank

MODULUS, VOCABULARY = 65521, 997
BLOCK_SIZE = 16
PATIENCE_SECONDS = 60.0


class LabelEngine:
    """One rank; ``asynchronous`` schedules a step before the results of the last one are known."""

    def __init__(
        self,
        rank: CacheRank,
        model: Path,
        transfer: dict[str, Any],
        *,
        asynchronous: bool = False,
        layout: str = "LBHNC",
        **arguments: Any,
    ) -> None:
        self.rank = rank
        config: Any = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            max_num_seqs=4,
            async_scheduling=False,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config={"kv_role": "kv_both", "engine_id": "labels", **transfer},
            **arguments,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = rank.config.num_blocks
        config.cache_config.kv_cache_layout = KVCacheLayout[layout].name
        config.scheduler_config.async_scheduling = asynchronous
        algorithm = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, algorithm)
        scheduler = config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=rank.config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, rank.config)
        self.worker.register_kv_caches(rank.caches)
        self._depth = config.max_concurrent_batches
        self._tokens: dict[str, list[int]] = {}
        self.num_computed = 0

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **parts: Any) -> None:
        """Queue a request."""
        self._tokens[name] = list(prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(prompt), sampling, None, **parts, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def run(self, **prompts: Sequence[int]) -> dict[str, list[int]]:
        """Run requests, and whatever the connector has to do behind them; return the new tokens of each."""
        for name, prompt in prompts.items():
            self.add(name, prompt)
        until, steps = time.monotonic() + PATIENCE_SECONDS, deque[tuple[Any, Any]]()
        while self.scheduler.has_requests() or steps:
            assert time.monotonic() < until, "the engine does not come to an end"
            output = self.scheduler.schedule()
            steps.append((output, self._execute(output)))
            if len(steps) == self._depth:
                self.scheduler.update_from_output(*steps.popleft())
            while steps and not self.scheduler.has_unfinished_requests():
                self.scheduler.update_from_output(*steps.popleft())
        return {name: self._tokens[name][len(prompt) :] for name, prompt in prompts.items()}

    def tokens_without_cache(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens of a request from its labels alone: no scheduler, no blocks, no connector."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            labels = labels_of(tokens)
            tokens.append(self._digest({layer: self._contents(layer, labels) for layer in self._in_order()}))
        return tokens[len(prompt) :]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Do as vLLM's model runner does with a step."""
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, output.num_scheduled_tokens[name]) for name in names]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=found,
        )

    def _compute(self, name: str, count: int) -> list[int]:
        """Write the KV of the next tokens of a request, and sample one where these are its last."""
        end = self.scheduler.requests[name].num_computed_tokens
        tokens = self._tokens[name]
        labels, positions = labels_of(tokens[:end])[end - count :], torch.arange(end - count, end)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        self.num_computed += count
        for layer, table in self._layers(tables):
            blocks, slots = torch.tensor(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
            self.rank.caches[layer][blocks, :, slots] = self._contents(layer, labels)
        if end < len(tokens):
            return []
        tokens.append(self._next(tables, end))
        return tokens[-1:]

    def _next(self, tables: Sequence[Sequence[int]], end: int) -> int:
        """Return the digest of what lies in the blocks of a request."""
        held = {}
        for layer, table in self._layers(tables):
            cache, ids = self.rank.caches[layer], torch.tensor(table[: -(-end // BLOCK_SIZE)])
            held[layer] = cache[ids].transpose(1, 2).flatten(0, 1)[:end]
        return self._digest(held)

    def _digest(self, held: dict[str, torch.Tensor]) -> int:
        """Return a digest of what attention reads: of each layer the numbers of all tokens, or of its window."""
        digest = 0
        for layer in self._in_order():
            spec = self.rank.specs[layer]
            read = held[layer][-spec.sliding_window :] if isinstance(spec, SlidingWindowSpec) else held[layer]
            digest += int((read.long().flatten() * torch.arange(1, read.numel() + 1)).sum())
        return digest % VOCABULARY

    def _in_order(self) -> list[str]:
        return [layer for layers in self.rank.groups() for layer in layers]

    def _layers(self, tables: Sequence[Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
        return [(layer, table) for layers, table in zip(self.rank.groups(), tables, strict=True) for layer in layers]

    def _contents(self, layer: str, labels: Sequence[int]) -> torch.Tensor:
        """Return the numbers of tokens, no two of which are equal: by token, head and channel."""
        _, heads, _, channels = self.rank.caches[layer].shape
        first = (torch.tensor(labels) * (1 + list(self.rank.specs).index(layer))) % MODULUS * 128
        numbers = torch.arange(heads * channels).reshape(heads, channels)
        return (first[:, None, None] + numbers).to(torch.float32)


def labels_of(tokens: Sequence[int]) -> list[int]:
    """Return a label for each token, of the token and all before it."""
    found, label = [], 1
    for token in tokens:
        label = (label * 31 + token + 7) % MODULUS
        found.append(label)
    return found
