"""What a Mooncake transport says of its transfers once it was closed, with an engine of the test."""

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.errors import Reason
from kvferry.layout.shard import Region
from kvferry.transport import mooncake
from kvferry.transport.mooncake import MooncakePeer, MooncakeTransfer, MooncakeTransport
from kvferry.transport.protocol import Direction, RegionTable, Status

RUNNING, COMPLETED = 0, 1


class Engine:
    """Mooncake's engine, whose batches and fences have the status that the test says."""

    def __init__(self) -> None:
        self.status: Callable[[], int] = lambda: RUNNING
        self._num_posted = 0

    def register_memory(self, address: int, length: int) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_transfer_async_read(self, *_: object) -> int:
        self._num_posted += 1
        return self._num_posted

    def transfer_check_status(self, fence: int) -> int:
        return self.status()

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return 0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    opened = [Engine()]
    monkeypatch.setattr(mooncake, "open_engine", lambda host: opened.pop())
    monkeypatch.setattr(mooncake, "is_built_with_cuda", lambda: False)
    monkeypatch.setattr(mooncake, "CLOSE_SECONDS", 0.01)
    return opened


def reading(transport: MooncakeTransport) -> MooncakeTransfer:
    """Return a read whose one slice is posted."""
    region = Region(1 << 20, 4096)
    transport.register([region])
    peer = MooncakePeer("a:1", RegionTable([Region(1 << 30, 4096)]), 0, bytes(16), "127.0.0.1:1")
    transfer = transport.submit(peer, Direction.READ, np.array([[1 << 30, 1 << 20, 4096]], np.uint64))
    assert isinstance(transfer, MooncakeTransfer)
    assert transport.poll(transfer) is Status.PENDING
    assert len(transfer.running) == 1
    return transfer


@pytest.mark.parametrize("fails", ["the engine stays", "the library fails"])
def test_a_read_of_an_engine_that_could_not_be_ended_is_pending_for_good(engines: list[Engine], fails: str) -> None:
    """A fence with a hole: the read's blocks would be given back while its bytes may land."""
    transport = MooncakeTransport()
    transfer = reading(transport)
    if fails == "the engine stays":
        kept = transport._engine
        assert not transport.close()
        assert not transport.close()
        assert kept is not None
    else:

        def fail() -> int:
            raise RuntimeError("of the library")

        transport._engine.status = fail
        with pytest.raises(RuntimeError):
            transport.close()
    assert transport.poll(transfer) is Status.PENDING
    assert transport.cancel(transfer) is Status.PENDING


@pytest.mark.parametrize("status", [RUNNING, COMPLETED])
def test_a_read_of_an_engine_that_has_ended_has_failed(engines: list[Engine], status: int) -> None:
    """The engine's own thread receives what lands, and it ends with the engine."""
    transport = MooncakeTransport()
    transfer = reading(transport)
    transport._engine.status = lambda: status
    assert transport.close()
    assert transport.close()
    assert transport.poll(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is Reason.CLOSED


def test_a_read_that_ended_before_the_engine_was_kept_from_ending_has_failed(engines: list[Engine]) -> None:
    transport = MooncakeTransport()
    transfer = reading(transport)
    kept = transport._engine
    kept.status = lambda: COMPLETED
    assert not transport.close()
    assert transport.poll(transfer) is Status.FAILED
