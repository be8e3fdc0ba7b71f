"""The list of vLLM's names has what kvferry's own source files use, and is true of the installed vLLM."""

import ast
from functools import cache
from inspect import Parameter
from pathlib import Path

import pytest

import kvferry
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.names.checker import (
    Function,
    Sources,
    differences,
    number_of,
    read_release,
    signature,
    used_in,
)
from kvferry.integrations.vllm.offload_names import _FIELDS_OF_STATES, _NUMBERS_OF_ATTENTION, VARIABLES

from .vllm_copies import FOLDER
from .vllm_uses import AttributesRead, SourceFile, subclasses

assert FOLDER is not None
VLLM = Sources(FOLDER)
SOURCE = Path(kvferry.__file__).parent
FILES = [SourceFile.read(path) for path in sorted(SOURCE.rglob("*.py"))]
OF_VLLM = [file for file in FILES if file.imported]
LISTED = {(each.module, each.name) for each in used_in(None)}


def name_of(file: SourceFile) -> str:
    return file.path.relative_to(SOURCE).as_posix()


def bases_of(name: str, module: str) -> set[str]:
    """Return the name of a class of vLLM and those of its base classes."""
    found = VLLM.find(module, name)
    if found is None or not isinstance(found.node, ast.ClassDef):
        return {name}
    bases = [(base.node.name, base.module.name) for base in found.bases() if isinstance(base.node, ast.ClassDef)]
    return {found.node.name}.union(*(bases_of(*base) for base in bases))


@cache
def owners() -> set[tuple[str, str]]:
    """Return classes, base classes included, and the attributes that are listed of them."""
    return {
        (base, name.partition(".")[2])
        for module, name in LISTED
        if "." in name
        for base in bases_of(name.partition(".")[0], module)
    }


def test_the_list_is_true_of_the_installed_vllm() -> None:
    names = used_in(number_of(versions.installed_version()))
    assert FOLDER is not None
    assert list(differences(names, read_release(FOLDER, names))) == []


@pytest.mark.parametrize("file", OF_VLLM, ids=name_of)
def test_what_is_imported_of_vllm_is_listed(file: SourceFile) -> None:
    for module, name in file.imported.values():
        is_module = f"{module}.{name}" in {where for where, _ in LISTED}
        is_listed = any(where == module and listed.partition(".")[0] == name for where, listed in LISTED)
        assert is_module or is_listed, f"{module}.{name} is not in names/used.txt"


@pytest.mark.parametrize("file", OF_VLLM, ids=name_of)
def test_the_attributes_that_are_read_are_listed(file: SourceFile) -> None:
    missing = {(owner, name) for owner, name in AttributesRead(file, VLLM).found if (owner, name) not in owners()}
    assert missing == set(), "not in names/used.txt"


def test_attributes_are_found() -> None:
    """Of some hundred attributes that kvferry reads, annotations tell the class."""
    found = {each for file in OF_VLLM for each in AttributesRead(file, VLLM).found}
    assert {("ParallelConfig", "tensor_parallel_size"), ("BlockPool", "touch"), ("Request", "block_hashes")} <= found
    assert len(found) > 80


def test_what_is_overridden_is_listed_as_it_is_written() -> None:
    written = {each.name: each for each in used_in(None) if each.is_overridden}
    trees = {file.path: file for file in FILES}
    seen = set()
    for (path, name), bases in subclasses(FILES).items():
        [node] = [each for each in trees[path].classes if each.name == name]
        for module, base in bases:
            found = VLLM.find(module, base)
            assert found is not None
            of_vllm = found.members()
            for method in (each for each in node.body if isinstance(each, Function) and each.name in of_vllm):
                entry = written.get(f"{base}.{method.name}")
                assert entry is not None, f"{name}.{method.name} overrides a method of vLLM's {base} and is not listed"
                seen.add(entry.name)
                if entry.call:
                    [listed] = ast.parse(f"{entry.call.replace('def ', 'def function')}: ...").body
                    assert isinstance(listed, Function)
                    assert parameters(method)[1:] == parameters(listed), f"{name}.{method.name}"
    assert len(seen) > 30


def parameters(function: Function) -> list[tuple[object, ...]]:
    """Return the name and kind of each parameter, and whether it may be left out."""
    listed = signature(function).parameters.values()
    return [(each.name, each.kind, each.default is not Parameter.empty) for each in listed]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("vllm.envs", VARIABLES),
        ("vllm.config", [f"AttentionConfig.{name}" for name in _NUMBERS_OF_ATTENTION]),
        ("vllm.config", [f"CacheConfig.{name}" for name in _FIELDS_OF_STATES]),
    ],
)
def test_names_that_are_read_by_a_table_are_listed(module: str, names: list[str]) -> None:
    assert {(module, name) for name in names} <= LISTED
