"""Every case of the transports' suite with the peer on another host, and ``kvferry doctor`` on each host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..virtual_network import Hosts

SUITE = Path(__file__).with_name("suite_between_hosts.py")


@pytest.mark.parametrize("transport", ["nixl", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def test_the_suite_between_two_hosts(transport: str, hosts: Hosts) -> None:
    prefill, decode, _ = hosts
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(SUITE), "-k", transport]
    environment = {
        **os.environ,
        "UCX_NET_DEVICES": "eth0",
        "MC_TCP_BIND_ADDRESS": decode.ipv4,
        "KVFERRY_PEERS_HOST": json.dumps([prefill.holder_id, prefill.ipv4]),
    }
    done = subprocess.run(
        decode.command(command), env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("index", [0, 1], ids=["prefill", "decode"])
def test_the_doctor_finds_each_host_well(index: int, hosts: Hosts) -> None:
    command = hosts[index].command([sys.executable, "-m", "kvferry.cli.main", "doctor", "--json"])
    report = json.loads(subprocess.check_output(command, timeout=400))
    found = {finding["name"]: finding["health"] for finding in report["findings"]}
    assert report["healthy"]
    assert found["transport nixl"] == "ok"
