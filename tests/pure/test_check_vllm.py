"""``make check-vllm`` on small trees: what a release has changed, as a table and as JSON, without a download."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvferry.integrations.vllm.names import checker

from .test_names_checker import NAMES, write_tree

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


def known(names: Path, release: str, folder: Path) -> Path:
    """Write the file of a known release; return the folder with the files."""
    names.mkdir(exist_ok=True)
    (names / f"{release}.json").write_text(json.dumps(checker.read_release(folder, checker.used_in(None))))
    return names


def test_a_renamed_method_is_printed_and_fails(tmp_path: Path) -> None:
    names = known(tmp_path / "names", "0.98.0", write_release(tmp_path / "before"))
    after = write_release(tmp_path / "after", POOL.replace("def touch", "def keep"))
    result = run("0.99.0", "--folder", after, "--names", names, "--json")
    assert result.returncode == 1, result.stderr
    assert json.loads(result.stdout)["against"] == "0.98.0"
    assert of_the_pool(result.stdout) == {"touch": "breaks"}
    table = run("0.99.0", "--folder", after, "--names", names).stdout
    assert "BlockPool.touch" in "".join(word.strip("│ ") for word in table.split())
    assert "breaks: kvferry cannot use it any more" in table
    assert checker.known_releases(names) == ["0.98.0"], "a release that kvferry cannot use is not known"


def test_a_harmless_change_is_printed(tmp_path: Path) -> None:
    names = known(tmp_path / "names", "0.97.0", write_release(tmp_path / "before"))
    after = write_release(tmp_path / "after", POOL.replace("touch(self, blocks)", "touch(self, blocks, now=True)"))
    known(names, "0.98.0", after)
    told = [run("0.99.0", "--folder", after, "--names", names, "--json", *more).stdout
            for more in ([], ["--against", "0.97.0"])]  # fmt: skip
    assert list(map(of_the_pool, told)) == [{}, {"touch": "signature"}]


def test_a_wheel_is_read_without_an_installation(tmp_path: Path) -> None:
    names = known(tmp_path / "names", "0.98.0", write_release(tmp_path / "before"))
    wheel = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MODULE, POOL.replace("-> bool", "-> None"))
        archive.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\n")
        archive.writestr("vllm/_C.abi3.so", b"not unpacked")
    result = run("--wheel", wheel, "--names", names, "--json")
    assert json.loads(result.stdout)["version"] == "0.99.0"
    assert of_the_pool(result.stdout) == {"reset_prefix_cache": "breaks"}
    assert not list(tmp_path.rglob("*.so"))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert run("--folder", tmp_path).returncode == 2
    result = run("--wheel", tmp_path / "vllm-0.99.0-none.whl", "--names", tmp_path)
    assert (result.returncode, "0.99.0-none.whl" in result.stderr) == (2, True)


# Kinds of changes.


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_vllm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_changes(script: ModuleType, folder: Path, old: str, new: str) -> list[Any]:
    before, after = write_tree(folder / "before"), write_tree(folder / "after", old, new)
    return list(script.changes(NAMES, *(checker.read_release(each, NAMES) for each in (before, after))))


def test_equal_releases_have_no_change(script: ModuleType, tmp_path: Path) -> None:
    assert found_changes(script, tmp_path, "", "") == []


@pytest.mark.parametrize(
    ("old", "new"), [("'''Text.'''", "'''Other text.'''"), ("self.touched =", "# Why.\n        self.touched =")]
)
def test_other_words_for_people_are_no_change(script: ModuleType, tmp_path: Path, old: str, new: str) -> None:
    assert found_changes(script, tmp_path, old, new) == []


@pytest.mark.parametrize(
    ("old", "new", "kind", "name"),
    [
        ("def touch(", "def keep(", "breaks", "BlockPool.touch"),
        ("def save", "def forget(self): ...\n    def save", "new", "Connector.forget"),
        ("other) -> tuple", "other, more=None) -> tuple", "signature", "resolve"),
        ("return 0.0", "return 1.0", "body", "BlockPool.usage"),
        ("SOURCE = 1", "SOURCE = 2", "body", "Role.SOURCE"),
        ("lambda: 1", "lambda: 2", "body", "VLLM_HIDDEN"),
    ],
)
def test_a_change_has_its_kind(script: ModuleType, tmp_path: Path, old: str, new: str, kind: str, name: str) -> None:
    found = found_changes(script, tmp_path, old, new)
    assert [each.kind for each in found if each.name.endswith(f".{name}")] == [kind], found
    # Two lines lead to the same function.
    assert {each.kind.value for each in found} - {"body"} <= {kind}


@pytest.mark.parametrize(
    ("release", "expected"), [("0.34.0", "0.33.0"), ("0.33.0", "0.31.0"), ("0.31.0", "0.30.0"), ("0.30.0", "0.31.0")]
)
def test_a_release_is_compared_with_the_one_before(
    script: ModuleType, tmp_path: Path, release: str, expected: str
) -> None:
    assert script.release_before(release, tmp_path) is None
    for each in ("0.30.0", "0.31.0", "0.33.0"):
        (tmp_path / f"{each}.json").touch()
    assert script.release_before(release, tmp_path) == expected
