"""A ``mooncake_master`` on loopback for tests of the pool tier, which can be killed, stopped and started again."""

import importlib.util
import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvferry.harness.launch import free_port
from kvferry.layout.shard import Region
from kvferry.tiers.pool.store import PoolStore
from kvferry.tiers.remote_pool import RemotePool

from ..waits import wait_until

SHARE_BYTES = 16 << 20


def skip_without_mooncake() -> None:
    """Skip a test where Mooncake Store cannot be loaded, with the reason."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)


class Master:
    """The process; ``address`` is what an engine's setting ``pool_master`` names."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found is not None
        assert found.submodule_search_locations is not None
        self._program = Path(found.submodule_search_locations[0]) / "mooncake_master"
        self._folder = folder
        self._port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it; the pool is empty."""
        with (self._folder / "master.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self._port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self._metrics_port}",
                ],
                stdout=log,
                stderr=log,
            )

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, such as SIGSTOP."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Let the process hang, until it gets SIGCONT."""
        self.send(signal.SIGSTOP)

    def kill(self) -> None:
        """End the process with SIGKILL; twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class SharedClients:
    """Mooncake's clients of one master, for one engine after another: each takes three seconds to leave a pool.

    ``open`` takes the place of ``PoolStore``. A client that its tier closes stays for the next one, with an empty pool.
    """

    def __init__(self) -> None:
        self._free: list[PoolStore] = []
        self._opened: list[PoolStore] = []
        self._closes = PoolStore.close

    def open(self, master: str, share_bytes: int, region: Region, num_threads: int) -> PoolStore:
        """Return a client whose blocks are copied from and to this region."""
        if not self._free:
            client = PoolStore(master, share_bytes, region, num_threads)
            self._opened.append(client)
            client.close = lambda: self._leave(client)  # type: ignore[method-assign]
            return client
        client = self._free.pop()
        assert (client._master, client._share_bytes) == (master, share_bytes)
        assert client._store.register_buffer(region.base_address, region.length) == 0
        client._region = region
        return client

    def close(self) -> None:
        """Let all clients leave the pool."""
        for client in self._opened:
            self._closes(client)

    def _leave(self, client: PoolStore) -> None:
        assert client._store.remove_by_regex("^kvferry/[0-9a-f]{32}/", True) >= 0
        assert client._store.unregister_buffer(client._region.base_address) == 0
        self._free.append(client)


def open_pool(master: Master, region: Region, share_bytes: int = SHARE_BYTES) -> RemotePool:
    """Return a pool tier that has reached the master."""
    pool = RemotePool(master.address, share_bytes, region)
    wait_until(lambda: pool.poll() == [] and pool.snapshot()["is_reachable"], "the master answers")
    return pool
