"""Streamed answers carry the parameters for the next turn: vLLM's own end points write them, without an engine."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput

from kvferry.integrations.vllm import request_checks
from kvferry.integrations.vllm.request_checks import check_requests
from kvferry.integrations.vllm.versions import streams_name_holds

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
HELD = {**ASKED, "remote_host": "décode-0", "remote_block_ids": [[1, 2]], "kvferry": {"epoch": 7}}
METHODS = {
    OpenAIServingCompletion: "completion_stream_generator",
    OpenAIServingChat: "chat_completion_stream_generator",
}
end_points = pytest.mark.parametrize("end_point", list(METHODS), ids=["completions", "chat"])
unless_vllm_does_it = pytest.mark.skipif(streams_name_holds(), reason="this vLLM does it itself, for every connector")


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrap what the plugin wraps, and unwrap it afterwards."""
    cleanup = "_with_kv_transfer_rejection_cleanup"
    for owner, name in ((GenerateBaseServing, cleanup), *METHODS.items()):
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    check_requests()


def result(text: str, *, finish_reason: str | None = None, index: int = 0, **fields: Any) -> RequestOutput:
    """Return one of the engine's results."""
    output = CompletionOutput(index, text, [1], None, None, finish_reason=finish_reason)
    given = {"prompt": "a prompt", "prompt_token_ids": [1, 2], "prompt_logprobs": None, **fields}
    return RequestOutput("r", outputs=[output], finished=finish_reason is not None, **given)


ANSWER = [result("é"), result(" b"), result(" c", finish_reason="stop", kv_transfer_params=HELD)]


class Answering:
    """An end point of vLLM with results at hand in the place of an engine."""

    def __init__(self, end_point: type, results: list[Any], **fields: Any) -> None:
        self.is_closed = False
        self._results = results
        self._is_chat = end_point is OpenAIServingChat
        self._end_point: Any = end_point.__new__(end_point)
        names = ("enable_force_include_usage", "enable_prompt_tokens_details", "enable_per_request_metrics")
        absent = dict.fromkeys((*names, "enable_log_outputs", "system_fingerprint", "request_logger", "parser_cls"))
        chat = {"response_role": "assistant", "_include_reasoning_tokens_details": False}
        client = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None))
        vars(self._end_point).update(absent | chat | {"has_kv_connector": True, "engine_client": client})
        prompt = {"messages": [{"role": "user", "content": "a"}]} if self._is_chat else {"prompt": "a"}
        kind = ChatCompletionRequest if self._is_chat else CompletionRequest
        asked = {"kv_transfer_params": ASKED, "stream": True, "max_tokens": 8, **prompt, **fields}
        self.request: Any = kind.model_validate(asked)

    async def stream(self) -> Any:
        """Return the stream as ``create_completion`` and ``create_chat_completion`` do."""
        return await self._end_point._with_kv_transfer_rejection_cleanup(self._create(), self.request, None)

    async def _create(self) -> Any:
        made = RequestResponseMetadata(request_id="r")
        if self._is_chat:
            return self._end_point.chat_completion_stream_generator(
                self.request, self._chat_results(), "r", "model", [], None, made
            )
        prompts = [{"prompt": "a"}]
        return self._end_point.completion_stream_generator(
            self.request, prompts, self._results_of_prompts(), "r", 1, "model", 1, None, request_metadata=made
        )

    async def _chat_results(self) -> AsyncIterator[RequestOutput]:
        try:
            for each in self._results:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.is_closed = True

    async def _results_of_prompts(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        async for each in self._chat_results():
            yield 0, each

    def events(self) -> list[str]:
        async def collect() -> list[str]:
            return [event async for event in await self.stream()]

        return asyncio.run(collect())


def chunks_of(events: list[str]) -> list[dict[str, Any]]:
    """Return what each event says; every event must be of the form that clients of a stream read."""
    assert events[-1] == "data: [DONE]\n\n"
    assert all(each.startswith("data: {") and each.endswith("}\n\n") and each.count("\n") == 2 for each in events[:-1])
    return [json.loads(each.removeprefix("data: ")) for each in events[:-1]]


def params_in(chunks: list[dict[str, Any]]) -> list[Any]:
    return [chunk["kv_transfer_params"] for chunk in chunks if chunk.get("kv_transfer_params")]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@end_points
@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
def test_the_event_that_ends_an_answer_has_the_parameters(end_point: type, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = chunks_of(Answering(end_point, ANSWER, **options).events())
    assert params_in(chunks) == [HELD]
    assert text_of(chunks) == "é b c"
    assert ("usage" in chunks[-1]) == usage
    [end] = [chunk for chunk in chunks if chunk.get("kv_transfer_params")]
    assert end["choices"][0]["finish_reason"] == "stop"
    assert chunks.index(end) == len(chunks) - 1 - usage


@end_points
@unless_vllm_does_it
def test_nothing_else_of_a_stream_changes(end_point: type) -> None:
    """To the byte, but for the time of day in a chat's events."""

    def without_time(events: list[str]) -> list[str]:
        return ["".join(part for part in event.split(",") if '"created"' not in part) for event in events]

    with_params = without_time(Answering(end_point, ANSWER).events())
    plain = without_time(Answering(end_point, ANSWER, kv_transfer_params=None).events())
    assert with_params[:-2] == plain[:-2]
    assert with_params[-1:] == plain[-1:]


@end_points
def test_an_answer_of_one_result_has_them_once_and_at_its_end(end_point: type) -> None:
    """A chat's first event says the role only, and comes after the last result where that is the first one, too."""
    chunks = chunks_of(Answering(end_point, ANSWER[-1:]).events())
    assert params_in(chunks) == [HELD]
    assert params_in(chunks[-1:]) == [HELD]


@end_points
def test_of_several_samples_one_event_has_them(end_point: type) -> None:
    both = [result("a", finish_reason="stop", index=number, kv_transfer_params=HELD) for number in (0, 1)]
    events = Answering(end_point, both, n=2).events()
    if not streams_name_holds():
        assert params_in(chunks_of(events)) == [HELD]


@end_points
@unless_vllm_does_it
@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (None, HELD),
        (ASKED, None),
        # Of another connector, whose routers may expect none.
        (ASKED, {"do_remote_prefill": True, "remote_host": "a"}),
    ],
    ids=["not asked", "nothing held", "another connector"],
)
def test_other_streams_are_left_alone(end_point: type, asked: Any, answered: Any) -> None:
    results = [result("a"), result("b", finish_reason="length", kv_transfer_params=answered)]
    assert params_in(chunks_of(Answering(end_point, results, kv_transfer_params=asked).events())) == []


@end_points
def test_an_error_in_the_stream_is_told_as_vllm_tells_it(end_point: type) -> None:
    for failed in (result("b", finish_reason="error", kv_transfer_params=HELD), RuntimeError("a failure")):
        [*_, error] = chunks_of(Answering(end_point, [result("a"), failed]).events())
        assert "error" in error
        assert "kv_transfer_params" not in error


@end_points
def test_the_request_ends_when_the_client_has_gone(end_point: type) -> None:
    answering = Answering(end_point, ANSWER)

    async def leave() -> None:
        stream = await answering.stream()
        await anext(stream)
        assert not answering.is_closed
        await stream.aclose()
        del stream
        for _ in range(10):  # the event loop closes one generator after the other
            await asyncio.sleep(0)
        assert answering.is_closed

    asyncio.run(leave())


@unless_vllm_does_it
def test_streams_are_wrapped_once_and_only_where_vllm_names_no_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    Answering(OpenAIServingChat, ANSWER).events()
    wrapped = OpenAIServingChat.chat_completion_stream_generator
    assert wrapped is not inspect.unwrap(wrapped)
    Answering(OpenAIServingChat, ANSWER).events()
    assert OpenAIServingChat.chat_completion_stream_generator is wrapped
    monkeypatch.setattr(OpenAIServingChat, METHODS[OpenAIServingChat], inspect.unwrap(wrapped))
    monkeypatch.setattr(request_checks, "streams_name_holds", lambda: True)
    assert params_in(chunks_of(Answering(OpenAIServingChat, ANSWER).events())) == []
