"""A guard word's second look at a source whose data change all the time, on any kind of memory.

The source, a process of its own, clears its word before it changes the data and sets a new one afterwards, as a worker
does whose blocks go to another request. A read that ends between must not be believed: whatever the word and the data
lie in, the data have landed when the word is read again.
"""

import json
import os
import random
import subprocess
import sys
import time

import numpy as np

from kvferry.execution.guard_words import WORD_BYTES, GuardWords, Scratch
from kvferry.execution.job import Phase
from kvferry.execution.read import Guard, RankRead, Read
from kvferry.testing.transport_memory import make_memory
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.transport.registry import Link, make

NUM_BYTES = 16 << 20
PAUSES = (0.0, 0.0005, 0.002, 0.01, 0.05)
"""Seconds that data stay: some reads end within them, and others do not."""
ENOUGH_BELIEVED, ENOUGH_TORN = 10, 3
MOST_SECONDS = 60.0


class SecondLook:
    """A test of a transport, beside those of :class:`kvferry.testing.transport_suite.TransportSuite`."""

    factory: str
    memory: str

    def test_no_read_is_believed_whose_data_changed_before_the_second_look(self) -> None:
        reading, writing = os.pipe()
        program = [sys.executable, "-m", __name__, self.factory, self.memory, str(writing)]
        source = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=[writing])
        os.close(writing)
        try:
            with os.fdopen(reading) as answers:
                hello = json.loads(answers.readline())
            believed, torn = self._look(bytes.fromhex(hello["end_point"]), hello["data"], hello["words"])
        finally:
            source.kill()
            source.wait()
        assert believed >= ENOUGH_BELIEVED, f"{believed} reads were believed, and {torn} had other data"
        assert torn >= ENOUGH_TORN, f"{torn} reads had other data, and {believed} were believed: nothing was shown"

    def _look(self, end_point: bytes, data: int, words: int) -> tuple[int, int]:
        """Read until enough is seen; return how many reads were believed, and how many refused ones had other data."""
        transport, memory, scratch = make(self.factory), make_memory(self.memory, NUM_BYTES), Scratch(8)
        transport.register([memory.region, scratch.region])
        link = Link("", transport, reach(transport, end_point))
        rows = np.array([[data, memory.region.base_address, NUM_BYTES]], np.uint64)
        [slot] = scratch.take(1)
        believed = torn = 0
        ends_at = time.monotonic() + MOST_SECONDS
        while (believed < ENOUGH_BELIEVED or torn < ENOUGH_TORN) and time.monotonic() < ends_at:
            memory.put(np.zeros(NUM_BYTES, np.uint8))
            first = transport.submit(link.peer, Direction.READ, scratch.descriptor(slot, words))
            while transport.poll(first) is Status.PENDING:
                pass
            assert first.status is Status.DONE, first.error
            word = scratch.word(slot)
            if word == bytes(WORD_BYTES):
                continue
            read = Read("a", lambda word=word: [RankRead(link, rows, guard=Guard(words, word))], ends_at)  # type: ignore[misc]
            while read.phase is not Phase.DONE:
                read.advance(scratch, time.monotonic())
            is_whole = bool((memory.get() == word[0]).all())
            if read.error is None:
                assert is_whole, "bytes landed after the second look, or it found an old word"
                believed += 1
            else:
                torn += not is_whole
        transport.close()
        return believed, torn


def main(factory: str, memory_name: str, answers: int) -> None:
    """Change data and word until the process is ended."""
    transport, memory, words = make(factory), make_memory(memory_name, NUM_BYTES), GuardWords(1)
    end_point = transport.register([memory.region, words.region])
    hello = {"end_point": end_point.hex(), "data": memory.region.base_address, "words": words.address}
    os.write(answers, json.dumps(hello).encode() + b"\n")
    number = 0
    while True:
        number = number % 250 + 1
        words.clear(0)
        memory.put(np.full(NUM_BYTES, number, np.uint8))
        words.set(0, bytes([number]) * WORD_BYTES)
        time.sleep(random.choice(PAUSES))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
