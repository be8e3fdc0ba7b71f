"""The directory of a disk tier as people see it: what it holds, and whether every block is intact."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from xxhash import xxh3_64

from kvferry.errors import Reason, TierError
from kvferry.tiers.disk.segments import (
    LOCK_NAME,
    Directory,
    RecordHeader,
    SegmentFiles,
    SegmentShape,
    errors_of,
    read_segment,
)
from kvferry.tiers.disk.workers import RUN_BYTES, Buffer
from kvferry.tiers.protocol import checksum

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
    buffers = threading.local()
    with ThreadPoolExecutor(NUM_READERS, initializer=lambda: setattr(buffers, "own", Buffer())) as pool:
        for report in reports:
            if report.shape is None:
                continue
            files = SegmentFiles(directory, report.shape, exists=True)
            runs = list(_runs(report))
            results = pool.map(lambda files, run: _damaged_in(files, run, buffers.own), repeat(files), runs)
            for run, found in zip(runs, results, strict=True):
                damaged += found
                advance(len(run))
            files.close()
    return damaged


def _runs(report: SegmentReport) -> Iterator[list[RecordHeader]]:
    """Yield the records of neighbouring cells together, up to ``RUN_BYTES``."""
    assert report.shape is not None
    most = max(1, RUN_BYTES // report.shape.cell_bytes)
    run: list[RecordHeader] = []
    for header in report.headers:
        if run and (header.cell != run[-1].cell + 1 or len(run) == most):
            yield run
            run = []
        run.append(header)
    if run:
        yield run


def _damaged_in(files: SegmentFiles, run: list[RecordHeader], buffer: Buffer) -> list[DamagedBlock]:
    try:
        found = _checksums(files, run, buffer)
    except TierError as error:
        return [DamagedBlock(files.name, header.cell, header.key.hex(), error.reason) for header in run]
    return [
        DamagedBlock(files.name, header.cell, header.key.hex(), Reason.CHECKSUM_MISMATCH)
        for header, checksum in zip(run, found, strict=True)
        if checksum != header.checksum
    ]


def _checksums(files: SegmentFiles, run: list[RecordHeader], buffer: Buffer) -> list[int]:
    """Return the checksums of blocks in neighbouring cells; a long block is read in parts, so memory is bounded."""
    cell_bytes = files.shape.cell_bytes
    if cell_bytes > RUN_BYTES:
        return [_checksum_in_parts(files, header, buffer) for header in run]
    view, address = buffer.of(len(run) * cell_bytes)
    files.read(run[0].cell, view)
    return [checksum(address + place * cell_bytes, header.num_bytes) for place, header in enumerate(run)]


def _checksum_in_parts(files: SegmentFiles, header: RecordHeader, buffer: Buffer) -> int:
    digest = xxh3_64()
    for begin in range(0, header.num_bytes, RUN_BYTES):
        view, _ = buffer.of(min(RUN_BYTES, files.shape.cell_bytes - begin))
        files.read(header.cell, view, begin)
        digest.update(view[: header.num_bytes - begin])
    return digest.intdigest()
