"""``kvferry tiers``: what a directory holds, damage found, blocks removed, and clear refusals."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import Reason, TierError
from kvferry.tiers.disk import inspection
from kvferry.tiers.disk.runs import RUN_BYTES, thread_buffer
from kvferry.tiers.disk.segments import Directory, SegmentShape

from .disk_blocks import Blocks

CAPACITY = 4 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with 10 blocks of 8192 bytes and 3 of 5000."""
    blocks = Blocks(tmp_path / "tier", CAPACITY)
    blocks.store(list(range(10)))
    blocks.store([100, 101, 102], 5000)
    blocks.store([200], 20_000)
    blocks.disk.close()
    return tmp_path / "tier"


def run(*arguments: Any, code: int = 0, answer: str = "") -> str:
    """Run the command and return its output; check the exit code."""
    result = CliRunner().invoke(app, ["tiers", *map(str, arguments)], input=answer)
    if isinstance(result.exception, TierError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def damage_one_block(directory: Path) -> None:
    """Flip a bit of one block of 8192 bytes."""
    path = sorted(directory.glob("segment-*.kv"))[0]
    offset = SegmentShape.unpack(path.with_suffix(".table").read_bytes()[:4096]).cell_offset(3) + 5
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def test_show_counts_blocks_by_size(directory: Path) -> None:
    found = json.loads(run("show", directory, "--json"))
    assert found["blocks"] == 14
    assert [(row["cell_bytes"], row["blocks"], row["block_bytes"]) for row in found["sizes"]] == [
        (8192, 13, 10 * 8192 + 3 * 5000),
        (20_480, 1, 20_000),
    ]
    assert found["bytes_on_disk"] == sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*"))
    shown = run("show", directory)
    assert "8.0 KiB" in shown
    assert "13" in shown


def test_show_works_while_an_engine_uses_the_directory(directory: Path) -> None:
    blocks = Blocks(directory, CAPACITY)
    assert json.loads(run("show", directory, "--json"))["blocks"] == 14
    blocks.disk.close()


def test_show_passes_over_a_segment_that_an_engine_replaces(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = inspection.read_segment

    def replace(opened: Directory, name: str) -> Any:
        if name == "segment-00000001":
            opened.remove_segment(name)
        return read(opened, name)

    monkeypatch.setattr(inspection, "read_segment", replace)
    found = json.loads(run("show", directory, "--json"))
    assert found["blocks"] == 1
    assert found["unusable"] == {}


def test_verify_finds_the_damaged_block(directory: Path) -> None:
    assert "14 blocks read, 0 damaged" in run("verify", directory)
    damage_one_block(directory)
    assert "14 blocks read, 1 damaged" in run("verify", directory, code=1)
    found = json.loads(run("verify", directory, "--json", code=1))
    assert [(row["cell"], row["reason"]) for row in found["damaged"]] == [(3, "checksum-mismatch")]
    assert len(found["damaged"][0]["key"]) == 96


def test_verify_reports_a_file_that_is_no_segment(directory: Path) -> None:
    (directory / "segment-00000098.table").write_bytes(b"nothing")
    (directory / "segment-00000099.kv").write_bytes(b"nothing")
    assert json.loads(run("verify", directory, "--json", code=1))["unusable"] == {"checksum-mismatch": 2}
    shown = " ".join(run("show", directory).split())
    assert "does not begin with the header" in shown
    assert "segment-00000099.kv has no table" in shown


def test_verify_reads_long_blocks_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged table may claim cells of 4 GiB: the memory of the command does not grow with them."""
    length = RUN_BYTES + 4096 + 5
    blocks = Blocks(tmp_path / "tier", 16 << 20)
    blocks.store([1], length)
    blocks.store([2], length)
    blocks.disk.close()
    asked: list[int] = []
    monkeypatch.setattr(inspection, "thread_buffer", lambda length: (asked.append(length), thread_buffer(length))[1])
    assert "2 blocks read, 0 damaged" in run("verify", tmp_path / "tier")
    assert max(asked) == RUN_BYTES
    path = sorted((tmp_path / "tier").glob("segment-*.kv"))[0]
    with path.open("r+b") as file:
        file.seek(RUN_BYTES + 4096 + 4)  # the last byte of the block
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    assert "2 blocks read, 1 damaged" in run("verify", tmp_path / "tier", code=1)


HOSTILE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a link in place of a table": (lambda cells, table: link_away(table), "levels of symbolic links"),
    "a link in place of cells": (lambda cells, table: link_away(cells), "is no file"),
    "a table that leads nowhere": (lambda cells, table: link_nowhere(table), "levels of symbolic links"),
    "a pipe in place of a table": (lambda cells, table: pipe(table), "is no file"),
    "a folder in place of a table": (lambda cells, table: folder(table), "is no file"),
    "a folder in place of cells": (lambda cells, table: folder(cells), "is no file"),
    "a longer table": (lambda cells, table: resize(table, 4096), "bytes; its table needs"),
    "a shorter table": (lambda cells, table: resize(table, -4096), "bytes; its table needs"),
    "an empty table": (lambda cells, table: os.truncate(table, 0), "does not begin with the header"),
    "longer cells": (lambda cells, table: resize(cells, 1 << 40), "bytes; its table needs"),
    "shorter cells": (lambda cells, table: resize(cells, -1), "bytes; its table needs"),
    "sizes that overflow": (lambda cells, table: forge_size(table), "no segment 1 has"),
    "another segment's table": (lambda cells, table: shutil.copy(other(table), table), "is the table of segment 2"),
    "a hard link": (lambda cells, table: os.link(cells, cells.with_name("mine")), "is one of 2 names"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_directory_that_somebody_has_changed_is_reported_and_used(directory: Path, change: str) -> None:
    """No command crashes, each says which file is wrong, and a tier opens and serves with what is left."""
    cells, table = directory / "segment-00000001.kv", directory / "segment-00000001.table"
    spoil, message = HOSTILE[change]
    spoil(cells, table)
    for command, code in (("show", 0), ("verify", 1)):
        shown = " ".join(run(command, directory, code=code).split())
        assert message in shown
        assert "segment-00000001: " in shown
    blocks = Blocks(directory, CAPACITY)
    assert blocks.disk.snapshot()["refused"].keys() <= {"checksum-mismatch", "tier-failed"}
    assert blocks.held([*range(10), 100, 200]) == {200}
    blocks.load([200], 20_000)
    assert blocks.store([5]).landed.all()
    assert blocks.load([5]).landed.all()
    blocks.disk.close()
    run("clear", directory, "--yes")


def link_away(path: Path) -> None:
    """Put a symbolic link to the file in its place."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_nowhere(path: Path) -> None:
    """Put a symbolic link to no file in its place."""
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def pipe(path: Path) -> None:
    """Put a pipe in place of the file."""
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    """Put a folder in place of the file."""
    path.unlink()
    path.mkdir()


def resize(path: Path, num_bytes: int) -> None:
    """Make a file longer or shorter."""
    os.truncate(path, path.stat().st_size + num_bytes)


def forge_size(table: Path) -> None:
    """Claim cells of more bytes than a file can have, under a right checksum."""
    table.write_bytes(SegmentShape(1, 1 << 62, 1 << 22).pack().ljust(4096, b"\0"))


def other(table: Path) -> Path:
    """Return the table of the second segment."""
    return table.with_name("segment-00000002.table")


def test_show_and_verify_say_why_a_directory_cannot_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", fail)
    for command in ("show", "verify"):
        with pytest.raises(TierError, match="Input/output error") as raised:
            run(command, directory)
        assert raised.value.reason is Reason.TIER_FAILED


def test_another_user_may_look(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator, who may read the files, checks the folder of an engine; only engines refuse it."""
    os.chown(directory, 12345, -1) if not os.geteuid() else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(TierError, match="belongs to user"):
        Blocks(directory, CAPACITY)
    assert "14 blocks read, 0 damaged" in run("verify", directory)


def test_clear_asks_and_removes_only_segments(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    run("clear", directory, answer="n\n", code=1)
    assert list(directory.glob("segment-*"))
    asked = CliRunner().invoke(app, ["tiers", "clear", str(directory), "--json"], input="n\n")
    assert "Remove 2 segments" in asked.stderr
    assert "Remove" not in asked.stdout
    assert "segments removed" in run("clear", directory, answer="y\n")
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "notes.txt"]
    assert json.loads(run("clear", directory, "--yes", "--json"))["segments_removed"] == 0


@pytest.mark.parametrize("command", [["verify"], ["clear", "--yes"]])
def test_a_directory_in_use_is_refused(directory: Path, command: list[str]) -> None:
    blocks = Blocks(directory, CAPACITY)
    with pytest.raises(TierError, match=f"process {os.getpid()}") as raised:
        run(command[0], directory, *command[1:])
    assert raised.value.reason is Reason.TIER_IN_USE
    assert "End the engine first" in raised.value.remedy
    assert json.loads(run(*command, directory, "--json", code=2))["error"]["reason"] == "tier-in-use"
    assert blocks.load([1]).landed.all()
    blocks.disk.close()


@pytest.mark.parametrize("command", [["show"], ["verify"], ["clear", "--yes"]])
def test_another_directory_is_refused_and_left_alone(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(TierError, match="no such directory exists") as raised:
        run(command[0], tmp_path / "nowhere", *command[1:])
    assert "disk_path" in raised.value.remedy
    with pytest.raises(TierError, match="has no file 'lock'"):
        run(command[0], tmp_path, *command[1:])
    assert not (tmp_path / "nowhere").exists()


def test_help_has_examples() -> None:
    for command in ("show", "verify", "clear"):
        assert f"kvferry tiers {command} /var/cache/kvferry" in run(command, "--help")
