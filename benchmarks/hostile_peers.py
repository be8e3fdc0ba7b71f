"""Measures valid questions beside hostile peers: garbage, half-open and slow connections to one control end point.

    python benchmarks/hostile_peers.py --json hostile_peers.json

Rounds without hostile peers, with hostile peers at another server of this machine, and with hostile peers at the asked
server take turns; the medians of all rounds are compared. The second ratio leaves out what the hostile peers' own
processes take of the machine's cores. In each hostile round there are 600 connections
that say nothing or half of something, 100 that send 20 bytes one by one, and 2,000 that send garbage, spread over the
round.
"""

import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvferry.handoff.messages import Answer, Handle, Question, Renew, Renewed
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys, Trust, make_keys

HOST, EPOCH = "127.0.0.1", 7
NUM_GARBAGE, NUM_HALF_OPEN, NUM_SLOW = 2000, 600, 100
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
HALF_FRAME = (100).to_bytes(4, "big") + bytes(20)
PAUSE_SECONDS = 0.002
"""Between two valid questions, so that they are spread over the round."""
QUESTION = Renew(EPOCH, (Handle("a", 1),))


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with and as many without hostile peers.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a round.")] = 10.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print what valid questions take with and without hostile peers, plain and over TLS."""
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys(Path(folder) / "keys").folder
        results = [measure(with_keys, rounds, seconds) for with_keys in (None, str(keys))]
    table = Table(title="Valid questions beside hostile peers")
    times = ("alone", "beside them elsewhere", "beside them", "to alone", "to elsewhere", "99 % alone", "99 % beside")
    for column in ("", *times, "server grew by", "log lines in a second"):
        table.add_column(column)
    for found in results:
        table.add_row(
            found["name"],
            *(f"{found[each] * 1e6:.0f} us" for each in ("alone", "elsewhere", "beside")),
            *(f"{found['beside'] / found[each]:.2f}" for each in ("alone", "elsewhere")),
            *(f"{found[each] * 1e6:.0f} us" for each in ("alone_99", "beside_99")),
            f"{found['grown_bytes'] / 2**20:.1f} MiB",
            str(found["lines_in_a_second"]),
        )
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2))


def measure(keys: str | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the times of valid questions, over TLS where there are keys."""
    context = multiprocessing.get_context("spawn")
    server, other = Started(context, keys), Started(context, keys)
    orders, attacked = context.Pipe()
    attacker = context.Process(target=attack, args=(attacked, seconds), daemon=True)
    attacker.start()
    places = {"alone": 0, "elsewhere": other.port, "beside": server.port}
    times: dict[str, list[float]] = {place: [] for place in places}
    with closing(Client(Trust(None if keys is None else Keys(keys)))) as client:
        list(ask(client, server.port, 1.0))
        before = server.told("bytes")
        for _ in range(rounds):
            for place, port in places.items():
                orders.send(port)
                orders.recv()  # the hostile connections are open, or closed
                times[place] += ask(client, server.port, seconds)
    grown, lines = server.told("bytes") - before, server.told("end")
    other.told("end")
    orders.send(None)
    for process in (server.process, other.process, attacker):
        process.join(timeout=20)
    return {
        "name": "plain" if keys is None else "TLS",
        **{place: statistics.median(found) for place, found in times.items()},
        **{f"{place}_99": statistics.quantiles(found, n=100)[98] for place, found in times.items()},
        "num_questions": {place: len(found) for place, found in times.items()},
        "grown_bytes": grown,
        "lines_in_a_second": lines,
    }


class Started:
    """A server in a process of its own."""

    def __init__(self, context: Any, keys: str | None) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, keys), daemon=True)
        self.process.start()
        self.port: int = self._pipe.recv()

    def told(self, order: str) -> int:
        """Give an order, and return the answer."""
        self._pipe.send(order)
        answer: int = self._pipe.recv()
        return answer


def ask(client: Client, port: int, seconds: float) -> Iterator[float]:
    """Yield the time of each question and answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began_at = time.perf_counter()
        client.send(HOST, port, QUESTION, 60.0)
        while not (ended := client.collect()):
            time.sleep(0.00002)
        assert isinstance(ended[0].answer, Renewed), ended
        yield time.perf_counter() - began_at
        time.sleep(PAUSE_SECONDS)


def serve(pipe: Pipe, keys: str | None) -> None:
    """Run a server until told to end; count the lines of its log."""
    raise_files()
    times: list[float] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.getMessage()
            times.append(record.created)

    logging.getLogger("kvferry").addHandler(Lines())

    def answer(question: Question) -> Answer:
        assert isinstance(question, Renew)
        return Renewed(EPOCH, 60.0, ())

    server = Server(HOST, 0, answer, keys=None if keys is None else Keys(keys))
    pipe.send(server.port)
    while pipe.recv() == "bytes":
        pipe.send(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    pipe.send(max((sum(begin <= each < begin + 1 for each in times) for begin in times), default=0))
    server.close()


def attack(pipe: Pipe, seconds: float) -> None:
    """Be the hostile peers of a port for a round, each time that one is named."""
    raise_files()
    while (port := pipe.recv()) is not None:
        if not port:
            pipe.send(0)
            continue
        half_open = [
            connected(port, (b"", HALF_FRAME[:3], HALF_FRAME, CLIENT_HELLO)[number % 4])
            for number in range(NUM_HALF_OPEN)
        ]
        slow = [connected(port, b"") for _ in range(NUM_SLOW)]
        pipe.send(len(half_open) + len(slow))
        noise, began_at = random.Random(0), time.monotonic()
        for number in range(NUM_GARBAGE):
            time.sleep(max(0.0, began_at + seconds * number / NUM_GARBAGE - time.monotonic()))
            with suppress(OSError):
                connected(port, noise.choice((b"", CLIENT_HELLO, HALF_FRAME)) + noise.randbytes(300)).close()
            with suppress(OSError):  # a slow peer may have been closed at its deadline
                slow[number % NUM_SLOW].send(HALF_FRAME[:1])
        for each in (*half_open, *slow):
            each.close()


def connected(port: int, says: bytes) -> socket.socket:
    """Return a connection that has said so much."""
    peer = socket.create_connection((HOST, port), timeout=10)
    with suppress(OSError):
        peer.sendall(says)
    return peer


def raise_files() -> None:
    """Let this process open as many files as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    typer.run(main)
