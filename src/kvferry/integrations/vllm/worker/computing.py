"""Tells when a rank computes: between vLLM's calls of its model runner, other work may have the rank's cores.

A connector's hooks do not show it: vLLM samples after the last of them, encodes images before the first, and runs
dummy batches without any.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from kvferry.integrations.vllm.engine_core import on_the_stack


def watch_computing(computing: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the calling rank's model runner compute within ``computing()``: forward passes, sampling and dummy batches.

    A step without tokens computes nothing. To be called while vLLM registers the caches; without a rank of vLLM's on
    the caller's stack, as in tests of a connector alone, nothing is watched.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    worker = on_the_stack(WorkerBase)
    if worker is None:
        return

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def compute(*arguments: Any, **named: Any) -> Any:
            with computing():
                return call(*arguments, **named)

        return compute

    runner = worker.model_runner
    execute_model, compute_model = runner.execute_model, within(runner.execute_model)

    @wraps(execute_model)
    def execute(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        run = compute_model if scheduler_output.total_num_scheduled_tokens else execute_model
        return run(scheduler_output, *arguments, **named)

    runner.execute_model = execute
    runner.sample_tokens, runner._dummy_run = within(runner.sample_tokens), within(runner._dummy_run)
