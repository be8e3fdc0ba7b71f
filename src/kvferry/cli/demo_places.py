"""Where the demo's processes run: all on loopback, or each engine and the router on a virtual host of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.handoff.wire.keys import make_keys
from kvferry.harness.launch import HOST
from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts


@dataclass(frozen=True, slots=True)
class DemoPlaces:
    """The engines' virtual hosts by engine, and the keys made for them; without hosts all run on loopback."""

    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    router_address: str = HOST
    keys: Path | None = None

    def address(self, engine: str) -> str:
        """Return the address at which an engine's API server listens."""
        return self.hosts[engine].ipv4 if engine in self.hosts else HOST

    def connector_settings(self, engine: str) -> dict[str, Any]:
        """Return the settings with which an engine's connector reaches the other engine's host and is reached there."""
        if engine not in self.hosts:
            return {}
        host = self.hosts[engine]
        others = [other.name for other in self.hosts.values() if other != host]
        return {"host": host.ipv4, "advertised_host": host.name, "keys": str(self.keys), "allowed_hosts": others}


@contextmanager
def demo_places(num_hosts: int, folder: Path) -> Iterator[DemoPlaces]:
    """Yield the places of the demo, with ``num_hosts`` of 2 on virtual hosts; the caller is then on the router's.

    Raises :class:`LaunchError` as :func:`virtual_hosts` does.
    """
    if num_hosts == 1:
        yield DemoPlaces()
        return
    keys = make_keys(folder / "keys").folder
    with virtual_hosts(("prefill-0", "decode-0", "router-0"), folder) as (prefill, decode, router), router.entered():
        yield DemoPlaces({"prefill": prefill, "decode": decode}, router.ipv4, keys)
