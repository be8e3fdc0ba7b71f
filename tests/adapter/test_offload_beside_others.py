"""The offload connector beside another one under vLLM's ``MultiConnector``: trap 9, and vLLM's own issue 46951."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.request import RequestStatus

from kvferry.integrations.vllm.scheduler import offload

from .offload_engine import BLOCK_SIZE, Engine, contents_of, prompt_of
from .test_offload_hazards import ranks  # noqa: F401
from .test_offload_requests import (  # noqa: F401
    PROMPT,
    configs,
    crowd_out,
    make_engine,
    make_engine_with_tier,
)

# ruff: noqa: F811
MakeEngine = Callable[..., Engine]


class LoadsFromElsewhere(KVConnectorBase_V1, SupportsHMA):
    """Loads the whole prompts of requests that come from a prefill engine, asynchronously; stores nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loads: dict[str, tuple[list[int], ...]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        is_asked = (request.kv_transfer_params or {}).get("do_remote_prefill") and request.request_id not in self.loads
        return (request.num_tokens - num_computed_tokens, True) if is_asked else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def beside_another(policy: str = "recompute") -> dict[str, Any]:
    """Return the configuration of an engine with both connectors under vLLM's ``MultiConnector``."""
    elsewhere = {"kv_connector": LoadsFromElsewhere.__name__, "kv_connector_module_path": __name__}
    ours = {"kv_connector": "KVFerryOffloadConnector", "kv_connector_extra_config": {"host_bytes": 1}}
    children = [{**each, "kv_role": "kv_both"} for each in (elsewhere, ours)]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": children},
        }
    }


REMOTE = {"kv_transfer_params": {"do_remote_prefill": True}}


def write_from_elsewhere(engine: Engine, request_id: str, prompt: Sequence[int]) -> None:
    """Write a prompt into the blocks that the other connector was given."""
    for group, ids in enumerate(engine.others[0].loads[request_id]):
        for place, content in enumerate(contents_of(prompt)):
            for rank in range(engine.num_ranks):
                engine.ranks.engine[rank, str(group), ids[place // BLOCK_SIZE], place % BLOCK_SIZE] = content


def test_trap_09_none_stalls_all_children_of_a_multi_connector(make_engine_with_tier: Any) -> None:
    """Answer 0 for requests that come from a prefill engine. The disk has their prompt, and hangs."""
    engine, tier = make_engine_with_tier(config=beside_another(), num_blocks=40)
    tier.faults.is_silent = True
    engine.add("local", PROMPT)
    engine.add("remote", PROMPT, extra_args=REMOTE)
    engine.step(ends_copies=False)
    assert engine.state()["counts"]["asked_again"] == 1, "the other request waits for the disk"
    assert engine.others[0].loads.keys() == {"remote"}
    write_from_elsewhere(engine, "remote", PROMPT)
    engine.ranks.received.add("remote")
    engine.now += 20.0
    engine.run()
    assert (engine.computed["remote"], engine.computed["local"]) == (1, 96)
    engine.check_at_rest()


@pytest.mark.parametrize("windows", [(0,), (0, 0)])
def test_vllm_46951_no_block_of_a_store_goes_to_a_load_of_another_connector(
    windows: tuple[int, ...], make_engine: MakeEngine
) -> None:
    """Beside another asynchronous connector stale KV is stored (vLLM #46951).

    The offloading connector does not hear of the blocks that the other one loads into, so these may be blocks that a
    store still reads. Here the cache has room for the other load only if the store's blocks are given away.
    """
    engine = make_engine(beside_another(), num_blocks=10 * len(windows) + 1, windows=windows, host_blocks=60)
    engine.role._stores.max_kept = 100
    engine.add("first", PROMPT)
    while "first" not in engine.finished:
        engine.step(ends_copies=False)
    engine.step(ends_copies=False)
    assert engine.ranks.copies, "the store is under way"
    other = prompt_of(5, 6)
    engine.add("remote", other, max_tokens=20, extra_args=REMOTE)
    for _ in range(3):
        engine.step(ends_copies=False)
        if "remote" in engine.others[0].loads:
            write_from_elsewhere(engine, "remote", other)
    engine.end_copies()
    while "remote" not in engine.others[0].loads:
        engine.step()
    write_from_elsewhere(engine, "remote", other)
    engine.ranks.received.add("remote")
    engine.run()
    engine.check_at_rest()
    assert engine.computed["remote"] == 1 + 19
    crowd_out(engine)
    for name, prompt in (("again", PROMPT), ("remote again", other)):
        engine.add(name, prompt)
        engine.run()
        assert engine.loaded[name] == 96, "both were stored, each with its own content"
    engine.check_at_rest()


@pytest.mark.parametrize("end", ["aborted", "fail", "recompute"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_vllm_46951_what_another_connector_did_not_load_is_not_stored(
    end: str, runs_ahead: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another asynchronous connector stale KV is stored: the request has blocks and counts as computed.

    Tails of failed requests are not stored either; they are here, so that only the count of written tokens protects.
    """
    monkeypatch.setattr(offload, "_WITHOUT_TAIL", ())
    policy = "recompute" if end == "aborted" else end
    engine = make_engine(beside_another(policy), num_blocks=40, host_blocks=60, runs_ahead=runs_ahead)
    engine.add("remote", PROMPT, max_tokens=3, extra_args=REMOTE)
    for _ in range(3):
        engine.step()
    assert engine.others[0].loads.keys() == {"remote"}
    if end == "aborted":
        engine.abort("remote")
    engine.ranks.received.add("remote")
    engine.ranks.failed.add("remote")
    engine.step(is_forced=True)
    if end != "recompute":
        engine.run()
        assert engine.state()["tiers"]["host_memory"]["num_blocks"] == 0
    engine.run()
    crowd_out(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == (96 if end == "recompute" else 0)
    engine.check_at_rest()


@pytest.mark.parametrize("asks_again", [False, True])
def test_vllm_46951_what_a_preempted_request_had_written_is_not_stored_from_its_next_blocks(
    asks_again: bool, make_engine: MakeEngine
) -> None:
    """It asks for a hit again and gets blocks that another connector loads into; then its last token comes, its end."""
    engine = make_engine(num_blocks=40, host_blocks=60)
    engine.role._stores.max_kept = 0  # so that all is left for the end
    request = engine.add("first", PROMPT, max_tokens=60)
    for _ in range(4):
        engine.step()
    engine.role._stores.max_kept = 100
    if asks_again:
        assert engine.role.get_num_new_matched_tokens(request, 0) == (0, False)
    request.status = RequestStatus.FINISHED_STOPPED
    engine.role.request_finished(request, (list(range(20, 27)),))
    assert engine.state()["stores"] == (not asks_again)
