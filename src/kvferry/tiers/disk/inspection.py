"""The directory of a disk tier as people see it: what it holds, and whether every block is intact."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from xxhash import xxh3_64

from kvferry.errors import Reason, TierError
from kvferry.tiers.disk.runs import RUN_BYTES, thread_buffer
from kvferry.tiers.disk.segments import (
    LOCK_NAME,
    Directory,
    RecordHeader,
    SegmentFiles,
    SegmentShape,
    errors_of,
    neighbours,
    read_segment,
)

NUM_READERS = 4


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment. ``error`` says why its files cannot be used; ``refused`` counts its unusable headers."""

    name: str
    occupied_bytes: int
    shape: SegmentShape | None = None
    headers: tuple[RecordHeader, ...] = ()
    refused: Counter[Reason] = field(default_factory=Counter)
    error: TierError | None = None


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block whose bytes are not those that were stored, or that cannot be read."""

    name: str
    cell: int
    key: str
    reason: Reason


def existing_directory(path: Path) -> Directory:
    """Return the directory of a disk tier. Raises :class:`TierError` ``invalid-request`` for any other."""
    with errors_of(path):
        if (path / LOCK_NAME).is_file():
            return Directory(path)
    why = f"it has no file {LOCK_NAME!r}" if path.is_dir() else "no such directory exists"
    message = f"{path} is not the directory of a disk tier: {why}."
    remedy = "Name the engine's setting disk_path; a further data-parallel rank has a folder dp<rank> in it."
    raise TierError(Reason.INVALID_REQUEST, message, remedy)


def inspect(directory: Directory) -> list[SegmentReport]:
    """Return a report on every segment; reads headers only, and needs no lock. Raises as ``segment_names``."""
    reports = []
    for name in directory.segment_names():
        with errors_of(directory.path / name):
            occupied_bytes = directory.occupied_bytes(name)
        try:
            shape, headers, refused = read_segment(directory, name)
        except TierError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # else an engine has replaced the segment
                reports.append(SegmentReport(name, occupied_bytes, error=error))
        else:
            reports.append(SegmentReport(name, occupied_bytes, shape, tuple(headers), refused))
    return reports


def verify(directory: Directory, reports: list[SegmentReport], advance: Callable[[int], None]) -> list[DamagedBlock]:
    """Read every block and return the damaged ones; ``advance`` is called with the number of blocks of each read."""
    damaged: list[DamagedBlock] = []
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for report in reports:
            if report.shape is None:
                continue
            files = SegmentFiles(directory, report.shape, exists=True)
            runs = list(neighbours(report.headers, max(1, RUN_BYTES // report.shape.cell_bytes)))
            for run, found in zip(runs, pool.map(_damaged_in, repeat(files), runs), strict=True):
                damaged += found
                advance(len(run))
            files.close()
    return damaged


def _damaged_in(files: SegmentFiles, run: list[RecordHeader]) -> list[DamagedBlock]:
    """Read blocks in neighbouring cells; a long block is read in parts, so memory is bounded."""
    cell_bytes = files.shape.cell_bytes
    digests = [xxh3_64() for _ in run]
    try:
        for begin in range(0, cell_bytes, RUN_BYTES):
            length = min(RUN_BYTES, cell_bytes - begin)
            view, _ = thread_buffer(len(run) * length)
            files.read(run[0].cell, view, begin)
            for place, (digest, header) in enumerate(zip(digests, run, strict=True)):
                digest.update(view[place * length :][: min(length, max(0, header.num_bytes - begin))])
    except TierError as error:
        return [DamagedBlock(files.name, header.cell, header.key.hex(), error.reason) for header in run]
    return [
        DamagedBlock(files.name, header.cell, header.key.hex(), Reason.CHECKSUM_MISMATCH)
        for header, digest in zip(run, digests, strict=True)
        if digest.intdigest() != header.checksum
    ]
