"""docs/upgrade.md: settings of kvferry that exist, and names of other connectors as the installed vLLM has them."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

import vllm
from vllm import envs
from vllm.config import KVTransferConfig

from kvferry.cli.settings import describe_settings
from kvferry.handoff.handshake import OURS
from kvferry.integrations.vllm.offload_settings import OffloadSettings

PAGE = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text()
SECTIONS = dict(re.findall(r"^### (.+)\n((?:(?!###).*\n)*)", PAGE, re.MULTILINE))
CONNECTORS = Path(vllm.__file__).parent / "distributed" / "kv_transfer" / "kv_connector"
OURS_BY_NAME = {each.name: each for each in (*describe_settings(), *describe_settings(OffloadSettings))}
NAMED = re.compile(r"`([^`]+)`(?: \(([^)]+)\))?")


class Name(NamedTuple):
    """A name in a cell, and what stands behind it in brackets: a default."""

    name: str
    default: str


def names(section: str, column: int) -> list[Name]:
    """Return what a column of a section's table names."""
    rows = re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)[1:]
    cells = [re.split(r" ?\| ?", row)[column] for row in rows]
    assert len(cells) > 5
    return [Name(*found) for cell in cells for found in NAMED.findall(cell)]


def sources(*patterns: str) -> str:
    """Return the text of vLLM's files of these names."""
    return "\n".join(path.read_text() for pattern in patterns for path in sorted(CONNECTORS.rglob(pattern)))


def test_the_page_has_a_section_for_each_connector() -> None:
    assert list(SECTIONS) == ["NixlConnector", "MooncakeConnector", "MooncakeStoreConnector", "LMCache", "vllm-ascend"]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_the_page_says_of_kvferrys_settings_is_so(section: str) -> None:
    for name, default in names(section, 1):
        assert name in OURS_BY_NAME
        assert default in ("", OURS_BY_NAME[name].shown_default)


@pytest.mark.parametrize(("section", "folder"), [("NixlConnector", "nixl"), ("MooncakeConnector", "mooncake")])
def test_what_the_page_says_of_vllms_settings_is_so(section: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = sources(f"{folder}/*.py")
    for name, default in names(section, 0):
        if name.isupper():
            monkeypatch.delenv(name, raising=False)
            assert f"envs.{name}" in text
            assert getattr(envs, name) == type(getattr(envs, name))(default)
        elif name not in KVTransferConfig.__dataclass_fields__:
            assert default in ("", default_of(name, text))


def default_of(name: str, text: str) -> str:
    """Return the default with which a setting is read; where that is another setting, the default of that one."""
    found = set(re.findall(rf'"{name}",\s*([^\s,)]+)', text))
    assert len(found) == 1, name
    default = found.pop()
    return default_of(default.removeprefix("self."), text) if default.startswith("self.") else default.strip('"')


def test_what_the_page_says_of_vllms_mooncake_store_is_so() -> None:
    text = sources("mooncake/store/*.py") + (CONNECTORS.parents[1] / "mooncake_store.py").read_text()
    found = names("MooncakeStoreConnector", 0)
    assert len(found) > 10
    for name, default in found:
        assert f'"{name}"' in text
        of_the_file = re.search(rf'^    {name}: \w+ = "?(\w+)', text, re.MULTILINE)
        assert default in ("", *re.findall(rf'"{name}", "?(\w+)', text), *(of_the_file.groups() if of_the_file else ()))


def test_what_the_page_says_of_lmcache_in_vllm_is_so() -> None:
    text = sources("lmcache*.py", "lmcache*/*.py")
    named = {name for name, _ in names("LMCache", 0) if name.lower().startswith("lmcache") and "..." not in name}
    assert len(named) == 3
    assert {name for name in named if name not in text} == set()


def test_what_the_page_says_of_vllms_fields_for_vllm_ascend_is_so() -> None:
    fields = KVTransferConfig.__dataclass_fields__
    assert {"kv_port", "engine_id"} <= {name for name, _ in names("vllm-ascend", 0)} & set(fields)


def test_connectors_are_named_as_vllm_registers_them() -> None:
    registered = set(re.findall(r'"(\w+)"', (CONNECTORS / "factory.py").read_text()))
    named = set(re.findall(r"`(\w*(?:Nixl|Mooncake|LMCache|Multi)\w*Connector\w*)`", PAGE))
    ascend = set(re.findall(r"`(\w+)`", SECTIONS["vllm-ascend"]))
    assert len(named - ascend) >= 5
    assert named - ascend <= registered


def test_the_page_says_which_versions_of_the_protocol_are_spoken() -> None:
    assert f"until now version {OURS} only" in PAGE
