"""Two prompts have equal digests only where the cache of one is right for the other."""

from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.scheduler.params import parse_transfer_params, prompt_digest

from .scheduler_requests import FULL, PROMPT, allocated, next_step, request

TOKENS = [7, 8, 9, 9, 9, 9, 10]


def image(identifier: str = "a", offset: int = 2, length: int = 4, modality: str = "image") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length))


def prompt(token_ids: list[int] = TOKENS, request_id: str = "r", **parts: Any) -> Request:
    return Request(request_id, token_ids, SamplingParams(), None, **parts)


def digest(token_ids: list[int] = TOKENS, num_tokens: int = len(TOKENS), **parts: Any) -> str:
    return prompt_digest(prompt(token_ids, **parts), num_tokens)


def lora(name: str = "a", number: int = 1, path: str = "/adapters/a") -> LoRARequest:
    return LoRARequest(name, number, path)


def test_each_part_of_a_prompt_changes_its_digest() -> None:
    prompts: dict[str, dict[str, Any]] = {
        "plain": {},
        "one token less": {"num_tokens": len(TOKENS) - 1},
        "another token": {"token_ids": [*TOKENS[:-1], 11]},
        "tokens in another order": {"token_ids": [8, 7, *TOKENS[2:]]},
        "an image": {"mm_features": [image()]},
        "another image": {"mm_features": [image("b")]},
        "an image elsewhere": {"mm_features": [image(offset=3)]},
        "a shorter image": {"mm_features": [image(length=3)]},
        "a sound": {"mm_features": [image(modality="audio")]},
        "two images": {"mm_features": [image(), image("b", 6, 1)]},
        "two images in another order": {"mm_features": [image("b"), image("a", 6, 1)]},
        "an adapter": {"lora_request": lora()},
        "an adapter of another name": {"lora_request": lora("b")},
        "an image and an adapter": {"mm_features": [image()], "lora_request": lora()},
    }
    digests = {name: digest(**parts) for name, parts in prompts.items()}
    same = [pair for pair in combinations(digests, 2) if digests[pair[0]] == digests[pair[1]]]
    assert same == []


def test_parts_do_not_run_into_each_other() -> None:
    """Each pair here had one digest when the parts were joined without lengths."""
    spelled = int.from_bytes(b"|abcdefg", "little")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"mm_features": [image("a|b")]}, {"mm_features": [image("a"), image("b")]}),
        ({"mm_features": [image("a")]}, {"lora_request": lora("a")}),
        ({"mm_features": [image("a"), image("b")]}, {"mm_features": [image("a")], "lora_request": lora("b")}),
        ({"token_ids": [*TOKENS, spelled], "num_tokens": 8}, {"mm_features": [image("abcdefg")]}),
        ({"lora_request": lora("a|b")}, {"mm_features": [image("a")], "lora_request": lora("b")}),
    ]
    for one, other in pairs:
        assert digest(**one) != digest(**other)


def test_numbers_that_engines_assign_do_not_change_the_digest() -> None:
    ours, theirs = ({"request_id": f"r{n}", "lora_request": lora(number=n), "arrival_time": float(n)} for n in (1, 2))
    assert digest(**ours) == digest(**theirs)


def test_a_salt_and_the_path_of_an_adapter_do_not_change_the_digest() -> None:
    """Routers may salt one request only; hosts mount the same adapter in folders of their own."""
    ours, theirs = ({"lora_request": lora(path=f"/{name}/a"), "cache_salt": name} for name in "ab")
    assert digest(**ours) == digest(**theirs)


def test_a_prompt_with_another_image_is_not_loaded(make_role: Any) -> None:
    """Its tokens are the same: an image is so many placeholders."""
    prefill, decode = make_role(FULL), make_role(FULL)
    sent = request(PROMPT, {"do_remote_decode": True})
    sent.mm_features = [image("a")]
    prefill.on_new_request(sent)
    prefill.update_state_after_alloc(sent, allocated([1, 2, 3, 4, 5]), 0)
    sent.num_computed_tokens = sent.num_prompt_tokens
    _, params = prefill.request_finished(sent, ([1, 2, 3, 4, 5],), is_complete=True)
    errors = []
    for number, identifier in enumerate("ab"):
        ours = request(PROMPT, dict(params), f"d{number}")
        ours.mm_features = [image(identifier)]
        decode.on_new_request(ours)
        decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
        [order] = next_step(decode).loads
        errors.append(order.error)
    same, other = errors
    assert same is None
    assert other.reason is Reason.INVALID_REQUEST
    assert "images" in other.remedy


@pytest.mark.parametrize("name", ["transfer_id", "remote_engine_id"])
def test_a_transfer_whose_name_no_message_can_carry_is_refused(name: str) -> None:
    """One message renews and releases the holds of many requests: none of them would be renewed."""
    given = {"transfer_id": "x", "remote_engine_id": "p", "remote_bootstrap_addr": "http://127.0.0.1:1"}
    parse_transfer_params(given, "r")
    with pytest.raises(HandoffError) as refused:
        parse_transfer_params({**given, name: "x\ud800"}, "r")
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
