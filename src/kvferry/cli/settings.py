"""``kvferry settings``: the settings of the connectors, from the classes that check them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import AsJson, open_console
from kvferry.errors import KVFerryError, Reason, SettingsError, in_one_line
from kvferry.integrations.vllm.connector_configs import CONNECTOR
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.preflight import (
    READERS,
    EngineHere,
    errors_of,
    settings_in_force,
    transfer_of,
    warnings_of,
)
from kvferry.integrations.vllm.refused_flags import IGNORED, NEEDED, RULES
from kvferry.integrations.vllm.settings import Settings

PAGE = """# Settings

All settings of `kv_connector_extra_config`, as `kvferry settings --markdown` writes them.

A wrong configuration ends the engine before it loads weights: settings, flags, ports, keys, folders and memory are
checked at once, and vLLM's traceback (`Value error, ...`) has a line for each error. `kvferry settings --check JSON`
checks all but flags without an engine. What only caches tell ends the engine later: its log has `kvferry.errors`.

A host is a name or address, without `http://` or port.

## KVFerryConnector

{table}

Where `VLLM_PLUGINS` leaves kvferry's plugin out, add `"kv_connector_module_path":
"kvferry.integrations.vllm.connector"` to `--kv-transfer-config`; on a CPU vLLM then keeps its caches in `LBHNC`,
and settings are checked after weights load. Then leave `--disable-hybrid-kv-cache-manager` out: the engine
would not start.

When a load fails, vLLM's `kv_load_failure_policy` decides: `fail` (its default) answers with an error, `recompute`
computes the prompt on the decode engine.

The variable `KVFERRY_SLEEPING_WORKERS=1` lets vLLM's waiting workers [sleep](decisions/sleeping-workers.md) in place of
yielding, for engines with fewer cores than ranks. Start such engines in one session (from one shell), or set
`kernel.sched_autogroup_enabled` to 0.

## KVFerryOffloadConnector

Sizes are numbers of bytes, or text such as `"8 GiB"`.

{offload_table}

## Flags of vLLM

| flag | is |
|---|---|
{flags}
"""


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """One setting. ``default`` is a JSON value; ``unset`` is the meaning of an empty default."""

    name: str
    default: Any
    unset: str
    unit: str
    allowed: str
    meaning: str
    page: str

    @property
    def shown_default(self) -> str:
        """The default as text."""
        if isinstance(self.default, bool):
            return json.dumps(self.default)
        return self.unset or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))


def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
    check: Annotated[
        str | None,
        typer.Option(
            help="Check a value of --kv-transfer-config, or settings of one connector, as JSON or @FILE: as an engine "
            "that starts now on this machine would, but for vLLM's flags."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="With --check: ranks (times pipeline stages), which need ports.")
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="With --check: engines on this machine, which need ports, folders and memory.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """List the settings of KVFerryConnector and KVFerryOffloadConnector, which go into kv_connector_extra_config.

    Try:

    kvferry settings --json

    kvferry settings --check '{"port": 5600, "lease_seconds": 30}' --tensor-parallel-size 2
    """
    if markdown and (as_json or check is not None):
        raise typer.BadParameter("--markdown goes alone.")
    if check is not None:
        here = EngineHere(range(data_parallel_size), tensor_parallel_size, has_bootstrap=data_parallel_size == 1)
        raise typer.Exit(_check(check, here, as_json))
    if (tensor_parallel_size, data_parallel_size) != (1, 1):
        raise typer.BadParameter("--tensor-parallel-size and --data-parallel-size need --check.")
    moving, offload = describe_settings(), describe_settings(OffloadSettings)
    if as_json:
        listed = {"settings": moving, "offload_settings": offload}
        typer.echo(json.dumps({name: [asdict(each) for each in these] for name, these in listed.items()}, indent=2))
    elif markdown:
        typer.echo(PAGE.format(table=_rows(moving), offload_table=_rows(offload), flags=_flags()), nl=False)
    else:
        for title, these in (("KVFerryConnector", moving), ("KVFerryOffloadConnector", offload)):
            open_console().print(_table(title, these))


def _check(given: str, here: EngineHere, as_json: bool) -> int:
    """Print the settings in force and warnings, or all errors; return the exit code."""
    errors, in_force, warnings = list[KVFerryError](), list[tuple[str, dict[str, Any]]](), list[str]()
    try:
        connectors = transfer_of(_read_json(given))
        errors = errors_of(connectors, here)
        warnings = [] if errors else warnings_of(connectors, here)
        in_force = [(each.name, settings_in_force(each)) for each in connectors if each.name in READERS]
    except KVFerryError as error:
        errors = [error]
    if as_json:
        told = [{"reason": each.reason.value, "message": each.message, "remedy": each.remedy} for each in errors]
        settings = [] if errors else [{"connector": name, "settings": values} for name, values in in_force]
        found = {"ok": not errors, "errors": told, "warnings": warnings, "connectors": settings}
        typer.echo(json.dumps(found, indent=2))
    elif errors:
        typer.echo("\n".join(map(in_one_line, errors)), err=True)
    else:
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)
        typer.echo("ok")
        for name, values in in_force:
            typer.echo("\n".join([name, *(f"  {setting}: {json.dumps(value)}" for setting, value in values.items())]))
    return 2 if errors else 0


def _read_json(given: str) -> Any:
    try:
        text = Path(given[1:]).read_text() if given.startswith("@") else given
    except (OSError, ValueError) as error:
        raise SettingsError(
            Reason.INVALID_SETTING, f"--check {given[:80]!r} cannot be read: {error}.", "Name a file after the @."
        ) from error
    try:
        return json.loads(text)
    except ValueError as error:
        remedy = "Give JSON in single quotes, or @ and the name of a file that has it."
        raise SettingsError(Reason.INVALID_SETTING, f"--check {given[:80]!r} is no JSON: {error}.", remedy) from error


def _flags() -> str:
    """Return the rows about vLLM's flags."""
    refused: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        told = "refused" if CONNECTOR in rule.connectors else "refused with offload"
        refused.setdefault((told, rule.flag), []).append(rule.when)
    rows = [(f"`{flag}`", f"{told} if: {', or '.join(whens)}") for (told, flag), whens in refused.items()]
    rows += [(f"`{flag}`", f"needed with {when}") for flag, when in NEEDED]
    rows.append((f"`{'`, `'.join(IGNORED)}`", "ignored"))
    return "\n".join(f"| {flag} | {told} |" for flag, told in rows)


def _table(title: str, descriptions: tuple[SettingDescription, ...]) -> Table:
    table = Table("setting", "default", "unit", "meaning", title=title, show_lines=True)
    for each in descriptions:
        meaning = f"{each.meaning}\nAllowed: {each.allowed}." if each.allowed else each.meaning
        cells = (each.name, each.shown_default, each.unit, meaning)
        table.add_row(*(escape(cell.replace("`", "")) for cell in cells))
    return table


def describe_settings(kind: type[msgspec.Struct] = Settings) -> tuple[SettingDescription, ...]:
    """Return the settings of a connector in the order of the class.

    >>> [each.shown_default for each in describe_settings() if each.name in ("lease_seconds", "keys")]
    ['no keys', '60']
    """
    information = msgspec.inspect.type_info(kind)
    assert isinstance(information, msgspec.inspect.StructType)
    return tuple(_describe(field) for field in information.fields)


def _describe(field: msgspec.inspect.Field) -> SettingDescription:
    about = field.type
    assert isinstance(about, msgspec.inspect.Metadata)
    extra, schema = about.extra or {}, about.extra_json_schema or {}
    return SettingDescription(
        name=field.name,
        default=None if field.required else msgspec.to_builtins(field.default),
        unset="must be set" if field.required else extra.get("unset", ""),
        unit=extra.get("unit", ""),
        allowed=_allowed(about.type, extra.get("values", ())),
        meaning=schema["description"],
        page=extra.get("page", ""),
    )


def _allowed(kind: msgspec.inspect.Type, values: tuple[str, ...]) -> str:
    """Return the allowed values of a setting as text; empty where the type allows any value."""
    match kind:
        case msgspec.inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case msgspec.inspect.IntType(ge=int(least), le=int(most)):
            return f"{least} to {most}"
        case msgspec.inspect.UnionType(types=(msgspec.inspect.Metadata(type=given), msgspec.inspect.NoneType())):
            return _allowed(given, values)
        case msgspec.inspect.FloatType(gt=float() | int() as least, le=float() | int() as most):
            return f"above {least:g}, at most {most:g}"
        case msgspec.inspect.FloatType(ge=float() | int() as least, le=float() | int() as most):
            return f"{least:g} to {most:g}"
        case _:
            return ", ".join(f"`{value}`" for value in values)


def _rows(descriptions: tuple[SettingDescription, ...]) -> str:
    """Return the table of docs/settings.md."""
    rows = ["| setting | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
    for each in descriptions:
        default = each.unset or f"`{each.shown_default}`"
        meaning = f"{each.meaning} ([more]({each.page}))" if each.page else each.meaning
        rows.append(f"| `{each.name}` | {default} | {each.unit} | {each.allowed} | {meaning} |".replace("  ", " "))
    return "\n".join(rows)
