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


def make_loadable() -> None:
    """Load the libraries into this process and let those that it starts find them; nothing where there are none."""
    paths = [found for name in NAMES for found in FOLDER.rglob(name)]
    if len(paths) < len(NAMES):
        return
    os.environ["UCX_MODULES"] = "^ib"
    folders = dict.fromkeys([*(str(path.parent) for path in paths), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    os.environ["LD_LIBRARY_PATH"] = ":".join(folders)
    for path in paths:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
