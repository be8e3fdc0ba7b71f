"""What an engine tells its peers is checked at its start as the peers check it: no request has to fail for it."""

import importlib
import string
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig

from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError
from kvferry.handoff.messages import (
    MAX_IDENTIFIER_LENGTH,
    PROTOCOL_VERSION,
    Directory,
    DirectoryRequest,
    EndPoint,
    Identity,
    Introduce,
    RankEntry,
    decode_answer,
    decode_question,
    encode,
)
from kvferry.handoff.wire.bootstrap import Entry, Offer, id_in_epoch, parse_address
from kvferry.handoff.wire.trust import in_url
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.plugin import CONNECTORS, register
from kvferry.integrations.vllm.scheduler.params import parse_params, parse_transfer_params
from kvferry.integrations.vllm.scheduler.router_beacon import encode_zmq_address
from kvferry.integrations.vllm.settings import Settings, parse_settings
from kvferry.layout.shard import MAX_GROUPS, Region

from ..support.null_transport import NullTransport
from .scheduler_requests import FULL

EPOCH = (1 << 53) - 1
IDENTITY = Identity("m", "w", "a", "float32", 2, 2, 8, "none", "float32")
FERRY = {
    "version": 1,
    "newest": 1,
    "epoch": EPOCH,
    "generation": "0" * 15 + "1",
    "is_late": False,
    "lease_seconds": 60.0,
    "num_tokens": 1,
    "prompt_digest": "0" * 32,
    "block_sizes": [16],
}
WORDS = ("http://", "tcp://", "10.0.0.1", "10.0.0.256", "fd00::1", "prefill-0", "example", "5600", "eth0", "a" * 63)
pieces = st.sampled_from([*WORDS, *"[]:%/.@* \n\0", "é", "\ud800"])
hosts = (
    st.lists(pieces, max_size=6).map("".join)
    | st.text(string.ascii_letters + string.digits + ".-_:[]%", max_size=12)
    | st.ip_addresses().map(str)
    | st.text(max_size=8)
)
ids = st.text(max_size=12) | st.text(string.printable, min_size=MAX_IDENTIFIER_LENGTH - 20, max_size=600)


def accepted(given: dict[str, Any]) -> Settings | None:
    """Return the settings, None where the engine would not start."""
    with suppress(SettingsError):
        return parse_settings(given)
    return None


def read_by_all(host: str, engine_id: str = "e", model_id: str = "m") -> None:
    """Read all messages and parameters that have these values, as other engines do."""
    where, identity = EndPoint(host, 5600, EPOCH), msgspec.structs.replace(IDENTITY, model=model_id)
    rank = RankEntry(0, 0, b"", {}, where)
    directory = Directory(PROTOCOL_VERSION, engine_id, EPOCH, identity, (rank,))
    assert decode_answer(encode(directory)) == directory
    name = f"{engine_id}/4095"
    questions = (
        DirectoryRequest(1, 1, name),
        Introduce(PROTOCOL_VERSION, EPOCH, name, identity, (b"",), b"", {}, where, registration=1, token=2),
    )
    assert [decode_question(encode(each)) for each in questions] == [*questions]
    offer = Offer(1, 1, id_in_epoch(engine_id, EPOCH), where, (16,))
    encoded = msgspec.json.encode(Entry(offer.engine_id, offer))
    assert msgspec.json.decode(encoded, type=Entry).kvferry.control.host == host
    params = {"remote_engine_id": engine_id, "remote_host": host, "remote_port": 5600}
    params |= {"remote_request_id": "r", "remote_block_ids": [[1]], "kvferry": FERRY}
    parsed = parse_params(params, "r")
    assert (parsed.remote_engine_id, parsed.remote_host) == (engine_id, host)
    told = encode_zmq_address(host, 8998, 5600, offer.engine_id)
    named = {
        "transfer_id": "t",
        "remote_engine_id": offer.engine_id,
        "remote_bootstrap_addr": f"http://{in_url(host)}:8998",
    }
    of_router = parse_transfer_params({"transfer_id": "t"}, f"cmpl-___prefill_addr_{told}___decode_addr_host:d")
    for transfer in (parse_transfer_params(named, "r"), of_router):
        assert transfer.remote_engine_id == offer.engine_id
        assert parse_address(transfer.remote_bootstrap_addr)[1] == 8998


@given(hosts)
@example("http://10.0.0.1")
@example("127.0.0.1:5600")
@example("prefill..example")
@example("fe80::1%eth0")
@example("[fd00::1]")
@example("prefill_0.example.")
def test_a_host_that_the_settings_take_is_one_that_every_peer_takes(host: str) -> None:
    for given_host in ({"advertised_host": host}, {"host": host, "keys": "none"}):
        settings = accepted(given_host)
        if settings is not None:
            read_by_all(settings.reachable_host)
            settings.reachable_host.encode("idna")  # as every look-up does


@given(ids)
@example("a" * (MAX_IDENTIFIER_LENGTH + 1))
@example("\ud800")
def test_a_model_id_that_the_settings_take_is_one_that_every_peer_takes(model_id: str) -> None:
    settings = accepted({"model_id": model_id})
    if settings is not None and settings.model_id:
        read_by_all("prefill-0", model_id=settings.model_id)


@given(ids)
@example("")
@example("a" * MAX_IDENTIFIER_LENGTH)
@example("a\nb")
@example("a___decode_addr_b")
def test_an_engine_id_with_which_an_engine_starts_is_one_that_every_peer_takes(engine_id: str) -> None:
    from kvferry.integrations.vllm.connector_configs import check_engine_id

    settings = parse_settings({"router_address": "r:1", "http_address": "e:2"})
    with suppress(SettingsError):
        check_engine_id(engine_id, settings)
        read_by_all("prefill-0", engine_id)


@pytest.mark.parametrize(
    ("host", "why", "write"),
    [
        ("http://10.0.0.1", "it is a URL", "'10.0.0.1'"),
        ("https://prefill-0.example:8000/v1", "it is a URL", "'prefill-0.example'"),
        ("127.0.0.1:5600", "it has a colon and is no IPv6 address", "'127.0.0.1'"),
        ("[fd00::1]:5600", "it has a colon and is no IPv6 address", "'[fd00::1]'"),
        ("prefill-0:5600", "it has a colon and is no IPv6 address", "'prefill-0'"),
        ("10.0.0.256", "it is no IPv4 address", "an address or a name"),
        ("10.0.0.0/8", "a name has ASCII letters", "'10.0.0.0'"),
        ("prefill-é", "a name has ASCII letters", "an address or a name"),
        ("prefill-0\n", "a name has ASCII letters", "'prefill-0'"),
        ("a" * 64, "each part of a name has 1 to 63 characters", "an address or a name"),
        ("a." * 130, "it has 260 characters", "an address or a name"),
        ("prefill%0", "it is no IPv6 address", "an address or a name"),
        ("[prefill-0]", "it is no IPv6 address", "an address or a name"),
        ("http://me:key@10.0.0.1:80", "it is a URL", "'10.0.0.1'"),
    ],
)
@pytest.mark.parametrize("name", ["host", "advertised_host"])
def test_what_is_no_host_is_refused_with_what_to_write(name: str, host: str, why: str, write: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} .* is no host: {why}") as refused:
        parse_settings({name: host, "keys": "none"})
    assert refused.value.reason is Reason.INVALID_SETTING
    assert refused.value.remedy.startswith(f"Write {write}")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            {"http_address": "http://10.0.0.1:8000"},
            "http_address 'http://10.0.0.1' is no host: it is a URL",
        ),
        ({"http_address": "10.0.0.1"}, "http_address '10.0.0.1' is no host:port"),
        ({"http_address": "0.0.0.0:8000"}, "http_address '0.0.0.0:8000' means every interface"),
        ({"http_address": "fd00::1:8000"}, "an IPv6 address before a port is in brackets"),
        ({"router_address": "http://router:9000"}, "router_address .* is no host"),
        ({"router_address": "router:70000"}, "router_address .* no port from 1 to 65535"),
        ({"router_address": "router:65536"}, "router_address .* no port from 1 to 65535"),
        ({"router_address": "router:009000"}, "router_address .* no port from 1 to 65535"),
    ],
)
def test_a_wrong_address_for_the_router_is_refused_before_the_engine_waits_for_it(
    places: dict[str, str], said: str
) -> None:
    """An engine whose own address nobody could connect to never registered, and said nothing."""
    both = {"router_address": "router:9000", "http_address": "10.0.0.1:8000"}
    assert parse_settings(both)
    assert parse_settings({**both, "router_address": "router:65535"})
    with pytest.raises(SettingsError, match=said) as refused:
        parse_settings({**both, **places})
    assert refused.value.reason is Reason.INVALID_SETTING


def configured(connector: str, extra: dict[str, Any], **more: Any) -> VllmConfig:
    """Return what ``vllm serve`` makes of its arguments, before anything is loaded."""
    register()
    register()
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        **more,
    )
    return VllmConfig(kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("extra", "more", "said"),
    [
        ({"advertised_host": "http://10.0.0.1"}, {}, "is a URL.*'10.0.0.1'.*invalid-setting"),
        ({"lease_second": 9}, {}, "Did you mean 'lease_seconds'"),
        ({}, {"engine_id": ""}, "engine_id '', of 0 characters"),
        ({}, {"engine_id": "a\x1bb"}, "engine_id"),
        ({}, {"engine_id": "a" * MAX_IDENTIFIER_LENGTH}, "engine_id"),
        (
            {"router_address": "a:1", "http_address": "b:1"},
            {"engine_id": "a___decode_addr_b"},
            "engine_id 'a___decode_addr_b' could not be read out of the ids of requests",
        ),
    ],
)
def test_settings_are_checked_before_weights_are_loaded(extra: dict[str, Any], more: dict[str, Any], said: str) -> None:
    one = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    for connector, settings in (("KVFerryConnector", extra), ("MultiConnector", {"connectors": [one]})):
        with pytest.raises(ValueError, match=f"(?s){said}"):
            configured(connector, settings, **more)


def test_settings_of_the_offload_connector_are_checked_before_weights_are_loaded() -> None:
    with pytest.raises(ValueError, match="host_bytes '8 gigs' is no size"):
        configured("KVFerryOffloadConnector", {"host_bytes": "8 gigs"})
    assert configured("KVFerryOffloadConnector", {"host_bytes": "8 GiB"}).kv_transfer_config is not None
    for master in ("http://127.0.0.1:50051", "127.0.0.1:0", "127.0.0.1"):
        with pytest.raises(ValueError, match=f"pool_master '{master}' does not name a master"):
            configured("KVFerryOffloadConnector", {"host_bytes": "8 GiB", "pool_master": master, "pool_bytes": "1 GiB"})


def test_right_settings_and_other_connectors_pass() -> None:
    assert configured("KVFerryConnector", {"advertised_host": "prefill-0.example"}, engine_id="p").kv_transfer_config
    odd = "a___decode_addr_b"  # only a router puts it into the ids of requests
    assert configured("KVFerryConnector", {}, engine_id=odd).kv_transfer_config
    assert configured("NixlConnector", {"advertised_host": "http://10.0.0.1"}).kv_transfer_config
    assert VllmConfig().kv_transfer_config is None


def check_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM make configurations as in a process that has not loaded kvferry."""
    register()
    plain = VllmConfig._verify_kv_transfer_compat.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(VllmConfig, "_verify_kv_transfer_compat", plain)
    transfer = KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both", engine_id="")
    assert VllmConfig(kv_transfer_config=transfer)


@pytest.mark.parametrize("module", [None, *CONNECTORS.values()])
def test_the_plugin_and_each_connector_makes_vllm_check(module: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that vLLM finds by its module's path has no plugin before it."""
    check_without(monkeypatch)
    if module is None:
        register()
    else:
        for name in CONNECTORS.values():  # second copies: the first ones come back
            folder, _, last = name.rpartition(".")
            monkeypatch.setattr(sys.modules[folder], last, None, raising=False)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(module)
    checks = VllmConfig._verify_kv_transfer_compat
    with pytest.raises(ValueError, match="engine_id ''"):
        configured("KVFerryConnector", {}, engine_id="")
    assert VllmConfig._verify_kv_transfer_compat is checks, "it has been told once"


def test_what_vllm_refuses_of_a_transfer_it_still_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="is incompatible with PYTORCH_CUDA_ALLOC_CONF"):
        configured("KVFerryConnector", {})


def test_a_connector_that_vllm_builds_without_the_plugin_checks_the_id_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.integrations.vllm import connector

    for name in ("check_supported", "check_layout", "resolved_layout"):
        monkeypatch.setattr(connector, name, lambda *_: None)
    transfer = SimpleNamespace(kv_connector_extra_config={}, engine_id="", kv_role="kv_both")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(SettingsError, match="engine_id ''"):
        KVFerryConnector(config, None, None)  # type: ignore[arg-type]


def test_an_engine_whose_directory_no_peer_could_read_does_not_start(make_role: Any) -> None:
    rank = RankEntry(0, 0, b"", {"": b""}, EndPoint("127.0.0.1", 1, 1))
    with pytest.raises(KVFerryError, match="no other engine could read the directory of engine 'engine-0'") as refused:
        make_role(FULL).publish([rank])
    assert refused.value.reason is Reason.UNSUPPORTED
    assert "`$.ranks[0].end_points`" in refused.value.message


def test_an_engine_whose_answers_no_peer_could_read_does_not_start(make_role: Any) -> None:
    rank = RankEntry(0, 0, b"", {}, EndPoint("127.0.0.1", 1, 1))
    make_role(*[FULL] * MAX_GROUPS).publish([rank])
    with pytest.raises(KVFerryError, match=r"no decode engine could read .* of length <= ") as refused:
        make_role(*[FULL] * (MAX_GROUPS + 1)).publish([rank])
    assert refused.value.reason is Reason.UNSUPPORTED


def test_memory_whose_end_point_no_peer_could_read_is_refused() -> None:
    regions = [Region(number << 13, 4096) for number in range(65537)]
    assert NullTransport().register(regions[1:])
    with pytest.raises(TransportError, match="no other engine could reach this memory over null") as refused:
        NullTransport().register(regions)
    assert refused.value.reason is Reason.UNSUPPORTED
