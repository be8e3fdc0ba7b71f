"""Answers ``GET /ready`` in vLLM's API server: whether routers should send requests to this engine.

vLLM's own ``/health`` says that an engine lives, until it ends. An engine that drains (``kvferry drain``) lives, and
must get no more requests. ``--middleware kvferry.integrations.vllm.readiness.Readiness`` asks the engine's schedulers,
as ``kvferry ready`` does. ``kvferry check`` asks the same page for what it needs to know of the engine
(:mod:`kvferry.integrations.vllm.facts`). See docs/guide.md.
"""

import asyncio
import functools
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.messages import Drain, Draining
from kvferry.handoff.wire.client import ask
from kvferry.handoff.wire.trust import Trust
from kvferry.integrations.vllm.connector_configs import CONNECTOR, own_settings
from kvferry.integrations.vllm.facts import ASKS, PATH, EngineFacts, ReadyAnswer, facts_of, local_ranks, may_ask
from kvferry.integrations.vllm.failed_loads import App, Message, Receive, Send
from kvferry.integrations.vllm.settings import Settings, control_port, invalid_setting, parse_settings, trust_of
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = PeerLog(logging.getLogger(__name__))

ASK_SECONDS = 4.0
"""vllm-router waits 5 s for an answer."""
KNOWN_SECONDS = 0.5
"""How long an answer serves further questions: any client may ask, and as often as it likes."""
_trust_of = functools.lru_cache(maxsize=1)(trust_of)
"""The keys are read once, as the engine does: a key that is replaced is for the engine's next start."""


class Readiness:
    """Middleware of vLLM's API server: answers ``GET /ready`` with 200, or with 503 while an engine rank drains.

    503 also where a scheduler does not answer. All other requests pass unchanged.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._asking = asyncio.Lock()
        self._known_until = 0.0
        self._known = ReadyAnswer(ready=False)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        vllm_config = scope["app"].state.engine_client.vllm_config
        async with self._asking:
            if time.monotonic() >= self._known_until:
                self._known = await asyncio.to_thread(answer, vllm_config)
                self._known_until = time.monotonic() + KNOWN_SECONDS
            known = self._known
        status = HTTPStatus.OK if known.ready else HTTPStatus.SERVICE_UNAVAILABLE
        told = msgspec.structs.replace(known, engine=_facts_for(scope, vllm_config))
        body = msgspec.json.encode(told)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status.value, "headers": headers})
        await send({"type": "http.response.body", "body": body if scope["method"] == "GET" else b""})


def answer(vllm_config: "VllmConfig") -> ReadyAnswer:
    """Ask the engine's schedulers; return the answer for everybody, which names no host."""
    try:
        drains = any_drains(vllm_config)
    except KVFerryError as error:
        logger.warning("kvferry: %s is answered with 503: %s", PATH, error, peer=PATH)
        return ReadyAnswer(ready=False, reason=error.reason.value)
    return ReadyAnswer(ready=not drains, reason=Reason.DRAINING.value if drains else "")


def _facts_for(scope: Message, vllm_config: "VllmConfig") -> EngineFacts | None:
    """Return the engine's facts for a client that may ask for them; None for others, and where nothing can be said."""
    if ASKS.encode() not in dict(scope["headers"]):
        return None
    try:
        settings, trust = _asked(vllm_config)
        client, _ = scope.get("client") or ("", 0)
        return facts_of(vllm_config, settings, trust.keys) if may_ask(trust, client, scope["headers"]) else None
    except KVFerryError:  # the log has the reason of :func:`answer`
        return None


def _asked(vllm_config: "VllmConfig") -> tuple[Settings, Trust]:
    """Return the settings of the engine's connector and whom the engine trusts. Raises as :func:`any_drains`."""
    if (given := own_settings(vllm_config.kv_transfer_config)) is None:
        raise invalid_setting(
            f"{PATH} is answered for an engine with {CONNECTOR}, which this engine has not.",
            f'Set "kv_connector" to "{CONNECTOR}", or leave the middleware out.',
        )
    settings = parse_settings(given)
    if settings.port == 0:
        raise invalid_setting(
            f"{PATH} asks the engine at its setting port, which is 0: the engine takes a free one.",
            'Set "port" to a port of this host.',
        )
    return settings, _trust_of(settings)


def any_drains(vllm_config: "VllmConfig") -> bool:
    """Return whether one of the data-parallel ranks behind this API server drains.

    Raises :class:`KVFerryError`: invalid-setting without kvferry's connector or without a fixed port, as
    :func:`~kvferry.handoff.wire.client.ask` where a scheduler does not answer.
    """
    settings, trust = _asked(vllm_config)
    for rank in local_ranks(vllm_config.parallel_config):
        port = control_port(settings, rank)
        found = ask(settings.local_host, port, Drain(begin=False), ASK_SECONDS, trust, is_trusted=True)
        if not isinstance(found, Draining) or found.is_draining:
            return True
    return False
