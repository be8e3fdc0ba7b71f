"""Every function and every file that the documents name exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/kvferry"
WALK = ROOT / "docs/life-of-a-request.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def defined_names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the classes, functions, methods and attributes of a module, as ``Class.method``."""
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from defined_names(node.body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name):
                yield prefix + name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


NAMES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", WALK.read_text())))


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_every_function_on_the_way_exists(file: str, name: str) -> None:
    assert name in set(defined_names(ast.parse((SOURCE / file).read_text()).body))


def test_every_file_on_the_way_has_a_name_in_it() -> None:
    quoted = set(re.findall(r"`([^`\n]*\.py[^`\n]*)`", WALK.read_text()))
    assert quoted == {f"{file}: {name}" for file, name in NAMES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    paths = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))`", page.read_text()))
    assert [path for path in sorted(paths) if not any((place / path).exists() for place in (ROOT, SOURCE))] == []
