"""Environments of their own that scripts make with pip."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off")


def make_environment(
    python: str, folder: Path, *installs: Sequence[str], variables: Mapping[str, str] | None = None
) -> Path:
    """Make an environment of this interpreter in ``folder``, and install these lists of requirements one after the
    other; return its folder of programs. A folder that is there keeps what it has.

    Raises :class:`subprocess.CalledProcessError`; what failed is on standard error.
    """
    programs = folder / "bin"
    commands = [[str(programs / "python"), *INSTALL, *requirements] for requirements in installs]
    for command in ([python, "-m", "venv", str(folder)], *commands):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=variables)
    return programs
