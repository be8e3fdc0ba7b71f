"""The comparison of kvferry's names with the source files of a release, on small trees that change one thing each."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.names import checker
from kvferry.integrations.vllm.names.checker import Difference, Used, differences, read_release, used_in

TREE = {
    "vllm/__init__.py": "",
    "vllm/envs.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            VLLM_SECONDS: int = 300
        environment_variables: dict = {"VLLM_HIDDEN": lambda: 1}
        def __getattr__(name): ...
    """,
    "vllm/pool/__init__.py": """
        from vllm.pool.block_pool import BlockPool as BlockPool
        from .block_pool import Role, resolve
    """,
    "vllm/pool/block_pool.py": """
        from dataclasses import dataclass
        from enum import Enum
        from abc import ABC, abstractmethod

        class Base:
            def __init__(self, num_blocks):
                self.blocks = [None] * num_blocks
            def free(self, blocks, *, at_once=False) -> None: ...

        class BlockPool(Base):
            def touch(self, blocks: "list[int]") -> None:
                '''Text.'''
                self.touched = blocks
            @property
            def usage(self): return 0.0
            async def wait(self, seconds): ...
            @staticmethod
            def sizes(count): ...

        @dataclass
        class Spec:
            size: int
            heads: int = 1

        @dataclass(kw_only=True)
        class Window(Spec):
            window: int

        class Role(Enum):
            SOURCE = 1

        class Connector(ABC):
            @abstractmethod
            def load(self, request, number=0) -> tuple[int | None, bool]: ...
            def save(self, **kwargs): ...

        def resolve(config, other) -> tuple[int, int]: ...

        def set_scales(layer, register=False):
            layer.register_buffer("scale", 1.0)
            layer.scale_float = 1.0
            other.scale_cpu = 1.0
    """,
}
NAMES = [
    Used.parse(module, line.strip())
    for module, lines in {
        "vllm.envs": """
            VLLM_SECONDS
            VLLM_HIDDEN
        """,
        "vllm.pool": """
            BlockPool.touch(blocks) -> None
            Role.SOURCE
            resolve(config, other) -> tuple[int, int]
        """,
        "vllm.pool.block_pool": """
            BlockPool.blocks
            BlockPool.touched
            BlockPool.usage
            BlockPool.free(blocks, *, at_once)
            async BlockPool.wait(seconds)
            BlockPool.sizes(count)
            Spec(size, heads)
            Window(*, size, window)
            set_scales.scale
            set_scales.scale_float
            overrides Connector.load(request, number=...) -> tuple[int | None, bool]
            overrides Connector.save(**kwargs)
        """,
    }.items()
    for line in lines.strip().splitlines()
]


def write_tree(folder: Path, old: str = "", new: str = "") -> Path:
    """Write the tree, with one text replaced in each file that has it; return the folder."""
    assert not old or any(old in textwrap.dedent(text) for text in TREE.values())
    for name, text in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace(old, new) if old else textwrap.dedent(text))
    return folder


def found_in(folder: Path) -> list[Difference]:
    return list(differences(NAMES, read_release(folder, NAMES)))


def test_a_release_with_all_names_has_no_difference(tmp_path: Path) -> None:
    assert found_in(write_tree(tmp_path)) == []


CHANGED = {
    "a renamed method": ("def touch(", "def keep(", "BlockPool.touch", "is not there"),
    "a renamed parameter": ("def touch(self, blocks: ", "def touch(self, kept: ", "BlockPool.touch", "(kept)"),
    "another order": ("resolve(config, other)", "resolve(other, config)", "resolve", "(other, config)"),
    "one more parameter": ("resolve(config, other)", "resolve(config, other, more)", "resolve", "'more'"),
    "a parameter by name only": ("sizes(count)", "sizes(*, count)", "BlockPool.sizes", "too many positional"),
    "a parameter less, in a base class": (
        ", *, at_once=False",
        "",
        "BlockPool.free",
        "argument 'at_once'",
    ),
    "another result": ("-> tuple[int, int]", "-> int", "resolve", "returns int"),
    "a function that waits no longer": ("async def wait", "def wait", "BlockPool.wait", "is not async"),
    "a value that became a method": ("@property\n", "\n", "BlockPool.usage", "is a function"),
    "an attribute that is gone": ("self.blocks = ", "self.all_blocks = ", "BlockPool.blocks", "is not there"),
    "a member that is gone": ("SOURCE = 1", "ORIGIN = 1", "Role.SOURCE", "is not there"),
    "a field of the base that must be given": ("size: int\n", "size: int\n    bytes: int\n", "Spec", "bytes"),
    "a renamed field": ("window: int", "span: int", "Window", "span"),
    "a variable that is gone": ("VLLM_HIDDEN", "VLLM_OTHER", "VLLM_HIDDEN", "is not there"),
    "a buffer that a function no longer registers": ('"scale"', '"scales"', "set_scales.scale", "is not there"),
    "what a function sets on another": ("layer.scale_", "other.scale_", "set_scales.scale_float", "is not there"),
    "an overridden method is called with more": (
        "request, number=0",
        "request, number=0, more=1",
        "Connector.load",
        "more",
    ),
    "an overridden method returns something else": ("[int | None, bool]", "[int, bool]", "Connector.load", "returns"),
    "an overridden method is gone": ("def save", "def store", "Connector.save", "is not there"),
    "a new method that subclasses must have": (
        "def save",
        "@abstractmethod\n    def drop(self): ...\n    def save",
        "Connector.drop",
        "is abstract",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_that_breaks_is_named(tmp_path: Path, case: str) -> None:
    old, new, name, found = CHANGED[case]
    told = found_in(write_tree(tmp_path, old, new))
    assert any(each.name.endswith(f".{name}") and found in str(each) for each in told), told


def test_what_kvferry_need_not_pass_may_be_added(tmp_path: Path) -> None:
    assert found_in(write_tree(tmp_path, "resolve(config, other)", "resolve(config, other, more=None)")) == []
    assert found_in(write_tree(tmp_path, "heads: int = 1", "heads: int = 1\n    bytes: int = 0")) == []


def test_an_overriding_method_may_take_more_than_vllm_passes(tmp_path: Path) -> None:
    assert found_in(write_tree(tmp_path, "request, number=0", "request")) == []


def test_a_module_that_is_gone(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "vllm/envs.py").unlink()
    assert [each.name for each in found_in(tmp_path)] == ["vllm.envs.VLLM_SECONDS", "vllm.envs.VLLM_HIDDEN"]


def test_every_line_can_be_read_and_none_stands_twice() -> None:
    names = used_in(None)
    assert len({each.full_name for each in names}) == len(names) > 400
    assert {each.module.partition(".")[0] for each in names} == {"vllm"}
    for each in names:
        assert not each.call or checker._CALLABLE.fullmatch(each.call), each
    with pytest.raises(ValueError, match="no name of vLLM"):
        Used.parse("vllm.envs", "a name")


def test_the_list_is_sorted() -> None:
    lines = (checker.FOLDER / "used.txt").read_text().splitlines()
    modules = [line for line in lines if line.startswith("vllm")]
    assert modules == sorted(set(modules))
    names = [(each.module, each.is_overridden, each.text.removeprefix("async ")) for each in used_in(None)]
    assert names == sorted(names)


def test_an_older_version_is_asked_for_fewer_names() -> None:
    count = [len(used_in(number)) for number in [(0, 30), (0, 31), (0, 32), (0, 33), None]]
    assert count[0] < count[1] < count[2] < count[3] == count[4]


@pytest.mark.parametrize("release", checker.known_releases())
def test_a_known_release_has_all_names_and_none_that_came_later(release: str) -> None:
    has: dict[str, Any] = json.loads((checker.FOLDER / f"{release}.json").read_text())
    names = used_in(checker.number_of(release))
    assert {each.full_name for each in names} <= has.keys(), "write its file again: make check-vllm"
    assert list(differences(names, has)) == []
    later = {each.full_name for each in used_in(None)} - {each.full_name for each in names}
    assert not later & has.keys(), "it has a name that is said to have come later"


def test_known_releases_are_in_order(tmp_path: Path) -> None:
    for release in ("0.9.1", "0.33.0", "0.10.0"):
        (tmp_path / f"{release}.json").touch()
    assert checker.known_releases(tmp_path) == ["0.9.1", "0.10.0", "0.33.0"]
    assert {"0.30.0", "0.31.0", "0.32.0", "0.33.0"} <= set(checker.known_releases())
