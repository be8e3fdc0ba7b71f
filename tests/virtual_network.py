"""The hosts of a test between hosts, or the reason why this machine has none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.harness.child_process import LaunchError
from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts

from .no_skips import OF_THE_MACHINE

Hosts = tuple[VirtualHost, ...]


def make_hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    """Yield hosts of these names. Skip the test, with the reason, where this machine has none."""
    try:
        with virtual_hosts(["trial"], folder):
            pass
    except LaunchError as error:
        pytest.skip(f"{OF_THE_MACHINE}no virtual hosts: {error.message}")
    with virtual_hosts(names, folder) as hosts:
        yield hosts
