"""Lets Mooncake's engine find libibverbs, which the set-up keeps out of the search path of other processes.

With libibverbs where every process finds it, NIXL 1.5.1 loads it too, and crashes when a process ends: two copies of
libnl. ``UCX_MODULES`` keeps NIXL from that.
"""

import ctypes
import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "libibverbs"
NAMES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")


def variables() -> dict[str, str]:
    """Return what the environment of a new process needs to find the libraries; nothing where there are none."""
    paths = _paths()
    if not paths:
        return {}
    folders = dict.fromkeys([*(str(path.parent) for path in paths), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"UCX_MODULES": "^ib", "LD_LIBRARY_PATH": ":".join(folders)}


def make_loadable() -> None:
    """Load the libraries into this process and let those that it starts find them; nothing where there are none."""
    os.environ |= variables()
    for path in _paths():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _paths() -> list[Path]:
    """Return the libraries, in the order in which they need each other; nothing where one is missing."""
    found = [path for name in NAMES for path in FOLDER.rglob(name)]
    return found if len(found) >= len(NAMES) else []
