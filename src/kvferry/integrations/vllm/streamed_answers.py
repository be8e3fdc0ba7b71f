"""Puts ``kv_transfer_params`` into streamed completions and chat completions, as vLLM itself does since 0.33.

vLLM's proxy for conversations lets the decode engine stream, and takes the parameters for the next turn from its
answer. vLLM 0.30 to 0.32 put them into whole answers only. So the methods that write a stream are wrapped: they get
the engine's results through an object that remembers the parameters, and these go into the event that ends the answer.
See docs/decisions/turn-by-turn.md.
"""

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import wraps
from typing import Any

from kvferry.integrations.vllm.versions import streams_name_holds

STREAMS = ("completion_stream_generator", "chat_completion_stream_generator")
"""The methods of vLLM's end points that write a stream; an end point has one of them at most."""
EVENT = "data: "
_MARK = "_kvferry_names_holds"


def name_holds_in_streams(end_point: type) -> None:
    """Let this class of vLLM's end points stream ``kv_transfer_params``. Safe to call again."""
    for name in STREAMS:
        method = getattr(end_point, name, None)
        if method is not None and not hasattr(method, _MARK) and not streams_name_holds():
            setattr(end_point, name, _naming_holds(method))


def _naming_holds(method: Any) -> Any:
    signature = inspect.signature(method)

    @wraps(method)
    def stream(*arguments: Any, **named: Any) -> AsyncGenerator[str, None]:
        """Stream an answer; other requests than those of a router for prefill and decode are left alone."""
        given = signature.bind(*arguments, **named)
        if not given.arguments["request"].kv_transfer_params:
            return method(*arguments, **named)  # type: ignore[no-any-return]
        results = _Results(given.arguments["result_generator"])
        given.arguments["result_generator"] = results
        return _with_params(method(*given.args, **given.kwargs), results)

    setattr(stream, _MARK, True)
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
