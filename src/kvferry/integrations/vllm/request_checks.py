"""Answers wrong ``kv_transfer_params`` with HTTP 400 in the API server, before the request reaches the engine.

vLLM gives a connector no say there: an engine can only fail a request that it has admitted, with HTTP 500. So the
plugin wraps two methods of vLLM: one that the completion, chat and responses end points call around each request, and
one that every request passes on its way to the engine. See docs/decisions/refused-at-the-door.md.
"""

import logging
import sys
from collections.abc import Awaitable, Mapping
from functools import wraps
from typing import Any

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

CONNECTOR = "KVFerryConnector"
SERVING_MODULE = "vllm.entrypoints.generate.base.serving"
PROCESSOR_MODULE = "vllm.v1.engine.input_processor"
_MARK = "_kvferry_checks"


def check_requests() -> None:
    """Check the requests of this process if it is an API server. Safe to call again."""
    if (serving := sys.modules.get(SERVING_MODULE)) is not None:
        _wrap(serving.GenerateBaseServing, "_with_kv_transfer_rejection_cleanup", _around_request)
    if (processor := sys.modules.get(PROCESSOR_MODULE)) is not None:
        _wrap(processor.InputProcessor, "process_inputs", _before_engine)


def check_params(config: Any, params: object, request_id: str, num_prompts: int = 1) -> None:
    """Refuse ``kv_transfer_params`` that no request to an engine with kvferry's connector can have.

    ``config`` is vLLM's ``kv_transfer_config``. Raises :class:`HandoffError`: malformed-message, protocol-mismatch,
    unsupported for a list of prompts.
    """
    if not params or getattr(config, "kv_connector", None) != CONNECTOR:
        return
    if not isinstance(params, Mapping):
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"kv_transfer_params are a {type(params).__name__}, not an object.",
            "Check that the router copies the prefill engine's kv_transfer_params whole.",
        )
    if num_prompts > 1 and (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"a list of {num_prompts} prompts has one object of kv_transfer_params, which names one prompt.",
            "Send each prompt in a request of its own.",
        )
    if params.get("do_remote_prefill"):
        from kvferry.integrations.vllm.scheduler.params import parse_params, parse_push_params
        from kvferry.integrations.vllm.settings import parse_settings

        is_push = parse_settings(config.kv_connector_extra_config).mode == "push"
        (parse_push_params if is_push else parse_params)(params, request_id)


def number_of_prompts(prompt: object) -> int:
    """Return the number of prompts in a completion request: one text, one list of tokens, or a list of these.

    >>> [number_of_prompts(prompt) for prompt in ("a", [1, 2], [[1, 2], [3]], ["a", "b", "c"], None)]
    [1, 1, 2, 3, 1]
    """
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if is_list else 1  # type: ignore[arg-type]


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    method = getattr(owner, name)
    if not hasattr(method, _MARK):
        wrapped = wraps(method)(wrapper(method))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def _refusal(error: KVFerryError, request_id: str) -> Exception:
    """Return vLLM's error for a request that is refused, and log why: the engine never hears of the request."""
    logger.warning("kvferry: %s is refused: %s", request_id, error, peer=request_id)
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(str(error), parameter="kv_transfer_params")


def _around_request(method: Any) -> Any:
    async def check(serving: Any, awaitable: Awaitable[Any], request: Any, raw_request: Any) -> Any:
        """Answer with an error before the request is begun; vLLM then lets the remote hold go."""
        config = getattr(getattr(serving.engine_client, "vllm_config", None), "kv_transfer_config", None)
        params = getattr(request, "kv_transfer_params", None)
        # The engine takes the router's id, which may name the prefill engine; the request's own id is vLLM's.
        request_id = str(serving._base_request_id(raw_request, request.request_id))
        try:
            check_params(config, params, request_id, number_of_prompts(getattr(request, "prompt", None)))
        except HandoffError as error:
            awaitable.close()  # type: ignore[attr-defined]  # a coroutine that never runs
            awaitable = _answer(serving.create_error_response(_refusal(error, request_id)))
        return await method(serving, awaitable, request, raw_request)

    return check


async def _answer(response: Any) -> Any:
    return response


def _before_engine(method: Any) -> Any:
    def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *arguments: Any, **named: Any) -> Any:
        extra = getattr(params, "extra_args", None) or {}
        try:
            config = processor.vllm_config.kv_transfer_config
            check_params(config, extra.get("kv_transfer_params"), request_id)
        except HandoffError as error:
            raise _refusal(error, request_id) from error
        return method(processor, request_id, prompt, params, *arguments, **named)

    return process_inputs
