"""The memory of a slab: one file without a name (memfd), mapped by its owner and by every rank of the engine.

A memfd needs no path, has no size limit of ``/dev/shm``, and goes with the last process that maps it. All pages are
allocated at once, after a look at the available memory: a slab that is too large is an error at the start, and never a
signal in the middle of a copy. Size seals let nobody cut the file under a mapping.

The owner puts the file into huge pages with ``MADV_COLLAPSE``; the kernel setting ``shmem_enabled=never``, which is the
default, refuses ``MADV_HUGEPAGE`` for a memfd, not ``MADV_COLLAPSE``. A huge page is made from one small page and 511
holes, and the holes are filled afterwards only where there is no huge page: to allocate all small pages first takes
several times as long. ``ShmemPmdMapped`` in ``/proc/self/smaps`` shows whether it worked. Ranks that attach later map
the same huge pages, since every mapping begins at a multiple of 2 MiB.
"""

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from kvferry.errors import Reason, TierError
from kvferry.execution.memory import collapse_to_huge_pages
from kvferry.layout.shard import Region
from kvferry.units import format_bytes

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_FEWER_BYTES = "Give the host tier fewer bytes."
_MAP_FIXED = 0x10
_CONTROL_GROUPS = "/sys/fs/cgroup"
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SlabHandle(msgspec.Struct, frozen=True):
    """What a rank of the same host and user needs to map a slab: where the owner has it open, and which file it is."""

    process_id: int
    file_descriptor: int
    inode: int
    length: int


class SlabMemory:
    """A mapped slab. ``SlabMemory(length)`` allocates one, :meth:`attach` maps that of another process.

    >>> slab = SlabMemory(100_000)
    >>> rank = SlabMemory.attach(slab.handle)
    >>> ctypes.memmove(slab.region.base_address, b"block", 5) == slab.region.base_address
    True
    >>> ctypes.string_at(rank.region.base_address, 5), rank.region.length
    (b'block', 100000)
    >>> rank.close(), slab.close()
    (None, None)
    """

    region: Region
    """Address of this process and length in bytes."""
    _file_descriptor: int
    _is_open: bool

    def __init__(self, length: int) -> None:
        """Allocate ``length`` bytes. Raises :class:`TierError` ``tier-failed``."""
        # The kernel would grant each page, and then kill processes for memory.
        if length > (available := available_bytes()):
            raise _too_large(length, f"{format_bytes(available)} are available")
        try:
            file_descriptor = os.memfd_create("kvferry-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _too_large(length, str(error.strerror)) from error
        with _closed_on_error(file_descriptor):
            try:
                os.truncate(file_descriptor, length)
            except OSError as error:  # a process may have a limit for the size of files
                raise _too_large(length, str(error.strerror)) from error
            fcntl.fcntl(file_descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            for begin in range(0, length - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
                _allocate(file_descriptor, begin, mmap.PAGESIZE)
            self._map(file_descriptor, length)
        refused = collapse_to_huge_pages(self.region.base_address, length)
        if refused is not None:
            logger.info("the slab has no huge pages: %s", refused)
        try:
            _allocate(file_descriptor, 0, length)
        except TierError:
            self.close()
            raise

    @classmethod
    def attach(cls, handle: SlabHandle) -> "SlabMemory":
        """Map the slab of a process of the same host and user.

        Raises :class:`TierError` ``peer-changed`` where the process has died, or another one has its id.
        """
        path = f"/proc/{handle.process_id}/fd/{handle.file_descriptor}"
        try:
            file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(handle, f"{path}: {error.strerror}") from error
        with _closed_on_error(file_descriptor):
            found = os.fstat(file_descriptor)
            if (found.st_ino, found.st_size) != (handle.inode, handle.length):
                raise _gone(handle, f"{path} is another file")
            slab = cls.__new__(cls)
            slab._map(file_descriptor, handle.length)
        return slab

    @property
    def handle(self) -> SlabHandle:
        """What a rank needs to attach."""
        inode = os.fstat(self._file_descriptor).st_ino
        return SlabHandle(os.getpid(), self._file_descriptor, inode, self.region.length)

    def close(self) -> None:
        """Unmap the slab; nobody may use its addresses any more. Twice is fine."""
        if self._is_open:
            _libc.munmap(self.region.base_address, self.region.length)
            os.close(self._file_descriptor)
            self._is_open = False

    def _map(self, file_descriptor: int, length: int) -> None:
        """Map the file at a multiple of 2 MiB, by way of a larger range of addresses."""
        mapped_length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        begin = _mapped(None, mapped_length + HUGE_PAGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            _mapped(address, mapped_length, access, mmap.MAP_SHARED | _MAP_FIXED, file_descriptor)
        except TierError:
            _libc.munmap(begin, mapped_length + HUGE_PAGE_BYTES)
            raise
        if address > begin:
            _libc.munmap(begin, address - begin)
        _libc.munmap(address + mapped_length, begin + HUGE_PAGE_BYTES - address)
        self.region = Region(address, length)
        self._file_descriptor, self._is_open = file_descriptor, True


def available_bytes() -> int:
    """Return the memory that this process can still get, within the limits of its control groups (cgroup v2) too.

    A control group counts the page cache as used. The kernel gives that up when memory is asked for, so files that
    were read, such as a model's weights, take nothing away.

    >>> available_bytes() > 1 << 20
    True
    """
    found = _counted("/proc/meminfo", "MemAvailable:") * 1024
    for group in _control_groups():
        limit = group / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            cached = sum(_counted(group / "memory.stat", name) for name in ("inactive_file", "active_file"))
            found = min(found, int(text) - int((group / "memory.current").read_text()) + cached)
    return found


def check_memory(host_bytes: int, pool_bytes: int, num_engines: int = 1) -> None:
    """Raise :class:`TierError` (tier-failed) unless each of the engines of a machine can get so much memory."""
    if (host_bytes + pool_bytes) * num_engines > (available := available_bytes()):
        sizes = f"host_bytes is {format_bytes(host_bytes)}"
        if pool_bytes:
            sizes += f" and pool_bytes {format_bytes(pool_bytes)}"
        if num_engines > 1:
            sizes += f" for each of {num_engines} data-parallel ranks"
        raise TierError(Reason.TIER_FAILED, f"{sizes}; {format_bytes(available)} are available.", "Set fewer.")


def _control_groups() -> Iterator[Path]:
    """Yield the directories of this process's control group and of all that contain it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    place = PurePosixPath(own)
    for part in (place, *place.parents):
        yield Path(f"{_CONTROL_GROUPS}{part}")


def _counted(path: str | Path, name: str) -> int:
    """Return the number that stands behind ``name`` in a file of the kernel."""
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.split()[0] == name)


def _allocate(file_descriptor: int, begin: int, length: int) -> None:
    """Give these bytes of the file pages where they have none. Raises :class:`TierError` ``tier-failed``."""
    try:
        os.posix_fallocate(file_descriptor, begin, length)
    except OSError as error:
        raise _too_large(length, str(error.strerror)) from error


@contextmanager
def _closed_on_error(file_descriptor: int) -> Iterator[None]:
    """Close the descriptor when the block raises."""
    try:
        yield
    except BaseException:
        os.close(file_descriptor)
        raise


def _mapped(address: int | None, length: int, access: int, flags: int, file_descriptor: int) -> int:
    """Call ``mmap``. Raises :class:`TierError` ``tier-failed``."""
    found = _libc.mmap(address, length, access, flags, file_descriptor, 0)
    if found == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise TierError(
            Reason.TIER_FAILED, f"{format_bytes(length)} cannot be mapped for a slab: {reason}.", _FEWER_BYTES
        )
    return int(found)


def _too_large(length: int, found: str) -> TierError:
    return TierError(
        Reason.TIER_FAILED,
        f"{format_bytes(length)} of host memory cannot be allocated for a slab: {found}.",
        _FEWER_BYTES,
    )


def _gone(handle: SlabHandle, found: str) -> TierError:
    return TierError(
        Reason.PEER_CHANGED,
        f"the slab of process {handle.process_id} is gone: {found}.",
        "Start the engine again: its slab goes with the process that owns it.",
    )
