"""What every forked engine needs: imported once, before the fork."""

import os

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
