"""Costs in a file, as a worker uses them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.execution import transfer_costs
from kvferry.execution.kept_costs import decode_costs
from kvferry.integrations.vllm.settings import parse_settings
from kvferry.integrations.vllm.worker import role as worker_role
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.staging.strategy import TYPICAL_COSTS

from ..local.engines_in_process import IDENTITY, Rank
from ..local.test_kept_costs import choose, report
from ..local.test_staged_loads import Pair


@pytest.mark.parametrize("is_given", [True, False])
def test_a_worker_uses_and_keeps_them(is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    patches = {
        "get_tensor_model_parallel_rank": 0,
        "get_pp_group": SimpleNamespace(rank_in_group=0),
        "resolved_layout": NamedLayout.BHLNC,
        "shard_of": Rank(0, 1).shard,
        "identity_of": IDENTITY,
    }
    for name, value in patches.items():
        monkeypatch.setattr(worker_role, name, lambda *_, value=value: value)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    transfer = SimpleNamespace(engine_id="d", is_kv_producer=False)
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    given, found = (replace(TYPICAL_COSTS["memcpy"], seconds_per_copy=seconds) for seconds in (0.125, 0.25))
    monkeypatch.setattr(transfer_costs, "measure_costs", lambda *_: found)
    if is_given:
        path.write_text(report(given))
    settings = {"transport": "memcpy", "strategy": "auto", "costs_file": str(path)}
    none: Any = None
    role = worker_role.WorkerRole(config, none, parse_settings(settings))
    role.register_kv_caches({})
    assert role._remote_engines is not None
    costs = choose(role._remote_engines._strategist, Pair()).costs
    role.shutdown()
    assert costs == (given if is_given else found)
    assert decode_costs(path.read_bytes()) == {"memcpy": costs}
