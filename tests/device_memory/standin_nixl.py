"""In the place of ``nixl._bindings`` where there is no GPU: NIXL's checks, and copies by way of the second mapping.

Only what :mod:`kvferry.transport.nixl` calls is here. As in NIXL 1.5.1: a list has one type of memory; a range must lie
in one registered range of that type and device number, on each side; an unknown agent or range raises
``nixlNotFoundError``; a dead peer ``nixlRemoteDisconnectError``. More strictly than NIXL, memory of a device must be
registered as VRAM under its own number, and other memory as DRAM. A transfer moves its bytes when its state is asked.
"""

import ctypes
import errno
import json
import os
from typing import Any, NamedTuple

import numpy as np

from kvferry.transport.protocol import RangeStream

from .untouchable import span_of

DRAM_SEG, VRAM_SEG = "DRAM", "VRAM"
NIXL_READ, NIXL_WRITE = "READ", "WRITE"
NIXL_SUCCESS, NIXL_IN_PROG = 0, 1
NIXL_THREAD_SYNC_NONE = 0
_MAX_RANGES = 1024

submissions: list[tuple[str, str, str]] = []
"""Operation, local and remote type of memory of each request that was posted."""

_libc = ctypes.CDLL(None, use_errno=True)
_arguments = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_calls = {NIXL_READ: _libc.process_vm_readv, NIXL_WRITE: _libc.process_vm_writev}
for _call in _calls.values():
    _call.argtypes, _call.restype = _arguments, ctypes.c_ssize_t


class nixlBackendError(Exception): ...


class nixlInvalidParamError(Exception): ...


class nixlMismatchError(Exception): ...


class nixlNotFoundError(Exception): ...


class nixlRemoteDisconnectError(Exception): ...


class nixlAgentConfig:
    useProgThread = False
    pthrDelay = 0
    syncMode = NIXL_THREAD_SYNC_NONE


class Registered(NamedTuple):
    """A registered range; ``shift`` is added to an address for its second mapping."""

    kind: str
    device: int
    address: int
    length: int
    shift: int


class nixlRegDList:
    def __init__(self, kind: str, rows: list[tuple[int, int, int, str]]) -> None:
        assert kind in (DRAM_SEG, VRAM_SEG)
        self.kind, self.rows = kind, list(rows)


class nixlXferDList:
    def __init__(self, kind: str, rows: Any) -> None:
        assert kind in (DRAM_SEG, VRAM_SEG)
        self.kind = kind
        self.rows = np.array(rows, np.uint64).reshape(-1, 3)  # address, length, device


class Request(NamedTuple):
    operation: str
    agent: str
    pid: int
    local: RangeStream
    remote: RangeStream
    num_bytes: int


class nixlAgent:
    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self._name = name
        self._registered: list[Registered] = []
        self._remote: dict[str, tuple[int, list[Registered]]] = {}
        self._requests: dict[int, Request] = {}
        self._posted: set[int] = set()
        self._num_requests = 0

    def createBackend(self, kind: str, parameters: dict[str, str]) -> int:
        assert kind == "UCX"
        return 1

    def registerMem(self, listed: nixlRegDList, backends: list[int]) -> int:
        assert backends == [1]
        self._registered += [_registered(listed.kind, *row[:3]) for row in listed.rows]
        return NIXL_SUCCESS

    def deregisterMem(self, listed: nixlRegDList, backends: list[int]) -> int:
        for address, length, device, _ in listed.rows:
            self._registered.remove(_registered(listed.kind, address, length, device))
        return NIXL_SUCCESS

    def getLocalMD(self) -> bytes:
        return json.dumps([self._name, os.getpid(), self._registered]).encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        try:
            name, pid, rows = json.loads(metadata)
        except ValueError as error:
            raise nixlMismatchError("no metadata") from error
        if name in self._remote:
            raise nixlInvalidParamError("the agent is loaded")
        self._remote[name] = pid, [Registered(*row) for row in rows]
        return str(name).encode()

    def invalidateRemoteMD(self, name: str) -> int:
        if self._remote.pop(name, None) is None:
            raise nixlNotFoundError(name)
        return NIXL_SUCCESS

    def createXferReq(
        self, operation: str, local: nixlXferDList, remote: nixlXferDList, agent: str, message: str, backends: list[int]
    ) -> int:
        assert backends == [1]
        if len(local.rows) != len(remote.rows) or not np.array_equal(local.rows[:, 1], remote.rows[:, 1]):
            raise nixlInvalidParamError("the lists differ")
        if agent not in self._remote:
            raise nixlNotFoundError(f"metadata for remote agent {agent!r} not found")
        pid, theirs = self._remote[agent]
        lengths = local.rows[:, 1]
        sides = RangeStream(_reached(self._registered, local), lengths), RangeStream(_reached(theirs, remote), lengths)
        submissions.append((operation, local.kind, remote.kind))
        self._num_requests += 1
        self._requests[self._num_requests] = Request(operation, agent, pid, *sides, int(lengths.sum()))
        return self._num_requests

    def postXferReq(self, handle: int) -> int:
        assert handle not in self._posted
        self._posted.add(handle)
        return NIXL_IN_PROG

    def getXferStatus(self, handle: int) -> int:
        request = self._requests[handle]
        if request.agent not in self._remote:
            raise nixlRemoteDisconnectError(request.agent)
        position = 0
        while position < request.num_bytes:
            ends = [stream.reach(position, _MAX_RANGES) for stream in (request.local, request.remote)]
            local, remote = (stream.cut(position, min(ends)) for stream in (request.local, request.remote))
            moved = _calls[request.operation](
                request.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
            )
            if moved <= 0:
                self._remote.pop(request.agent)
                raise nixlRemoteDisconnectError(errno.errorcode.get(ctypes.get_errno(), "no byte"))
            position += moved
        return NIXL_SUCCESS

    def releaseXferReq(self, handle: int) -> int:
        del self._requests[handle]
        self._posted.discard(handle)
        return NIXL_SUCCESS


def _registered(kind: str, address: int, length: int, device: int) -> Registered:
    span = span_of(address, length)
    if span is None:
        if kind != DRAM_SEG:
            raise nixlBackendError("VRAM memory is detected as host")
        return Registered(kind, device, address, length, 0)
    if kind != VRAM_SEG or span.device != f"cuda:{device}":
        raise nixlBackendError(f"memory of {span.device} is registered as {kind} of device {device}")
    return Registered(kind, device, address, length, span.reachable - span.address)


def _reached(registered: list[Registered], listed: nixlXferDList) -> Any:
    """Return where the processor reaches each range of a list, or raise."""
    found = np.zeros(len(listed.rows), bool)
    addresses, lengths, devices = (listed.rows[:, column] for column in range(3))
    moved = addresses.copy()
    for each in registered:
        if each.kind != listed.kind:
            continue
        inside = (devices == each.device) & (addresses >= each.address)
        inside &= addresses + lengths <= each.address + each.length
        moved[inside & ~found] += np.uint64(each.shift % (1 << 64))
        found |= inside
    if not len(found) or not found.all():
        raise nixlNotFoundError(f"{int((~found).sum())} ranges are not registered as {listed.kind}")
    return moved
