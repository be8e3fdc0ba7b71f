"""Blocks of requests with an adapter whose files change: in vLLM's own scheduler, see ``offload_engine``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from kvferry.integrations.vllm import adapters

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
        monkeypatch.setattr(adapters, "digest_of_files", raises(PermissionError("no access")))
    later = make_engine(**arguments)
    later.now = 2000.0
    later.add("second", PROMPT, lora_request=request)
    later.run(3000)
    assert later.loaded["second"] == num_loaded
    assert later.state()["counts"].get("stores", 0) == 0 or change in ("weights", "scale")
    later.check_at_rest()


def test_trap_02_an_adapter_that_is_loaded_anew_while_the_engine_runs(adapter: Path, make_engine: MakeEngine) -> None:
    """LoRA weights changed in place: vLLM keeps the hash (``load_inplace``), and warns that its own cache is stale."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.add("running", prompt_of(3), max_tokens=80, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.step()
    num_stored = engine.state()["counts"]["stores"]
    train(adapter)
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    while "running" not in engine.finished:
        engine.step()
    assert engine.loaded["second"] == 0
    assert engine.state()["counts"]["stores"] - num_stored <= 3, "those of the second request"
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
    num_stored = engine.state()["tiers"]["host_memory"]["num_blocks"]
    assert num_stored >= 3
    train(adapter)
    engine.run()
    assert engine.state()["tiers"]["host_memory"]["num_blocks"] == num_stored
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
    num_stores = engine.state()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.state()["counts"]["stores"] == num_stores
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
    num_stores = engine.state()["counts"]["stores"]
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("one", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert engine.state()["counts"]["stores"] == num_stores
    engine.add("other again", PROMPT[:-1], lora_request=LoRARequest("other", 2, str(adapter)))
    engine.run()
    assert engine.loaded["other again"] == 80


def test_trap_02_the_files_of_an_adapter_are_read_once_while_they_stay_as_they_are(
    adapter: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine core's thread reads them, also for each request of an adapter that was loaded in place."""
    read, weights_of = [], adapters._weights_of
    monkeypatch.setattr(adapters, "_weights_of", lambda path: (read.append(path), weights_of(path))[1])
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


AddLora = Callable[..., None]


@pytest.fixture
def add_lora(monkeypatch: pytest.MonkeyPatch) -> AddLora:
    """VLLM's ``add_lora`` before any engine of the test is made; ``during`` happens while ranks read the files."""
    monkeypatch.setattr(EngineCore, "add_lora", inspect.unwrap(EngineCore.add_lora))

    def add(request: LoRARequest, during: Callable[[], object] = lambda: None) -> None:
        core: Any = SimpleNamespace(model_executor=SimpleNamespace(add_lora=lambda _: during() is None))
        EngineCore.add_lora(core, request)

    return add


def num_visible(engine: Engine) -> int:
    found = engine.state()["tiers"]["host_memory"]["num_blocks"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(("when", "num_stored"), [("never", 6), ("before", 6), ("during", 0), ("after", 0)])
def test_trap_02_the_digest_is_of_the_files_that_add_lora_has_read(
    when: str, num_stored: int, adapter: Path, make_engine: MakeEngine, tmp_path: Path, add_lora: AddLora
) -> None:
    """The first request comes after the files were replaced: their new digest would name blocks of the old weights.

    A later process reads the new files, and must not find such blocks.
    """
    disk: dict[str, Any] = {"host_blocks": 60, "disk_path": str(tmp_path / "disk"), "disk_bytes": 1 << 20}
    engine = make_engine({"enable_lora": True}, **disk)
    request = LoRARequest("adapter", 1, str(adapter))
    if when == "before":
        train(adapter)
    add_lora(request, during=lambda: train(adapter) if when == "during" else None)
    if when == "after":
        train(adapter)
    engine.add("first", PROMPT, lora_request=request)
    engine.run(3000)
    assert num_visible(engine) == num_stored
    engine.role.shutdown()
    later = make_engine({"enable_lora": True}, **disk)
    later.now = 2000.0
    add_lora(request)
    later.add("second", PROMPT, lora_request=request)
    later.run(3000)
    assert later.loaded["second"] == num_stored * 16
    later.check_at_rest()


def test_trap_02_files_that_change_before_the_step_has_read_them(adapter: Path, make_engine: MakeEngine) -> None:
    """VLLM reads them in the first step of a request: the blocks of that step are stored only if they are the same."""
    engine = make_engine(num_blocks=40, host_blocks=400)
    engine.add("first", PROMPT, max_tokens=40, lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.schedule()
    train(adapter)
    engine.process()
    engine.run()
    assert engine.state()["counts"]["stores"] == 1
    assert num_visible(engine) == 0
    crowd_out(engine)
    engine.add("second", PROMPT[:-1], lora_request=LoRARequest("adapter", 1, str(adapter), load_inplace=True))
    engine.run()
    assert engine.loaded["second"] == 0
    engine.check_at_rest()


@pytest.mark.parametrize("is_inplace", [False, True])
def test_trap_02_an_id_that_another_path_takes(
    is_inplace: bool, adapter: Path, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """A request under way computes with the weights that its id has got, and its own path's files have not changed.

    The step in which vLLM reads the other files fills a block of that request.
    """
    other = tmp_path / "other"
    other.mkdir()
    for file in adapter.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    train(other)
    engine = make_engine(num_blocks=60, host_blocks=400)
    running = engine.add("running", prompt_of(3), 120, lora_request=LoRARequest("adapter", 1, str(adapter)))
    for _ in range(16):
        engine.step()
    assert (running.num_computed_tokens, num_visible(engine)) == (63, 3)
    taken = LoRARequest("adapter", 1, str(other), load_inplace=is_inplace)
    engine.add("other", PROMPT, max_tokens=9, lora_request=taken, skips_cache=True)
    engine.run()
    num_others = 6 if is_inplace else 0
    assert num_visible(engine) == 3 + num_others
    engine.check_at_rest()


def test_trap_02_an_id_that_add_lora_finds_loaded(adapter: Path, make_engine: MakeEngine, add_lora: AddLora) -> None:
    """VLLM reads nothing then, and the id keeps the weights that the files had before."""
    engine = make_engine({"enable_lora": True}, num_blocks=40, host_blocks=400)
    request = LoRARequest("adapter", 1, str(adapter))
    seen_before(engine, lora_request=request)
    num_stored = num_visible(engine)
    train(adapter)
    add_lora(request)
    engine.add("second", prompt_of(1, 7), lora_request=request)
    engine.run()
    assert (engine.loaded["second"], num_visible(engine)) == (0, num_stored)


def test_trap_02_an_adapter_that_could_not_be_read_again(
    adapter: Path, make_engine: MakeEngine, add_lora: AddLora
) -> None:
    """One rank of two may have the new weights: nobody knows what its requests compute with."""
    engine = make_engine({"enable_lora": True}, num_blocks=40, host_blocks=400)
    seen_before(engine, lora_request=LoRARequest("adapter", 1, str(adapter)))
    num_stored = num_visible(engine)
    with pytest.raises(RuntimeError, match="a rank failed"):
        add_lora(
            LoRARequest("adapter", 1, str(adapter), load_inplace=True), during=raises(RuntimeError("a rank failed"))
        )
    engine.add("second", prompt_of(1, 7), lora_request=LoRARequest("adapter", 1, str(adapter)))
    engine.run()
    assert engine.loaded["second"] == 0
    assert num_visible(engine) == num_stored
