"""Proxies before two engines that ask them what vLLM's example proxies ask, in the same order."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .engine_pool import Engine, RequestFailed, post

NOTHING_HELD: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


def prefilled(engine: Engine, body: dict[str, Any], asked: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of the prefill engine, which computes the prompt and one token."""
    asked_of_prefill = {**body, "kv_transfer_params": asked, "stream": False, "max_tokens": 1}
    asked_of_prefill.pop("stream_options", None)
    answer = post(f"{engine.server.url}/v1/completions", asked_of_prefill, headers={"X-Request-Id": request_id})
    return dict(answer["kv_transfer_params"])


def streamed(engine: Engine, body: dict[str, Any], params: dict[str, Any], request_id: str) -> Iterator[dict[str, Any]]:
    """Yield what each event of the decode engine's streamed answer says. Raises :class:`RequestFailed`."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    asked = json.dumps({**body, "kv_transfer_params": params, "stream": True})
    try:
        with urlopen(Request(f"{engine.server.url}/v1/completions", asked.encode(), headers), timeout=300) as answer:
            events = [event for event in answer.read().decode().split("\n\n") if event]
    except HTTPError as error:
        raise RequestFailed(error.code, error.read().decode()) from None
    assert events.pop() == "data: [DONE]"
    yield from (json.loads(event.removeprefix("data: ")) for event in events)


def tokens_in(chunks: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a streamed answer of one sample."""
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@dataclass
class OneTurnProxy:
    """As ``toy_proxy_server.py`` of vLLM's tests: the prefill engine's parameters go to the decode engine unchanged."""

    prefill: Engine
    decode: Engine

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each event of the answer says."""
        request_id = str(uuid.uuid4())
        params = prefilled(self.prefill, body, NOTHING_HELD, request_id)
        return list(streamed(self.decode, body, params, request_id))


@dataclass
class ManyTurnsProxy:
    """As ``disagg_proxy_multiturn.py`` of vLLM's examples: what the decode engine's stream says of its hold goes to the
    prefill engine with the next turn. The proxy writes ``host``, its own name of both hosts, into all parameters.
    """

    prefill: Engine
    decode: Engine
    host: str
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the decode engine holds of each conversation."""

    def answer(self, conversation: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each event of the answer says. Raises :class:`RequestFailed` of the decode engine."""
        request_id = str(uuid.uuid4())
        last = self.held.pop(conversation, None)
        asked = NOTHING_HELD if last is None else {**last, "do_remote_decode": True, "do_remote_prefill": False}
        params = prefilled(self.prefill, body, asked, request_id)
        chunks = list(streamed(self.decode, body, {**params, "remote_host": self.host}, request_id))
        for chunk in chunks:
            if params := chunk.get("kv_transfer_params") or {}:
                self.held[conversation] = {**params, "remote_host": self.host}
        return chunks
