"""A wrong configuration ends while vLLM makes it, before there is an engine, with every error in a line of its own."""

import copy
import errno
import importlib.util
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

from kvferry.cli.main import app
from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.wire import trust
from kvferry.handoff.wire.trust import make_keys
from kvferry.harness.launch import port_is_free
from kvferry.integrations.vllm import preflight
from kvferry.integrations.vllm.connector_configs import CONNECTOR, SEVERAL
from kvferry.integrations.vllm.preflight import OFFLOAD, EngineHere, check_configuration, engine_here, transfer_of
from kvferry.integrations.vllm.refused_flags import IGNORED, RULES
from kvferry.tiers.disk.segments import cells_name, segment_name
from kvferry.tiers.local_disk import open_directory

from .engine_flags import flag_errors, refused_lines
from .test_values_for_peers import configured

HOST = "127.0.0.1"
NOT_HERE = "192.0.2.1"


def refused(connector: str, settings: dict[str, Any], **more: Any) -> list[str]:
    """Return the lines of the error with which a configuration with these settings ends."""
    return refused_lines(lambda: configured(connector, settings, **more))


def leave_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file system have so many bytes free, to a block of the file system."""
    look = os.statvfs

    def fuller(place: Any) -> os.statvfs_result:
        found = look(place)
        return os.statvfs_result((*found[:4], num_bytes // found.f_frsize, *found[5:]))

    monkeypatch.setattr(os, "statvfs", fuller)


@contextmanager
def taken_port() -> Iterator[int]:
    with closing(socket.create_server((HOST, 0))) as listening:
        yield listening.getsockname()[1]


def expired_keys(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make keys whose certificate was valid for a day."""
    from cryptography.x509 import CertificateBuilder

    with patch.context() as changed:
        set_end = CertificateBuilder.not_valid_after
        early = datetime(2000, 1, 2)
        changed.setattr(CertificateBuilder, "not_valid_after", lambda builder, _: set_end(builder, early))
        changed.setattr(trust, "_refuse_expired", lambda _: None)
        make_keys(folder)
    return folder


def test_each_wrong_setting_of_the_machine_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = tmp_path / "readable"
    make_keys(readable)
    (readable / "key.pem").chmod(0o644)
    file = tmp_path / "file"
    file.touch()
    with taken_port() as port, taken_port() as other:
        disk = {"host_bytes": 1, "disk_bytes": "1 GiB"}
        pool = {"host_bytes": 1, "pool_bytes": "16 MiB"}
        cases: list[tuple[str, dict[str, Any], str, Reason]] = [
            (CONNECTOR, {"bootstrap_port": port}, '"bootstrap_port" in kv_conn', Reason.PORT_IN_USE),
            (CONNECTOR, {"rank_ports": f"{port}-{port}"}, "0 of the ports", Reason.PORT_IN_USE),
            (CONNECTOR, {"host": NOT_HERE, "keys": "none"}, "an address of this machine", Reason.INVALID_SETTING),
            (CONNECTOR, {"keys": str(tmp_path / "none")}, "cannot be read: No such file", Reason.INVALID_SETTING),
            (CONNECTOR, {"keys": str(readable)}, "other users can read", Reason.PERMISSION_DENIED),
            (
                CONNECTOR,
                {"keys": str(expired_keys(tmp_path / "expired", monkeypatch))},
                "is valid from 2000-01-01 00:00 to 2000-01-02",
                Reason.INVALID_SETTING,
            ),
            (OFFLOAD, {"host_bytes": 1 << 60}, "are available", Reason.TIER_FAILED),
            (OFFLOAD, {**disk, "disk_path": str(file)}, "is there and is no directory", Reason.TIER_FAILED),
            (OFFLOAD, {**disk, "disk_path": f"{file}/below"}, "cannot be made in", Reason.TIER_FAILED),
            (OFFLOAD, {**disk, "disk_path": str(tmp_path), "disk_bytes": 1 << 60}, "in all", Reason.INVALID_SETTING),
            (OFFLOAD, {**disk, "disk_path": str(tmp_path), "disk_bytes": 9}, "no room for", Reason.INVALID_SETTING),
            (OFFLOAD, {**pool, "pool_master": "127.0.0.1:1"}, "no master answers at", Reason.PEER_UNREACHABLE),
            (OFFLOAD, {**pool, "pool_master": f"{HOST}:{other}", "pool_bytes": 1}, "", Reason.INVALID_SETTING),
        ]
        monkeypatch.setattr("kvferry.tiers.remote_pool.check_master_answers", answers_unless_refused)
        monkeypatch.setattr(preflight, "check_installed", lambda _: None)
        for connector, settings, told, reason in cases:
            [line] = refused(connector, settings)
            assert told in line, settings
            assert line.endswith(f"[{reason}]"), settings


def answers_unless_refused(master: str) -> None:
    """Greet a master as far as its connection, since a mute listener takes a second."""
    from kvferry.tiers import remote_pool

    host, _, port = master.rpartition(":")
    with closing(socket.socket()) as asking:
        if asking.connect_ex((host, int(port))) == errno.ECONNREFUSED:
            raise remote_pool.TierError(Reason.PEER_UNREACHABLE, f"no master answers at {master}.")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_transport_whose_package_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each, *more: None if each == name else find(each, *more))
    [line] = refused(CONNECTOR, {"transport": name})
    assert "pip install" in line
    assert line.endswith("[missing-dependency]")
    assert refused(CONNECTOR, {"transport": "cma"}) == []


def test_a_folder_of_another_engine_is_refused_and_a_free_one_stays_free(tmp_path: Path) -> None:
    tiers = {"host_bytes": 1, "disk_path": str(tmp_path / "blocks"), "disk_bytes": "1 MiB"}
    assert refused(OFFLOAD, tiers) == []
    assert not (tmp_path / "blocks").exists(), "the check makes nothing"
    directory, lock = open_directory(tmp_path / "blocks")
    try:
        [line] = refused(OFFLOAD, tiers)
        assert f"is in use by process {os.getpid()}" in line
        assert line.endswith("[tier-in-use]")
    finally:
        os.close(lock)
        directory.close()
    assert refused(OFFLOAD, tiers) == []


def test_every_error_of_every_connector_is_told_at_once(tmp_path: Path) -> None:
    with taken_port() as port:
        moving = {"port": port, "lease_second": 9, "transfer_log": "/none/log", "keys": str(tmp_path)}
        tiers = {"host_bytes": 1 << 60, "loads": "never", "disk_path": str(tmp_path), "disk_bytes": 1}
        listed = [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
            for name, settings in ((CONNECTOR, moving), (OFFLOAD, tiers))
        ]
        lines = refused(SEVERAL, {"connectors": listed})
        reasons = ["unknown-setting", "invalid-setting", "invalid-setting", "port-in-use"]
        reasons += ["invalid-setting", "invalid-setting", "tier-failed"]
        assert [line.rpartition("[")[2].rstrip("]") for line in lines] == reasons
        assert sorted(lines) == sorted(refused(CONNECTOR, moving) + refused(OFFLOAD, tiers))


def test_nothing_is_kept_and_nothing_is_checked_where_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes its port after the check; a copy of its configuration, and a child process, do not look at it."""
    with taken_port() as port:
        pass
    config = configured(CONNECTOR, {"port": port, "rank_ports": f"{port - 1}-{port - 1}"})
    transfer = config.kv_transfer_config
    with closing(socket.create_server((HOST, port))):
        for same in (transfer, copy.deepcopy(transfer)):
            assert VllmConfig(kv_transfer_config=same)
        assert refused(CONNECTOR, {"port": port}), "another engine"
        monkeypatch.setattr(preflight, "is_child_process", lambda: True)
        assert refused(CONNECTOR, {"port": port}) == []
        assert "unknown setting" in refused(CONNECTOR, {"port": port, "prot": 1})[0]


def test_a_name_or_a_master_that_does_not_answer_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(preflight, "check_port", lambda *_: never.wait())
    try:
        [line] = refused(CONNECTOR, {"host": "localhost"})
    finally:
        never.set()
    assert "the look-up of host has not ended within 0.01 s" in line
    assert line.endswith("[deadline-exceeded]")


@pytest.mark.parametrize(
    ("flags", "here"),
    [
        ({}, EngineHere()),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, EngineHere(num_ranks=6)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, EngineHere(range(2), 1, has_bootstrap=False)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 0}, None),
        ({"data_parallel_index": 3}, EngineHere(range(3, 4))),
        ({"nnodes_within_dp": 2}, None),
        ({"distributed_executor_backend": "ray"}, None),
        ({"distributed_executor_backend": "external_launcher"}, None),
        ({"data_parallel_backend": "ray"}, None),
    ],
    ids=str,
)
def test_ports_are_those_of_the_ranks_that_start_here(flags: dict[str, Any], here: EngineHere | None) -> None:
    names = ("nnodes_within_dp", "distributed_executor_backend", "data_parallel_size_local", "data_parallel_index")
    names += ("data_parallel_backend",)
    names += ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    usual = ParallelConfig()
    parallel: Any = SimpleNamespace(**{name: getattr(usual, name) for name in names} | flags)
    assert engine_here(parallel) == here


def test_each_rank_of_an_engine_needs_ports() -> None:
    first = next(port for port in range(50000, 60000, 3) if all(port_is_free(port + more) for more in range(3)))
    connector = transfer_of({"port": 0, "rank_ports": f"{first}-{first + 2}"})
    assert preflight.errors_of(connector, None) == []
    [error] = preflight.errors_of(connector, EngineHere(range(2), 2, has_bootstrap=False))
    assert f"3 of the ports from {first} to {first + 2} are free, and this engine needs 4" in error.message
    with taken_port() as port:
        [error] = preflight.errors_of(transfer_of({"port": port - 1}), EngineHere(range(1, 2)))
        assert f"{HOST}:{port}" in error.message


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
    ("--decode-context-parallel-size", {"decode_context_parallel_size": 2}),
    ("--speculative-config", {"num_prefill_lookahead_tokens": 2}),
    ("--speculative-config", {"is_hybrid": True, "speculative_config": SimpleNamespace()}),
    ("--enable-prefix-caching", {"is_hybrid": True, "mamba_cache_mode": "align"}),
    ("--kv-cache-dtype", {"cache_dtype": "nvfp4"}),
    ("VLLM_KV_CACHE_LAYOUT", {"use_mla": True}),
    ("kv_role", {"settings": {"router_address": "r:1", "http_address": "h:1"}, "role": "kv_both"}),
    ("--data-parallel-size", {"settings": {"bootstrap_port": 8998}, "data_parallel_size": 2}),
    ("--nnodes", {"name": OFFLOAD, "nnodes_within_dp": 2}),
    ("--model", {"name": OFFLOAD, "is_attention_free": True}),
]


def test_every_flag_of_the_page_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    assert [flag for flag, _ in FLAGS] == [rule.flag for rule in RULES]
    for rule, (_, changes) in zip(RULES, FLAGS, strict=True):
        [error] = flag_errors(**changes)
        assert (error.reason, error.remedy) == (rule.reason, rule.remedy)
    for name in (CONNECTOR, OFFLOAD):
        assert flag_errors(name) == []
        assert len(flag_errors(name, prefill_context_parallel_size=2, decode_context_parallel_size=2)) == 2


def test_hashes_that_differ_between_processes_are_refused_where_others_are_to_find_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    shared = {"host_bytes": 1, "disk_path": str(tmp_path), "disk_bytes": 1, "model_id": "m"}
    for settings, reasons in ((shared, [Reason.UNREPEATABLE_HASHES]), ({"host_bytes": 1}, [])):
        found = flag_errors(OFFLOAD, settings, prefix_caching_hash_algo="xxhash")
        assert [error.reason for error in found] == reasons
    assert flag_errors(OFFLOAD, shared) == []


def test_fields_that_are_ignored_are_read_nowhere() -> None:
    sources = Path(preflight.__file__).parents[2].rglob("*.py")
    text = "\n".join(path.read_text() for path in sources if path.name != "refused_flags.py")
    assert [name for name in IGNORED if name in text or name not in KVTransferConfig.__dataclass_fields__] == []


@pytest.mark.parametrize(
    "listed",
    [[{"kv_role": "kv_both"}], [1], {"a": 1}, [{"kv_connector": CONNECTOR, "kv_connector_extra_config": [1]}]],
    ids=str,
)
def test_a_list_of_connectors_that_is_none_is_refused(listed: Any) -> None:
    transfer: Any = SimpleNamespace(kv_connector=SEVERAL, kv_connector_extra_config={"connectors": listed})
    with pytest.raises(KVFerryError, match="configures no connector") as found:
        check_configuration(SimpleNamespace(kv_transfer_config=transfer, parallel_config=ParallelConfig()))  # type: ignore[arg-type]
    assert found.value.reason is Reason.INVALID_SETTING


# kvferry settings --check


def checked(given: Any, *options: str) -> tuple[int, str]:
    text = given if isinstance(given, str) else json.dumps(given)
    result = CliRunner().invoke(app, ["settings", "--check", text, *options])
    return result.exit_code, result.output


def test_the_command_prints_what_is_in_force_or_a_line_for_each_error(tmp_path: Path) -> None:
    code, told = checked({"lease_seconds": 9})
    assert (code, told.splitlines()[:2]) == (0, ["ok", CONNECTOR])
    assert "  lease_seconds: 9.0\n" in told
    assert '  transport: "auto"\n' in told
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({"lease_seconds": 0, "host": NOT_HERE}))
    code, told = checked(f"@{file}")
    assert (code, len(told.splitlines())) == (2, 3)
    whole = {"kv_connector": OFFLOAD, "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": "1 MiB"}}
    code, told = checked(whole, "--json")
    assert code == 0
    [found] = json.loads(told)["connectors"]
    assert (found["connector"], found["settings"]["host_bytes"]) == (OFFLOAD, 1 << 20)
    del whole["kv_role"]
    code, told = checked(whole, "--json")
    assert code == 2
    assert [error["reason"] for error in json.loads(told)["errors"]] == ["invalid-setting"]
    for wrong, said in (
        ("{", "is no JSON"),
        (f"@{tmp_path}/none", "No such file"),
        ([1], "an object is wanted"),
        ({"kv_connector": "KVFeryConnector"}, "Did you mean 'KVFerryConnector'"),
    ):
        code, told = checked(wrong)
        assert (code, said in told) == (2, True), told


def test_the_command_knows_how_many_ranks_an_engine_has() -> None:
    with taken_port() as port:
        for settings, flag, told in (
            ({"rank_ports": f"{port}-{port}"}, "--tensor-parallel-size", "this engine needs 2"),
            ({"port": port - 1}, "--data-parallel-size", f"{HOST}:{port}"),
        ):
            code, said = checked(settings, flag, "2")
            assert (code, told in said) == (2, True), said
    assert CliRunner().invoke(app, ["settings", "--tensor-parallel-size", "2"]).exit_code == 2


def test_a_folder_with_less_room_than_it_may_use_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "blocks"
    settings = {"host_bytes": 1, "disk_path": str(folder), "disk_bytes": "64 MiB"}
    leave_free(40 << 20, monkeypatch)
    told = f"{folder}: the disk tier may use 64.0 MiB and uses 0 B, but its file system has 40.0 MiB free."
    code, said = checked(settings)
    assert (code, f"warning: {told}" in said) == (0, True), said
    code, said = checked(settings, "--json")
    [warning] = json.loads(said)["warnings"]
    assert (code, warning.startswith(told)) == (0, True)
    # Blocks that are there already take none of what is free.
    directory, lock = open_directory(folder)
    (folder / cells_name(segment_name(1))).write_bytes(bytes(30 << 20))
    os.close(lock)
    directory.close()
    assert json.loads(checked(settings, "--json")[1])["warnings"] == []
    leave_free(0, monkeypatch)
    code, said = checked(settings)
    assert (code, "uses 30.0 MiB" in said) == (0, True), said


values = st.none() | st.booleans() | st.integers(-1, 1 << 60) | st.sampled_from(["", "a", "7-5", "1 GiB", "http://a:1"])
names = st.sampled_from([*preflight.Settings.__struct_fields__, *preflight.OffloadSettings.__struct_fields__, "prot"])


@limits(max_examples=50)
@given(st.dictionaries(names, values | st.lists(values, max_size=2), max_size=4), st.sampled_from([CONNECTOR, OFFLOAD]))
def test_whatever_is_given_is_taken_or_refused_in_lines(settings: dict[str, Any], name: str) -> None:
    """A line for each error, each with a reason; what is refused together is refused alone too."""
    found = preflight.READERS[name](settings)
    lines = [str(error) for error in found.errors]
    assert len(set(lines)) == len(lines)
    for error, line in zip(found.errors, lines, strict=True):
        assert line.endswith(f"[{error.reason}]")
        assert error.remedy
    assert found.wrong <= set(type(found.settings).__struct_fields__)
    assert bool(lines) or not found.wrong
