"""A prompt of an adapter moves only to an engine whose adapter of that name has the same weights."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.handshake import Adapter
from kvferry.handoff.wire.trust import make_keys
from kvferry.integrations.vllm import adapters

from ..waits import wait_until
from .flows import to_decode, to_prefill
from .handoff_engine import HandoffEngine
from .handoff_engine import make_engine as make_engine
from .scheduler_requests import FULL, PROMPT, allocated, kept, next_step, request, scheduled
from .test_refusals_in_both_logs import SCHEDULER, lines_of
from .vllm_caches import full

LAYERS = {"0": full(1), "1": full(1)}
TOKENS = [(7 * index + 3) % 500 for index in range(64)]
MakeAdapter = Callable[..., LoRARequest]


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """Return a function that writes an adapter into a folder of its own."""

    def make(weights: str = "weights", folder: str = "", number: int = 1, **more: Any) -> LoRARequest:
        place = tmp_path / (folder or f"adapter of {weights} {number}")
        place.mkdir(exist_ok=True)
        write(place, weights)
        return LoRARequest("sql", number, str(place), **more)

    return make


def write(place: Path, weights: str) -> None:
    (place / "adapter_model.safetensors").write_bytes(bytes(8) + weights.encode())
    (place / "adapter_config.json").write_text('{"lora_alpha": 8}')


def prefilled(engine: HandoffEngine, adapter: LoRARequest, name: str = "p", **parts: Any) -> dict[str, Any]:
    return engine.ask(name, TOKENS, {"do_remote_decode": True}, max_tokens=1, lora_request=adapter, **parts).params


def arrived(role: Any, adapter: LoRARequest, params: dict[str, Any]) -> Any:
    """Return a request with the adapter, which waits for its blocks."""
    waiting = request(list(PROMPT), params)
    waiting.lora_request = adapter
    role.on_new_request(waiting)
    return waiting


def finished(role: Any, ours: Any) -> dict[str, Any] | None:
    """Let a prompt in the blocks 1 to 5 be computed to its end; return the parameters for a decode engine."""
    ours.num_computed_tokens = ours.num_prompt_tokens
    params: dict[str, Any] | None = role.request_finished(ours, ([1, 2, 3, 4, 5],), is_complete=True)[1]
    return params


def let_vllm_read(role: Any, adapter: LoRARequest) -> None:
    """Another request asks for the adapter."""
    role._state.adapters.of(SimpleNamespace(lora_request=adapter, request_id="another"))


def replace_in_place(role: Any, adapter: LoRARequest, make_adapter: MakeAdapter) -> LoRARequest:
    """Let vLLM read other weights for the adapter's id."""
    trained = make_adapter("trained", Path(adapter.lora_path).name, load_inplace=True)
    let_vllm_read(role, trained)
    return trained


def awaited(role: Any, ours: Any) -> tuple[int | None, bool]:
    """Return what the engine is told to load, as soon as the prefill engine is known."""
    return wait_until(lambda: found if (found := role.get_num_new_matched_tokens(ours, 0))[0] is not None else None)


def check_nothing_is_left(*engines: HandoffEngine) -> None:
    for engine in engines:
        state = engine.connector._scheduler._state
        wait_until(lambda state=state: (state.holds.num_holds, state.leases.num_requests) == (0, 0))
        engine.ask("afterwards", [1, 2, 3], {})  # the step that frees the blocks
        assert state.kept_blocks.num_kept == 0


def test_an_adapter_of_the_same_weights_at_another_path_is_loaded(make_engine: Any, make_adapter: MakeAdapter) -> None:
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    ours, theirs = make_adapter(number=1), make_adapter(number=2)
    assert ours.lora_path != theirs.lora_path
    params = prefilled(prefill, theirs)
    assert params["kvferry"]["adapter"]
    before = decode.num_computed
    answer = decode.ask("d", TOKENS, params, lora_request=ours)
    assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(TOKENS, 3))
    assert decode.num_computed - before <= 3, "computed, not loaded"
    check_nothing_is_left(prefill, decode)


def test_an_adapter_of_other_weights_is_refused_in_both_logs(
    make_engine: Any, make_adapter: MakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    """One name, two trainings: the tokens of the prompt are the same, and its cache is another one."""
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    theirs, ours = make_adapter(), make_adapter("trained")
    params = prefilled(prefill, theirs)
    with caplog.at_level(logging.INFO):
        answer = decode.ask("d", TOKENS, params, lora_request=ours)
        assert (answer.has_failed, answer.tokens) == (True, [])
        lines = lines_of(caplog, SCHEDULER, "d cannot be loaded")
        lines += lines_of(caplog, SCHEDULER, "decode engine engine-1 refuses this prefill engine")
    digests = [adapters._weights_of(each.lora_path).digest for each in (theirs, ours)]
    assert params["kvferry"]["adapter"] == digests[0] != digests[1]
    told = ["'sql'", f"prefill has {digests[0]!r}", f"decode has {digests[1]!r}", "Load the same", "[adapter-mismatch]"]
    for line in lines:
        assert [each for each in told if each not in line] == [], line
    check_nothing_is_left(prefill, decode)
    again = decode.ask("again", TOKENS, prefilled(prefill, theirs, "q"), lora_request=theirs)
    assert not again.has_failed


def check_computed(decode: HandoffEngine, adapter: LoRARequest, params: dict[str, Any]) -> None:
    """Check that an engine computes a prompt, for which its client gets the right tokens."""
    before = decode.num_computed
    answer = decode.ask("d", TOKENS, params, lora_request=adapter)
    assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(TOKENS, 3))
    assert decode.num_computed - before >= len(TOKENS), "loaded"


@pytest.mark.parametrize("is_unknown_to", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["sql", ""])
def test_a_prompt_of_an_adapter_is_computed_where_an_engine_does_not_know_or_say_its_weights(
    name: str, is_unknown_to: str, make_engine: Any, make_adapter: MakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that strips the digest, and a decode engine whose adapter comes from a hub without a commit. vLLM takes
    an empty name for an adapter too.
    """
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    theirs, ours = make_adapter(), make_adapter("trained")
    theirs.lora_name = ours.lora_name = name
    params = prefilled(prefill, theirs)
    if is_unknown_to == "prefill":
        del params["kvferry"]["adapter"]
    else:
        ours = LoRARequest(name, 9, "some/adapter")
    check_computed(decode, ours, params)
    assert "d is computed here" in caplog.text
    assert "[unknown-weights]" in caplog.text
    check_nothing_is_left(prefill, decode)


def test_a_prompt_of_an_adapter_whose_weights_are_unknown_is_not_held(make_engine: Any) -> None:
    """Another adapter of a hub, or another commit, may have this name on the decode engine."""
    prefill, adapter = make_engine(LAYERS), LoRARequest("sql", 9, "some/adapter")
    assert prefilled(prefill, adapter) == {}
    check_nothing_is_left(prefill)


def test_a_prompt_that_one_engine_computes_with_an_adapter_and_the_other_without_is_never_loaded(
    make_engine: Any, make_adapter: MakeAdapter
) -> None:
    """The digest of the prompt has the adapter's name. No prefill engine says a digest for a prompt without one."""
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    plain = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    check_computed(decode, make_adapter(), plain)
    of_adapter = prefilled(prefill, make_adapter(), "q")
    assert decode.ask("e", TOKENS, of_adapter).has_failed
    again = prefill.ask("s", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    again["kvferry"]["adapter"] = of_adapter["kvferry"]["adapter"]
    assert decode.ask("f", TOKENS, again).has_failed


# With keys.

Params = dict[str, Any]
FORGERIES: dict[str, tuple[str, Callable[[Params, Params], Params]]] = {
    "none": ("loaded", lambda mine, other: {}),
    "both stripped": ("refused", lambda mine, other: {"adapter": "", "signature": ""}),
    "signature stripped": ("refused", lambda mine, other: {"signature": ""}),
    "digest stripped": ("refused", lambda mine, other: {"adapter": ""}),
    "another digest": ("refused", lambda mine, other: {"adapter": other["adapter"]}),
    "both of another hold": (
        "refused",
        lambda mine, other: {each: other[each] for each in ("adapter", "signature")},
    ),
    "another digest without a signature": (
        "refused",
        lambda mine, other: {"adapter": other["adapter"], "signature": ""},
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("is_same", [True, False], ids=["same weights", "other weights"])
def test_with_keys_a_client_cannot_choose_the_adapter_whose_blocks_are_loaded(
    is_same: bool,
    forgery: str,
    make_engine: Any,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_keys(tmp_path / "keys")
    prefill, decode = (make_engine(LAYERS, keys=str(tmp_path / "keys")) for _ in range(2))
    theirs, others = make_adapter(), make_adapter("trained", number=2)
    params, other = prefilled(prefill, theirs), prefilled(prefill, others, "other")
    expected, changes = FORGERIES[forgery]
    params["kvferry"] |= changes(params["kvferry"], other["kvferry"])
    ours = make_adapter("weights" if is_same else "trained", folder="ours")
    before = decode.num_computed
    answer = decode.ask("d", TOKENS, params, lora_request=ours)
    assert answer.has_failed == (expected == "refused" or not is_same)
    assert expected == "refused" or decode.num_computed - before <= 3
    assert ("[permission-denied]" in caplog.text) == (expected == "refused")
    assert ("[adapter-mismatch]" in caplog.text) == (expected == "loaded" and not is_same)


def test_a_digest_that_is_none_is_malformed(make_engine: Any, make_adapter: MakeAdapter) -> None:
    """The digest goes into log lines."""
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    for forged in ("x", "a" * 32 + "\n", 7, None):
        params = prefilled(prefill, make_adapter(), f"p{forged!r}")
        params["kvferry"]["adapter"] = forged
        assert decode.ask("d", TOKENS, params, lora_request=make_adapter()).has_failed


def test_a_prompt_without_an_adapter_says_none(make_engine: Any) -> None:
    params = make_engine(LAYERS).ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    assert "adapter" not in params["kvferry"]


def test_files_that_are_replaced_under_a_running_engine(
    make_engine: Any, make_adapter: MakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    """Until vLLM has read them, the engine's weights are unknown. No client gets an error for that."""
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    theirs, ours = make_adapter(number=1), make_adapter(number=2)
    params = prefilled(prefill, theirs)
    write(Path(theirs.lora_path), "weights")
    assert prefilled(prefill, theirs, "copied") != {}, "the same files again"
    write(Path(theirs.lora_path), "trained")
    assert prefilled(prefill, theirs, "q") == {}, "not held, so the decode engine computes the prompt"
    write(Path(ours.lora_path), "trained")
    let_vllm_read(decode.connector._scheduler, ours)
    write(Path(ours.lora_path), "trained again")
    before = decode.num_computed
    answer = decode.ask("d", TOKENS, params, lora_request=ours)
    assert not answer.has_failed
    assert decode.num_computed - before >= len(TOKENS), "loaded under an adapter of unknown weights"
    assert "d is computed here" in caplog.text
    prefill.release("copied")
    check_nothing_is_left(prefill, decode)


def test_an_adapter_that_was_replaced_in_place_has_the_digest_of_its_new_weights(
    make_engine: Any, make_adapter: MakeAdapter
) -> None:
    """What is held keeps the former digest. New prompts begin outside of vLLM's prefix cache, which has the former
    blocks under the same hash, until that cache is reset.
    """
    prefill, decode = make_engine(LAYERS), make_engine(LAYERS)
    first = prefilled(prefill, make_adapter(folder="one"))
    computed = prefill.num_computed
    prefilled(prefill, make_adapter(folder="one", load_inplace=True), "unchanged")
    assert prefill.num_computed - computed < len(TOKENS), "found in the prefix cache"
    computed = prefill.num_computed
    trained = make_adapter("trained", folder="one", load_inplace=True)
    second = prefilled(prefill, trained, "q")
    assert prefill.num_computed - computed >= len(TOKENS), "blocks of the former weights"
    assert second["kvferry"]["adapter"] != first["kvferry"]["adapter"]
    ours = make_adapter("trained", folder="two")
    assert not decode.ask("d", TOKENS, second, lora_request=ours).has_failed
    assert decode.ask("e", TOKENS, first, lora_request=ours, cache_salt="e").has_failed
    prefill.release()
    prefill.ask("ends the holds", [1, 2, 3], {})
    prefill.forget()
    prefilled(prefill, trained, "r")
    computed = prefill.num_computed
    prefilled(prefill, trained, "s")
    assert prefill.num_computed - computed < len(TOKENS), "the prefix cache has no block of the former weights"


@pytest.mark.parametrize("when", ["never", "while it waits", "while it runs", "in place"])
def test_a_prompt_whose_adapter_changes_before_its_end_is_not_held(
    when: str, make_role: Any, make_adapter: MakeAdapter
) -> None:
    role, adapter = make_role(FULL), make_adapter()
    let_vllm_read(role, adapter)
    ours = arrived(role, adapter, {"do_remote_decode": True})
    if when == "while it waits":
        write(Path(adapter.lora_path), "trained")
    if when == "in place":
        # Its prompt may begin in vLLM's prefix cache with blocks of the earlier weights.
        replace_in_place(role, adapter, make_adapter)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    next_step(role, "r")
    if when == "while it runs":
        write(Path(adapter.lora_path), "trained")
    params = finished(role, ours)
    next_step(role)
    assert (params is not None) == (when == "never")
    assert (kept(role) != [], role._state.holds.num_holds) == ((True, 1) if when == "never" else (False, 0))


def test_an_engine_that_caches_no_prefixes_has_no_blocks_of_earlier_weights(
    make_role: Any, make_adapter: MakeAdapter
) -> None:
    """Weights that were replaced while a prompt waited do not keep it from being held: none of it was computed."""
    role, adapter = make_role(FULL, prefix_caching=False), make_adapter()
    let_vllm_read(role, adapter)
    ours = arrived(role, adapter, {"do_remote_decode": True})
    trained = replace_in_place(role, adapter, make_adapter)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    next_step(role, "r")
    params = finished(role, ours)
    assert params is not None
    assert params["kvferry"]["adapter"] == adapters._weights_of(trained.lora_path).digest


# Routers' transfers.


def begun(role: Any, adapter: LoRARequest, transfer_id: str = "x") -> Any:
    ours = arrived(role, adapter, to_prefill("concurrent", transfer_id))
    role.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    return ours


def test_a_transfer_carries_the_digest_of_each_engines_adapter(make_role: Any, make_adapter: MakeAdapter) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    ours, theirs = make_adapter(), make_adapter("trained")
    sent = begun(prefill, theirs)
    [(_, prompt)] = prefill.build_connector_meta(scheduled({"r": 80}, {"r": ([5, 4, 3, 2, 1],)})).prompts
    digests = [adapters._weights_of(each.lora_path).digest for each in (theirs, ours)]
    assert prompt.adapter == Adapter("sql", digests[0])
    assert sent.kv_transfer_params["transfer_id"] == "x"
    prefill._source.publish()
    waiting = request(list(PROMPT), to_decode("concurrent", prefill, None), "d")
    waiting.lora_request = ours
    decode.on_new_request(waiting)
    assert awaited(decode, waiting) == (80, True)
    decode.update_state_after_alloc(waiting, allocated([11, 12, 13, 14, 15]), 80)
    [order] = next_step(decode).loads
    assert order.announced.adapter == digests[1]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prompt_of_an_adapter_of_unknown_weights_is_computed(
    is_known: bool, make_role: Any, make_adapter: MakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill._source.publish()
    waiting = request(list(PROMPT), to_decode("concurrent", prefill, None), "d")
    waiting.lora_request = make_adapter() if is_known else LoRARequest("sql", 9, "some/adapter")
    decode.on_new_request(waiting)
    assert awaited(decode, waiting) == ((80, True) if is_known else (0, False))
    assert ("[unknown-weights]" in caplog.text) == (not is_known)
    plain = request(list(PROMPT), to_decode("concurrent", prefill, None), "e")
    decode.on_new_request(plain)
    assert awaited(decode, plain) == (80, True)


def test_a_prompt_of_an_adapter_whose_weights_are_unknown_is_not_written(make_role: Any) -> None:
    role = make_role(FULL)
    begun(role, LoRARequest("sql", 9, "some/adapter"))
    orders = role.build_connector_meta(scheduled({"r": 80}, {"r": ([5, 4, 3, 2, 1],)}))
    assert (orders.prompts, orders.ended_transfers) == ([], ["x"])


def test_nothing_is_written_of_an_adapter_whose_files_change_meanwhile(
    make_role: Any, make_adapter: MakeAdapter
) -> None:
    role, adapter = make_role(FULL), make_adapter()
    ours = begun(role, adapter)
    first = role.build_connector_meta(scheduled({"r": 32}, {"r": ([5, 4],)}))
    assert [name for name, _ in first.prompts] == ["x"]
    ours.num_computed_tokens = 32
    write(Path(adapter.lora_path), "trained")
    orders = role.build_connector_meta(scheduled({"r": 48}, {"r": ([5, 4, 3, 2, 1],)}))
    assert (orders.prompts, orders.ended_transfers) == ([], ["x"])
    assert begun(role, adapter, transfer_id="y")
    assert next_step(role).ended_transfers == ["y"]
    assert (kept(role), role._state.holds.num_holds) == ([], 0)


def test_nothing_is_written_of_a_prompt_that_may_have_begun_with_earlier_weights(
    make_role: Any, make_adapter: MakeAdapter
) -> None:
    """It waited while the weights were replaced in place: vLLM's prefix cache has the former blocks."""
    role, adapter = make_role(FULL), make_adapter()
    let_vllm_read(role, adapter)
    ours = arrived(role, adapter, to_prefill("concurrent"))
    replace_in_place(role, adapter, make_adapter)
    role.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    orders = role.build_connector_meta(scheduled({"r": 80}, {"r": ([5, 4, 3, 2, 1],)}))
    assert (orders.prompts, orders.ended_transfers) == ([], ["x"])


def test_the_weights_of_files_that_cannot_be_read_are_unknown(
    make_role: Any, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, adapter = make_role(FULL), make_adapter()

    def fail(*_: object) -> None:
        raise PermissionError("no access")

    monkeypatch.setattr(adapters, "digest_of_files", fail)
    with pytest.raises(KVFerryError) as refused:
        let_vllm_read(role, adapter)
    assert refused.value.reason is Reason.UNKNOWN_WEIGHTS


def test_an_adapters_folder_that_cannot_be_read_at_the_end(
    make_role: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8) + b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    role = make_role(FULL)
    ours = arrived(role, LoRARequest("sql", 1, str(tmp_path)), {"do_remote_decode": True})
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    next_step(role, "r")

    def stale(self: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(adapters.Path, "exists", stale)
    assert finished(role, ours) is None
