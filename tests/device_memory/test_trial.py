"""The trial at start, on memory that no processor may touch: finds what is wrong, and leaves nothing behind."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution.device import Mark
from kvferry.execution.digests import Integrity
from kvferry.execution.trial import LabelledBlocks, Trial, choose_blocks, open_side, try_device
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.transport.registry import TransportSet, make

from ..pure.arrangements import attention, hybrid
from . import standin_nixl
from .device import ImmediateOrder
from .device_tensor import device_tensor, tensor_at
from .standin_transport import FACTORY
from .untouchable import DeviceMemory


class Engine:
    """A rank on the device, with the engine's views of its layers, and all that the trial takes."""

    def __init__(self, shard: Shard, integrity: Integrity = Integrity.FULL) -> None:
        self.memory = DeviceMemory(shard.regions[0].length)
        self.memory.content[:] = np.random.default_rng(3).integers(0, 256, self.memory.nbytes, np.uint8)
        self.shard = placed(shard, self.memory)
        self.views = views_of(self.shard, self.memory)
        self.order = ImmediateOrder()
        self.integrity = integrity
        self.side = open_side(self.shard, opened)

    def trial(self, opens: Callable[[], TransportSet] | None = None) -> Trial:
        return Trial(self.side, self.views, self.order, opens or opened, NamedLayout.BLHNC, self.integrity)


def opened() -> TransportSet:
    return TransportSet({"nixl": make(FACTORY)})


def placed(shard: Shard, memory: DeviceMemory) -> Shard:
    return Shard(regions=(memory.region,), groups=shard.groups, tp_rank=shard.tp_rank, tp_size=shard.tp_size)


def views_of(shard: Shard, memory: DeviceMemory) -> dict[str, torch.Tensor]:
    """Return for each layer its rows by block, as an engine's tensor has them: here all bytes of a layer in a block."""
    found = {}
    content = device_tensor(memory)
    for group in shard.groups:
        for at, layer in enumerate(group.layers):
            parts = group.components
            begin = min(part.layer_offsets[at] for part in parts)
            heads = [sum(held.end - held.start for held in part.heads) for part in parts]
            ends = [
                part.layer_offsets[at]
                + (count - 1) * part.head_stride
                + (group.block_size - 1) * part.token_stride
                + (part.num_channels - 1) * part.channel_stride
                + part.itemsize
                for part, count in zip(parts, heads, strict=True)
            ]
            found[layer] = torch.as_strided(
                content, (group.num_blocks, max(ends) - begin), (parts[0].block_stride, 1), begin
            )
    return found


SHARDS: Mapping[str, Callable[[], Shard]] = {
    "attention": lambda: attention(0, 1, ["0", "1", "2"]),
    "one rank of two": lambda: attention(1, 2, ["0", "1"]),
    "tokens outermost": lambda: attention(0, 1, ["0", "1"], layout=NamedLayout.BLNHC),
    "hybrid": lambda: hybrid(0, 1),
    "hybrid, one rank of two": lambda: hybrid(1, 2),
}


@pytest.mark.parametrize("name", SHARDS)
def test_the_trial_passes_and_leaves_every_byte_as_it_was(name: str) -> None:
    engine = Engine(SHARDS[name](), Integrity.SAMPLE)
    before = engine.memory.content.copy()
    standin_nixl.submissions.clear()
    result = engine.trial().run()
    assert np.array_equal(engine.memory.content, before)
    assert result.num_bytes > 0
    assert result.transport == "nixl"
    assert result.seconds < 5.0
    assert {each for each in standin_nixl.submissions if "VRAM" in each} == {("WRITE", "VRAM", "VRAM")}


def failing(engine: Engine) -> TransportError:
    """Return the trial's error; every byte is as it was before."""
    before = engine.memory.content.copy()
    with pytest.raises(TransportError) as caught:
        engine.trial().run()
    assert caught.value.reason is Reason.TRIAL_FAILED
    assert np.array_equal(engine.memory.content, before)
    return caught.value


def test_a_shard_that_says_the_wrong_place_is_found_through_the_engines_views() -> None:
    """The plan and its proof believe the shard; only the engine's own views show that a layer ends elsewhere."""
    engine = Engine(attention(0, 1, ["0", "1", "2"]), Integrity.OFF)
    last = engine.views["2"]
    # The mapping is longer than the cache: it ends with a page.
    longer = tensor_at(engine.memory.region.base_address, engine.memory.nbytes + 2)
    engine.views["2"] = torch.as_strided(longer, last.shape, last.stride(), last.storage_offset() + 2)
    with pytest.raises(TransportError) as caught:
        engine.trial().run()
    error = caught.value
    assert error.reason is Reason.TRIAL_FAILED
    assert "layout BLHNC, transport nixl" in error.message
    assert "bytes are wrong" in error.message
    assert "VLLM_KV_CACHE_LAYOUT" in error.remedy


def moves_nothing_of_the_device() -> Callable[[Any, int], int]:
    moves = standin_nixl.nixlAgent.getXferStatus

    def moves_only_the_hosts(agent: Any, handle: int) -> int:
        request = agent._requests[handle]
        return moves(agent, handle) if request.num_bytes <= 16 else standin_nixl.NIXL_SUCCESS

    return moves_only_the_hosts


def test_a_transport_that_moves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(attention(0, 1, ["0", "1"]), Integrity.OFF)
    monkeypatch.setattr(standin_nixl.nixlAgent, "getXferStatus", moves_nothing_of_the_device())
    assert "bytes are wrong" in failing(engine).message


def test_sums_of_the_device_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.execution.digests import DeviceCells

    sums = DeviceCells.sums
    monkeypatch.setattr(DeviceCells, "sums", lambda self, *given: sums(self, *given) + np.uint64(id(self)))
    error = failing(Engine(attention(0, 1, ["0", "1"])))
    assert '"integrity"' in error.remedy


def test_memory_that_cannot_be_registered_ends_the_trial_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(attention(0, 1, ["0", "1"]))

    def refuse(*_: object) -> None:
        raise standin_nixl.nixlBackendError("VRAM memory is detected as host")

    monkeypatch.setattr(standin_nixl.nixlAgent, "registerMem", refuse)
    with pytest.raises(TransportError) as caught:
        engine.trial().run()
    assert "UCX_TLS" in caught.value.remedy


def test_a_cache_of_too_few_blocks_is_refused() -> None:
    with pytest.raises(TransportError, match="too small") as caught:
        Engine(attention(0, 1, ["0"], num_blocks=4)).trial()
    assert caught.value.reason is Reason.TRIAL_FAILED


@pytest.mark.parametrize("fault", ["none", "wrong bytes", "refused memory"])
def test_the_second_agent_is_closed_whatever_comes_of_the_trial(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the device's memory registered as long as the engine runs."""
    engine = Engine(attention(0, 1, ["0", "1"]), Integrity.OFF)
    second = []

    def opens() -> TransportSet:
        second.append(opened())
        return second[-1]

    if fault == "wrong bytes":
        monkeypatch.setattr(standin_nixl.nixlAgent, "getXferStatus", moves_nothing_of_the_device())
    elif fault == "refused memory":
        monkeypatch.setattr(TransportSet, "register", _raise_refusal)
    with nullcontext() if fault == "none" else pytest.raises(TransportError):
        engine.trial(opens).run()
    [each] = second
    with pytest.raises(TransportError) as closed:
        each.transports["nixl"].register([Region(4096, 4096)])
    assert closed.value.reason is Reason.CLOSED


def _raise_refusal(*_: object) -> dict[str, bytes]:
    raise TransportError(Reason.TRANSPORT_UNAVAILABLE, "this memory is refused.")


class LateOrder(ImmediateOrder):
    """Of a device that does nothing before somebody asks for a mark; notes how many submissions there were then."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.asked: list[int] = []

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    def mark(self) -> Mark:
        order = self

        class AskedMark:
            def is_over(self) -> bool:
                order.asked.append(len(standin_nixl.submissions))
                order.run()
                return True

            def wait(self) -> None:
                self.is_over()

        return AskedMark()


def test_the_trial_waits_for_the_devices_own_work_before_each_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are launched on the engine's stream: another agent must not read blocks that they have not reached."""
    engine = Engine(attention(0, 1, ["0", "1"]), Integrity.OFF)
    engine.order = order = LateOrder()
    label = LabelledBlocks.label
    monkeypatch.setattr(LabelledBlocks, "label", lambda content: order.work.append(lambda: label(content)))
    standin_nixl.submissions.clear()
    engine.trial().run()
    data = [number for number, kinds in enumerate(standin_nixl.submissions) if "VRAM" in kinds]
    assert order.asked == [0], "the label"
    assert data[0] > 0


def test_a_device_that_ends_no_work_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.execution.trial.TRIAL_SECONDS", 0.3)

    class Never(ImmediateOrder):
        def mark(self) -> Mark:
            class NeverOver:
                def is_over(self) -> bool:
                    return False

                def wait(self) -> None:
                    raise AssertionError("a wait without limit")

            return NeverOver()

    engine = Engine(attention(0, 1, ["0", "1"]))
    engine.order = Never()
    assert "did not arrive" in failing(engine).message


def test_a_write_that_fails_ends_the_trial_with_the_transports_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(attention(0, 1, ["0", "1"]))

    def fails(*_: object) -> int:
        raise standin_nixl.nixlBackendError("the wire is cut")

    asks = standin_nixl.nixlAgent.getXferStatus
    monkeypatch.setattr(
        standin_nixl.nixlAgent,
        "getXferStatus",
        lambda agent, handle: (asks if agent._requests[handle].num_bytes <= 16 else fails)(agent, handle),
    )
    assert "the wire is cut" in failing(engine).message


def test_a_write_that_never_ends_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.execution.trial.TRIAL_SECONDS", 0.3)
    monkeypatch.setattr("kvferry.transport.nixl.CLOSE_SECONDS", 0.1)
    engine = Engine(attention(0, 1, ["0", "1"]))
    asks = standin_nixl.nixlAgent.getXferStatus

    def hangs(agent: Any, handle: int) -> int:
        is_nonce = agent._requests[handle].num_bytes <= 16
        return asks(agent, handle) if is_nonce else standin_nixl.NIXL_IN_PROG

    monkeypatch.setattr(standin_nixl.nixlAgent, "getXferStatus", hangs)
    assert "did not arrive" in failing(engine).message


@pytest.mark.parametrize("damaged", ["labelled", "returned", "null block", "behind"])
def test_a_change_of_any_block_that_the_trial_looks_at_is_found(damaged: str) -> None:
    """A move that writes into the blocks that it reads, into the null block, or behind its blocks."""
    engine = Engine(attention(0, 1, ["0", "1"]))
    trips = choose_blocks(engine.shard)
    content = LabelledBlocks(engine.views, engine.shard, trips)
    content.label()
    [trip] = trips
    for labelled, returned in zip(trip.labelled, trip.returned, strict=True):
        for view in engine.views.values():
            view[returned].copy_(view[labelled])
    content.compare()
    block = {
        "labelled": trip.labelled[1],
        "returned": trip.returned[0],
        "null block": 0,
        "behind": trip.returned[-1] + 1,
    }[damaged]
    engine.views["1"][block][3] ^= 4
    with pytest.raises(HandoffError, match=rf"layer '1', block {block}: 1 of") as caught:
        content.compare()
    assert caught.value.reason is Reason.BYTES_FOREIGN


@pytest.mark.parametrize("layout", NamedLayout)
def test_the_small_cache_of_doctor_passes_in_every_layout(layout: NamedLayout) -> None:
    result = try_device(ImmediateOrder(), layout, opens=opened)
    # Two blocks of four layers, 8 heads, 16 tokens and 128 numbers of two bytes, K and V.
    assert result.num_bytes == 2 * 4 * 8 * 16 * 2 * 128 * 2


def test_an_engine_on_a_device_runs_the_trial_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.integrations.vllm.settings import Settings

    from ..adapter.worker_roles import make_worker_role

    memory = DeviceMemory(attention(0, 1, ["0", "1"]).regions[0].length)
    shard = placed(attention(0, 1, ["0", "1"]), memory)
    views = views_of(shard, memory)
    settings = Settings(transport="nixl")
    standin_nixl.submissions.clear()
    role = make_worker_role(monkeypatch, settings, shard, views=views, device_order=ImmediateOrder())
    assert role.get_handshake_metadata() is not None
    assert {each[0] for each in standin_nixl.submissions if "VRAM" in each} == {"WRITE"}
    assert not memory.content.any()
    role.shutdown()
    monkeypatch.setattr(standin_nixl.nixlAgent, "createXferReq", _refuses)
    with pytest.raises(TransportError) as caught:
        make_worker_role(monkeypatch, settings, shard, views=views, device_order=ImmediateOrder())
    assert caught.value.reason is Reason.TRIAL_FAILED


def _refuses(*_: object) -> int:
    raise standin_nixl.nixlNotFoundError("no")
