"""``kvferry settings`` and docs/settings.md: every setting, from the class that checks settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.settings import SettingDescription, describe_settings
from kvferry.errors import SettingsError
from kvferry.integrations.vllm.settings import Settings, parse_settings

ROOT = Path(__file__).parents[2]
DESCRIPTIONS = {each.name: each for each in describe_settings()}


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["settings", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_what_the_command_writes() -> None:
    assert (ROOT / "docs/settings.md").read_text() == printed("--markdown"), (
        "run: kvferry settings --markdown > docs/settings.md"
    )


def test_every_setting_is_in_every_output() -> None:
    names = list(Settings.__struct_fields__)
    page, listed = printed("--markdown"), json.loads(printed("--json"))["settings"]
    assert [each["name"] for each in listed] == names
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == names
    assert all(re.search(rf"^│ {name} ", printed(), re.MULTILINE) for name in names)


@pytest.mark.parametrize("about", DESCRIPTIONS.values(), ids=lambda about: about.name)
def test_a_setting_has_one_sentence_and_its_default(about: SettingDescription) -> None:
    assert re.fullmatch(r"[A-Z`][^\n]*\.", about.meaning)
    assert not re.search(r"\. [A-Z]", about.meaning)
    assert bool(about.unset) is (about.default in ("", (), None)), "an empty default needs words"
    assert about.default == getattr(Settings(), about.name)
    assert about.unit or not about.name.endswith(("_seconds", "_bytes"))


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("port", "0 to 65535", [-1, 65536]),
        ("lease_seconds", "above 0, at most 86400", [0, 86401]),
        ("load_timeout_seconds", "above 0, at most 86400", [0, 86401]),
        ("mode", "`pull`, `push`", ["fetch"]),
        ("transport", "`auto`, `cma`, `nixl`, `mooncake`, `memcpy`, `null`", ["pigeon"]),
    ],
)
def test_what_is_allowed_is_what_is_checked(name: str, allowed: str, refused: list[Any]) -> None:
    assert DESCRIPTIONS[name].allowed == allowed
    for value in refused:
        with pytest.raises(SettingsError):
            parse_settings({name: value})


def test_the_readme_gives_the_same_defaults() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = [
        (name, default)
        for names, defaults in rows
        for name, default in zip(re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", defaults), strict=True)
        if name in DESCRIPTIONS
    ]
    assert found
    assert found == [(name, DESCRIPTIONS[name].shown_default.strip("`")) for name, _ in found]


def test_markdown_or_json() -> None:
    assert CliRunner().invoke(app, ["settings", "--markdown", "--json"]).exit_code == 2
