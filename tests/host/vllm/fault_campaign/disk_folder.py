"""What happens to the folder of a disk tier behind the tier's back: damaged blocks, headers and files."""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.tiers.disk.segments import (
    PAGE_BYTES,
    RECORD_BYTES,
    VERSION,
    RecordHeader,
    SegmentShape,
    cells_name,
    table_name,
)

from ..offloads import DiskPlace, on_disk


@dataclass
class DiskFolder:
    """The folder, and ``wanted``: the places of blocks that the next request needs from the disk."""

    path: Path
    random: random.Random
    wanted: list[DiskPlace] = field(default_factory=list)

    def places(self) -> dict[bytes, DiskPlace]:
        """Return the places of all blocks, by key; none where the folder cannot be read."""
        try:
            return on_disk(self.path)
        except OSError:
            return {}

    def segments(self) -> list[str]:
        """Return the names of the segments that have a table."""
        return sorted(file.stem for file in self.path.glob("segment-*.table"))

    def segment(self) -> str:
        """Return the segment of a wanted block, else any segment."""
        return self.random.choice(self.wanted)[0] if self.wanted else self.random.choice(self.segments())

    def table(self, segment: str) -> Path:
        """Return the file of a segment's record headers."""
        return self.path / table_name(segment)

    def cells(self, segment: str) -> Path:
        """Return the file of a segment's blocks."""
        return self.path / cells_name(segment)

    def change(self, file: Path, offset: int, content: bytes) -> None:
        """Write bytes into a file, not beyond its end."""
        with file.open("r+b") as opened:
            room = max(0, os.fstat(opened.fileno()).st_size - offset)
            opened.seek(offset)
            opened.write(content[:room])

    def flip_bit(self, file: Path, begin: int, end: int) -> None:
        """Flip one bit between two offsets."""
        offset = self.random.randrange(begin, end)
        with file.open("rb") as opened:
            opened.seek(offset)
            byte = opened.read(1)
        if byte:
            self.change(file, offset, bytes([byte[0] ^ 1 << self.random.randrange(8)]))

    def shape(self, segment: str) -> SegmentShape:
        """Return the shape of a segment."""
        with self.table(segment).open("rb") as opened:
            return SegmentShape.unpack(opened.read(PAGE_BYTES))

    def header(self, place: DiskPlace) -> tuple[Path, int, RecordHeader, SegmentShape]:
        """Return the file, the offset of the record header, the header and the shape of a block's segment."""
        name, header, shape = place
        return self.table(name), shape.header_offset(header.cell), header, shape

    def cell(self, place: DiskPlace) -> tuple[Path, int, int]:
        """Return the file of a block, where it begins and where it ends."""
        name, header, shape = place
        begin = shape.cell_offset(header.cell)
        return self.cells(name), begin, begin + header.num_bytes

    def any_place(self) -> DiskPlace:
        """Return a wanted block, else any block."""
        return self.random.choice(self.wanted or list(self.places().values()))


# blocks


def flip_bits_in_blocks(folder: DiskFolder) -> None:
    for place in _some(folder):
        folder.flip_bit(*folder.cell(place))


def page_of_zeros_in_a_block(folder: DiskFolder) -> None:
    file, begin, end = folder.cell(folder.any_place())
    folder.change(file, folder.random.randrange(begin, end, PAGE_BYTES), bytes(PAGE_BYTES))


def bytes_of_another_block(folder: DiskFolder) -> None:
    file, begin, end = folder.cell(folder.any_place())
    others = [place for place in folder.places().values() if folder.cell(place)[:2] != (file, begin)]
    if others:
        source, start, _ = folder.cell(folder.random.choice(others))
        with source.open("rb") as opened:
            opened.seek(start)
            folder.change(file, begin, opened.read(end - begin))


def cut_in_a_block(folder: DiskFolder) -> None:
    file, begin, end = folder.cell(folder.any_place())
    os.truncate(file, folder.random.randrange(begin, end))


def no_cells_left(folder: DiskFolder) -> None:
    os.truncate(folder.cells(folder.segment()), 0)


def cells_removed(folder: DiskFolder) -> None:
    folder.cells(folder.segment()).unlink()


def table_removed(folder: DiskFolder) -> None:
    folder.table(folder.segment()).unlink()


def cells_replaced_by_a_copy(folder: DiskFolder) -> None:
    """The copy has another inode: what the tier has open is no longer the file of that name."""
    file = folder.cells(folder.segment())
    shutil.copyfile(file, folder.path / "copy")
    os.replace(folder.path / "copy", file)


def directory_removed(folder: DiskFolder) -> None:
    shutil.rmtree(folder.path)


def directory_replaced(folder: DiskFolder) -> None:
    moved = folder.path.with_name(f"{folder.path.name}-moved")
    shutil.rmtree(moved, ignore_errors=True)
    folder.path.rename(moved)
    folder.path.mkdir()


def everything_in_the_directory_removed(folder: DiskFolder) -> None:
    for file in folder.path.iterdir():
        file.unlink()


# what a tier reads when it is opened


def flip_bit_in_a_record_header(folder: DiskFolder) -> None:
    file, offset, _, _ = folder.header(folder.any_place())
    folder.flip_bit(file, offset, offset + RECORD_BYTES)


def half_of_a_record_header(folder: DiskFolder) -> None:
    file, offset, _, _ = folder.header(folder.any_place())
    folder.change(file, offset + RECORD_BYTES // 2, bytes(RECORD_BYTES // 2))


def record_header_in_another_cell(folder: DiskFolder) -> None:
    file, _, header, shape = folder.header(folder.any_place())
    other = folder.random.randrange(shape.num_cells)
    folder.change(file, shape.header_offset(other), header.pack(shape.segment_id))


def record_header_of_another_length(folder: DiskFolder) -> None:
    file, offset, header, shape = folder.header(folder.any_place())
    forged = RecordHeader(header.cell, header.key, header.num_bytes - 1, header.checksum, header.sequence)
    folder.change(file, offset, forged.pack(shape.segment_id))


def record_header_with_another_checksum(folder: DiskFolder) -> None:
    file, offset, header, shape = folder.header(folder.any_place())
    forged = RecordHeader(header.cell, header.key, header.num_bytes, header.checksum ^ 1, header.sequence)
    folder.change(file, offset, forged.pack(shape.segment_id))


def record_header_with_the_key_of_another(folder: DiskFolder) -> None:
    """One header says what another one says, in the cell of the first: two blocks with one key."""
    file, offset, header, shape = folder.header(folder.any_place())
    other = folder.random.choice(list(folder.places().values()))[1]
    forged = RecordHeader(header.cell, other.key, other.num_bytes, other.checksum, other.sequence + 1000)
    folder.change(file, offset, forged.pack(shape.segment_id))


def record_header_of_another_version(folder: DiskFolder) -> None:
    file, offset, _, _ = folder.header(folder.any_place())
    folder.change(file, offset + 8, (VERSION + 1).to_bytes(2, "little"))


def table_of_zeros(folder: DiskFolder) -> None:
    segment = folder.segment()
    folder.change(folder.table(segment), PAGE_BYTES, bytes(folder.shape(segment).num_cells * RECORD_BYTES))


def table_of_noise(folder: DiskFolder) -> None:
    segment = folder.segment()
    noise = folder.random.randbytes(folder.shape(segment).num_cells * RECORD_BYTES)
    folder.change(folder.table(segment), PAGE_BYTES, noise)


def cut_in_a_table(folder: DiskFolder) -> None:
    os.truncate(folder.table(folder.segment()), PAGE_BYTES + folder.random.randrange(RECORD_BYTES * 4))


def flip_bit_in_a_segment_header(folder: DiskFolder) -> None:
    folder.flip_bit(folder.table(folder.segment()), 0, 48)


def table_of_another_segment(folder: DiskFolder) -> None:
    segment = folder.segment()
    others = [other for other in folder.segments() if other != segment]
    if others:
        shutil.copyfile(folder.table(folder.random.choice(others)), folder.table(segment))


def segment_under_another_name(folder: DiskFolder) -> None:
    segment = folder.segment()
    shutil.copyfile(folder.cells(segment), folder.cells("segment-99999999"))
    shutil.copyfile(folder.table(segment), folder.table("segment-99999999"))


def noise_with_the_name_of_a_segment(folder: DiskFolder) -> None:
    folder.cells("segment-88888888").write_bytes(folder.random.randbytes(10_000))
    folder.table("segment-88888888").write_bytes(folder.random.randbytes(10_000))


def lock_file_removed(folder: DiskFolder) -> None:
    (folder.path / "lock").unlink()


def tables_of(folder: DiskFolder) -> dict[Path, bytes]:
    """Return the tables of all segments without their headers, to be put back later."""
    tables = map(folder.table, folder.segments())
    return {file: file.read_bytes()[PAGE_BYTES:] for file in tables}


def put_back(folder: DiskFolder, tables: dict[Path, bytes]) -> None:
    """Put earlier tables back: an index that is older than the blocks."""
    for file, table in tables.items():
        if file.exists():
            folder.change(file, PAGE_BYTES, table)


Damage = Callable[[DiskFolder], None]

OF_BLOCKS: dict[str, Damage] = {
    "bits of blocks flipped": flip_bits_in_blocks,
    "a page of a block zeroed": page_of_zeros_in_a_block,
    "a block with the bytes of another": bytes_of_another_block,
    "a file cut within a block": cut_in_a_block,
    "a file cut to nothing": no_cells_left,
}
"""Damage that a tier meets in its next read; the tier goes on with its files."""
OF_FILES: dict[str, Damage] = {
    "the cells of a segment removed": cells_removed,
    "the table of a segment removed": table_removed,
    "the cells of a segment replaced by a copy": cells_replaced_by_a_copy,
    "the directory removed": directory_removed,
    "the directory replaced by an empty one": directory_replaced,
    "all files of the directory removed": everything_in_the_directory_removed,
}
"""Damage after which the tier has files open that nobody finds; an engine is started again after it."""
OF_THE_INDEX: dict[str, Damage] = {
    "a bit of a record header flipped": flip_bit_in_a_record_header,
    "a record header torn": half_of_a_record_header,
    "a record header in another cell": record_header_in_another_cell,
    "a record header with another length": record_header_of_another_length,
    "a record header with another checksum": record_header_with_another_checksum,
    "a record header with another's key": record_header_with_the_key_of_another,
    "a record header of another version": record_header_of_another_version,
    "a table zeroed": table_of_zeros,
    "a table of noise": table_of_noise,
    "a table cut": cut_in_a_table,
    "the table of another segment": table_of_another_segment,
    "a bit of a segment header flipped": flip_bit_in_a_segment_header,
    "the cells of a segment gone": cells_removed,
    "a segment under another name": segment_under_another_name,
    "noise with the name of a segment": noise_with_the_name_of_a_segment,
    "the lock file removed": lock_file_removed,
}
"""Damage between two lives of an engine: what a tier reads when it is opened."""


def _some(folder: DiskFolder) -> Sequence[DiskPlace]:
    wanted = folder.wanted or [folder.any_place()]
    return folder.random.sample(wanted, folder.random.randint(1, len(wanted)))
