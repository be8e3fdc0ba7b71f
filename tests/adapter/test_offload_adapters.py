"""Blocks of requests with an adapter whose files change: in vLLM's own scheduler, see ``offload_engine``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from kvferry.integrations.vllm import offload_adapters

from .offload_engine import Engine, prompt_of
from .test_offload_hazards import raises
from .test_offload_requests import (  # noqa: F401
    PROMPT,
    configs,
    crowd_out,
    make_engine,
    seen_before,
)

# ruff: noqa: F811
MakeEngine = Callable[..., Engine]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter's folder."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(8) + b"weights")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    return folder


def train(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(bytes(8) + b"trained")


@pytest.mark.parametrize(("change", "num_loaded"), [("", 96), ("weights", 0), ("scale", 0), ("unreadable", 0)])
def test_trap_02_blocks_on_disk_are_of_an_adapters_weights_and_not_of_its_path(
    change: str, num_loaded: int, adapter: Path, make_engine: MakeEngine, tmp_path: Path, monkeypatch: Any
) -> None:
    """The block hash covers LoRA name and path, and not LoRA weights changed in place: between two processes."""
    arguments: dict[str, Any] = {"host_blocks": 60, "disk_path": str(tmp_path / "disk"), "disk_bytes": 1 << 20}
    request = LoRARequest("adapter", 1, str(adapter))
    engine = make_engine(**arguments)
    engine.add("first", PROMPT, lora_request=request)
    engine.run(3000)
    engine.check_at_rest()
    engine.role.shutdown()
    if change == "weights":
        train(adapter)
    if change == "scale":
        (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
    if change == "unreadable":
        (adapter / "adapter_config.json").unlink()
        monkeypatch.setattr(offload_adapters, "weights_of", raises(PermissionError("no access")))
    later = make_engine(**arguments)
    later.now = 2000.0
    later.add("second", PROMPT, lora_request=request)
    later.run(3000)
    assert later.loaded["second"] == num_loaded
    assert later.role.snapshot()["counts"].get("stores", 0) == 0 or change in ("weights", "scale")
    later.check_at_rest()


def test_trap_02_an_adapter_that_is_loaded_anew_while_the_engine_runs(adapter: Path, make_engine: MakeEngine) -> None:
    """LoRA weights changed in place: vLLM keeps the hash (``load_inplace``), and warns that its own cache is stale."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.step()
    num_stored = engine.role.snapshot()["counts"]["stores"]
    train(adapter)
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    while "running" not in engine.finished:
        engine.step()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] - num_stored <= 3, "those of the second request"
    engine.run()
    for number, is_replaced in enumerate((False, True)):
        crowd_out(engine)
        request = LoRARequest("adapter", 1, str(adapter), load_inplace=is_replaced)
        engine.add(f"again {number}", PROMPT[:-1], lora_request=request)
        engine.run()
        assert engine.loaded[f"again {number}"] == 80, "these are the weights of the second request"
    engine.check_at_rest()


def test_trap_02_a_running_request_stores_nothing_once_its_adapter_has_other_files(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """``add_lora`` in place is heard of by no scheduler: the next blocks may be of either weights."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    request = engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    for _ in range(20):
        engine.step()
    num_stored = engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"]
    assert num_stored >= 3
    train(adapter)
    engine.run()
    assert engine.role.snapshot()["tiers"]["host_memory"]["num_blocks"] == num_stored
    tokens = list(request.all_token_ids)
    crowd_out(engine)
    engine.add("again", tokens, lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    engine.run()
    assert engine.loaded["again"] == 0
    engine.check_at_rest()


def test_trap_02_an_adapter_that_vllm_has_dropped_and_read_again_under_one_id(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """Nobody knows here whether its cache of adapters has dropped it since the files changed: until it reads them."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    train(adapter)
    num_stores = engine.role.snapshot()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] == num_stores
    for name, number in (("third", 0), ("fourth", 80)):
        crowd_out(engine)
        engine.add(name, PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
        engine.run()
        assert engine.loaded[name] == number
    engine.check_at_rest()


def test_trap_02_two_ids_of_one_path_have_the_weights_that_each_was_read_with(
    adapter: Path, make_engine: MakeEngine
) -> None:
    """Under two names: the second was read after training, and the first is still loaded as it was."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("one", 1, str(adapter)))
    train(adapter)
    engine.add("other", PROMPT[:-1], lora_request=LoRARequest("other", 2, str(adapter)))
    engine.run()
    crowd_out(engine)
    num_stores = engine.role.snapshot()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("one", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.role.snapshot()["counts"]["stores"] == num_stores
    engine.add("other again", PROMPT[:-1], lora_request=LoRARequest("other", 2, str(adapter)))
    engine.run()
    assert engine.loaded["other again"] == 80


def test_trap_02_the_files_of_an_adapter_are_read_once_while_they_stay_as_they_are(
    adapter: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine core's thread reads them, also for each request of an adapter that was loaded in place."""
    read, weights_of = [], offload_adapters._weights_of
    monkeypatch.setattr(offload_adapters, "_weights_of", lambda path: (read.append(path), weights_of(path))[1])
    engine = make_engine(num_blocks=40, host_blocks=400)
    for number in range(4):
        request = LoRARequest("adapter", 1, str(adapter), load_inplace=number > 0)
        engine.add(f"r{number}", prompt_of(number, 7), max_tokens=20, lora_request=request)
        engine.run()
    assert read == [str(adapter)]
    for file in adapter.iterdir():
        file.unlink()
    adapter.rmdir()
    engine.add("gone", prompt_of(0, 7), lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["gone"] == 96, "vLLM cannot have read other files"


@pytest.mark.parametrize(("is_trained", "num_loaded"), [(False, 80), (True, 0)])
def test_trap_02_an_adapter_that_is_unloaded_and_loaded_again_has_another_id(
    is_trained: bool, num_loaded: int, adapter: Path, make_engine: MakeEngine
) -> None:
    """VLLM reads the files again and keeps the hash, which has name and path and not the id."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.step()
    running = engine.role._requests["running"]
    if is_trained:
        train(adapter)
    for turn, expected in enumerate((num_loaded, 80)):
        engine.add(f"again {turn}", PROMPT[:-1], lora_request=LoRARequest("adapter", 2, str(adapter)))
        engine.run()
        crowd_out(engine)
        assert engine.loaded[f"again {turn}"] == expected
    assert running.may_store != is_trained
    engine.check_at_rest()
