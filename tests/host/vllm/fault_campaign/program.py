"""The processes of the campaign's engines: one that has imported vLLM, one with an engine, and the engine's lives.

Starting a process with vLLM costs half a minute. So one process imports vLLM and forks, for each engine, a process that
builds it and forks again, for each *life* of the engine. An engine opens its tiers in its first steps, so each life
has its own slab, folder and threads. It is killed with SIGKILL and forked anew as often as the campaign asks.

Every process connects to the campaign, says what it is, and then does what it is told; it ends when the campaign does.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.llm_engine import LLMEngine

from kvferry.execution.device import HOST
from kvferry.execution.executor import Executor
from kvferry.integrations.vllm.offload_connector import KVFerryOffloadConnector
from kvferry.integrations.vllm.scheduler import offload, offload_tiers
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks
from kvferry.tiers import local_disk
from kvferry.tiers.disk import runs, segments
from kvferry.tiers.lower_copies import CopySettings
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Stack

from ....support.offload_state import role_state
from .faulty_os import Fault, FaultyOs
from .watched_tiers import StoredBytes, WatchedDisk, WatchedPool, bytes_on_disk

START_SECONDS, REQUEST_SECONDS, QUIET_SECONDS, POOL_SECONDS = 30.0, 30.0, 20.0, 20.0

Prompt = tuple[list[int], str]
"""Tokens and salt."""


def main() -> NoReturn:
    """Import vLLM, then fork an engine whenever the campaign sends one."""
    address = sys.argv[1]
    serve(address, {"is": "program"}, partial(_build_and_serve, address))


def serve(address: str, hello: dict[str, Any], make_child: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Fork a child for each order of the campaign; end when the campaign does."""
    connection = Client(address)
    connection.send({**hello, "process_id": os.getpid()})
    while True:
        try:
            order = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        # The kernel buries the children.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            try:
                make_child(order)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(1)


def _build_and_serve(address: str, order: dict[str, Any]) -> None:
    engine = build(order)
    serve(address, {"is": "engine"}, lambda life: Life(engine, life).serve(address))


def build(order: dict[str, Any]) -> LLMEngine:
    """Return an engine in this process; its first step has not begun."""
    transfer = order.pop("transfer", None)
    return LLMEngine.from_engine_args(
        EngineArgs(
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            distributed_executor_backend="uni",
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **order,
        )
    )


class Life:
    """One life of an engine, in a process of its own. ``order`` says what differs from other lives.

    Deadlines are shorter than those of an engine that serves, so that a campaign is over in minutes.
    """

    def __init__(self, engine: LLMEngine, order: dict[str, Any]) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.params = SamplingParams(max_tokens=order["max_tokens"], temperature=0.0, ignore_eos=True)
        self.num_sent = 0
        self.role: offload.OffloadScheduler | None = None
        self.disk: WatchedDisk | None = None
        self.pool: WatchedPool | None = None
        self.most_bytes = 0
        self.faults = FaultyOs(self._measure)
        self.order = order
        connector = self.core.scheduler.connector
        if connector is not None:
            assert isinstance(connector, KVFerryOffloadConnector)
            self.role = connector._scheduler
            self.stored = StoredBytes(Path(order["stored_bytes"]))
            self._prepare_tiers()
            self._start()

    def _prepare_tiers(self) -> None:
        """Let the tiers that this life opens have its settings, be watched, and use system calls that can fail."""
        order = self.order
        given = {name: order[name] for name in ("disk_path", "disk_bytes", "pool_master", "pool_bytes")}
        open_tiers = offload.open_tiers
        offload.open_tiers = lambda settings, *rest: open_tiers(  # type: ignore[assignment]
            msgspec.structs.replace(settings, **given), *rest
        )
        copies = CopySettings(hang_seconds=order["hang_seconds"], suspend_seconds=order["suspend_seconds"])
        offload_tiers.Stack = partial(Stack, settings=copies)  # type: ignore[assignment,misc]
        offload_tiers.LocalDisk = self._open_disk  # type: ignore[assignment,misc]
        offload_tiers.RemotePool = self._open_pool  # type: ignore[assignment,misc]
        local_disk.RETRY_SECONDS = order["retry_seconds"]  # type: ignore[misc]
        segments.os = self.faults  # type: ignore[assignment]
        if not order["verifies"]:
            runs.checksum = lambda *_: 0  # type: ignore[assignment]
        if order["fault"] is not None:
            self.faults.arm(Fault(**order["fault"]))
        # Threads do not survive a fork.
        worker = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
        worker._executor = Executor((), HOST)

    def _open_disk(self, *arguments: Any, **options: Any) -> WatchedDisk:
        seconds = self.order["stall_seconds"]
        self.disk = WatchedDisk(self.stored, *arguments, stall_seconds=seconds, **options)
        self._measure()
        return self.disk

    def _open_pool(self, *arguments: Any, **options: Any) -> WatchedPool:
        self.pool = WatchedPool(self.stored, *arguments, **options)
        return self.pool

    def _start(self) -> None:
        """Step until all ranks can copy."""
        assert self.role is not None
        deadline = time.monotonic() + START_SECONDS
        while self.role._start.is_under_way and time.monotonic() < deadline:
            self._step()

    def serve(self, address: str) -> None:
        """Do what the campaign asks."""
        connection: Connection = Client(address)
        connection.send({"is": "life", "process_id": os.getpid(), "started": self.started()})
        while True:
            try:
                verb, arguments = connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            connection.send(getattr(self, verb)(**arguments))

    def started(self) -> dict[str, Any]:
        """Return how far the start has come, and what the disk tier has found."""
        if self.role is None:
            return {}
        found = self.disk.snapshot() if self.disk is not None else {}
        refused = sum(found.get("refused", {}).values())
        return {"state": self.role._start.state.name.lower(), "blocks": found.get("num_blocks", 0), "refused": refused}

    # Requests.

    def send(self, prompts: Sequence[Prompt], fault: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send prompts at once, and return their tokens and what the tiers did until they were quiet again.

        A fault is there from the first step to the end of all copies.
        """
        self._forget_own_cache()
        before = self.counts()
        if fault is not None:
            self.faults.arm(Fault(**fault))
        outputs = self._run(prompts)
        self._step_while(lambda: self.core.scheduler.has_requests(), self.order["fault_seconds"])
        num_met = self.faults.disarm()
        is_quiet = self.settle()
        counts = {name: number - before[name] for name, number in self.counts().items()}
        return {"outputs": outputs, "met": num_met, "counts": counts, "kept": self.kept(), "quiet": is_quiet}

    def _run(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Return the end of each request: its tokens, how it finished, and how many prompt tokens were not computed."""
        places, ended = {}, list[dict[str, Any]]()
        for place, (tokens, salt) in enumerate(prompts):
            self.num_sent += 1
            prompt: Any = {"prompt_token_ids": tokens, "cache_salt": salt}
            self.engine.add_request(str(self.num_sent), prompt, self.params)
            places[str(self.num_sent)] = place
            ended.append({"tokens": [], "finish": "none", "cached": 0, "prompt": len(tokens)})
        deadline = time.monotonic() + REQUEST_SECONDS
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline:
            for output in self._step():
                if output.finished:
                    [sample] = output.outputs
                    ended[places[output.request_id]] |= {
                        "tokens": list(sample.token_ids),
                        "finish": str(sample.finish_reason),
                        "cached": output.num_cached_tokens or 0,
                    }
        if self.engine.has_unfinished_requests():
            self.engine.abort_request(list(places))
        return ended

    def _step(self) -> list[Any]:
        outputs = self.engine.step()
        if not outputs:
            time.sleep(0.0005)
        return outputs

    def _step_while(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Step while the condition holds; return whether it held no longer in time."""
        deadline = time.monotonic() + seconds
        while condition():
            if time.monotonic() > deadline:
                return False
            self._step()
        return True

    def _forget_own_cache(self) -> None:
        assert self._step_while(lambda: not self.engine.reset_prefix_cache(), QUIET_SECONDS), "blocks stay in use"

    def settle(self, with_pool: bool = False) -> bool:
        """Step until nothing moves and no tier is left alone; return whether that came in time."""
        if self.role is None:
            return self._step_while(lambda: self.core.scheduler.has_requests(), QUIET_SECONDS)
        if with_pool:
            assert self.pool is not None
            self._step_while(lambda: not self._is_pool_back(), POOL_SECONDS)
        return self._step_while(self._is_busy, QUIET_SECONDS)

    def _is_pool_back(self) -> bool:
        assert self.pool is not None
        return bool(self.pool.snapshot()["is_reachable"])

    def _is_busy(self) -> bool:
        assert self.role is not None
        if self.core.scheduler.has_requests():
            return True
        lower = role_state(self.role)["tiers"].get("lower", {})
        if any(tier["is_suspended"] for tier in lower.values()):
            self._poll()
            return True
        return any(tier is not None and tier.snapshot()["num_waiting"] for tier in (self.disk, self.pool))

    def _poll(self) -> None:
        """Let the tiers go on while the engine has no reason to step."""
        if self.role is not None and self.role._start.tiers is not None:
            self.role._start.tiers.stack.poll(time.monotonic())

    # What the campaign asks.

    def keys(self, prompts: Sequence[Prompt]) -> list[list[BlockKey]]:
        """Return the keys of the whole blocks of each prompt."""
        assert self.role is not None
        tiers = self.role._start.tiers
        assert tiers is not None
        found = []
        for tokens, salt in prompts:
            prompt: Any = {"prompt_token_ids": tokens, "cache_salt": salt}
            given = self.engine.input_processor.process_inputs(
                "keys", prompt, self.params, supported_tasks=self.engine.get_supported_tasks()
            )
            request, _ = self.core.preprocess_add_request(given)
            blocks = RequestBlocks(self.role._groups, tiers.names)
            blocks.update(request.block_hashes)
            found.append(list(blocks.keys[0]))
        return found

    def where(self, keys: Sequence[Sequence[BlockKey]]) -> list[list[int]]:
        """Return where each block would be loaded from, as :meth:`Stack.locate`."""
        assert self.role is not None
        assert self.role._start.tiers is not None
        stack, now = self.role._start.tiers.stack, time.monotonic()
        return [stack.locate(of_prompt, now).tolist() for of_prompt in keys]

    def counts(self) -> Counter[str]:
        """Return what has been counted so far: blocks by what became of them."""
        counts = Counter[str]()
        if self.role is None or self.role._start.tiers is None:
            return counts
        for name, lower in role_state(self.role)["tiers"]["lower"].items():
            counts[f"{name} loaded"] = lower["blocks_up"]
            counts[f"{name} stored"] = lower["blocks_down"]
            for reason, number in lower["failures"].items():
                counts[f"failed: {reason}"] += number
        counts["failed loads"] = self.role._counts["failed_loads"]
        counts["wrong blocks"] = self.stored.num_wrong
        return counts

    def kept(self) -> dict[str, Any]:
        """Return everything that is pinned, kept, promised or moving: nothing, when the engine is at rest."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        found: dict[str, Any] = {"engine blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()}
        if self.role is not None:
            state = role_state(self.role)
            found |= {name: state[name] for name in ("requests", "promised", "loads", "stores", "kept_blocks")}
            if state["tiers"]:
                stack = state["tiers"]
                found |= {"stack requests": stack["requests"], "blocks in chunks": stack["blocks_in_chunks"]}
                found |= _open_copies("host_memory", stack["host_memory"])
                for name, lower in stack["lower"].items():
                    for queue in ("promotions", "writes", "queued_chunks", "stuck_blocks"):
                        found[f"{name} {queue}"] = lower[queue]
        for name, tier in (("local_disk", self.disk), ("remote_pool", self.pool)):
            if tier is not None:
                found |= _open_copies(name, tier.snapshot())
        return {name: what for name, what in found.items() if what}

    def most_on_disk(self) -> int:
        """Return the most bytes that the folder occupied after a call that may take room."""
        self._measure()
        return self.most_bytes

    def _measure(self) -> None:
        folder = self.order.get("disk_path")
        if folder:
            self.most_bytes = max(self.most_bytes, bytes_on_disk(Path(folder)))


def _open_copies(tier: str, snapshot: dict[str, Any]) -> dict[str, int]:
    return {f"{tier} {name}": snapshot[name] for name in ("num_pinned", "num_loads", "num_stores")}


if __name__ == "__main__":
    main()
