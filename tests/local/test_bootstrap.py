"""Bootstrap servers, at which decode engines query the id of the pushing engine, and bad addresses and answers."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import PROTOCOL_VERSION, EndPoint
from kvferry.handoff.wire import bootstrap, client
from kvferry.handoff.wire.bootstrap import BootstrapQueries, BootstrapServer, Entry, Offer, query, signed
from kvferry.handoff.wire.trust import make_keys

from ..waits import wait_until

HOST, SECONDS = "127.0.0.1", 10.0


def offer(engine_id: str = "p@7") -> Offer:
    return Offer(PROTOCOL_VERSION, PROTOCOL_VERSION, engine_id, EndPoint(HOST, 5600, 7), (16,))


def awaited(ask: Callable[[], Offer | None]) -> Offer:
    return wait_until(ask)


def test_an_offer_is_asked_for_once_and_again_when_it_is_forgotten() -> None:
    served = BootstrapServer(HOST, 0, offer())
    asked: list[str] = []

    def ask(address: str) -> list[Entry]:
        asked.append(address)
        return query(address)

    try:
        offers, address = BootstrapQueries(ask), f"http://{HOST}:{served.port}"
        for _ in range(2):
            assert awaited(lambda: offers.get(address, "p@7")) == offer()
        assert len(asked) == 1
        offers.forget(address, "p@7")
        assert awaited(lambda: offers.get(address, "p@7")) == offer()
        assert len(asked) == 2
    finally:
        served.close()


def test_with_keys_an_offer_counts_only_if_a_trusted_key_has_signed_it(tmp_path: Path) -> None:
    """HTTP protects nothing: whoever answers in the engine's place could name another host, or other block sizes."""
    keys, strangers = make_keys(tmp_path / "keys"), make_keys(tmp_path / "strangers")
    ours = signed(offer(), keys)
    elsewhere = msgspec.structs.replace(ours, control=EndPoint("203.0.113.1", 5600, 7))
    for answered, reason in (
        (ours, None),
        (offer(), Reason.PERMISSION_DENIED),
        (signed(offer(), strangers), Reason.PERMISSION_DENIED),
        (elsewhere, Reason.PERMISSION_DENIED),
        (msgspec.structs.replace(ours, block_sizes=(32,)), Reason.PERMISSION_DENIED),
    ):
        served = BootstrapServer(HOST, 0, answered)
        offers, address = BootstrapQueries(keys=keys), f"http://{HOST}:{served.port}"
        try:
            if reason is None:
                assert awaited(partial(offers.get, address, "p@7")) == answered
            else:
                with pytest.raises(HandoffError) as caught:
                    awaited(partial(offers.get, address, "p@7"))
                assert caught.value.reason is reason
        finally:
            served.close()


def test_an_address_that_goes_on_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ANSWER_SECONDS", 0.05)
    ends = threading.Event()

    def ask(address: str) -> list[Entry]:
        ends.wait(SECONDS)
        return []

    offers = BootstrapQueries(ask)
    try:
        with pytest.raises(HandoffError) as refused:
            awaited(lambda: offers.get("http://slow:1", "p@7"))
        assert refused.value.reason is Reason.DEADLINE_EXCEEDED
        assert refused.value.remedy
    finally:
        ends.set()


class DrippingServer:
    """Accepts every connection, and sends each of them a byte from time to time: no single wait for a byte is long."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=256)
        self.address = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._drip)]
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._stop.is_set():
                self._connections.append(self._listener.accept()[0])

    def _drip(self) -> None:
        while not self._stop.wait(0.02):
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.send(b"H")

    def close(self) -> None:
        self._stop.set()
        self._listener.close()
        for connection in self._connections:
            connection.close()


def test_hole_3_64_slow_bootstrap_servers_do_not_keep_a_healthy_one_from_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hold every slot, and drip their answers: the whole query has a deadline, not each byte of its answer."""
    monkeypatch.setattr(bootstrap, "QUERY_SECONDS", 0.3)
    slow, served = DrippingServer(), BootstrapServer(HOST, 0, offer())
    offers = BootstrapQueries()
    try:
        names = [f"slow{number}" for number in range(client.MAX_RUNNING)]
        assert all(offers.get(slow.address, name) is None for name in names)
        assert awaited(lambda: offers.get(f"http://{HOST}:{served.port}", "p@7")) == offer()
        with pytest.raises(HandoffError) as refused:
            awaited(lambda: offers.get(slow.address, names[0]))
        assert refused.value.reason is Reason.PEER_UNREACHABLE
    finally:
        slow.close()
        served.close()


def test_a_query_that_drips_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "QUERY_SECONDS", 0.3)
    served = BootstrapServer(HOST, 0, offer())
    try:
        with socket.create_connection((HOST, served.port)) as dripping:
            end = time.monotonic() + SECONDS
            with suppress(ConnectionError):
                while time.monotonic() < end:
                    dripping.send(b"G")
                    time.sleep(0.02)
            assert time.monotonic() < end
    finally:
        served.close()


def test_hole_9_a_restarted_engine_is_found_at_its_address_although_the_router_repeats_its_former_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-router asks once, at its start, and names the same epoch for ever."""
    monkeypatch.setattr(bootstrap, "OFFER_SECONDS", 0.0)
    answers = [offer("p@7"), offer("p@8")]
    offers = BootstrapQueries(lambda _: [Entry("p", answers[0])])
    assert awaited(lambda: offers.get("http://p:1", "p@7")).engine_id == "p@7"
    del answers[0]
    assert awaited(lambda: offers.get("http://p:1", "p@7")).engine_id == "p@8"


def test_an_answer_counts_for_a_shorter_time_than_an_engine_needs_to_start() -> None:
    assert bootstrap.OFFER_SECONDS <= 5


def test_of_several_engines_at_one_address_only_the_one_that_the_router_names_is_taken() -> None:
    offers = BootstrapQueries(lambda _: [Entry("p", offer("p@7")), Entry("q", offer("q@9"))])
    assert awaited(lambda: offers.get("http://p:1", "q@9")).engine_id == "q@9"
    with pytest.raises(HandoffError) as refused:
        awaited(lambda: offers.get("http://p:1", "p@6"))
    assert refused.value.reason is Reason.PEER_CHANGED


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing are closed after seconds, and until then others beyond the bound at once."""
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 2)
    served = BootstrapServer(HOST, 0, offer())
    try:
        silent = [socket.create_connection((HOST, served.port)) for _ in range(2)]
        with socket.create_connection((HOST, served.port), timeout=bootstrap.QUERY_SECONDS / 2) as one_more:
            assert one_more.recv(1) == b""
        for connection in silent:
            connection.close()
        wait_until(lambda: answered(served.port))
    finally:
        served.close()


def test_connections_beyond_the_bound_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 1)
    served, started, start = BootstrapServer(HOST, 0, offer()), [], threading.Thread.start

    def noted(self: threading.Thread) -> None:
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    try:
        with socket.create_connection((HOST, served.port)):
            for _ in range(20):
                with socket.create_connection((HOST, served.port), timeout=SECONDS) as one_more:
                    assert one_more.recv(1) == b""
            assert len(started) == 1
    finally:
        served.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_peers_that_break_off_cause_no_line_of_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Python's server prints a traceback for each."""
    served = BootstrapServer(HOST, 0, offer())
    try:
        for _ in range(20):
            with socket.create_connection((HOST, served.port)) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes by a reset
                peer.sendall(b"GET /query HTTP/1.1\r\n")
        end = time.monotonic() + SECONDS
        while not answered(served.port):
            assert time.monotonic() < end
    finally:
        served.close()
    assert capfd.readouterr().err == ""


def test_a_query_is_read_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's reader takes a hundred headers of 64 KB."""
    read, readinto = [], bootstrap.UntilDeadline.readinto

    def noted(self: Any, buffer: Any) -> int:
        read.append(readinto(self, buffer))
        return read[-1]

    monkeypatch.setattr(bootstrap.UntilDeadline, "readinto", noted)
    served = BootstrapServer(HOST, 0, offer())
    header = b"X: " + bytes([97]) * 60000 + b"\r\n"
    try:
        with socket.create_connection((HOST, served.port), timeout=SECONDS) as peer, suppress(ConnectionError):
            peer.sendall(b"GET /query HTTP/1.1\r\n" + header * 50)
            while peer.recv(1000):
                pass
        assert 0 < sum(read) <= bootstrap.MAX_QUERY_BYTES
        assert answered(served.port)
    finally:
        served.close()


def answered(port: int) -> list[Entry] | None:
    try:
        return query(f"http://{HOST}:{port}")
    except HandoffError:
        return None


def test_a_server_without_http_is_named_in_the_error() -> None:
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"this is no web server\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HandoffError) as refused:
            query(f"http://{HOST}:{server.getsockname()[1]}")
    assert refused.value.reason is Reason.PEER_UNREACHABLE
    assert "bootstrap_port" in refused.value.remedy


@pytest.fixture
def web_server() -> Iterator[tuple[int, list[str]]]:
    """A server beside the engines that redirects whatever it is asked, and lists the paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", f"http://{HOST}:{self.server.server_address[1]}/latest/meta-data")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "given",
    [
        "http://{place}/admin/delete?all=1&x=",
        "http://{place}/admin/delete",
        "http://{place}?x=",
        "http://{place}/?x=",
        "http://{place}#x",
        "http://user:password@{place}",
        "http://user@{place}",
        "http://{place}//",
        "http://{place}\n",
        "http://{place}/admin HTTP/1.1\r\nHost: x\r\n\r\n",
        "http:/{place}",
        "https://{place}",
        "file://{place}",
        "{place}",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:port",
        "http://:8998",
        "http://::1:8998",
        f"http://{'a' * 256}:8998",
        "",
    ],
)
def test_an_address_that_names_more_than_host_and_port_is_refused_and_nothing_is_asked(
    given: str, web_server: tuple[int, list[str]]
) -> None:
    port, asked = web_server
    with pytest.raises(HandoffError) as refused:
        query(given.format(place=f"{HOST}:{port}"))
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert "http://host:port" in refused.value.remedy
    assert asked == []


def test_a_redirect_is_not_followed(web_server: tuple[int, list[str]]) -> None:
    port, asked = web_server
    with pytest.raises(HandoffError) as refused:
        query(f"http://{HOST}:{port}/")
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert "302" in refused.value.message
    assert "bootstrap_port" in refused.value.remedy
    assert asked == ["/query"]


def test_an_answer_is_read_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    served = BootstrapServer(HOST, 0, offer())
    try:
        assert query(f"http://{HOST}:{served.port}/") == [Entry("p@7", offer())]
        monkeypatch.setattr(bootstrap, "MAX_ANSWER_BYTES", 20)
        with pytest.raises(HandoffError) as refused:
            query(f"http://{HOST}:{served.port}")
        assert refused.value.reason is Reason.MALFORMED_MESSAGE
    finally:
        served.close()


def test_offers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_OFFERS", 2)
    offers = BootstrapQueries(lambda _: [Entry("p@7", offer())])
    for address in "abc":
        awaited(lambda address=address: offers.get(address, "p@7"))
    assert [address for address, _ in offers._answers] == ["b", "c"]


def test_a_taken_port_and_a_foreign_host_have_different_errors() -> None:
    served = BootstrapServer(HOST, 0, offer())
    try:
        for host, port, reason in ((HOST, served.port, Reason.PORT_IN_USE), ("192.0.2.1", 0, Reason.INVALID_SETTING)):
            with pytest.raises(HandoffError) as refused:
                BootstrapServer(host, port, offer())
            assert refused.value.reason is reason
    finally:
        served.close()
