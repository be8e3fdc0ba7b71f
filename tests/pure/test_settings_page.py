"""``kvferry settings`` and docs/settings.md: every setting, from the class that checks settings."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.settings import SettingDescription, describe_settings
from kvferry.errors import Reason, SettingsError
from kvferry.integrations.vllm.offload_settings import OffloadSettings, parse_offload_settings
from kvferry.integrations.vllm.refused_flags import RULES
from kvferry.integrations.vllm.settings import Settings, parse_settings

ROOT = Path(__file__).parents[2]
DESCRIPTIONS = {each.name: each for each in describe_settings()}
BOTH = [(kind, each) for kind in (Settings, OffloadSettings) for each in describe_settings(kind)]


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["settings", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_what_the_command_writes() -> None:
    assert (ROOT / "docs/settings.md").read_text() == printed("--markdown"), (
        "run: kvferry settings --markdown > docs/settings.md"
    )


def test_every_setting_is_in_every_output() -> None:
    names = [*Settings.__struct_fields__, *OffloadSettings.__struct_fields__]
    page, listed = printed("--markdown"), json.loads(printed("--json"))
    assert [each["name"] for each in (*listed["settings"], *listed["offload_settings"])] == names
    before, flags = page.split("## Flags of vLLM")
    assert re.findall(r"^\| `(\w+)` \|", before, re.MULTILINE) == names
    assert all(f"| `{rule.flag}` | refused" in flags and rule.when in flags for rule in RULES)
    assert all(re.search(rf"^│ {name} ", printed(), re.MULTILINE) for name in names)


@pytest.mark.parametrize(("kind", "about"), BOTH, ids=[f"{kind.__name__}-{about.name}" for kind, about in BOTH])
def test_a_setting_has_one_sentence_and_its_default(kind: type[msgspec.Struct], about: SettingDescription) -> None:
    assert re.fullmatch(r"[A-Z`][^\n]*\.", about.meaning)
    assert not re.search(r"\. [A-Z]", about.meaning)
    is_empty = about.default in ("", (), None) or (kind is OffloadSettings and about.default == 0)
    assert bool(about.unset) is is_empty, "an empty default needs words"
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    assert about.default == defaults.get(about.name)
    assert about.unit or not about.name.endswith(("_seconds", "_bytes"))


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("port", "0 to 65535", [-1, 65536]),
        ("lease_seconds", "above 0, at most 86400", [0, 86401]),
        ("load_timeout_seconds", "above 0, at most 86400", [0, 86401]),
        ("turn_seconds", "0 to 86400", [-1, 86401]),
        ("integrity", "`auto`, `full`, `off`, `sample`", ["most"]),
        ("transport", "`auto`, `cma`, `nixl`, `mooncake`", ["pigeon", "memcpy"]),
    ],
)
def test_what_is_allowed_is_what_is_checked(name: str, allowed: str, refused: list[Any]) -> None:
    assert DESCRIPTIONS[name].allowed == allowed
    for value in refused:
        with pytest.raises(SettingsError):
            parse_settings({name: value})


@pytest.mark.parametrize(
    ("given", "reason", "said"),
    [
        ({}, Reason.INVALID_SETTING, "host_bytes is missing"),
        ({"host_byte": 1}, Reason.UNKNOWN_SETTING, "Did you mean 'host_bytes'"),
        ({"host_bytes": 1, "keys": "/a"}, Reason.UNKNOWN_SETTING, "'kvferry settings' lists the settings of each"),
        ({"host_bytes": 1, "loads": "never"}, Reason.INVALID_SETTING, "Use 'always' or 'when-quicker'."),
        ({"host_bytes": 1, "disc_path": "/a"}, Reason.UNKNOWN_SETTING, "Did you mean 'disk_path'"),
        ({"host_bytes": "8 gigabytes"}, Reason.INVALID_SETTING, "host_bytes '8 gigabytes' is no size"),
        ({"host_bytes": 0}, Reason.INVALID_SETTING, "host_bytes: a whole number >= 1 is wanted"),
        ({"host_bytes": "0"}, Reason.INVALID_SETTING, "host_bytes: a whole number >= 1 is wanted"),
        ({"host_bytes": -1}, Reason.INVALID_SETTING, "host_bytes: a whole number >= 1 is wanted"),
        ({"host_bytes": 1, "disk_path": "/a"}, Reason.INVALID_SETTING, "disk_path and disk_bytes go together"),
        ({"host_bytes": 1, "disk_bytes": "1 MB"}, Reason.INVALID_SETTING, "disk_path and disk_bytes go together"),
        ({"host_bytes": 1, "pool_master": "a:1"}, Reason.INVALID_SETTING, "pool_master and pool_bytes go together"),
        (
            {"host_bytes": 1, "pool_master": "http://a:1", "pool_bytes": 1},
            Reason.INVALID_SETTING,
            "pool_master 'http://a:1' does not name a master",
        ),
        ({"host_bytes": 1, "loads": "never"}, Reason.INVALID_SETTING, "loads: 'never' is not one of its values"),
        (
            {"host_bytes": 1, "load_wait_seconds": 0},
            Reason.INVALID_SETTING,
            "load_wait_seconds: a number > 0.0 is wanted",
        ),
        ({"host_bytes": 1, "block_size": -16}, Reason.INVALID_SETTING, "block_size: a whole number >= 0 is wanted"),
    ],
)
def test_a_wrong_setting_of_the_offload_connector_is_refused(given: dict[str, Any], reason: Reason, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_offload_settings(given)
    assert refused.value.reason is reason
    assert said in str(refused.value)


def test_all_wrong_settings_of_the_offload_connector_are_told_at_once() -> None:
    for given, told in (
        ({"disk_path": "/a", "loads": "never"}, ["loads: ", "host_bytes is missing", "disk_path and disk_bytes go"]),
        ({"host_bytes": "8 gigs", "disk_bytes": "x", "disk_path": "/a"}, ["host_bytes '8 gigs'", "disk_bytes 'x'"]),
        ({"host_byte": 1, "pool_master": "a", "pool_bytes": 1}, ["unknown setting 'host_byte'", "pool_master 'a'"]),
    ):
        with pytest.raises(SettingsError) as refused:
            parse_offload_settings(given)
        lines = str(refused.value).splitlines()
        assert len(lines) == len(told), lines
        assert all(said in line for said, line in zip(told, lines, strict=True)), lines


def test_sizes_may_be_text() -> None:
    sizes = ("4096", "4 KiB", "4kib", "4.096 kB", 4096)
    assert {parse_offload_settings({"host_bytes": size}).host_bytes for size in sizes} == {4096}


def test_the_readme_gives_the_same_defaults() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = [
        (name, default)
        for names, defaults in rows
        for name, default in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True)
        if name in DESCRIPTIONS
    ]
    assert found
    assert found == [(name, DESCRIPTIONS[name].unset or f"`{DESCRIPTIONS[name].shown_default}`") for name, _ in found]


def test_markdown_or_json() -> None:
    for other in (["--json"], ["--check", "{}"]):
        assert CliRunner().invoke(app, ["settings", "--markdown", *other]).exit_code == 2
