"""A prefill engine in a process of its own, whose prompts are read or pushed, so that a test can cut connections to it.

Run as ``python -m tests.local.handing_process <transport> <pull or push>``. The process prints the port of its
directory and ends with its standard input.
"""

import sys

from kvferry.handoff.source import END

from .engines_in_process import PrefillEngine, filled_ranks
from .engines_that_write import Batches, SendingEngine

SOURCE_IDS = [5, 0, 3]
NUM_TRANSFERS = 64


def main(transport: str, mode: str) -> None:
    if mode == "pull":
        port = PrefillEngine(transport, filled_ranks(1)).listener.port
    else:
        engine = SendingEngine(1, None, Batches.CHUNKS, transport=transport)
        for number in range(NUM_TRANSFERS):
            engine.compute(END, SOURCE_IDS, f"transfer {number}")
        port = engine.listener.port
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
