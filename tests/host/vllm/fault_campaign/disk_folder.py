"""What happens to the folder of a disk tier behind the tier's back: damaged blocks, headers and files."""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.tiers.disk.records import PAGE_BYTES, RECORD_BYTES, VERSION, RecordHeader, SegmentShape

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

    def segments(self) -> list[Path]:
        """Return the segment files."""
        return sorted(self.path.glob("segment-*.kv"))

    def segment(self) -> Path:
        """Return the file of a wanted block, else any segment."""
        return self.path / self.random.choice(self.wanted)[0] if self.wanted else self.random.choice(self.segments())

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

    def shape(self, file: Path) -> SegmentShape:
        """Return the shape of a segment."""
        with file.open("rb") as opened:
            return SegmentShape.unpack(opened.read(PAGE_BYTES))

    def header(self, place: DiskPlace) -> tuple[Path, int, RecordHeader, SegmentShape]:
        """Return the file, the offset of the record header, the header and the shape of a block's segment."""
        name, header, shape = place
        return self.path / name, shape.header_offset(header.cell), header, shape

    def cell(self, place: DiskPlace) -> tuple[Path, int, int]:
        """Return the file of a block, where it begins and where it ends."""
        name, header, shape = place
        begin = shape.cell_offset(header.cell)
        return self.path / name, begin, begin + header.num_bytes

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


def empty_segment(folder: DiskFolder) -> None:
    os.truncate(folder.segment(), 0)


def segment_removed(folder: DiskFolder) -> None:
    folder.segment().unlink()


def segment_replaced_by_a_copy(folder: DiskFolder) -> None:
    """The copy has another inode: what the tier has open is no longer the file of that name."""
    file = folder.segment()
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
    file = folder.segment()
    folder.change(file, PAGE_BYTES, bytes(folder.shape(file).num_cells * RECORD_BYTES))


def table_of_noise(folder: DiskFolder) -> None:
    file = folder.segment()
    folder.change(file, PAGE_BYTES, folder.random.randbytes(folder.shape(file).num_cells * RECORD_BYTES))


def cut_in_a_table(folder: DiskFolder) -> None:
    os.truncate(folder.segment(), PAGE_BYTES + folder.random.randrange(RECORD_BYTES * 4))


def flip_bit_in_a_segment_header(folder: DiskFolder) -> None:
    folder.flip_bit(folder.segment(), 0, 48)


def segment_under_another_name(folder: DiskFolder) -> None:
    shutil.copyfile(folder.segment(), folder.path / "segment-99999999.kv")


def noise_with_the_name_of_a_segment(folder: DiskFolder) -> None:
    (folder.path / "segment-88888888.kv").write_bytes(folder.random.randbytes(10_000))


def lock_file_removed(folder: DiskFolder) -> None:
    (folder.path / "lock").unlink()


def tables_of(folder: DiskFolder) -> dict[Path, bytes]:
    """Return the tables of all segments, to be put back later."""
    found = {}
    for file in folder.segments():
        shape = folder.shape(file)
        with file.open("rb") as opened:
            opened.seek(PAGE_BYTES)
            found[file] = opened.read(shape.num_cells * RECORD_BYTES)
    return found


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
    "a file cut to nothing": empty_segment,
}
"""Damage that a tier meets in its next read; the tier goes on with its files."""
OF_FILES: dict[str, Damage] = {
    "a segment file removed": segment_removed,
    "a segment file replaced by a copy": segment_replaced_by_a_copy,
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
    "a file cut within its table": cut_in_a_table,
    "a bit of a segment header flipped": flip_bit_in_a_segment_header,
    "a segment under another name": segment_under_another_name,
    "noise with the name of a segment": noise_with_the_name_of_a_segment,
    "the lock file removed": lock_file_removed,
}
"""Damage between two lives of an engine: what a tier reads when it is opened."""


def _some(folder: DiskFolder) -> Sequence[DiskPlace]:
    wanted = folder.wanted or [folder.any_place()]
    return folder.random.sample(wanted, folder.random.randint(1, len(wanted)))
