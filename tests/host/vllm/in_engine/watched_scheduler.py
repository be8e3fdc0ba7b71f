"""vLLM's scheduler, which writes after each step what is under way: an engine without requests must have nothing left.

An engine is told to use the class by ``--scheduler-cls watched_scheduler.WatchedScheduler``, with this folder in
``PYTHONPATH`` and a file in the environment variable ``KVFERRY_WATCH_FILE``.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.offload_connector import KVFerryOffloadConnector

VARIABLE = "KVFERRY_WATCH_FILE"


class WatchedScheduler(Scheduler):
    """Counts what the scheduler and its connectors keep for requests."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        path = Path(os.environ[VARIABLE])
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(self.what_is_under_way()))
        draft.replace(path)
        return outputs

    def what_is_under_way(self) -> dict[str, int]:
        """Return counts by name: those of the connectors are theirs alone, the others are vLLM's own."""
        pool = self.kv_cache_manager.block_pool
        found = {
            "requests": len(self.requests),
            "used blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }
        for connector in getattr(self.connector, "sub_connectors", [self.connector]):
            if isinstance(connector, KVFerryConnector):
                found |= under_way_in_moves(connector)
            elif isinstance(connector, KVFerryOffloadConnector):
                found |= under_way_in_offload(connector)
        return found


def under_way_in_moves(connector: KVFerryConnector) -> dict[str, int]:
    """Return what the connector that moves prompts keeps: as a prefill engine, and as a decode engine."""
    role = connector._scheduler
    state = role._state
    return {
        "holds": len(state.holds._holds),
        "ended holds": len(state.holds._ended),
        "held blocks": state.kept_blocks.num_kept,
        "remote holds": len(state.leases._holds._uses),
        "loads": len(role._loading),
        "expected": len(role._destination._expected),
        "quarantined": len(role._quarantine._kept_since),
    }


def under_way_in_offload(connector: KVFerryOffloadConnector) -> dict[str, int]:
    """Return what the offload connector and its tiers keep."""
    role = connector._scheduler
    if role._start.tiers is None:
        return {"offload is not ready": 1}
    stack = role._start.tiers.stack
    host = stack._host.snapshot()
    of_tiers = {"offload " + name: host[f"num_{name}"] for name in ("pinned", "loads", "stores")}
    return {
        "offload requests": len(role._requests),
        "offload promises": len(role._loads.promised),
        "offload loads of requests": len(role._loads.jobs),
        "offload stores of requests": len(role._stores.jobs),
        "offload kept blocks": role._stores.kept.num_kept,
        "offload askers": len(stack._askers),
        "offload blocks being stored": sum(group["being_stored"] for group in host["groups"].values()),
        **of_tiers,
    }
