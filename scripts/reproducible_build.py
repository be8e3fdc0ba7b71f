"""The project's build back end: setuptools, whose archives depend on nothing but the files, their names and one time.

With SOURCE_DATE_EPOCH set, two builds of one tree by one setuptools give the same bytes: no archive then has a time,
an owner, a mode or an order of its own. Without it the archives are setuptools' own.
"""

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
VARIABLE = "SOURCE_DATE_EPOCH"
FILE_MODE, EXECUTABLE_MODE, FOLDER_MODE = 0o644, 0o755, 0o755
REGULAR_FILE = 0o100000


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Build the source distribution; return its file name."""
    name = build_meta.build_sdist(sdist_directory, config_settings)
    if VARIABLE in os.environ:
        normalize_sdist(Path(sdist_directory) / name, int(os.environ[VARIABLE]))
    return name


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel; return its file name."""
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    if VARIABLE in os.environ:
        normalize_wheel(Path(wheel_directory) / name)
    return name


def normalize_sdist(path: Path, seconds: int) -> None:
    """Write an archive again: sorted, every time ``seconds`` after 1970, every owner 0, one mode for each kind."""
    content = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = FOLDER_MODE if member.isdir() else EXECUTABLE_MODE if member.mode & 0o100 else FILE_MODE
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as packed:
        packed.write(content.getvalue())


def normalize_wheel(path: Path) -> None:
    """Write an archive again with one mode; setuptools sorts it, and takes its times from SOURCE_DATE_EPOCH."""
    with zipfile.ZipFile(path) as old:
        members = [(member, old.read(member)) for member in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member, content in members:
            member.external_attr = (REGULAR_FILE | FILE_MODE) << 16
            new.writestr(member, content, zipfile.ZIP_DEFLATED)
