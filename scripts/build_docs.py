"""Builds the site of README.md and docs/ in build/site, as mkdocs.yml says; a link that leads nowhere is an error.

The extra ``docs`` of pyproject.toml goes into build/docs-environment, beside the environment of the tests.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from environments import make_environment

ROOT = Path(__file__).absolute().parent.parent
ENVIRONMENT = ROOT / "build" / "docs-environment"


def main() -> int:
    """Return the exit status of MkDocs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    programs = make_environment(sys.executable, ENVIRONMENT, project["optional-dependencies"]["docs"])
    return subprocess.run([str(programs / "mkdocs"), "build", "--strict"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
