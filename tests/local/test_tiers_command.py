"""``kvferry tiers``: what a directory holds, damage found, blocks removed, and clear refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import Reason, TierError
from kvferry.tiers.disk import inspection
from kvferry.tiers.disk.records import SegmentShape
from kvferry.tiers.disk.segments import Directory

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
    path = sorted(directory.glob("segment-*"))[0]
    offset = SegmentShape.unpack(path.read_bytes()[:4096]).cell_offset(3) + 5
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
        if name == "segment-00000001.kv":
            opened.remove(name)
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
    (directory / "segment-00000099.kv").write_bytes(b"nothing")
    assert json.loads(run("verify", directory, "--json", code=1))["unusable"] == {"checksum-mismatch": 1}
    assert "does not begin with the header" in run("show", directory)


def test_clear_asks_and_removes_only_segments(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    run("clear", directory, answer="n\n", code=1)
    assert list(directory.glob("segment-*"))
    assert "segments removed" in run("clear", directory, answer="y\n")
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "notes.txt"]
    assert json.loads(run("clear", directory, "--yes", "--json"))["segments_removed"] == 0


@pytest.mark.parametrize("command", [["verify"], ["clear", "--yes"]])
def test_a_directory_in_use_is_refused(directory: Path, command: list[str]) -> None:
    blocks = Blocks(directory, CAPACITY)
    with pytest.raises(TierError, match=f"process {os.getpid()}") as raised:
        run(command[0], directory, *command[1:])
    assert raised.value.reason is Reason.TIER_IN_USE
    assert json.loads(run(*command, directory, "--json", code=2))["error"]["reason"] == "tier-in-use"
    assert blocks.load([1]).landed.all()
    blocks.disk.close()


@pytest.mark.parametrize("command", [["show"], ["verify"], ["clear", "--yes"]])
def test_another_directory_is_refused_and_left_alone(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(TierError, match="not the directory of a disk tier"):
        run(command[0], tmp_path / "nowhere", *command[1:])
    assert not (tmp_path / "nowhere").exists()


def test_help_has_examples() -> None:
    for command in ("show", "verify", "clear"):
        assert f"kvferry tiers {command} /var/cache/kvferry" in run(command, "--help")
