"""Registration with a router that sends to both engines at once, and the addresses in the router's request ids."""

import socket as socket_module
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

from kvferry.errors import HandoffError, Reason, SettingsError
from kvferry.integrations.vllm.scheduler import router_beacon
from kvferry.integrations.vllm.scheduler.params import TransferParams, parse_transfer_params
from kvferry.integrations.vllm.scheduler.router_beacon import RouterBeacon, encode_zmq_address
from kvferry.integrations.vllm.settings import parse_settings

PLACE = encode_zmq_address("127.0.0.1", 8998, 5600, "p@7")
TO_DECODE = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_engine_id": None, "remote_block_ids": None}


def test_an_engine_registers_with_the_router_again_and_again() -> None:
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    with socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        api_server = socket_module.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{api_server.getsockname()[1]}"
        beacon = RouterBeacon(f"127.0.0.1:{port}", "P", address, PLACE, tp_size=2)
        try:
            for _ in range(2):
                assert socket.poll(5000)
                message = msgspec.msgpack.decode(socket.recv_multipart()[1])
                assert message == {
                    "type": "P",
                    "http_address": address,
                    "zmq_address": PLACE,
                    "dp_size": 1,
                    "tp_size": 2,
                    "transfer_mode": "WRITE",
                }
        finally:
            beacon.close()
            beacon.close()
            api_server.close()


def test_an_engine_registers_once_its_api_server_listens() -> None:
    """The router sends requests at once, and they would fail."""
    with socket_module.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    with zmq.Context.instance().socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        beacon = RouterBeacon(f"127.0.0.1:{port}", "P", address, PLACE, tp_size=1)
        try:
            assert not socket.poll(1500)
            host, _, http_port = address.partition(":")
            with socket_module.create_server((host, int(http_port))):
                assert socket.poll(5000)
        finally:
            beacon.close()


def test_an_api_server_at_an_ipv6_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine connects to an address in brackets."""
    asked: list[Any] = []
    connection = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(socket_module, "create_connection", lambda place, _: (asked.append(place), connection)[1])
    assert router_beacon.listens("[fd00::1]:8000")
    assert asked == [("fd00::1", 8000)]


def test_request_ids_say_where_the_prompt_comes_from() -> None:
    request_id = f"cmpl-___prefill_addr_{PLACE}___decode_addr_host:d,handshake:1,notify:2,engine:d@9_{'0' * 32}-0-abc"
    assert parse_transfer_params(TO_DECODE, request_id) == TransferParams("tx-1", "p@7", "http://127.0.0.1:8998")
    with pytest.raises(HandoffError) as refused:
        parse_transfer_params(TO_DECODE, "cmpl-1")
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert "--vllm-discovery-address" in str(refused.value)


@pytest.mark.parametrize("max_length", [router_beacon.MAX_REQUEST_ID, 1 << 30])
@pytest.mark.parametrize("num_characters", [1 << 14, 1 << 20])
@pytest.mark.parametrize(
    "repeated",
    [
        "___prefill_addr_host:",
        "___prefill_addr_host:h,handshake:1,notify:1,engine:",
        "___prefill_addr_host:h,handshake:1",
        ",handshake:1",
        ",handshake:1,notify:1,engine:",
        "1",
    ],
)
def test_a_hostile_request_id_is_parsed_quickly(
    repeated: str, num_characters: int, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound on its length, and without. A search for a pattern took 7.5 s for 16 KiB of such an id."""
    monkeypatch.setattr(router_beacon, "MAX_REQUEST_ID", max_length)
    request_id = ("___prefill_addr_host:" + repeated * (num_characters // len(repeated)))[:num_characters]
    begin = time.process_time()
    for end in ("", "___decode_addr_"):
        with suppress(HandoffError):  # Some name a place of a very long life.
            parse_transfer_params(TO_DECODE, request_id + end)
    assert time.process_time() - begin < 0.2


def test_a_request_id_over_the_limit_is_not_parsed() -> None:
    ends = f"___prefill_addr_{PLACE}___decode_addr_"
    longest = "x" * (router_beacon.MAX_REQUEST_ID - len(ends)) + ends
    assert router_beacon.decode_request_id(longest) == ("http://127.0.0.1:8998", "p@7")
    assert router_beacon.decode_request_id("x" + longest) is None


@pytest.mark.parametrize(
    "given",
    [
        {"router_address": "127.0.0.1:1"},
        {"http_address": "127.0.0.1:1"},
    ],
)
def test_addresses_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings(given)
    assert refused.value.reason is Reason.INVALID_SETTING


def test_a_slow_lookup_of_a_routers_name_delays_no_other_socket() -> None:
    """It is looked up on the thread that serves all sockets of a context, the engine's control end point among them."""
    beacon = RouterBeacon("127.0.0.1:1", "P", "127.0.0.1:8100", PLACE, tp_size=1)
    try:
        assert beacon._socket.context is not zmq.Context.instance()
    finally:
        beacon.close()


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        RouterBeacon("no address", "P", "127.0.0.1:8100", PLACE, tp_size=1)
    assert refused.value.reason is Reason.INVALID_SETTING
