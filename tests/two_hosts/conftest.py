"""Three virtual hosts for the whole run."""

from collections.abc import Iterator

import pytest

from ..virtual_network import Hosts, make_hosts

TIMEOUT_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A host to prefill, a host to decode, and a host for the router."""
    yield from make_hosts(tmp_path_factory.mktemp("hosts"), "prefill-0", "decode-0", "router-0")
