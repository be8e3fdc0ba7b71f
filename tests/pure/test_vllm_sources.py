"""The comparison of kvferry's names with the source files of a release, on small trees that change one thing each."""

import textwrap
from pathlib import Path

import pytest

from kvferry.integrations.vllm.versions import CAME_WITH, names_of_version
from kvferry.integrations.vllm.vllm_names import OVERRIDDEN, USED
from kvferry.integrations.vllm.vllm_sources import Change, ChangeKind, Difference, Entry, Sources, changes

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
        from .block_pool import *
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
USES = {
    "vllm.envs": ("VLLM_SECONDS", "VLLM_HIDDEN"),
    "vllm.pool": ("BlockPool.touch(blocks) -> None", "Role.SOURCE", "resolve(config, other) -> tuple[int, int]"),
    "vllm.pool.block_pool": (
        "BlockPool.blocks",
        "BlockPool.touched",
        "BlockPool.usage",
        "BlockPool.free(blocks, *, at_once)",
        "async BlockPool.wait(seconds)",
        "BlockPool.sizes(count)",
        "Spec(size, heads)",
        "Window(*, size, window)",
        "set_scales.scale",
        "set_scales.scale_float",
    ),
}
OVERRIDES = {
    "vllm.pool.block_pool": (
        "Connector.load(request, number=...) -> tuple[int | None, bool]",
        "Connector.save(**kwargs)",
    )
}


def write_tree(folder: Path, old: str = "", new: str = "") -> Sources:
    """Write the tree, with one text replaced in each file that has it."""
    assert not old or any(old in textwrap.dedent(text) for text in TREE.values())
    for name, text in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace(old, new) if old else textwrap.dedent(text))
    return Sources(folder)


def differences(sources: Sources) -> list[Difference]:
    return list(sources.differences(USES, OVERRIDES))


def test_a_release_with_all_names_has_no_difference(tmp_path: Path) -> None:
    assert differences(write_tree(tmp_path)) == []


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
    told = differences(write_tree(tmp_path, old, new))
    assert any(each.name.endswith(f".{name}") and found in str(each) for each in told), told


def test_what_kvferry_need_not_pass_may_be_added(tmp_path: Path) -> None:
    assert differences(write_tree(tmp_path, "resolve(config, other)", "resolve(config, other, more=None)")) == []
    assert differences(write_tree(tmp_path, "heads: int = 1", "heads: int = 1\n    bytes: int = 0")) == []


def test_an_overriding_method_may_take_more_than_vllm_passes(tmp_path: Path) -> None:
    sources = write_tree(tmp_path, "request, number=0", "request")
    assert differences(sources) == []


def test_a_module_that_is_gone(tmp_path: Path) -> None:
    sources = write_tree(tmp_path)
    (tmp_path / "vllm/envs.py").unlink()
    assert [each.name for each in differences(sources)] == ["vllm.envs.VLLM_SECONDS", "vllm.envs.VLLM_HIDDEN"]


def found_changes(folder: Path, old: str, new: str) -> list[Change]:
    before, after = write_tree(folder / "before"), write_tree(folder / "after", old, new)
    return list(changes(before, after, USES, OVERRIDES))


def test_equal_releases_have_no_change(tmp_path: Path) -> None:
    assert found_changes(tmp_path, "", "") == []


def test_other_words_in_a_docstring_are_no_change(tmp_path: Path) -> None:
    assert found_changes(tmp_path, "'''Text.'''", "'''Other text.'''") == []


@pytest.mark.parametrize(
    ("old", "new", "kind", "name"),
    [
        ("def touch(", "def keep(", ChangeKind.BREAKS, "BlockPool.touch"),
        ("def save", "def forget(self): ...\n    def save", ChangeKind.NEW, "Connector.forget"),
        ("other) -> tuple", "other, more=None) -> tuple", ChangeKind.SIGNATURE, "resolve"),
        ("return 0.0", "return 1.0", ChangeKind.BODY, "BlockPool.usage"),
        ("SOURCE = 1", "SOURCE = 2", ChangeKind.BODY, "Role.SOURCE"),
        ("lambda: 1", "lambda: 2", ChangeKind.BODY, "VLLM_HIDDEN"),
    ],
)
def test_a_change_has_its_kind(tmp_path: Path, old: str, new: str, kind: ChangeKind, name: str) -> None:
    found = found_changes(tmp_path, old, new)
    assert any(each.kind is kind and each.name.endswith(f".{name}") for each in found), found
    # Two entries lead to the same function.
    assert {each.kind for each in found} - {ChangeKind.BODY} <= {kind}


def test_every_entry_can_be_read_and_none_stands_twice() -> None:
    for listed in (USED, OVERRIDDEN):
        for module, entries in listed.items():
            assert module.partition(".")[0] == "vllm"
            texts = [Entry.parse(entry).text for entry in entries]
            assert len(set(texts)) == len(texts), module


def test_what_came_with_a_version_is_listed() -> None:
    listed = {
        f"{module}.{Entry.parse(entry).name}"
        for each in (USED, OVERRIDDEN)
        for module, entries in each.items()
        for entry in entries
    }
    for names in CAME_WITH.values():
        for name in names:
            assert any(each == name or each.startswith(f"{name}.") for each in listed), name


def test_an_older_version_is_asked_for_fewer_names() -> None:
    count = [
        sum(len(entries) for each in names_of_version(number) for entries in each.values())
        for number in [(0, 30), (0, 31), (0, 32), (0, 33), None]
    ]
    assert count[0] < count[1] < count[2] < count[3] == count[4]
