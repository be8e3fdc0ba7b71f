"""Answers wrong ``kv_transfer_params`` with HTTP 400 in the API server, before the request reaches the engine.

vLLM gives a connector no say there: an engine can only fail a request that it has admitted, with HTTP 500. So the
plugin wraps two methods of vLLM: one that the completion, chat and responses end points call around each request, and
one that every request passes on its way to the engine. See docs/decisions/refused-at-the-door.md.

The plugin also puts ``kv_transfer_params`` into streamed answers, as vLLM itself does since 0.33: its proxy for
conversations takes the parameters for the next turn from there. The methods that write a stream get the engine's
results through an object that remembers the parameters, and these go into the event that ends the answer. See
docs/decisions/turn-by-turn.md.
"""

import inspect
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.handoff.wire.bootstrap import parse_address
from kvferry.handoff.wire.trust import Trust
from kvferry.integrations.vllm.connector_configs import may_be_for_another, own_settings
from kvferry.integrations.vllm.settings import parse_settings, trust_of
from kvferry.integrations.vllm.versions import replace_once, streams_name_holds
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = PeerLog(logging.getLogger(__name__))

SERVING_MODULE = "vllm.entrypoints.generate.base.serving"
PROCESSOR_MODULE = "vllm.v1.engine.input_processor"
_lets_go: ContextVar[bool] = ContextVar("kvferry_lets_go", default=False)
"""Whether vLLM lets the remote hold go when the request of this context is refused. A stream has begun by the time at
which its prompt is known."""


def check_requests() -> None:
    """Check the requests of this process if it is an API server. Safe to call again."""
    if (serving := sys.modules.get(SERVING_MODULE)) is not None:
        replace_once(serving.GenerateBaseServing, "_with_kv_transfer_rejection_cleanup", _around_request)
        refused_requests()
    if (processor := sys.modules.get(PROCESSOR_MODULE)) is not None:
        replace_once(processor.InputProcessor, "process_inputs", _before_engine)


REFUSALS = (
    Reason.MALFORMED_MESSAGE,
    Reason.PROTOCOL_MISMATCH,
    Reason.UNSUPPORTED,
    Reason.PERMISSION_DENIED,
    Reason.INVALID_REQUEST,
)
"""Why a request is refused here."""


@cache
def refused_requests() -> "Counter":
    """Return the counter of this API server, which counts from 0: Prometheus sees no increase in a series that begins
    with 1.
    """
    from prometheus_client import Counter

    counter = Counter(
        "kvferry:refused_requests",
        "Requests that this API server has refused for their kv_transfer_params, by reason.",
        ["reason"],
    )
    for reason in REFUSALS:
        counter.labels(reason.value)
    return counter


def check_params(config: Any, params: object, request_id: str, num_prompts: int = 1) -> None:
    """Refuse ``kv_transfer_params`` that no request to an engine with kvferry's connector can have.

    ``config`` is vLLM's ``kv_transfer_config``, in which kvferry's connector may be one of several; parameters that do
    not name it, and may be for another of them, pass. Nothing is looked up, and no connection made. Raises
    :class:`HandoffError`: malformed-message, protocol-mismatch, unsupported for a list of prompts, permission-denied
    for parameters that no trusted key has signed or, without keys, that name an address to which the engine does not
    connect.
    """
    if not params or (settings := own_settings(config)) is None:
        return
    if not isinstance(params, Mapping):
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"kv_transfer_params are a {type(params).__name__}, not an object.",
            "Check that the router copies the prefill engine's kv_transfer_params whole.",
        )
    if _is_for_another(config, params):
        return
    if num_prompts > 1 and (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"the request has a list of {num_prompts} prompts; prefill and decode engines move the cache of one.",
            "Send one prompt per request.",
        )
    if params.get("do_remote_prefill"):
        _check_source(_trust_of(settings), params, request_id)


def check_own_prompt(config: Any, params: Any, request: Any) -> None:
    """Refuse the parameters of a hold that are not of the prompt of ``request``, vLLM's request to its engine.

    Raises :class:`HandoffError` (invalid-request).
    """
    if not params or own_settings(config) is None:
        return
    # vLLM remembers images that it has given to the engine: to refuse such a prompt here would mislead it.
    if not params.get("do_remote_prefill") or request.mm_features or _is_for_another(config, params):
        return
    from kvferry.integrations.vllm.scheduler.params import check_prompt, names_transfer, parse_params

    if names_transfer(params, request.request_id):
        return
    parsed = parse_params(params, request.request_id)
    num_tokens, num_held = len(request.prompt_token_ids or ()), parsed.kvferry.num_tokens
    # Which of the two is right, only the engine's cache groups say.
    check_prompt(parsed, request, num_held if num_tokens - 1 <= num_held <= num_tokens else num_tokens)


def _is_for_another(config: Any, params: Mapping[str, Any]) -> bool:
    """Return whether parameters of a remote prefill are for another connector of the engine, as far as one can tell.

    Mooncake's connector has a ``transfer_id`` too, which its router sends together with a bootstrap address.
    """
    if not params.get("do_remote_prefill") or not may_be_for_another(config):
        return False
    return "kvferry" not in params and "transfer_id" not in params


def _check_source(trust: Trust | None, params: Mapping[str, Any], request_id: str) -> None:
    """Refuse parameters that name no prefill engine, or one that is not trusted. Raises as :func:`check_params`."""
    from kvferry.integrations.vllm.scheduler.params import (
        check_signature,
        names_transfer,
        parse_params,
        parse_transfer_params,
    )

    if names_transfer(params, request_id):
        # No key signs what a router says of a transfer.
        host, _ = parse_address(parse_transfer_params(params, request_id).remote_bootstrap_addr)
    else:
        parsed = parse_params(params, request_id)
        if trust is not None and trust.keys is not None:
            check_signature(parsed, trust.keys, request_id)
            return
        host = parsed.remote_host
    if trust is not None:
        trust.refuse_numeric(host)


_known: tuple[Mapping[str, Any], Trust | None] | None = None
"""The settings of the last request's engine, and whom it trusts: an API server has one engine."""


def _trust_of(extra_config: Mapping[str, Any]) -> Trust | None:
    """Return whom the engine with these settings trusts; None where this process cannot read the keys."""
    global _known
    if _known is None or _known[0] != extra_config:
        settings, trust = parse_settings(extra_config), None
        try:
            trust = trust_of(settings)
        except SettingsError as error:
            # On another host than the engine, for example. The engine checks each request again.
            logger.warning("kvferry: this API server leaves the check of signatures to its engine: %s", error)
        _known = dict(extra_config), trust
    return _known[1]


def number_of_prompts(prompt: object) -> int:
    """Return the number of prompts in a completion request: one text, one list of tokens, or a list of these.

    >>> [number_of_prompts(prompt) for prompt in ("a", [1, 2], [[1, 2], [3]], ["a", "b", "c"], None)]
    [1, 1, 2, 3, 1]
    """
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if is_list else 1  # type: ignore[arg-type]


def _refusal(error: KVFerryError, request_id: str) -> Exception:
    """Return vLLM's error for a request that is refused, and log why: the engine never hears of the request."""
    logger.warning("kvferry: %s is refused: %s", request_id, error, peer=request_id)
    refused_requests().labels(error.reason.value).inc()
    from vllm.exceptions import VLLMValidationError

    told = str(error)
    if error.reason is Reason.PERMISSION_DENIED:
        # Where hosts and keys are is for the operator.
        told = (
            "kv_transfer_params do not come from a prefill engine that this engine trusts. The log of this server says "
            f"why. [{error.reason.value}]"
        )
    # A client sends prompts; a router adds the other parameters.
    return VLLMValidationError(told, parameter="prompt" if error.reason is Reason.UNSUPPORTED else "kv_transfer_params")


def _around_request(method: Any) -> Any:
    async def check(serving: Any, awaitable: Awaitable[Any], request: Any, raw_request: Any) -> Any:
        """Answer with an error before the request is begun; vLLM then lets the remote hold go."""
        # Here an end point is known: vLLM has loaded none when the plugin is registered.
        name_holds_in_streams(type(serving))
        config = getattr(getattr(serving.engine_client, "vllm_config", None), "kv_transfer_config", None)
        params = getattr(request, "kv_transfer_params", None)
        # The engine takes the router's id, which may name the prefill engine; the request's own id is vLLM's.
        request_id = str(serving._base_request_id(raw_request, request.request_id))
        try:
            check_params(config, params, request_id, number_of_prompts(getattr(request, "prompt", None)))
        except HandoffError as error:
            awaitable.close()  # type: ignore[attr-defined]  # a coroutine that never runs
            awaitable = _answer(serving.create_error_response(_refusal(error, request_id)))
        before = _lets_go.set(not getattr(request, "stream", False))
        try:
            return await method(serving, awaitable, request, raw_request)
        finally:
            _lets_go.reset(before)

    return check


async def _answer(response: Any) -> Any:
    return response


def _before_engine(method: Any) -> Any:
    def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *arguments: Any, **named: Any) -> Any:
        given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        config = processor.vllm_config.kv_transfer_config
        try:
            check_params(config, given, request_id)
            request = method(processor, request_id, prompt, params, *arguments, **named)
            if _lets_go.get():
                check_own_prompt(config, given, request)
        except HandoffError as error:
            raise _refusal(error, request_id) from error
        return request

    return process_inputs


STREAMS = ("completion_stream_generator", "chat_completion_stream_generator")
"""The methods of vLLM's end points that write a stream; an end point has one of them at most."""
EVENT = "data: "


def name_holds_in_streams(end_point: type) -> None:
    """Let this class of vLLM's end points stream ``kv_transfer_params``. Safe to call again."""
    for name in STREAMS:
        if hasattr(end_point, name) and not streams_name_holds():
            replace_once(end_point, name, _naming_holds)


def _naming_holds(method: Any) -> Any:
    signature = inspect.signature(method)

    def stream(*arguments: Any, **named: Any) -> AsyncGenerator[str, None]:
        """Stream an answer; other requests than those of a router for prefill and decode are left alone."""
        given = signature.bind(*arguments, **named)
        if not given.arguments["request"].kv_transfer_params:
            return method(*arguments, **named)  # type: ignore[no-any-return]
        results = _Results(given.arguments["result_generator"])
        given.arguments["result_generator"] = results
        return _with_params(method(*given.args, **given.kwargs), results)

    return stream


class _Results:
    """The engine's results of one request, on their way to the method that streams them."""

    def __init__(self, results: AsyncIterator[Any]) -> None:
        self._results = results
        self.params: Mapping[str, Any] | None = None
        """What kvferry's connector answers; None until the last result is there, and with other connectors."""

    def __aiter__(self) -> "_Results":
        return self

    async def __anext__(self) -> Any:
        result = await anext(self._results)
        # A completion has several prompts, so vLLM says which of them a result is of.
        output = result[1] if isinstance(result, tuple) else result
        if "kvferry" in (output.kv_transfer_params or {}):
            self.params = output.kv_transfer_params
        return result


async def _with_params(stream: AsyncGenerator[str, None], results: _Results) -> AsyncGenerator[str, None]:
    is_told = False
    async with aclosing(stream):
        async for event in stream:
            if results.params is not None and not is_told and (ended := _end_of_answer(event)) is not None:
                is_told = True
                event = f"{EVENT}{json.dumps({**ended, 'kv_transfer_params': results.params}, ensure_ascii=False)}\n\n"
            yield event


def _end_of_answer(event: str) -> dict[str, Any] | None:
    """Return what an event says that ends an answer; None for others: a part of it, the usage, an error, the last one.

    >>> _end_of_answer('data: {"choices": [{"text": "t", "finish_reason": "stop"}]}')
    {'choices': [{'text': 't', 'finish_reason': 'stop'}]}
    >>> _end_of_answer('data: {"choices": [{"text": "t", "finish_reason": null}]}'), _end_of_answer("data: [DONE]")
    (None, None)
    """
    try:
        told = json.loads(event.removeprefix(EVENT))
    except ValueError:
        return None
    choices = told.get("choices") if isinstance(told, dict) else None
    return told if choices and any(choice.get("finish_reason") for choice in choices) else None
