"""``KVFerryOffloadConnector`` as vLLM calls it in a worker, alone and beside ``KVFerryConnector``."""

import gc
import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm import connector as connector_module
from kvferry.integrations.vllm.engine_core import FIRST_WAIT_SECONDS, IdleSteps
from kvferry.integrations.vllm.offload_connector import KVFerryOffloadConnector
from kvferry.integrations.vllm.offload_step import OffloadStatistics, OffloadStep
from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.worker import caches as worker_caches
from kvferry.layout.named_layouts import NamedLayout

from ..support.dense import shard_for
from .model_files import CONFIG
from .offload_engine import Engine, make_config


def connector_of(worker: Mock) -> Any:
    connector: Any = object.__new__(KVFerryOffloadConnector)
    connector._worker = connector._side = worker
    connector._connector_metadata, connector._idle_steps, connector._ranks = None, IdleSteps(), None
    worker.take_finished.return_value = (set(), set())
    worker.take_report.return_value = worker.take_statistics.return_value = None
    return connector


def run_step(connector: Any, orders: OffloadStep, compute: Callable[[], object] = lambda: None) -> Any:
    """Run a step in the order of vLLM's model runner."""
    output = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set[str]())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
        patch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
        with KVConnectorModelRunnerMixin._get_kv_connector_output(output) as found:  # type: ignore[arg-type]
            compute()
    return found


def names_of(worker: Mock) -> list[str]:
    return [call[0] for call in worker.method_calls]


def test_loads_are_marked_before_the_step_and_stores_begin_behind_it() -> None:
    worker = Mock()
    connector, orders = connector_of(worker), OffloadStep()
    run_step(connector, orders, lambda: worker.computes())
    expected = ["begin_step", "computes", "start_loads", "finish_step", "take_finished", "take_statistics"]
    assert names_of(worker) == [*expected, "take_report"]
    assert worker.finish_step.call_args.kwargs == {"has_failed": False}


def test_a_step_that_failed_is_named_so() -> None:
    """A connector ends its step in a ``finally`` of vLLM: what was not computed must not be stored."""
    worker = Mock()
    with pytest.raises(ZeroDivisionError):
        run_step(connector_of(worker), OffloadStep(), lambda: divmod(1, 0))
    assert worker.finish_step.call_args.kwargs == {"has_failed": True}


@pytest.mark.parametrize(("computes", "waits"), [(True, [0, 0, 0, 0]), (False, [1, 2, 4, 1])])
def test_only_a_step_that_computes_nothing_waits(computes: bool, waits: list[float]) -> None:
    worker = Mock()
    connector = connector_of(worker)
    for received in (set[str](), set[str](), {"r"}, set[str]()):
        worker.take_finished.return_value = (received, received)
        output = run_step(connector, OffloadStep(computes=computes))
        assert (output.finished_recving, output.failed_recving) == (received, received)
    found = [call.args[0] / FIRST_WAIT_SECONDS for call in worker.take_finished.call_args_list]
    assert found == waits


def test_a_step_sleeps_as_long_as_the_scheduler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(connector_module.time, "sleep", slept.append)
    connector = connector_of(Mock())
    for seconds in (0.0, 0.004):
        run_step(connector, OffloadStep(computes=False, wait_seconds=seconds))
    assert slept == [0.004]


def test_no_preemption_waits_for_the_connector_and_all_cache_groups_are_handled() -> None:
    assert not connector_of(Mock()).requires_kv_delivery
    assert supports_hma(KVFerryOffloadConnector)


def children() -> Any:
    """Return an engine's configuration with both of kvferry's connectors."""
    given = [{"kv_connector": "KVFerryConnector"}, {"kv_connector": "KVFerryOffloadConnector"}]
    settings: list[dict[str, Any]] = [{}, {"host_bytes": "1 GiB"}]
    connectors = [
        {**name, "kv_role": "kv_both", "kv_connector_extra_config": each}
        for name, each in zip(given, settings, strict=True)
    ]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": connectors}
    )
    model = SimpleNamespace(use_mla=False, is_hybrid=False)
    return SimpleNamespace(kv_transfer_config=config, model_config=model)


def test_both_connectors_fit_under_a_multi_connector() -> None:
    register()
    config = children()
    assert MultiConnector.get_required_kvcache_layout(config) == "BHLNC"
    assert MultiConnector.all_children_support_hma(config.kv_transfer_config)
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryOffloadConnector") is KVFerryOffloadConnector
    assert not MultiConnector.requires_piecewise_for_cudagraph(config.kv_transfer_config.kv_connector_extra_config)


def test_the_connector_kills_the_other_ranks_of_an_engine_that_has_lost_one(tmp_path: Path) -> None:
    """Without the other connector, too, which watches them as well."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=time.sleep, args=(60,), name=f"VllmWorker-{each}", daemon=True) for each in (0, 1)]
    for rank in ranks:
        rank.start()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = Engine(make_config(tmp_path))
    try:
        ranks[0].kill()
        ranks[1].join(10.0)
        assert ranks[1].exitcode == -signal.SIGKILL
    finally:
        engine.scheduler.connector.shutdown()
        for rank in ranks:
            rank.kill()
            rank.join()


def test_statistics_of_a_rank_survive_a_multi_connector() -> None:
    register()
    statistics = OffloadStatistics()
    statistics.record(JobResult("load 1", None, num_bytes=8, transfer_seconds=0.5), "load")
    worker = Mock()
    connector = connector_of(worker)
    worker.take_statistics.return_value = statistics
    multi: Any = object.__new__(MultiConnector)
    multi._connectors = [connector]
    data = multi.get_kv_connector_stats().data
    sent = {name: each.data for name, each in data.items()}
    [read] = MultiConnector.build_kv_connector_stats(sent).data.values()  # type: ignore[union-attr]
    assert read.data["copy_bytes"] == {"load": [8]}
    empty = KVFerryOffloadConnector.build_kv_connector_stats()
    assert empty is not None
    assert empty.is_empty()


class EngineSettings(SimpleNamespace):
    """Settings of an engine, which cannot be hashed, as vLLM's."""

    __hash__ = None  # type: ignore[assignment]


def test_a_cache_is_prepared_once_for_all_connectors_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    shard = shard_for(
        layers=["0"],
        num_kv_heads=2,
        head_size=8,
        itemsize=4,
        block_size=4,
        num_blocks=4,
        layout=NamedLayout.BHLNC,
    )

    def config(engine: EngineSettings) -> Any:
        return SimpleNamespace(compilation_config=engine)

    monkeypatch.setattr(worker_caches, "_prepared", [])
    monkeypatch.setattr(worker_caches, "resolved_layout", lambda _: NamedLayout.BHLNC)
    monkeypatch.setattr(worker_caches, "shard_of", lambda *_: shard)
    for name in ("check_engine_kernels", "ask_for_amx", "fill_scales_in_slots", "_use_huge_pages"):
        monkeypatch.setattr(worker_caches, name, lambda *_, name=name: calls.append(name))
    first, second = EngineSettings(), EngineSettings()
    nothing: Any = None
    for engine in (first, first, second, first):
        assert worker_caches.register_caches(config(engine), nothing, {}, 0, 0) is shard
    once = ["check_engine_kernels", "ask_for_amx", "_use_huge_pages", "fill_scales_in_slots"]
    assert calls == once * 2
    del first, engine
    gc.collect()
    worker_caches.register_caches(config(third := EngineSettings()), nothing, {}, 0, 0)
    assert len(worker_caches._prepared) == 2, f"engines that are gone are forgotten: {third}"


def test_a_cache_that_fails_its_check_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Mock(side_effect=[ValueError, None])
    monkeypatch.setattr(worker_caches, "_prepared", [])
    monkeypatch.setattr(worker_caches, "resolved_layout", lambda _: NamedLayout.BHLNC)
    monkeypatch.setattr(worker_caches, "shard_of", lambda *_: SimpleNamespace(regions=()))
    monkeypatch.setattr(worker_caches, "check_engine_kernels", checks)
    monkeypatch.setattr(worker_caches, "fill_scales_in_slots", lambda *_: None)
    config: Any = SimpleNamespace(compilation_config=EngineSettings())
    nothing: Any = None
    with pytest.raises(ValueError):
        worker_caches.register_caches(config, nothing, {}, 0, 0)
    worker_caches.register_caches(config, nothing, {}, 0, 0)
    assert checks.call_count == 2
