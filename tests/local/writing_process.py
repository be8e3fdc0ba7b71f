"""A prefill engine in a process of its own, which writes slowly, so that a test can stop or kill it in the middle.

It hears no revocation and knows no deadline, as a network card that carries out what was posted.

Run as ``python -m tests.local.writing_process <transport> <boot id>``; an empty boot id is that of this host. The
process prints the port of its directory and ends with its standard input.
"""

import sys
from typing import Any

import msgspec

from kvferry.handoff.source import END, SourceWrites
from kvferry.transport.protocol import own_identity

from ..support.faults import FaultPlan
from .engines_that_write import Batches, SendingEngine

SOURCE_IDS = [0, 1, 2, 3]
BYTES_PER_SECOND = 2000


def main(transport: str, boot_id: str) -> None:
    process = own_identity()
    if boot_id:
        process = msgspec.structs.replace(process, boot_id=boot_id)
    slowly = FaultPlan(bytes_per_second=BYTES_PER_SECOND)
    writes: Any = SourceWrites
    writes.revoke, writes.tick = (lambda *_: False), (lambda *_: None)
    engine = SendingEngine(1, slowly, Batches.CHUNKS, transport=transport, process=process)
    engine.compute(END, SOURCE_IDS)
    print(engine.listener.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
