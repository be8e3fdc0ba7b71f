"""A reset of the cache through vLLM's own scheduler, block pool and both roles of a connector, without a model."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.integrations.vllm.worker import role as worker_role

from .label_engine import LabelEngine
from .model_files import write_model
from .vllm_caches import CacheRank, full

PROMPT = list(range(1, 60))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabelEngine]:
    """A prefill engine of one rank, whose core calls its worker as vLLM's executor does."""
    rank = CacheRank({"l.0": full(1), "l.1": full(1)}, "LBHNC", num_blocks=12)
    for name, value in (
        ("get_tensor_model_parallel_rank", 0),
        ("get_pp_group", SimpleNamespace(rank_in_group=0)),
        ("register_caches", rank.shard),
    ):
        monkeypatch.setattr(worker_role, name, lambda *_, value=value: value)
    transfer = {"kv_connector": "KVFerryConnector", "kv_connector_extra_config": {"transport": "cma"}}
    engine = LabelEngine(rank, write_model(tmp_path / "model"), transfer)
    engine.scheduler.connector._scheduler._engine._core = SimpleNamespace(
        get_weight_version=lambda: "default", collective_rpc=lambda call, _, arguments: call(None, *arguments)
    )
    yield engine
    engine.shutdown()


def prefill(engine: LabelEngine) -> dict[str, Any]:
    """Return the answer of a prompt that goes to a decode engine."""
    engine._tokens["r"] = list(PROMPT)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    engine.scheduler.add_request(Request("r", list(PROMPT), sampling, None, block_hasher=engine._hasher))
    for _ in range(4):
        output = engine.scheduler.schedule()
        answers = engine.scheduler.update_from_output(output, engine._execute(output))
        for answer in (each for outputs in answers.values() for each in outputs.outputs):
            if answer.kv_transfer_params:
                return answer.kv_transfer_params  # type: ignore[no-any-return]
    raise AssertionError("no answer names a hold")


def test_hole_7_a_prefix_cache_is_reset_beside_a_held_prompt_and_a_connector_s_cache_with_it(
    engine: LabelEngine,
) -> None:
    scheduler = engine.scheduler
    role, writes = scheduler.connector._scheduler, engine.worker._worker._source.writer._writes
    params = prefill(engine)
    assert scheduler.reset_prefix_cache(), "a held prompt prevents the reset of the engine's own cache"
    assert (role._state.holds.num_holds, len(writes._prompts)) == (1, 1), "the hold stays"
    assert scheduler.kv_cache_manager.usage > 0
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not writes._prompts, "no step has run, and no decode engine can load the prompt any more"
    assert (role._state.holds.num_holds, scheduler.kv_cache_manager.usage) == (0, 0)
    assert role._state.epoch != params["kvferry"]["epoch"]
    again = prefill(engine)
    assert again["kvferry"]["epoch"] == role._state.epoch
    assert writes._prompts
