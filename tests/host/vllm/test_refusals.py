"""Engines that must refuse to start, each with one clear error."""

import socket
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from kvferry.integrations.vllm.child_process import LaunchError
from kvferry.integrations.vllm.launch import HOST, stop_servers, wait_until_ready

from .engine_pool import EnginePool

pytestmark = pytest.mark.vllm


def test_wrong_settings_are_refused_at_start(engine_pool: EnginePool) -> None:
    """All four engines start at once, to save time; each must end by itself and say why."""
    with closing(socket.socket()) as listener:
        listener.bind((HOST, 0))
        listener.listen()
        cases: dict[str, tuple[str, dict[str, Any], str]] = {
            "unknown-key": ("gqa-tp1", {"lease_second": 60}, "Did you mean 'lease_seconds'? [unknown-setting]"),
            "port": ("gqa-tp1", {"port": listener.getsockname()[1]}, "[port-in-use]"),
            "layout": ("gqa-tp1", {"layout": "BHLCN"}, "[unknown-layout]"),
            "mla-cross-layer": ("mla-tp1", {}, "[kernel-cannot-read-layout]"),
        }
        servers = {}
        try:
            for name, (engine, settings, _) in cases.items():
                base = engine_pool.settings(engine)
                # VLLM_KV_CACHE_LAYOUT, which wins over the connector's wish
                layout = "BHLNC" if name == "mla-cross-layer" else None
                changed = replace(base, connector_settings={**base.connector_settings, **settings}, layout=layout)
                servers[name] = engine_pool.start(f"refused-{name}", changed)
            for name, (_, _, text) in cases.items():
                with pytest.raises(LaunchError):
                    wait_until_ready([servers[name]], timeout_seconds=200)
                assert servers[name].process.exit_status() not in (None, 0)
                assert text in servers[name].process.log_path.read_text(errors="replace"), name
        finally:
            stop_servers(list(servers.values()))
