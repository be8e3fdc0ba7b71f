"""``make check-vllm`` on small trees: what a release has changed, as a table and as JSON, without a download."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_vllm.py"
MODULE = "vllm/v1/core/block_pool.py"
POOL = """class BlockPool:
    def __init__(self):
        self.blocks, self.num_gpu_blocks = [], 0
    def touch(self, blocks) -> None: ...
    def unpin_blocks(self, blocks, on_reuse) -> None: ...
    def free_blocks(self, ordered_blocks) -> None: ...
    def get_cached_block(self, block_hash, kv_cache_group_ids) -> "list[KVCacheBlock] | None": ...
    def reset_prefix_cache(self) -> bool: ...
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def write_release(folder: Path, text: str = POOL) -> Path:
    """Write a release of which only the block pool is there."""
    path = folder / MODULE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return folder


def of_the_pool(told: str) -> dict[str, str]:
    """Return the kinds of the changes of the block pool, by name."""
    found = json.loads(told)["changes"]
    return {each["name"].rpartition(".")[2]: each["kind"] for each in found if ".core.block_pool." in each["name"]}


def test_a_renamed_method_is_printed_and_fails(tmp_path: Path) -> None:
    before = write_release(tmp_path / "0.98.0")
    after = write_release(tmp_path / "0.99.0", POOL.replace("def touch", "def keep"))
    result = run("0.99.0", "--folder", after, "--against", before, "--json")
    assert result.returncode == 1, result.stderr
    assert of_the_pool(result.stdout) == {"touch": "breaks"}
    table = run("0.99.0", "--folder", after, "--against", before).stdout
    assert "BlockPool.touch" in "".join(word.strip("│ ") for word in table.split())
    assert "breaks: kvferry cannot use it any more" in table


def test_a_harmless_change_is_printed(tmp_path: Path) -> None:
    before = write_release(tmp_path / "before")
    after = write_release(tmp_path / "after", POOL.replace("touch(self, blocks)", "touch(self, blocks, now=True)"))
    result = run("0.99.0", "--folder", after, "--against", before, "--json")
    assert of_the_pool(result.stdout) == {"touch": "signature"}


def test_a_wheel_is_read_without_an_installation(tmp_path: Path) -> None:
    before, wheel = write_release(tmp_path / "before"), tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MODULE, POOL.replace("-> bool", "-> None"))
        archive.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\n")
        archive.writestr("vllm/_C.abi3.so", b"not unpacked")
    result = run("--wheel", wheel, "--against", before, "--json")
    assert json.loads(result.stdout)["version"] == "0.99.0"
    assert of_the_pool(result.stdout) == {"reset_prefix_cache": "breaks"}
    assert not list(tmp_path.rglob("*.so"))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert run().returncode == 2
    result = run("--wheel", tmp_path / "none.whl", "--against", tmp_path)
    assert (result.returncode, "none.whl" in result.stderr) == (2, True)
