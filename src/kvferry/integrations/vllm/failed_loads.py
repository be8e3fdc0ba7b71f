"""Tells a client why the cache of its prompt was not loaded, and whether to send the request again.

vLLM answers every failed load with status 500 and "Internal server error". A connector can give it no reason, but its
statistics reach the process of the API server, together with the request's end: they name failed requests and reasons
(:class:`kvferry.integrations.vllm.worker.records.Statistics`). ``--middleware
kvferry.integrations.vllm.failed_loads.FailedLoadAnswers`` puts them into the answer. See docs/failures.md.
"""

import asyncio
import json
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from kvferry.errors import Reason, helps_to_repeat
from kvferry.handoff.messages import Bounded

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MAX_FAILED = 4096
"""Failed requests that are remembered."""
ARRIVAL_SECONDS = 0.5
"""How long an answer waits for its reason: vLLM may handle the request's end before the statistics beside it."""
REQUEST_ID = b"x-request-id"
UNEXPLAINED = "Internal server error"
EVENT = b"data: "
_ADDED = re.compile(r"(?:\d+_)?(cmpl-|chatcmpl-|generate-tokens-)?(.*)", re.DOTALL)
_PROMPT_INDEX = re.compile(r"-\d+\Z")
_REFUSED = frozenset(
    (Reason.MALFORMED_MESSAGE, Reason.INVALID_REQUEST, Reason.WRONG_PARAMETERS, Reason.PERMISSION_DENIED)
)
"""Reasons that lie in what the request says of its prompt and its prefill engine."""


class FailedLoads:
    """The reasons of the last failed loads, by the engine's id of the request.

    >>> failed = FailedLoads()
    >>> failed.note({"cmpl-7c1-0-9f3b": "peer-died"})
    >>> failed.reason_of("7c1"), failed.reason_of("7c")
    (<Reason.PEER_DIED: 'peer-died'>, None)
    """

    def __init__(self) -> None:
        self._reasons: Bounded[str, str] = Bounded(2 * MAX_FAILED)
        self._lock = threading.Lock()

    def note(self, reasons: Mapping[str, str]) -> None:
        """Remember failed requests."""
        with self._lock:
            for name, reason in reasons.items():
                for request_id in _request_ids_in(name):
                    self._reasons[request_id] = reason

    def reason_of(self, request_id: str) -> Reason | None:
        """Return why a request failed whose ``X-Request-Id`` was this."""
        with self._lock:
            reason = self._reasons.get(request_id)
        try:
            return None if reason is None else Reason(reason)
        except ValueError:  # of another version
            return None


def _request_ids_in(name: str) -> tuple[str, str]:
    """Return what the ``X-Request-Id`` of an engine's request may have been: vLLM adds words before and after.

    The random word at the end may be left out (``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION``).

    >>> _request_ids_in("1_cmpl-7c-1-0-9f3b12aa"), _request_ids_in("chatcmpl-7c-9f3b12aa")
    (('7c-1-0-9f3b12aa', '7c-1'), ('7c-9f3b12aa', '7c'))
    """
    kind, rest = _ADDED.fullmatch(name).groups()  # type: ignore[union-attr]  # it takes every name
    found = rest, rest.rpartition("-")[0]
    if kind != "cmpl-":
        return found
    return _PROMPT_INDEX.sub("", found[0]), _PROMPT_INDEX.sub("", found[1])


FAILED = FailedLoads()
"""Of this process: the metrics write them, the middleware reads them."""


def status_of(reason: Reason) -> HTTPStatus:
    """Return the status of an answer: a client or router may repeat a request after 503, and not after 400 or 500."""
    if helps_to_repeat(reason):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.BAD_REQUEST if reason in _REFUSED else HTTPStatus.INTERNAL_SERVER_ERROR


def explained(error: Mapping[str, Any], reason: Reason) -> dict[str, Any]:
    """Return vLLM's error with the reason; hosts and other requests are left out, since clients are not trusted."""
    status, retry = status_of(reason), helps_to_repeat(reason)
    advice = "Sending it again may help." if retry else "Sending it again unchanged does not help."
    message = f"The cache of this request's prompt was not loaded from the prefill engine [{reason.value}]. {advice}"
    kind = {HTTPStatus.BAD_REQUEST: "BadRequestError", HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError"}
    known = {"message": message, "type": kind.get(status, "InternalServerError"), "code": status.value}
    return {**error, **known, "reason": reason.value, "retry": retry}


class FailedLoadAnswers:
    """Middleware of vLLM's API server: puts the reason of a failed load into the error that the client gets.

    All other answers pass unchanged. A request without ``X-Request-Id`` gets one, by which its reason is found.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":  # as every request that loads
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if REQUEST_ID not in headers:
            headers[REQUEST_ID] = secrets.token_hex(16).encode()
            scope = {**scope, "headers": [*scope["headers"], (REQUEST_ID, headers[REQUEST_ID])]}
        answer = _Answer(headers[REQUEST_ID].decode("latin-1"), send)
        await self._app(scope, receive, answer.send)


class _Answer:
    """One answer on its way to the client. The head of an error is kept back until its body is there."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._request_id = request_id
        self._send = send
        self._head: Message | None = None
        self._is_stream = False
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR:
                self._head = message
                return
            self._is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and self._head is not None:
            await self._send_error(self._head, message)
            return
        elif self._is_stream and UNEXPLAINED.encode() in message.get("body", b""):
            message = {**message, "body": await self._explain_events(message["body"])}
        await self._send(message)

    async def _send_error(self, head: Message, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        found = await self._explain(self._body)
        if found is not None:
            error, self._body = found
            kept = [(name, value) for name, value in head["headers"] if name != b"content-length"]
            length = (b"content-length", str(len(self._body)).encode())
            head = {**head, "status": error["code"], "headers": [*kept, length]}
        self._head = None
        await self._send(head)
        await self._send({**message, "body": self._body})

    async def _explain_events(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for index, line in enumerate(lines):
            if line.startswith(EVENT) and (found := await self._explain(line.removeprefix(EVENT))) is not None:
                lines[index] = EVENT + found[1]
        return b"\n".join(lines)

    async def _explain(self, body: bytes) -> tuple[dict[str, Any], bytes] | None:
        """Return the error with its reason, and the body that has it; None where ``body`` is no failed load."""
        try:
            answer = json.loads(body)
        except ValueError:
            return None
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict) or error.get("message") != UNEXPLAINED:
            return None
        reason = await self._reason()
        if reason is None:
            return None
        error = answer["error"] = explained(error, reason)
        return error, json.dumps(answer).encode()

    async def _reason(self) -> Reason | None:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while (reason := FAILED.reason_of(self._request_id)) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return reason
