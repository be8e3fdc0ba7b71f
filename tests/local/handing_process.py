"""A prefill engine in a process of its own, which writes prompts, so that a test can cut connections to it.

Run as ``python -m tests.local.handing_process <transport> <bytes per second>``; none is as fast as it goes. The process
prints the port of its directory and ends with its standard input.
"""

import sys

from kvferry.handoff.source import END

from ..support.faults import FaultPlan
from .engines_that_write import Batches, SendingEngine

SOURCE_IDS = [5, 0, 3]
NUM_TRANSFERS = 64


def main(transport: str, bytes_per_second: str) -> None:
    slowly = FaultPlan(bytes_per_second=int(bytes_per_second)) if bytes_per_second else None
    engine = SendingEngine(1, slowly, Batches.CHUNKS, transport=transport)
    for number in range(NUM_TRANSFERS):
        engine.compute(END, SOURCE_IDS, f"transfer {number}")
    print(engine.listener.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
