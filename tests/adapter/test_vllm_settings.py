"""Settings of the vLLM connector and its choice of layout, without an engine."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.integrations.vllm.settings import control_port, parse_settings
from kvferry.layout.named_layouts import NamedLayout


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("lease_second", "lease_seconds"),
        ("trasnport", "transport"),
        ("loadtimeout", "load_timeout_seconds"),
        ("Transport", "transport"),
    ],
)
def test_an_unknown_setting_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(KVFerryError, match=f"unknown setting '{wrong}'.*'{nearest}'") as refusal:
        parse_settings({wrong: 1})
    assert refusal.value.reason is Reason.UNKNOWN_SETTING


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"port": -1},
        {"lease_seconds": 0},
        {"lease_seconds": "long"},
        {"turn_seconds": -1},
        {"host": ""},
        {"integrity": "most"},
        {"allowed_hosts": [""]},
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(KVFerryError) as refusal:
        parse_settings(settings)
    assert refusal.value.reason is Reason.INVALID_SETTING


@pytest.mark.parametrize(
    ("settings", "is_meant"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"allowed_hosts": ["127.0.0.2"]}, False),
        ({"host": "192.0.2.2", "keys": "none"}, True),
        ({"host": "0.0.0.0", "advertised_host": "prefill-0", "keys": "none"}, True),
        ({"allowed_hosts": ["10.1.0.0/16"]}, False),
        ({"keys": "none"}, False),
        ({"advertised_host": "192.0.2.2", "allowed_hosts": ["10.1.0.0/16"]}, True),
    ],
)
def test_transports_listen_for_other_hosts_only_where_the_engine_does(
    settings: dict[str, Any], is_meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from kvferry.integrations.vllm.worker import role

    opened: list[tuple[str, Any]] = []
    monkeypatch.setattr(role, "open_transports", lambda name, *, network: opened.append((name, network)))
    monkeypatch.setattr(role, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(role, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(role, "resolved_layout", lambda _: NamedLayout.BHLNC)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1), kv_transfer_config=None)
    role.WorkerRole(config, None, parse_settings(settings))  # type: ignore[arg-type]
    [(name, network)] = opened
    assert (name, network.listens_at != "127.0.0.1") == ("auto", is_meant)
    with pytest.raises(HandoffError) if "keys" not in settings else nullcontext():
        network.addresses_of("203.0.113.1", 5600)


@pytest.mark.parametrize(
    ("settings", "listens_at"),
    [
        ({"host": "192.0.2.2"}, "192.0.2.2"),
        ({"host": "prefill-0"}, "prefill-0"),
        ({"host": "0.0.0.0", "advertised_host": "192.0.2.2"}, ""),
        ({}, "127.0.0.1"),
        ({"allowed_hosts": ["prefill-0"]}, "127.0.0.1"),
        ({"advertised_host": "192.0.2.2"}, ""),
    ],
    ids=str,
)
def test_transports_listen_where_the_engine_does(settings: dict[str, Any], listens_at: str) -> None:
    """An engine on loopback is met by its own host alone, whomever it trusts: any process of another could write."""
    for trust in ({"keys": "folder"}, {"keys": "none"}):
        assert parse_settings({**settings, **trust}).transports_listen_at == listens_at


@pytest.mark.parametrize("given", ["5700", "5700-", "5799-5700", "0-5", "5700-70000", "5700-5799,5900-5999", "a-b"])
def test_rank_ports_are_a_range(given: str) -> None:
    with pytest.raises(SettingsError, match=f"rank_ports '{given}' names no range of ports from 1 to 65535") as refusal:
        parse_settings({"rank_ports": given})
    assert refusal.value.reason is Reason.INVALID_SETTING
    assert "'5700-5799'" in refusal.value.remedy


def test_rank_ports_name_both_ends_and_without_them_any_port_is_taken() -> None:
    assert parse_settings({"rank_ports": "5700-5799"}).ports_of_ranks == range(5700, 5800)
    assert parse_settings({"rank_ports": "65535-65535"}).ports_of_ranks == range(65535, 65536)
    assert parse_settings({}).ports_of_ranks == range(1)


def test_no_port_of_an_engine_is_one_that_its_ranks_may_take_first() -> None:
    settings = parse_settings({"port": 5600, "rank_ports": "5601-5699"})
    assert control_port(settings, 0) == 5600
    with pytest.raises(SettingsError, match="port 5601 of data-parallel rank 1 is also in rank_ports '5601-5699'"):
        control_port(settings, 1)
    for more, port in (
        ({"port": 5700}, "port 5700"),
        ({"bootstrap_port": 5799}, "bootstrap_port 5799"),
    ):
        with pytest.raises(SettingsError, match=f"{port}.* is also in rank_ports") as refusal:
            parse_settings({"rank_ports": "5700-5799", **more})
        assert refusal.value.reason is Reason.INVALID_SETTING


def test_every_engine_may_have_the_ports_of_ranks_and_of_concurrent_routers() -> None:
    assert parse_settings({"rank_ports": "5700-5799", "bootstrap_port": 8998}).bootstrap_port == 8998
    assert parse_settings({"router_address": "a:1", "http_address": "b:1"}).router_address == "a:1"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 600),
        ({"lease_seconds": 5, "load_timeout_seconds": 49}, 50),
        ({"load_timeout_seconds": 601}, 601),
        ({"turn_seconds": 700}, 700),
    ],
    ids=str,
)
def test_no_time_exceeds_the_greatest_age_of_a_hold(settings: dict[str, Any], seconds: float) -> None:
    assert parse_settings(settings).max_hold_seconds == seconds


def test_an_unknown_transport_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(SettingsError, match="no transport 'cam'") as refusal:
        parse_settings({"transport": "cam"})
    assert refusal.value.reason is Reason.UNKNOWN_SETTING
    assert "Did you mean 'cma'?" in refusal.value.remedy


def test_a_transfer_log_needs_a_folder(tmp_path: Path) -> None:
    assert parse_settings({"transfer_log": str(tmp_path / "log")}).transfer_log == str(tmp_path / "log")
    with pytest.raises(SettingsError, match=f"transfer_log .*no folder '{tmp_path}/missing'") as refusal:
        parse_settings({"transfer_log": str(tmp_path / "missing" / "log")})
    assert refusal.value.reason is Reason.INVALID_SETTING


def test_a_handshake_ends_before_the_load_that_waits_for_it() -> None:
    assert parse_settings({}).handshake_timeout_seconds == 15
    assert parse_settings({"load_timeout_seconds": 10}).handshake_timeout_seconds == 5
    assert parse_settings({"lease_seconds": 180}).handshake_timeout_seconds == 45
    assert parse_settings({"load_timeout_seconds": 600}).handshake_timeout_seconds == 15


def test_a_fence_comes_half_of_a_loads_time_after_its_failure() -> None:
    assert parse_settings({}).fence_seconds == 60
    assert parse_settings({"load_timeout_seconds": 30}).fence_seconds == 15


def test_a_load_waits_as_long_behind_every_router() -> None:
    assert parse_settings({}).load_timeout_seconds == 120
    for former in ("mode", "held_prompts", "strategy", "transfer_cores", "fence_seconds"):
        with pytest.raises(SettingsError) as refusal:
            parse_settings({former: "auto"})
        assert refusal.value.reason is Reason.UNKNOWN_SETTING


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"port": "5600"}, "port: a text was given, a whole number is wanted."),
        ({"port": 70000}, "port: a whole number <= 65535 is wanted."),
        ({"integrity": "most"}, "integrity: 'most' is not one of its values."),
        ({"allowed_hosts": [1]}, "allowed_hosts[0]: a whole number was given, a text is wanted."),
    ],
)
def test_a_value_of_another_type_is_told_in_a_users_words(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse_settings(settings)
    assert refusal.value.message == f"kv_connector_extra_config: {told}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"port": "5600", "lease_second": 9}, ["unknown setting 'lease_second'", "port: a text was given"]),
        ({"port": -1, "lease_seconds": 0, "turn_seconds": "long"}, ["port: ", "lease_seconds: ", "turn_seconds: "]),
        ({"host": "http://a", "advertised_host": "b:1"}, ["host 'http://a' is no host", "advertised_host 'b:1' is no"]),
        ({"transport": "cam", "transfer_log": "/none/log"}, ["no transport 'cam'", "transfer_log '/none/log'"]),
        ({"allowed_hosts": ["a/b", "c", "d:e"]}, ["allowed_hosts has 'a/b'", "allowed_hosts has 'd:e'"]),
        ({"rank_ports": "7-5", "router_address": "r:1"}, ["rank_ports '7-5'", "router_address and http_address go"]),
        (
            {"host": "0.0.0.0", "advertised_host": "http://a"},
            ["advertised_host 'http://a' is no", "host '0.0.0.0' can"],
        ),
        # What follows from a wrong setting is not told.
        ({"advertized_host": "a", "host": "0.0.0.0", "keys": "none"}, ["unknown setting 'advertized_host'"]),
        ({"keys": 1, "host": "192.0.2.2"}, ["keys: a whole number was given"]),
        ({"rank_ports": "7-5", "port": 6}, ["rank_ports '7-5'"]),
        ({"port": 8998, "bootstrap_port": 8998}, ["port and bootstrap_port are both 8998"]),
    ],
    ids=str,
)
def test_all_that_is_wrong_is_told_at_once_each_in_a_line(settings: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse_settings(settings)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(told)
    for line, said in zip(lines, told, strict=True):
        assert said in line
        assert line.endswith(("[invalid-setting]", "[unknown-setting]"))


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "[::]", "*"])
def test_every_interface_is_refused_as_an_advertised_address(host: str) -> None:
    for settings in ({"host": host}, {"advertised_host": host}):
        # A prefill engine connects to a decode engine for the next turn of a conversation, and to write.
        told = "means every interface, which is no address that other engines can connect to"
        with pytest.raises(KVFerryError, match=told) as refusal:
            parse_settings(settings)
        assert refusal.value.reason is Reason.INVALID_SETTING
        assert 'Set "advertised_host"' in str(refusal.value)
    given = {"host": host, "advertised_host": "prefill-0", "keys": "none"}
    assert parse_settings(given).host == host


def engine(use_mla: bool = False, is_hybrid: bool = False) -> Any:
    """Return as much of a vLLM configuration as the choice of a layout looks at."""
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla, is_hybrid=is_hybrid))


def test_the_layout_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.integrations.vllm import plugin

    assert plugin.preferred_layout(engine()) is NamedLayout.BHLNC
    assert plugin.preferred_layout(engine(is_hybrid=True)) is NamedLayout.BLHNC
    monkeypatch.setattr(plugin, "on_cpu", lambda: True)
    assert plugin.preferred_layout(engine(use_mla=True)) is None
    monkeypatch.setattr(plugin, "on_cpu", lambda: False)
    assert plugin.preferred_layout(engine(use_mla=True)) is NamedLayout.BLHNC


@pytest.mark.parametrize("layout", NamedLayout)
def test_vllms_variable_takes_every_layout_and_wins(layout: NamedLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=None)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout.value)
    assert resolve_kv_cache_layout(config, [[each.value for each in NamedLayout]]).name == layout.value


@pytest.mark.parametrize("layout", [layout for layout in NamedLayout if layout.is_cross_layer])
def test_cross_layer_mla_is_refused_on_cpus(layout: NamedLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.integrations.vllm import plugin

    monkeypatch.setattr(plugin, "on_cpu", lambda: True)
    with pytest.raises(KVFerryError) as refusal:
        plugin.check_layout(engine(use_mla=True), layout)
    assert refusal.value.reason is Reason.KERNEL_CANNOT_READ_LAYOUT
    plugin.check_layout(engine(use_mla=True), NamedLayout.LBNHC)


def test_a_layout_that_the_engine_does_not_use_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    from kvferry.integrations.vllm.plugin import check_layout

    check_layout(engine(), NamedLayout.BHLNC)
    assert not caplog.records
    check_layout(engine(), NamedLayout.LBHNC)
    assert "asked for KV cache layout BHLNC and the engine uses LBHNC" in caplog.text


def test_a_hold_ends_at_the_greatest_age(make_role: Any) -> None:
    from .scheduler_requests import FULL, PROMPT, run_prefill  # vLLM is imported by those who need it

    role = make_role(FULL, lease_seconds=5.0, load_timeout_seconds=5.0)
    run_prefill(role, PROMPT, [5, 4, 3, 2, 1])
    holds = role._state.holds
    [hold] = holds._holds.values()
    for renewal in range(1, 11):
        assert holds.renew(role._state.epoch, [hold.handle], hold.held_at + 4.9 * renewal) == []
    holds.expire(hold.held_at + 49.9)
    assert holds.num_holds == 1
    holds.expire(hold.held_at + 50.0)
    assert holds.num_holds == 0
