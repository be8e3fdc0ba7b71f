"""Lower tiers that are watched: no block may land with bytes that were never stored under its key.

What was stored outlives a killed engine in a file, one row for each key and content. The engine may store other bytes
under the same key: the order of its sums depends on what else is computed with a prompt.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.tiers.disk.runs import memory
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import KEY_BYTES, BlockKey, Load, Slots, Store, TierCopy
from kvferry.tiers.remote_pool import RemotePool

DIGEST_BYTES = 16
_ROW_BYTES = KEY_BYTES + DIGEST_BYTES


def bytes_on_disk(folder: Path) -> int:
    """Return what a folder and its files occupy, as the file system counts it; 0 for none."""
    try:
        total = folder.stat().st_blocks
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:  # removed meanwhile
                    continue
    except FileNotFoundError:
        return 0
    return total * 512


class StoredBytes:
    """Digests of all blocks that engines with this file have stored. ``num_wrong``: blocks that landed with others."""

    def __init__(self, path: Path) -> None:
        self.num_wrong = 0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        rows = path.read_bytes()
        whole = range(0, len(rows) - _ROW_BYTES + 1, _ROW_BYTES)
        self._known = {rows[start : start + _ROW_BYTES] for start in whole}

    def add(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """Note blocks before they are stored."""
        new = set(self._rows(keys, slots)) - self._known
        self._known |= new
        os.write(self._file, b"".join(new))

    def compare(self, load: Load) -> None:
        """Count the blocks of a load that have landed with other bytes."""
        places = np.flatnonzero(load.landed)
        rows = self._rows([load.keys[place] for place in places.tolist()], load.slots[load.landed])
        self.num_wrong += sum(row not in self._known for row in rows)

    @staticmethod
    def _rows(keys: Sequence[BlockKey], slots: Slots) -> list[bytes]:
        places = zip(keys, slots.addresses.tolist(), slots.lengths.tolist(), strict=True)
        return [
            key + hashlib.blake2b(memory(address, length), digest_size=DIGEST_BYTES).digest()
            for key, address, length in places
        ]


class _Watched:
    """The verbs between which the slots of a copy belong to the tier."""

    stored: StoredBytes

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots) -> Store:
        self.stored.add(keys, slots)
        store: Store = super().prepare_store(keys, slots)  # type: ignore[misc]
        return store

    def poll(self) -> list[TierCopy]:
        ended: list[TierCopy] = super().poll()  # type: ignore[misc]
        for copy in ended:
            if isinstance(copy, Load):
                self.stored.compare(copy)
        return ended


class WatchedDisk(_Watched, LocalDisk):
    """A disk tier that is watched."""

    def __init__(self, stored: StoredBytes, *arguments: Any, **options: Any) -> None:
        self.stored = stored
        super().__init__(*arguments, **options)


class WatchedPool(_Watched, RemotePool):
    """A pool tier that is watched."""

    def __init__(self, stored: StoredBytes, *arguments: Any, **options: Any) -> None:
        self.stored = stored
        super().__init__(*arguments, **options)
