"""One prompt through two engines, for ``kvferry check``, and where its time went as far as the engines tell."""

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec

from kvferry.cli.check_pair import ASK_SECONDS, Server, Side
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.messages import Handle, Identifier, Release, Unsigned
from kvferry.handoff.wire.bootstrap import HttpAnswer
from kvferry.handoff.wire.client import ask
from kvferry.harness.launch import parse_metrics
from kvferry.peer_log import printable

NUM_TOKENS = 64
FIRST_TOKEN, LAST_TOKEN = 100, 199
"""Ids that each vocabulary has. Nobody has sent the prompt before: no cache of prefixes has it."""
MAX_ANSWER_BYTES = 4 << 20
MAX_METRICS_BYTES = 32 << 20
METRICS_SECONDS = 5.0
"""How long an engine takes to count a request that it has answered."""
POLL_SECONDS = 0.1
LABEL = re.compile(r'(\w+)="(\w+)"')
MAX_TEXT = 600
QUEUE, COMPUTE = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"
WAIT, COMPARE, PHASE = "kvferry:wait_seconds", "kvferry:compare_seconds", "kvferry:phase_seconds"
PHASE_TEXTS = {
    "find": "handshake, introduction, plan",
    "announce": "to the source and back",
    "post": "until the source has the prompt, and between batches",
    "move": "first to last byte",
    "confirm": "digests, the source's report",
    "next_step": "until the engine takes the blocks",
}
LOADS, FAILED_LOADS, SUCCESSES = "kvferry:loads_total", "kvferry:failed_loads_total", "vllm:request_success_total"
RECEIVED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
STATUS_REASONS = {
    400: Reason.INVALID_REQUEST,
    401: Reason.PERMISSION_DENIED,
    403: Reason.PERMISSION_DENIED,
    404: Reason.INVALID_REQUEST,
}
DATA_WAY_REASONS = {
    Reason.PEER_UNREACHABLE,
    Reason.TRANSPORT_UNAVAILABLE,
    Reason.TRANSFER_FAILED,
    Reason.DEADLINE_EXCEEDED,
}
"""Why a load fails where a firewall closes a port between two engines."""
NO_LOGS = "What the {} did with the prompt, and when: it has no metrics (--disable-log-stats)."


class _Held(msgspec.Struct):
    """What of a prefill engine's answer names the hold."""

    epoch: Unsigned
    generation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class _Params(msgspec.Struct):
    remote_request_id: Identifier
    kvferry: _Held


class TimeRow(NamedTuple):
    """A part of the time of a request: ``milliseconds`` is None where it cannot be known; ``depth`` indents. The row of
    a ``phase`` of a load has the ``transport`` that moved the bytes.
    """

    where: str
    what: str
    milliseconds: float | None
    depth: int = 0
    phase: str = ""
    transport: str = ""


@dataclass(slots=True)
class Sent:
    """What became of one prompt."""

    through: str
    problems: list[KVFerryError] = field(default_factory=list)
    rows: list[TimeRow] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    received_tokens: int | None = None
    num_bytes: int | None = None
    descriptors: int | None = None
    compared_bytes: int | None = None

    @property
    def transports(self) -> list[str]:
        """What moved the bytes: one transport, or one for each kind of ranks; empty where that is not known."""
        return sorted({row.transport for row in self.rows if row.transport})

    def as_json(self) -> dict[str, Any]:
        """Return what is known, and the times, as JSON values."""
        found = {
            "through": self.through,
            "prompt_tokens": NUM_TOKENS,
            "received_tokens": self.received_tokens,
            "bytes": self.num_bytes,
            "descriptors": self.descriptors,
            "compared_bytes": self.compared_bytes,
            "transports": self.transports,
        }
        return {**found, "times": [row._asdict() for row in self.rows], "unknown": self.unknown}


class Counted:
    """The metrics of an engine before a request, and what the request has added to them; none where there are none."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._before, self._after = metrics_of(side.server), dict[str, float]()

    @property
    def is_known(self) -> bool:
        """Whether the engine counts requests and loads."""
        return any(name.startswith("vllm:request_success") for name in self._before)

    def take(self, until: float, num_loads: int = 0) -> None:
        """Read the metrics until the engine has counted one request more and so many loads, or the time is over."""
        while self.is_known:
            self._after = metrics_of(self.side.server)
            loads = self.added(LOADS) + self.added(FAILED_LOADS)
            if (self.added(SUCCESSES) >= 1 and loads >= num_loads) or time.monotonic() > until:
                return
            time.sleep(POLL_SECONDS)

    def added(self, name: str) -> float:
        """Return what was added to a counter, over all of its labels."""
        return sum(
            value - self._before.get(key, 0.0)
            for key, value in self._after.items()
            if key == name or key.startswith(f"{name}{{")
        )

    def reasons(self) -> list[str]:
        """Return the reasons of loads that have failed since."""
        return sorted(
            key.partition('reason="')[2].partition('"')[0]
            for key, value in self._after.items()
            if key.startswith(FAILED_LOADS) and value > self._before.get(key, 0.0)
        )

    def milliseconds(self, name: str, count: int = 1) -> float | None:
        """Return the mean of the values that were added to a histogram, None unless ``count`` were."""
        if round(self.added(f"{name}_count")) != count:
            return None
        return 1e3 * self.added(f"{name}_sum") / count

    def by_phase(self, count: int) -> list[tuple[str, str, float]]:
        """Return each phase, its transport and mean milliseconds, unless ``count`` loads were added."""
        found = []
        for key, seconds in self._after.items():
            labels = dict(LABEL.findall(key)) if key.startswith(f"{PHASE}_sum{{") else {}
            name = key.replace("_sum{", "_count{", 1)
            if labels.keys() == {"phase", "transport"} and self.added(name):
                seconds -= self._before.get(key, 0.0)
                found.append((labels["phase"], labels["transport"], 1e3 * seconds / self.added(name)))
        return found if round(self.added(f"{WAIT}_count")) == count else []

    def total(self, name: str) -> int | None:
        """Return the sum of the values that were added to a histogram."""
        return round(self.added(f"{name}_sum")) if self.is_known else None


def metrics_of(server: Server) -> dict[str, float]:
    """Return an engine's metrics; none where it has none, or none that can be read."""
    answer = server.ask("/metrics", ASK_SECONDS, MAX_METRICS_BYTES)
    try:
        found = parse_metrics(answer.body.decode()) if answer.status == 200 else {}
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


class Prompts:
    """Sends prompts to engines and routers. ``api_key`` is vLLM's, empty for none."""

    def __init__(self, seconds: float, api_key: str = "") -> None:
        self._seconds = seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def send(self, prefill: Side, decode: Side, open_ports: str = "") -> Sent:
        """Send a prompt as a sequential router does. A hold that is not loaded is released, however this ends.

        ``open_ports`` tells what to open in firewalls between the engines; a load that fails as behind one says it.
        """
        sent = Sent("")
        params: Any = None
        try:
            counted = Counted(prefill), Counted(decode)
            models = self._model_of(prefill.server), self._model_of(decode.server)
            request_id, prompt = _new_prompt()
            body = {"prompt": prompt, "kv_transfer_params": {"do_remote_decode": True}}
            seconds, answer = self._post(prefill.server, request_id, {"model": models[0], **body})
            params = _answered(prefill.server, answer).get("kv_transfer_params")
            if not isinstance(params, dict) or "kvferry" not in params:
                raise HandoffError(
                    Reason.UNSUPPORTED,
                    f"the prefill engine has answered {request_id} without naming a hold.",
                    "Its log says why the prompt is not held.",
                )
            counted[0].take(time.monotonic() + METRICS_SECONDS)
            sent.rows += _prefill_rows(counted[0], 1e3 * seconds)
            body = {"prompt": prompt, "kv_transfer_params": params}
            try:
                seconds, answer = self._post(decode.server, request_id, {"model": models[1], **body})
            except HandoffError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                raise _late(counted[1], self._seconds, request_id, open_ports) from error
            counted[1].take(time.monotonic() + METRICS_SECONDS, len(decode.ranks))
            try:
                _answered(decode.server, answer, request_id, counted[1].reasons())
            except HandoffError as error:
                raise _with_ports(error, open_ports) from error
            params = None
        except KVFerryError as error:
            sent.problems.append(error)
            return sent
        finally:
            if params is not None:
                with suppress(KVFerryError):
                    release(prefill, params)
        self._note_load(sent, counted[1], 1e3 * seconds, request_id)
        sent.problems = [_with_ports(error, open_ports) for error in sent.problems]
        return sent

    def send_through(self, router: Server, prefill: Side, decode: Side) -> Sent:
        """Send another prompt to a router, and find out what the two engines did with it."""
        sent = Sent(router.url)
        try:
            counted = Counted(prefill), Counted(decode)
            request_id, prompt = _new_prompt()
            model = self._model_of(decode.server)
            seconds, answer = self._post(router, request_id, {"model": model, "prompt": prompt})
            until = time.monotonic() + METRICS_SECONDS
            counted[1].take(until, len(decode.ranks))
            _answered(router, answer, request_id, counted[1].reasons())
            counted[0].take(until)
            sent.rows.append(TimeRow("router", "HTTP request", 1e3 * seconds))
            if all(each.is_known for each in counted) and counted[1].added(LOADS) < 1:
                raise _not_moved(counted[0].added(SUCCESSES), counted[1].added(SUCCESSES), counted[1].reasons())
        except KVFerryError as error:
            sent.problems.append(error)
            return sent
        sent.rows += _router_rest(1e3 * seconds, counted)
        sent.rows += _prefill_rows(counted[0], None)
        self._note_load(sent, counted[1], None, request_id)
        return sent

    def _post(self, server: Server, request_id: str, body: Mapping[str, Any]) -> tuple[float, HttpAnswer]:
        """Return the seconds of one completion and its answer."""
        sent = json.dumps({**body, "max_tokens": 1, "temperature": 0}).encode()
        headers = {**self._headers, "Content-Type": "application/json", "X-Request-Id": request_id}
        began_at = time.monotonic()
        answer = server.ask(
            "/v1/completions", self._seconds, MAX_ANSWER_BYTES, method="POST", headers=headers, body=sent
        )
        return time.monotonic() - began_at, answer

    def _model_of(self, server: Server) -> str:
        answer = server.ask("/v1/models", self._seconds, MAX_ANSWER_BYTES, headers=self._headers)
        with suppress(LookupError, TypeError):
            return str(_answered(server, answer)["data"][0]["id"])
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"the {server.name} at {server.url} names no model at /v1/models.",
            "Check which program listens there.",
        )

    def _note_load(self, sent: Sent, decode: Counted, milliseconds: float | None, request_id: str) -> None:
        num_ranks = len(decode.side.ranks)
        sent.rows += _decode_rows(decode, milliseconds, num_ranks)
        if not decode.is_known:
            sent.unknown.append(NO_LOGS.format(decode.side.server.name))
            return
        if (loads := round(decode.added(LOADS))) < num_ranks:
            sent.problems.append(_not_loaded(request_id, decode.reasons()))
            return
        sent.received_tokens = round(decode.added(RECEIVED))
        sent.num_bytes = decode.total("kvferry:transfer_bytes")
        sent.descriptors = decode.total("kvferry:transfer_descriptors")
        sent.compared_bytes = decode.total("kvferry:compared_bytes")
        if loads > num_ranks:
            sent.unknown.append(f"{loads - num_ranks} loads of others ended meanwhile: sums have them too.")
        if failed := round(decode.added(FAILED_LOADS)):
            reasons = ", ".join(decode.reasons())
            sent.unknown.append(f"{failed} loads failed meanwhile ({reasons}): this prompt's may be one of them.")


def release(prefill: Side, params: object) -> None:
    """End the hold of a prompt that nobody loads. Raises :class:`HandoffError`."""
    try:
        named = msgspec.convert(params, _Params)
    except msgspec.ValidationError:
        return
    handle = Handle(named.remote_request_id, int(named.kvferry.generation, 16))
    trust = prefill.trust
    for directory, port in zip(prefill.directories, prefill.facts.ports, strict=True):
        if directory.epoch == named.kvferry.epoch:
            question = Release(directory.epoch, (handle,))
            ask(prefill.host, port, question, ASK_SECONDS, trust, is_trusted=trust.keys is not None)


def _new_prompt() -> tuple[str, list[int]]:
    """Return the id and the tokens of a prompt that nobody has sent before."""
    tokens = [FIRST_TOKEN + secrets.randbelow(LAST_TOKEN - FIRST_TOKEN + 1) for _ in range(NUM_TOKENS)]
    return f"kvferry-check-{secrets.token_hex(6)}", tokens


def _answered(server: Server, answer: HttpAnswer, request_id: str = "", reasons: list[str] | None = None) -> Any:
    """Return what a server answers. Raises :class:`HandoffError` for an error, with its reason where one is told."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        found = None
    if answer.status == 200 and isinstance(found, dict):
        return found
    error = found.get("error") if isinstance(found, dict) else None
    told = error if isinstance(error, dict) else {}
    text = printable(str(told.get("message") or answer.body.decode(errors="replace")))[:MAX_TEXT]
    codes = [str(told.get("reason") or ""), *(reasons or ())]
    reason = next((Reason(code) for code in codes if code in set(Reason)), None)
    if answer.status in (401, 403):
        remedy = "Give vLLM's key with --api-key."
    elif request_id:
        remedy = f"The line of the decode engine's log that has {request_id} names what to do."
    else:
        remedy = "The log of this server says why."
    raise HandoffError(
        reason or STATUS_REASONS.get(answer.status, Reason.TRANSFER_FAILED),
        f"the {server.name} at {server.url} has answered the prompt with HTTP status {answer.status}: {text}.",
        remedy,
    )


def _late(decode: Counted, seconds: float, request_id: str, open_ports: str) -> KVFerryError:
    """Return the error of a decode engine that has not answered in time."""
    with suppress(KVFerryError):
        decode.take(time.monotonic())
    has_loaded = decode.added(LOADS) >= len(decode.side.ranks)
    error = HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the decode engine at {decode.side.server.url} has not answered the prompt within {seconds:g} s"
        f"{', though it has loaded the cache' if has_loaded else ''}.",
        f"Look for {request_id} in its log, or raise --timeout.",
    )
    return error if has_loaded else _with_ports(error, open_ports)


def _with_ports(error: KVFerryError, open_ports: str) -> KVFerryError:
    """Return the error of a load, with the ports to open where a firewall may be the cause."""
    if error.reason not in DATA_WAY_REASONS or not open_ports:
        return error
    return HandoffError(error.reason, error.message, f"{error.remedy} {open_ports}")


def _not_loaded(request_id: str, reasons: list[str]) -> HandoffError:
    """Return the error of a decode engine that has answered without the prefill engine's cache."""
    code = next((Reason(code) for code in reasons if code in set(Reason)), None)
    if code is not None:
        return HandoffError(
            code,
            "the decode engine could not load the prompt, and has computed it.",
            f"The line of its log that has {request_id} names what to do.",
        )
    return HandoffError(
        Reason.WRONG_PARAMETERS,
        "the decode engine has computed the prompt although the request named a hold.",
        f"Its log says why where it has {request_id}.",
    )


def _not_moved(num_prefilled: float, num_decoded: float, reasons: list[str]) -> HandoffError:
    """Return the error of a router through which no cache has moved."""
    if code := next((Reason(code) for code in reasons if code in set(Reason)), None):
        return HandoffError(code, "the router's prompt was not loaded.", "The decode engine's log says why.")
    if num_decoded < 1:
        return HandoffError(
            Reason.INVALID_SETTING,
            "the router has answered, and the decode engine has had no request.",
            "Give the router these two engines (--prefill URL --decode URL), or the URLs of its engines to this.",
        )
    if num_prefilled < 1:
        return HandoffError(
            Reason.INVALID_SETTING,
            "the router sends the prompt to the decode engine alone, which has computed it.",
            "Start the router with --vllm-pd-disaggregation, and the prefill engine's URL at --prefill.",
        )
    return HandoffError(
        Reason.WRONG_PARAMETERS,
        "the router is in the wrong mode: both engines have computed the prompt, since the decode engine was told no "
        "hold and no transfer.",
        "Start vllm-router with --vllm-pd-disaggregation and without --kv-connector; or with --kv-connector mooncake "
        "and the prefill engine's bootstrap_port, or moriio and each engine's router_address.",
    )


def _prefill_rows(counted: Counted, milliseconds: float | None) -> list[TimeRow]:
    queue, compute = counted.milliseconds(QUEUE), counted.milliseconds(COMPUTE)
    rows = [] if milliseconds is None else [TimeRow("prefill", "HTTP request", milliseconds)]
    rows += [TimeRow("prefill", "in the queue", queue, 1), TimeRow("prefill", "prompt computed", compute, 1)]
    return [*rows, *_rest("prefill", milliseconds, queue, compute)]


def _decode_rows(counted: Counted, milliseconds: float | None, num_ranks: int) -> list[TimeRow]:
    queue, compute = counted.milliseconds(QUEUE), counted.milliseconds(COMPUTE)
    rows = [] if milliseconds is None else [TimeRow("decode", "HTTP request", milliseconds)]
    rows += [
        TimeRow("decode", "in the queue, the wait for the cache included", queue, 1),
        TimeRow("decode", "wait for the cache", counted.milliseconds(WAIT, num_ranks), 2),
    ]
    times: dict[str, list[tuple[str, float | None]]] = {phase: [] for phase in PHASE_TEXTS}
    for phase, transport, each in counted.by_phase(num_ranks):
        times.get(phase, []).append((transport, each))
    for phase, text in PHASE_TEXTS.items():
        for transport, taken in times[phase] or [("", None)]:
            depth = 2 if phase == "next_step" else 3
            rows.append(TimeRow("decode", f"{phase}: {text}", taken, depth, phase, transport))
        if phase == "confirm":
            rows.append(TimeRow("decode", "comparing digests", counted.milliseconds(COMPARE, num_ranks), 4))
    rows.append(TimeRow("decode", "last token computed", compute, 1))
    return [*rows, *_rest("decode", milliseconds, queue, compute)]


def _router_rest(milliseconds: float, counted: Sequence[Counted]) -> list[TimeRow]:
    """Return what the engines have not spent, where they worked one after the other."""
    spent = [each.milliseconds(name) for each in counted for name in (QUEUE, COMPUTE)]
    known = [each for each in spent if each is not None]
    left = milliseconds - sum(known)
    if len(known) < len(spent) or left < 0:
        return []
    return [TimeRow("router", "all but the engines' queues and computing, in a sequential flow", left, 1)]


def _rest(where: str, milliseconds: float | None, queue: float | None, compute: float | None) -> list[TimeRow]:
    if milliseconds is None or queue is None or compute is None:
        return []
    return [TimeRow(where, "HTTP, and between steps", max(milliseconds - queue - compute, 0.0), 1)]
