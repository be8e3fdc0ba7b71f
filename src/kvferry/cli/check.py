"""``kvferry check``: whether two engines can exchange caches, and one prompt through them, before traffic comes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.check_pair import (
    Problem,
    Route,
    Server,
    Side,
    Verdict,
    ask_engine,
    judge,
    options_named,
    ports_to_open,
)
from kvferry.cli.check_prompt import Prompts, Sent, TimeRow
from kvferry.cli.console import AsJson, open_console, progress, refused
from kvferry.errors import KVFerryError
from kvferry.handoff.wire.trust import Keys, in_url
from kvferry.peer_log import printable
from kvferry.units import format_bytes

WORKS, CANNOT_WORK, CANNOT_ASK, INTERRUPTED = 0, 1, 2, 130
NAMES = ("prefill engine", "decode engine")


@dataclass(slots=True)
class Report:
    """What was found: engines that cannot be asked, or the verdict on the pair and what became of the prompts."""

    sides: list[Side] = field(default_factory=list)
    unasked: list[KVFerryError] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    sent: list[Sent] = field(default_factory=list)

    @property
    def problems(self) -> list[Problem]:
        """Why the pair does not work."""
        found = list(self.verdict.problems)
        for error in (error for sent in self.sent for error in sent.problems):
            found.append(Problem(error, options_named(error, *(side.facts for side in self.sides))))
        return found

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        if self.unasked:
            return CANNOT_ASK
        return CANNOT_WORK if self.problems else WORKS

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "works": self.exit_code == WORKS,
            "cannot_ask": [Problem(error).as_json() for error in self.unasked],
            "problems": [problem.as_json() for problem in self.problems],
            "engines": [_side_as_json(side) for side in self.sides],
            "route": None if self.verdict.route is None else asdict(self.verdict.route),
            "prompts": [sent.as_json() for sent in self.sent],
            "notes": self.verdict.notes,
        }


def check(
    prefill_url: Annotated[str, typer.Argument(help="URL of the prefill engine's API server.", show_default=False)],
    decode_url: Annotated[str, typer.Argument(help="URL of the decode engine's API server.", show_default=False)],
    router_url: Annotated[
        str | None, typer.Argument(help="URL of the router, to which another prompt is sent.", show_default=False)
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="A folder of keys that the engines trust.")] = None,
    prompt: Annotated[bool, typer.Option("--prompt/--no-prompt", help="Send one prompt through.")] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each answer of a server, the plan, and all ports.", min=0.1, max=86400)
    ] = 60.0,
    api_key: Annotated[
        str, typer.Option(help="vLLM's --api-key.", envvar="VLLM_API_KEY", show_default=False, show_envvar=True)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say whether two engines can exchange caches, why not, and where the time of one prompt goes.

    Each engine needs --middleware kvferry.integrations.vllm.readiness.Readiness and a fixed "port". Run this on the
    engines' host, or with --keys.

    Exit code 0: it works. 1: the pair cannot work, for the reasons listed. 2: an engine cannot be asked.

    Try:

    kvferry check http://127.0.0.1:8100 http://127.0.0.1:8200

    kvferry check http://127.0.0.1:8100 http://127.0.0.1:8200 http://127.0.0.1:30000

    kvferry check http://prefill-0:8000 http://decode-0:8000 --keys /etc/kvferry/keys --no-prompt --json
    """
    try:
        with progress("asking the engines") as announce, refused(as_json):
            report = Report()
            servers = [Server.parse("router", router_url)] if router_url is not None else []
            _ask(report, (prefill_url, decode_url), None if keys is None else Keys(keys), timeout)
            if not report.unasked:
                announce("planning between the engines")
                report.verdict = judge(report.sides[0], report.sides[1], timeout)
            if prompt and not report.unasked and not report.verdict.problems:
                announce("sending a prompt")
                _send(report, servers, Prompts(timeout, api_key))
    except KeyboardInterrupt:
        typer.echo("kvferry: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report, open_console())
    raise typer.Exit(report.exit_code)


def _ask(report: Report, urls: Sequence[str], keys: Keys | None, seconds: float) -> None:
    """Ask both engines, and note those that cannot be asked."""
    for name, url in zip(NAMES, urls, strict=True):
        try:
            report.sides.append(ask_engine(name, url, keys, seconds))
        except KVFerryError as error:
            report.unasked.append(error)


def _send(report: Report, routers: Sequence[Server], prompts: Prompts) -> None:
    prefill, decode = report.sides
    route = report.verdict.route
    report.sent.append(prompts.send(prefill, decode, "" if route is None else ports_to_open(prefill, decode, route)))
    for router in routers if not report.sent[0].problems else ():
        report.sent.append(prompts.send_through(router, prefill, decode))


def _side_as_json(side: Side) -> dict[str, Any]:
    facts = side.facts
    return {
        "engine": side.server.name,
        "url": side.server.url,
        "role": facts.role,
        "at": [f"{in_url(facts.reachable_host)}:{port}" for port in facts.ports],
        "ranks": len(side.ranks),
        "transports": list(side.ranks[0].end_points),
        "key": facts.key,
        "options": facts.options,
    }


def print_report(report: Report, console: Console) -> None:
    """Print what was found; text of engines is printed as it is, without control characters."""
    if report.sides:
        console.print(_engines(report.sides))
    for error in report.unasked:
        _say(console, f"cannot be asked: {error}", "red")
    for problem in report.problems:
        _say(console, str(problem.error), "red")
        for option, prefill, decode in problem.options:
            _say(console, f"  {option}: prefill has {prefill}, decode has {decode}", "red")
    if report.verdict.route is not None:
        _say(console, in_words(report.verdict.route))
    for sent in report.sent:
        if sent.rows:
            console.print(_times(sent))
    unknown = [*report.verdict.notes, *(line for sent in report.sent for line in sent.unknown)]
    for line in dict.fromkeys(unknown):
        _say(console, f"Not known from here: {line}", "yellow")
    if not report.unasked:
        _say(console, "works" if not report.problems else "cannot work", "bold")


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(printable(line), style=style, markup=False, highlight=False, soft_wrap=True)


def in_words(route: Route) -> str:
    """Return a route as a sentence.

    >>> in_words(Route("cma", 10000, 1 << 20, 625, 3, 1))
    'A prompt of 10000 tokens: 1.0 MiB in 625 descriptors, or in 3 where its blocks are consecutive, over cma.'
    """
    return (
        f"A prompt of {route.tokens} tokens: {format_bytes(route.num_bytes)} in {_descriptors(route.descriptors)}, or "
        f"in {route.joined} where its blocks are consecutive, over {route.transport}."
    )


def _descriptors(number: int) -> str:
    return f"{number} descriptor{'s' * (number != 1)}"


def _engines(sides: Sequence[Side]) -> Table:
    table = Table("engine", "URL", "other engines reach it at", "kv_role", "ranks", "transports", "keys")
    for side in sides:
        told = _side_as_json(side)
        cells = (
            side.server.name,
            side.server.url,
            ", ".join(told["at"]),
            told["role"],
            str(told["ranks"]),
            ", ".join(told["transports"]),
            told["key"][:16] or "none",
        )
        table.add_row(*(escape(printable(cell)) for cell in cells))
    return table


def _times(sent: Sent) -> Table:
    """Return where the time of a prompt went, and what of it moved."""
    table = Table(title=f"One prompt {'through the router' if sent.through else 'through both engines'}")
    table.add_column("where")
    table.add_column("what")
    table.add_column("over")
    table.add_column("ms", justify="right")
    for row in sent.rows:
        table.add_row(row.where, f"{'  ' * row.depth}{row.what}", row.transport, _milliseconds(row))
    if sent.num_bytes is not None and sent.compared_bytes is not None:
        table.caption = (
            f"{sent.received_tokens} tokens received, {format_bytes(sent.num_bytes)} in "
            f"{_descriptors(sent.descriptors or 0)}, {format_bytes(sent.compared_bytes)} compared"
        )
    return table


def _milliseconds(row: TimeRow) -> str:
    return "not known" if row.milliseconds is None else f"{row.milliseconds:.1f}"
