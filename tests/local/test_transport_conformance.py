"""Every shipped transport passes the conformance suite."""

import pytest

from ..support.transport_suite import TransportSuite


class TestCma(TransportSuite):
    factory = "kvferry.transport.cma:CmaTransport"


@pytest.mark.slow
class TestNixl(TransportSuite):
    factory = "kvferry.transport.nixl:NixlTransport"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _installed(cls) -> None:
        pytest.importorskip("nixl")


@pytest.mark.mooncake
class TestMooncake(TransportSuite):
    factory = "kvferry.transport.mooncake:MooncakeTransport"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _installed(cls) -> None:
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
