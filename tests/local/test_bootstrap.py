"""Where decode engines learn which engine pushes, and what becomes of addresses that say nothing of use."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import PROTOCOL_VERSION, EndPoint
from kvferry.handoff.wire import bootstrap
from kvferry.handoff.wire.bootstrap import Bootstrap, Bootstraps, Entry, Offer, query

HOST, SECONDS = "127.0.0.1", 10.0


def offer(engine_id: str = "p@7") -> Offer:
    return Offer(PROTOCOL_VERSION, engine_id, EndPoint(HOST, 5600, 7), (16,))


def awaited(ask: Callable[[], Offer | None]) -> Offer:
    end = time.monotonic() + SECONDS
    while (found := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def test_an_offer_is_asked_for_once_and_again_when_it_is_forgotten() -> None:
    served = Bootstrap(HOST, 0, offer())
    asked: list[str] = []

    def ask(address: str) -> list[Entry]:
        asked.append(address)
        return query(address)

    try:
        offers, address = Bootstraps(ask), f"http://{HOST}:{served.port}"
        for _ in range(2):
            assert awaited(lambda: offers.get(address, "p@7")) == offer()
        assert len(asked) == 1
        offers.forget(address)
        assert awaited(lambda: offers.get(address, "p@7")) == offer()
        assert len(asked) == 2
    finally:
        served.close()


def test_an_address_that_goes_on_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ANSWER_SECONDS", 0.05)
    ends = threading.Event()

    def ask(address: str) -> list[Entry]:
        ends.wait(SECONDS)
        return []

    offers = Bootstraps(ask)
    try:
        with pytest.raises(HandoffError) as refused:
            awaited(lambda: offers.get("http://slow:1", "p@7"))
        assert refused.value.reason is Reason.DEADLINE_EXCEEDED
        assert refused.value.remedy
    finally:
        ends.set()


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing are closed after seconds, and until then others beyond the bound at once."""
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 2)
    served = Bootstrap(HOST, 0, offer())
    try:
        silent = [socket.create_connection((HOST, served.port)) for _ in range(2)]
        with socket.create_connection((HOST, served.port), timeout=bootstrap.QUERY_SECONDS / 2) as one_more:
            assert one_more.recv(1) == b""
        for connection in silent:
            connection.close()
        end = time.monotonic() + SECONDS
        while not answered(served.port):
            assert time.monotonic() < end
    finally:
        served.close()


def answered(port: int) -> list[Entry] | None:
    try:
        return query(f"http://{HOST}:{port}")
    except HandoffError:
        return None


def test_what_speaks_no_http_is_told_of_as_such() -> None:
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


def test_offers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MAX_OFFERS", 2)
    offers = Bootstraps(lambda _: [Entry("p@7", offer())])
    for address in "abc":
        awaited(lambda address=address: offers.get(address, "p@7"))
    assert list(offers._offers) == ["b", "c"]


def test_a_taken_port_and_a_host_that_is_not_here_are_told_apart() -> None:
    served = Bootstrap(HOST, 0, offer())
    try:
        for host, port, reason in ((HOST, served.port, Reason.PORT_IN_USE), ("192.0.2.1", 0, Reason.INVALID_SETTING)):
            with pytest.raises(HandoffError) as refused:
                Bootstrap(host, port, offer())
            assert refused.value.reason is reason
    finally:
        served.close()
