"""``kvferry drain`` and ``kvferry ready``: before an engine is ended, let it finish what it holds and take no more."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvferry.cli.console import AsJson, progress, refused
from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Drain, Draining
from kvferry.handoff.wire.trust import parse_place

ASK_SECONDS = 5.0
POLL_SECONDS = 0.5
IN_LOG = "The engine's log has it at its start: 'engine ... at HOST:PORT'."
NAME_IT = f"Name the engine's address for other engines, not that of its API server. {IN_LOG}"
REMEDIES = {
    Reason.PEER_UNREACHABLE: NAME_IT,
    Reason.MALFORMED_MESSAGE: NAME_IT,
    Reason.PERMISSION_DENIED: "Give --keys a folder that the engine trusts; leave it out where the engine has none.",
}
"""What to do in place of what an engine would have to do that asked the same."""
ENGINE_HELP = f"The engine's address for other engines. {IN_LOG}"
Engine = Annotated[str, typer.Argument(help=ENGINE_HELP, metavar="HOST:PORT", show_default=False)]
KeysFolder = Annotated[
    Path | None, typer.Option("--keys", help="A folder of keys that the engine trusts; none for an engine without.")
]


def drain(
    engine: Engine,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until nothing is left.", min=0.0)] = 300.0,
    keys: KeysFolder = None,
    as_json: AsJson = False,
) -> None:
    """Tell an engine that it will be ended, and wait until it has nothing left to do.

    Exit code 1: something is left. 2: no answer.

    The engine stops being ready at once, and works on until routers have noticed (15 s; 6 s where it registers with a
    router). Then it holds no more prompts, and the command waits for what it holds and for its requests.

    The engine goes on draining where this command is interrupted or its time is over; a restart ends the drain.

    Try:

    kvferry drain 127.0.0.1:5600

    kvferry drain 10.0.0.7:5600 --timeout 120 --keys /etc/kvferry/keys
    """
    began_at = time.monotonic()
    with progress(f"draining {engine}") as announce, refused(as_json):
        found = ask_drain(engine, keys, begin=True)
        while not _is_drained(found) and time.monotonic() < began_at + timeout:
            announce(f"draining {engine}: {in_words(found)}")
            time.sleep(POLL_SECONDS)
            found = ask_drain(engine, keys, begin=True)
    _end(found, as_json, time.monotonic() - began_at, is_well=_is_drained(found))


def ready(engine: Engine, keys: KeysFolder = None, as_json: AsJson = False) -> None:
    """Say whether routers should send to an engine, for a readiness probe. Exit code 1: it drains. 2: no answer.

    Whether two engines that are ready fit together, `kvferry check` says.

    Try:

    kvferry ready 127.0.0.1:5600

    kvferry ready 10.0.0.7:5600 --keys /etc/kvferry/keys --json
    """
    with refused(as_json):
        found = ask_drain(engine, keys, begin=False)
    _end(found, as_json, 0.0, is_well=not found.is_draining)


def ask_drain(engine: str, keys: Path | None, *, begin: bool) -> Draining:
    """Ask the engine at ``HOST:PORT`` whether it drains; with ``begin`` it drains from now on.

    Raises :class:`HandoffError`: invalid-setting, peer-unreachable, permission-denied, or the engine's refusal; and as
    :class:`Keys`.
    """
    from kvferry.handoff.wire.client import ask
    from kvferry.handoff.wire.trust import Keys, Trust

    host, port = parse_end_point(engine)
    trust = Trust(None if keys is None else Keys(keys))
    try:
        answer = ask(host, port, Drain(begin), ASK_SECONDS, trust, is_trusted=True)
    except HandoffError as error:
        raise HandoffError(error.reason, error.message, REMEDIES.get(error.reason, error.remedy)) from None
    if not isinstance(answer, Draining):
        what = f"{engine} answered {type(answer).__name__}."
        raise HandoffError(Reason.PROTOCOL_MISMATCH, what, "Run the same kvferry version here and there.")
    return answer


def parse_end_point(text: str) -> tuple[str, int]:
    """Return the host and port of ``HOST:PORT``, an IPv6 address in brackets.

    Raises :class:`HandoffError` (invalid-setting).

    >>> parse_end_point("prefill-0:5600"), parse_end_point("[::1]:5600")
    (('prefill-0', 5600), ('[::1]', 5600))
    """
    try:
        return parse_place(text)
    except ValueError as error:
        remedy = f"Write the engine's address for other engines, such as 127.0.0.1:5600 or [::1]:5600. {IN_LOG}"
        raise HandoffError(Reason.INVALID_SETTING, f"{text!r} is not HOST:PORT.", remedy) from error


def in_words(found: Draining) -> str:
    """Return what an engine still does.

    >>> in_words(Draining("p", 7, True, 1, 0)), in_words(Draining("p", 7, False, 0, 1))
    ('drains, 1 prompt held, 0 requests under way', 'takes prompts, 0 prompts held, 1 request under way')
    """
    held, requests = found.num_holds, found.num_loads
    counts = f"{held} prompt{'s' * (held != 1)} held, {requests} request{'s' * (requests != 1)} under way"
    return f"{'drains' if found.is_draining else 'takes prompts'}, {counts}"


def _is_drained(found: Draining) -> bool:
    """Return whether nothing is left. An engine drains some seconds after it was told."""
    return found.is_draining and not found.num_holds + found.num_loads


def _end(found: Draining, as_json: bool, seconds: float, *, is_well: bool) -> NoReturn:
    if as_json:
        row: dict[str, Any] = {"engine_id": found.engine_id, "epoch": found.epoch, "draining": found.is_draining}
        row |= {"holds": found.num_holds, "requests": found.num_loads, "seconds": round(seconds, 3)}
        typer.echo(json.dumps(row, indent=2))
    else:
        typer.echo(f"{found.engine_id} {in_words(found)}")
    raise typer.Exit(0 if is_well else 1)
