"""Builds the image of docker/Dockerfile.cpu, and tries in a container of it what a user tries first.

The first of docker (with its daemon), podman and buildah that works here builds. Options after ``--`` are the
builder's, such as ``-- --secret id=pip,src=pip.conf``. With --debootstrap the base image is made of Debian's packages,
as root and by buildah, where no registry of images can be reached. Exit status 1 says that something failed, 2 that
nothing here builds images.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from package import ROOT, build

DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"
BUILDERS = ("docker", "podman", "buildah")
IMAGE, BASE_IMAGE = "kvferry-check", "kvferry-check-base"
# What python:3.11-slim-bookworm has besides the essential packages.
DEBIAN, DEBIAN_PACKAGES = "bookworm", "ca-certificates,python3,python3-dev,python3-venv"
# For a builder that may neither make namespaces nor mount: in a container of its own, for example.
UNPRIVILEGED = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
WRONG_SETTINGS = {"transport": "pigeon"}
GOOD_SETTINGS = {"transport": "nixl", "port": 5600, "lease_seconds": 30}


class Failed(Exception):
    """The image cannot be built, or does not do what it promises; the text says what."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A command in a container, its exit status, and what its output says."""

    command: Sequence[str]
    status: int
    told: str


TRIALS = (
    Trial(["id", "-u"], 0, "2000"),
    Trial(["kvferry", "doctor"], 0, "transport nixl"),
    Trial(["kvferry", "settings", "--check", json.dumps(GOOD_SETTINGS)], 0, '"nixl"'),
    Trial(["kvferry", "settings", "--check", json.dumps(WRONG_SETTINGS)], 2, "pigeon"),
    Trial(["python", "-m", "vllm.entrypoints.openai.api_server", "--help"], 0, "--kv-transfer-config"),
    Trial(["vllm-router", "--help"], 0, "--vllm-pd-disaggregation"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where the image does not build or a trial fails, 2 where there is no builder."""
    parser = argparse.ArgumentParser(prog="check_image", description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--base", help="the base image, in place of the Dockerfile's")
    group.add_argument("--debootstrap", action="store_true", help="make the base image of Debian's packages")
    parser.add_argument("builders_options", nargs="*", metavar="-- OPTION", help="of the builder")
    options = parser.parse_args(arguments)
    if options.debootstrap:
        os.environ.update({name: os.environ.get(name, value) for name, value in UNPRIVILEGED.items()})
    builder = find_builder(("buildah",) if options.debootstrap else BUILDERS)
    if builder is None or (options.debootstrap and not shutil.which("debootstrap")):
        wanted = "buildah and debootstrap, as root" if options.debootstrap else f"one of {', '.join(BUILDERS)}"
        print(f"nothing was built: there is no builder here; needed is {wanted}", file=sys.stderr)
        return 2
    try:
        base = make_base(builder) if options.debootstrap else options.base
        version = build_image(builder, base, options.builders_options)
        with commands_in_container(builder) as begin:
            for trial in (Trial(["kvferry", "--version"], 0, f"kvferry {version}"), *TRIALS):
                run_trial(begin, trial)
    except (Failed, subprocess.CalledProcessError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(f"{builder} built the image, and every command in it did what it promises")
    return 0


def find_builder(names: Sequence[str]) -> str | None:
    """Return the first of these builders that is here and works; docker does not without its daemon."""
    for name in names:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def make_base(builder: str) -> str:
    """Make an image of Debian's packages, with this machine's sources of them; return its name."""
    with tempfile.TemporaryDirectory(prefix="kvferry-base-") as folder:
        debootstrap = shutil.which("debootstrap") or "debootstrap"
        packages = f"--include={DEBIAN_PACKAGES}"
        subprocess.run([debootstrap, "--variant=minbase", packages, DEBIAN, folder], check=True)
        container = _output(builder, "from", "scratch")
        subprocess.run([builder, "add", "--quiet", container, folder, "/"], check=True)
        subprocess.run([builder, "commit", "--quiet", "--rm", container, BASE_IMAGE], check=True)
    return BASE_IMAGE


def build_image(builder: str, base: str | None, more: Sequence[str]) -> str:
    """Build the wheel and the image; return kvferry's version."""
    wheel = build(ROOT / "dist")[1]
    given = ["--build-arg", f"WHEEL={wheel.name}", *(["--build-arg", f"BASE={base}"] if base else []), *more]
    subprocess.run([builder, "build", "--file", str(DOCKERFILE), "--tag", IMAGE, *given, str(ROOT)], check=True)
    return wheel.name.split("-")[1]


@contextmanager
def commands_in_container(builder: str) -> Iterator[list[str]]:
    """Yield what begins a command line that runs in a container of the image."""
    if builder != "buildah":
        yield [builder, "run", "--rm", "--shm-size=2g", IMAGE]
        return
    container = _output(builder, "from", IMAGE)
    try:
        yield [builder, "run", container, "--"]
    finally:
        subprocess.run([builder, "rm", container], check=False, stdout=subprocess.DEVNULL)


def run_trial(begin: Sequence[str], trial: Trial) -> None:
    """Run a command in a container. Raises :class:`Failed`."""
    ran = subprocess.run([*begin, *trial.command], capture_output=True, text=True, check=False)
    output = ran.stdout + ran.stderr
    if ran.returncode != trial.status or trial.told not in output:
        raise Failed(f"{' '.join(trial.command)}: exit status {ran.returncode}\n{output}")
    print(f"{' '.join(trial.command)}: as promised", flush=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
