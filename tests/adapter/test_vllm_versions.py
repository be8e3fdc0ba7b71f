"""Which vLLM versions kvferry accepts: tested ones, compared ones, and unknown ones whose sources fit."""

import importlib
import logging
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.integrations.vllm import plugin, versions
from kvferry.integrations.vllm.connector_configs import SEVERAL
from kvferry.integrations.vllm.engine_core import RANK_NAME, Engine, RankMonitor
from kvferry.integrations.vllm.names import checker
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, check_filled_whole
from kvferry.integrations.vllm.scheduler.offload import check_offloadable
from kvferry.integrations.vllm.versions import Support, check_version, report_version
from kvferry.layout.shard import CacheKind

from .engine_flags import refused_lines
from .vllm_copies import FOLDER, changed_copy, parsed_once

UNKNOWN = "0.99.0"
NAMES = checker.used_in(checker.number_of(versions.installed_version()))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was compared and said, not what the files say."""
    monkeypatch.setattr(checker, "parsed", parsed_once)
    monkeypatch.setattr(versions, "_has_reported", False)
    versions._problem_of.cache_clear()
    yield
    versions._problem_of.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, version: str, folder: Path | None = FOLDER) -> None:
    """Let a version be the installed one, with its sources in a folder; the names are those of the installed vLLM."""
    monkeypatch.setattr(checker, "used_in", lambda _: NAMES)
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    monkeypatch.setattr(versions, "_installed_folder", lambda: folder)


def test_the_installed_version_is_tested() -> None:
    """Where the adapter's tests run on the sources of another release, that one was compared."""
    if versions.installed_version().startswith(tuple(f"{tested}." for tested in versions.TESTED)):
        assert check_version() is Support.TESTED
    else:
        assert check_version() in (Support.COMPARED, Support.UNKNOWN)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.7+cpu"])
def test_a_release_whose_engines_the_tests_run_is_accepted_without_a_look_at_it(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, version, folder=None)
    assert check_version() is Support.TESTED


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0", "0.33.0+cu129"])
def test_a_compared_release_is_accepted_without_a_look_at_it(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version, folder=None)
    assert check_version() is Support.COMPARED


@pytest.mark.parametrize("version", [UNKNOWN, "0.30.1", "0.33.1", "1.0.0rc1", "dev"])
def test_an_unknown_release_is_accepted_where_all_names_fit(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    assert check_version() is Support.UNKNOWN


@pytest.mark.parametrize("version", ["0.29.0", "0.8.5"])
def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(KVFerryError, match=r"0\.30 and later") as caught:
        check_version()
    assert caught.value.reason is Reason.UNSUPPORTED_VERSION


RENAMED = {
    "a method that kvferry calls": ("vllm.v1.core.block_pool", "def touch(", "def keep(", "BlockPool.touch"),
    "a method that vLLM calls": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "def update_state_after_alloc(",
        "def update_state_after_allocation(",
        "KVConnectorBase_V1.update_state_after_alloc",
    ),
    "a field": ("vllm.v1.outputs", "failed_recving", "failed_receiving", "KVConnectorOutput.failed_recving"),
    "a parameter": ("vllm.v1.core.block_pool", "ordered_blocks", "blocks", "BlockPool.free_blocks"),
}


@pytest.mark.parametrize("case", RENAMED)
def test_an_unknown_release_with_a_renamed_function_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    module, old, new, name = RENAMED[case]
    install(monkeypatch, UNKNOWN, changed_copy(tmp_path / "copy", module, old, new))
    with pytest.raises(KVFerryError) as caught:
        check_version()
    assert caught.value.reason is Reason.UNSUPPORTED_VERSION
    assert f"{module}.{name}" in caught.value.message


def test_a_release_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, UNKNOWN, None)
    with pytest.raises(KVFerryError, match="in no folder"):
        check_version()
    install(monkeypatch, UNKNOWN, changed_copy(tmp_path, "vllm.v1.outputs", "class ", "class class "))
    with pytest.raises(KVFerryError, match="cannot be read"):
        check_version()


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    """Return what the module says; other tests of this process may have sent kvferry's lines elsewhere, or twice."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger(versions.__name__)
    handler.emit = records.append  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("0.33.0", logging.INFO, "compared with its released sources"),
        (UNKNOWN, logging.WARNING, "is not known to this"),
    ],
)
def test_what_was_compared_is_said_once(
    monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord], version: str, level: int, words: str
) -> None:
    install(monkeypatch, version)
    report_version()
    report_version()
    [record] = said
    assert record.levelno == level
    assert words in record.getMessage()
    assert version in record.getMessage()


def test_nothing_is_said_of_a_tested_version_nor_by_vllms_other_processes(
    monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]
) -> None:
    install(monkeypatch, "0.32.0")
    report_version()
    monkeypatch.setattr(versions, "_has_reported", False)
    monkeypatch.setattr(versions, "is_child_process", lambda: True)
    install(monkeypatch, UNKNOWN)
    report_version()
    assert not said


def test_the_plugin_refuses_its_connectors_where_a_function_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    of_vllm = {name: each for name, each in KVConnectorFactory._registry.items() if name not in plugin.CONNECTORS}
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__)
    install(monkeypatch, UNKNOWN, changed_copy(tmp_path, "vllm.v1.core.block_pool", "def touch(", "def keep("))
    with caplog.at_level(logging.ERROR, logger=plugin.__name__):
        plugin.register()
    assert KVConnectorFactory._registry.keys() == plugin.CONNECTORS.keys()
    for name in plugin.CONNECTORS:
        with pytest.raises(SettingsError, match="kvferry cannot use it") as refused:
            KVConnectorFactory.get_connector_class_by_name(name)
        assert refused.value.reason is Reason.UNSUPPORTED_VERSION
    # Before the weights load, where vLLM's configuration asks for no class.
    monkeypatch.setattr(KVConnectorFactory, "_registry", of_vllm)
    for name in plugin.CONNECTORS:
        listed = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"}]}
        for transfer in ({"kv_connector": name}, {"kv_connector": SEVERAL, "kv_connector_extra_config": listed}):
            config = KVTransferConfig(kv_role="kv_both", **transfer)  # type: ignore[arg-type]
            [line] = refused_lines(lambda config=config: VllmConfig(kv_transfer_config=config))  # type: ignore[misc]
            assert line.endswith("[unsupported-version]")
    assert VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"))
    assert VllmConfig().kv_transfer_config is None
    assert "BlockPool.touch" in caplog.text
    assert "[unsupported-version]" in caplog.text


def test_an_engine_without_the_connectors_starts_where_vllm_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration may have no place for connectors, or one that kvferry cannot read, and its maker arguments."""
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    finished = list[tuple[Any, ...]]()
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(VllmConfig, "__post_init__", lambda *given: finished.append(given))
    plugin.refuse_connectors(SettingsError(Reason.UNSUPPORTED_VERSION, "this vLLM is unknown.", "Install another."))
    listed = {"connectors": [{"another": "connector"}]}
    unread = SimpleNamespace(kv_connector=SEVERAL, kv_connector_extra_config=listed)
    for config in (SimpleNamespace(), SimpleNamespace(kv_transfer_config=unread)):
        VllmConfig.__post_init__(config, 1)  # type: ignore[arg-type,call-arg]
        assert finished.pop() == (config, 1)


# What earlier versions have otherwise.


def test_a_vllm_without_sources_of_hits_is_told_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(versions.cache_hit_source("P2P")).lower().endswith("p2p")
    hide(monkeypatch, "vllm.v1.metrics.cache_hit_source")
    assert versions.cache_hit_source("P2P") == "P2P"


def test_the_tokens_of_a_hash_are_known_without_a_field_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.tokens_per_hash(None, SimpleNamespace(hash_block_size=32)) == 32  # type: ignore[arg-type]
    utilities = importlib.import_module("vllm.v1.core.kv_cache_utils")
    monkeypatch.setattr(utilities, "resolve_kv_cache_block_sizes", lambda cache, engine: (16, 8))
    assert versions.tokens_per_hash(None, SimpleNamespace()) == 8  # type: ignore[arg-type]


def test_block_hashes_that_are_the_same_for_other_requests_are_not_offloaded_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not versions.installed_version().startswith("0.30."):
        versions.check_block_hashes()
        monkeypatch.delattr("vllm.v1.core.kv_cache_utils.to_event_extra_keys")
    with pytest.raises(KVFerryError, match="the same block hashes") as refused:
        check_offloadable(None)  # type: ignore[arg-type]
    assert refused.value.reason is Reason.UNSUPPORTED_VERSION


def test_the_drafters_reach_follows_the_rule_of_the_scheduler() -> None:
    def config(*, eagle: bool, modules: bool) -> Any:
        drafting = SimpleNamespace(use_eagle=lambda: eagle, use_multi_module_mtp=lambda: modules)
        return SimpleNamespace(speculative_config=drafting, num_speculative_tokens=3)

    assert versions.num_prefill_lookahead_tokens(SimpleNamespace(speculative_config=None)) == 0  # type: ignore[arg-type]
    found = [config(eagle=False, modules=False), config(eagle=True, modules=False), config(eagle=True, modules=True)]
    assert list(map(versions.num_prefill_lookahead_tokens, found)) == [0, 1, 3]


def test_a_model_with_states_needs_whole_blocks_where_vllm_clears_no_part() -> None:
    assert versions.can_name_loaded_groups() == (not versions.installed_version().startswith(("0.30.", "0.31.")))
    groups = [GroupShape(CacheKind.ATTENTION, 544), GroupShape(CacheKind.STATE, 1)]
    check_filled_whole(groups, [544, 1])
    with pytest.raises(KVFerryError, match="blocks of 288 tokens") as caught:
        check_filled_whole(groups, [288, 1])
    assert caught.value.reason is Reason.BLOCK_SIZE_MISMATCH


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let an import of this module fail."""
    monkeypatch.setitem(importlib.import_module("sys").modules, module, None)


@pytest.mark.parametrize(
    ("executor", "expected"),
    [
        (None, False),
        (SimpleNamespace(is_failed=False), False),
        (SimpleNamespace(is_failed=False, shutting_down=True), True),
        (SimpleNamespace(is_failed=True, shutting_down=True), False),
    ],
    ids=["none", "works", "ends", "has lost a rank"],
)
def test_an_executor_ends_its_ranks_in_order_where_none_has_failed(executor: object, expected: bool) -> None:
    """Its own monitor ends them too, where one has."""
    engine = Engine()
    engine._core = SimpleNamespace(model_executor=executor)
    assert engine.ends_ranks is expected


def test_the_monitor_of_ranks_asks_the_core_that_builds_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        model_executor = SimpleNamespace(is_failed=False)

        def build(self) -> RankMonitor | None:
            return RankMonitor.of_this_process()

    monkeypatch.setattr("vllm.v1.engine.core.EngineCore", Core)
    rank = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name=RANK_NAME + "0", daemon=True)
    rank.start()
    core = Core()
    monitor = core.build()
    assert monitor is not None
    assert not monitor._ends_ranks()
    core.model_executor.shutting_down = True
    assert monitor._ends_ranks()
    monitor.close()
    rank.kill()
    rank.join()
