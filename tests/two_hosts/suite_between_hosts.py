"""The transports' suite with peers on another virtual host; ``test_transports.py`` runs this file on a host."""

import json
import os

import pytest

from kvferry.harness.virtual_hosts import VirtualHost

from ..support.transport_suite import TransportSuite

# A run of doctests imports this file too.
HOLDER_ID, IPV4 = json.loads(os.environ.get("KVFERRY_PEERS_HOST", '[0, ""]'))


class BetweenHosts(TransportSuite):
    """Peers run on the host that the environment names."""

    @staticmethod
    def on_host(command: list[str]) -> list[str]:
        return VirtualHost("peer", IPV4, "", HOLDER_ID).command(["env", f"MC_TCP_BIND_ADDRESS={IPV4}", *command])


class TestNixl(BetweenHosts):
    factory = "kvferry.transport.nixl:NixlTransport"


@pytest.mark.mooncake
class TestMooncake(BetweenHosts):
    factory = "kvferry.transport.mooncake:MooncakeTransport"
