"""What every forked engine needs: imported once, before the fork."""

import os
import re

# libgomp reads this when torch loads it. Threads that it had started here, a fork would not have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

_check_and_update_config = CpuPlatform.check_and_update_config


def _check_and_fork(_: type, config: object) -> None:
    """On a CPU vLLM starts an engine's processes anew, each of which imports vLLM again."""
    _check_and_update_config(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(_check_and_fork)


def _bind_to_cores() -> None:
    """Give a worker the cores that vLLM names in variables for its OpenMP, which reads them at a process's start."""
    named = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")
    if cores := [int(core) for core in re.findall(r"\d+", named)]:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


os.register_at_fork(after_in_child=_bind_to_cores)
