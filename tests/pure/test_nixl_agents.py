"""The remote agents that a NIXL transport has loaded: all that are used, and few others."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.errors import Reason, TransportError
from kvferry.transport import nixl
from kvferry.transport.nixl import NixlEndPoint, NixlPeer, RemoteAgents

NAMES = ["a", "b", "c", "d", "e"]
MOST_UNUSED = 2
names = st.sampled_from(NAMES)


class Agent:
    """NIXL's agent, as far as remote agents go: to forget one whose transfer runs would crash."""

    def __init__(self, running: dict[int, str]) -> None:
        self.running = running
        self.loaded: dict[str, bytes] = {}

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        name, _, version = metadata.partition(b":")
        if not version:
            raise RuntimeError("NIXL_ERR_MISMATCH")
        self.loaded.setdefault(name.decode(), metadata)
        return name

    def invalidateRemoteMD(self, name: str) -> None:
        assert name not in self.running.values(), "NIXL crashes"
        del self.loaded[name]


def end_point(name: str, metadata: bytes) -> NixlEndPoint:
    return NixlEndPoint("nixl", 1, name, metadata, [], 4096, bytes(16))


class AgentsMachine(RuleBasedStateMachine):
    """Connections to a few agents, some of which restart, lie about their metadata, or have transfers running."""

    @initialize()
    def open(self) -> None:
        self.running: dict[int, str] = {}
        self.agent = Agent(self.running)
        nixl = SimpleNamespace(nixlBackendError=KeyError, nixlRemoteDisconnectError=KeyError)
        self.agents = RemoteAgents(nixl, self.agent, self.running, "")
        self.peers: list[NixlPeer] = []
        self.versions: Counter[str] = Counter()

    def _connect(self, name: str, metadata: bytes) -> TransportError | None:
        try:
            self.peers.append(self.agents.peer(end_point(name, metadata)))
        except TransportError as error:
            return error
        return None

    @rule(name=names, is_new=st.booleans())
    def connect(self, name: str, is_new: bool) -> None:
        metadata = f"{name}:{self.versions[name] + is_new}".encode()
        before = dict(self.agent.loaded)
        error = self._connect(name, metadata)
        if error is None:
            assert self.agent.loaded[name] == metadata
            self.versions[name] += is_new
        else:
            assert (error.reason, before) == (Reason.PEER_UNREACHABLE, self.agent.loaded)
            assert name in self.running.values()

    @rule(name=names, other=st.sampled_from([*NAMES, "nobody"]), is_garbage=st.booleans())
    def lie(self, name: str, other: str, is_garbage: bool) -> None:
        """Metadata that is none, or another agent's: nothing changes."""
        if other == name or name in self.running.values():
            return
        before = dict(self.agent.loaded)
        error = self._connect(name, b"garbage" if is_garbage else f"{other}:9".encode())
        assert error is not None
        assert (error.reason, self.agent.loaded) == (Reason.MALFORMED_MESSAGE, before)

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.peers.remove(peer)
        peer.close()
        peer.close()

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        self.running[len(self.running)] = data.draw(st.sampled_from(self.peers)).name

    @rule()
    def end(self) -> None:
        self.running.clear()

    @rule()
    def let_go(self) -> None:
        self.agents.let_go()
        used = {peer.name for peer in self.peers} | set(self.running.values())
        assert len(self.agent.loaded.keys() - used) <= MOST_UNUSED

    @invariant()
    def what_is_used_is_loaded(self) -> None:
        if hasattr(self, "peers"):
            assert {peer.name for peer in self.peers} <= self.agent.loaded.keys()
            assert self.agents._metadata == self.agent.loaded

    def teardown(self) -> None:
        if hasattr(self, "running"):
            self.running.clear()
            self.agents.close()
            assert self.agent.loaded == {}


@pytest.fixture(autouse=True)
def most_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_UNUSED", MOST_UNUSED)


def test_agents_are_loaded_as_long_as_they_are_used() -> None:
    run_state_machine_as_test(AgentsMachine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))


@pytest.mark.parametrize("before", [{}, {nixl.DEVICES_VARIABLE: "eth7"}, {nixl.MODULES_VARIABLE: "all"}])
@pytest.mark.parametrize("has_efa", [False, True])
@pytest.mark.parametrize("devices", ["", "eth0,lo"])
def test_variables_are_set_for_one_context_alone(
    before: dict[str, str], has_efa: bool, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other libraries of this process, and its children, read them too."""
    environment: dict[str, Any] = {**before}
    monkeypatch.setattr(nixl.os, "environ", environment)
    monkeypatch.setattr(nixl, "has_efa_device", lambda: has_efa)
    for fails in (False, True):
        try:
            with nixl._ucx_variables(devices):
                assert environment.get(nixl.DEVICES_VARIABLE) == (devices or before.get(nixl.DEVICES_VARIABLE))
                modules = before.get(nixl.MODULES_VARIABLE, None if has_efa else "^efa")
                assert environment.get(nixl.MODULES_VARIABLE) == modules
                assert not fails or 1 // 0
        except ZeroDivisionError:
            pass
        assert environment == before
