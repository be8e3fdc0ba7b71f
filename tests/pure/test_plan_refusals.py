"""Refusals with their reasons: of peers at the handshake, of requests before any byte moves."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, VerificationError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import MAX_GROUPS, MAX_SHARD_BYTES, CacheKind, Shard, decode_shard, encode_shard
from kvferry.plan.match import GroupBlocks, choose_sources
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_destination, verify_pair

from ..support.dense import Content, shard_for
from .refusals import refused


def rank(**changes: object) -> Shard:
    values: dict[str, object] = {
        "layers": ["0", "1"],
        "num_kv_heads": 4,
        "head_size": 8,
        "itemsize": 2,
        "block_size": 4,
        "num_blocks": 6,
        "layout": NamedLayout.BHLNC,
    }
    return shard_for(**{**values, **changes})  # type: ignore[arg-type]


def engine(tp_size: int, **changes: object) -> list[Shard]:
    return [rank(tp_rank=index, tp_size=tp_size, base_address=index << 32, **changes) for index in range(tp_size)]


def ask(**changes: object) -> GroupBlocks:
    values: dict[str, object] = {
        "group": "full",
        "first_token": 0,
        "last_token": 8,
        "source_block_ids": [1, 2],
        "destination_block_ids": [3, 4],
    }
    return GroupBlocks(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "source", "destination"),
    [
        (Reason.LAYER_MISMATCH, {"layers": ["0", "1"]}, {"layers": ["0", "2"]}),
        (Reason.LAYER_MISMATCH, {"layers": ["0", "1"]}, {"layers": ["0"]}),
        (Reason.LAYER_MISMATCH, {"layers": ["0"]}, {"layers": ["0", "1"]}),
        (Reason.GROUP_MISMATCH, {"group_name": "full"}, {"group_name": "window"}),
        (Reason.GROUP_MISMATCH, {"kind": CacheKind.MLA, "num_kv_heads": 1}, {"num_kv_heads": 1}),
        (Reason.MODEL_MISMATCH, {"num_kv_heads": 4}, {"num_kv_heads": 8}),
        (Reason.HEAD_SIZE_MISMATCH, {"head_size": 8}, {"head_size": 16}),
        (Reason.HEAD_SIZE_MISMATCH, {"value_head_size": 4}, {"value_head_size": 8}),
        (Reason.DTYPE_MISMATCH, {"itemsize": 2}, {"itemsize": 4}),
        (Reason.SPLIT_ATOM, {"content": Content.FUSED}, {"content": Content.PLANES}),
        (Reason.PACKING_MISMATCH, {"packing": "cpu_attn:amx:bfloat16"}, {"packing": "cpu_attn:vec:bfloat16"}),
        (Reason.PACKING_MISMATCH, {"packing": "cpu_attn:amx:bfloat16"}, {}),
        (Reason.BLOCK_SIZE_MISMATCH, {"packing": "amx", "block_size": 4}, {"packing": "amx", "block_size": 8}),
    ],
    ids=str,
)
def test_peers_that_do_not_fit(reason: Reason, source: dict[str, object], destination: dict[str, object]) -> None:
    message = refused(reason, lambda: Planner([rank(**source)], rank(**destination)))
    assert message.count(".") >= 2, "a message and a remedy"
    if reason in (Reason.LAYER_MISMATCH, Reason.GROUP_MISMATCH):
        assert "--speculative-config" in message
        assert "--disable-hybrid-kv-cache-manager" in message


def test_missing_ranks() -> None:
    refused(Reason.MISSING_SOURCE, lambda: Planner([], rank()))
    refused(Reason.MISSING_SOURCE, lambda: Planner(engine(2)[:1], rank()))
    refused(Reason.MISSING_SOURCE, lambda: Planner(engine(8)[:6], rank()))
    assert len(Planner(engine(8)[::2], rank()).plans(0)) == 4, "one replica of each is enough"


def test_sources_with_overlapping_stages() -> None:
    stages = [rank(layers=["0", "1"]), rank(layers=["1", "2"])]
    refused(Reason.LAYER_MISMATCH, lambda: Planner(stages, rank(layers=["0", "1", "2"])))


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "window"},
        {"source_block_ids": [1, 6]},
        {"source_block_ids": [-1, 2]},
        {"destination_block_ids": [3, 2**40]},
        {"destination_block_ids": [3, 3]},
        {"destination_block_ids": [3]},
        {"source_block_ids": [1]},
        {"source_block_ids": [1.0, 2.0]},
        {"source_block_ids": [[1, 2]]},
        {"source_block_ids": ["1", "2"]},
        {"first_token": 9},
        {"first_token": -1},
        {"source_first_token": 4, "first_token": 2},
    ],
    ids=str,
)
def test_requests_that_do_not_fit(changes: dict[str, object]) -> None:
    (plan,) = Planner([rank()], rank(base_address=1 << 40)).plans(0)
    assert len(plan.lower([ask()])) == 1
    refused(Reason.INVALID_REQUEST, lambda: plan.lower([ask(**changes)]))


def test_two_requests_may_not_share_a_destination_block() -> None:
    (plan,) = Planner([rank()], rank(base_address=1 << 40, block_size=8)).plans(0)
    one = ask(destination_block_ids=[3])
    other = ask(destination_block_ids=[3], destination_first_token=4, first_token=4, last_token=6)
    plan.lower([one])
    plan.lower([other])
    refused(Reason.INVALID_REQUEST, lambda: plan.lower([one, other]))
    doubled = np.concatenate((plan.lower([one]), plan.lower([other])))
    requests = [one, other]
    refused(Reason.INVALID_REQUEST, lambda: verify_pair(doubled, plan.source, plan.destination, requests, plan.heads))


def test_packed_pages_move_whole_or_not_at_all() -> None:
    (plan,) = Planner([rank(packing="amx")], rank(packing="amx", base_address=1 << 40)).plans(0)
    rows = plan.lower([ask(first_token=4, last_token=7)])
    verify_pair(rows, plan.source, plan.destination, [ask(first_token=4, last_token=7)], plan.heads)
    assert int(rows[:, 2].sum()) == 2 * 4 * 4 * 16 * 2
    refused(Reason.INVALID_REQUEST, lambda: plan.lower([ask(first_token=2)]))


def test_no_tokens_need_no_descriptors() -> None:
    (plan,) = Planner([rank()], rank(base_address=1 << 40)).plans(0)
    empty = ask(first_token=3, last_token=3, source_block_ids=[], destination_block_ids=[])
    assert plan.lower([empty]).shape == (0, 3)
    assert plan.lower([]).shape == (0, 3)
    verify_destination([(plan.source, plan.lower([empty]))], plan.destination, [empty])


def test_verify_refuses_too_few_blocks() -> None:
    (plan,) = Planner([rank()], rank(base_address=1 << 40)).plans(0)
    with pytest.raises(VerificationError) as error:
        verify_pair(plan.lower([ask()]), plan.source, plan.destination, [ask(last_token=9)], plan.heads)
    assert error.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(("kind", "tp_size", "replicas"), [(CacheKind.ATTENTION, 16, 4), (CacheKind.MLA, 8, 8)])
def test_replicas_take_turns(kind: CacheKind, tp_size: int, replicas: int) -> None:
    heads = 1 if kind is CacheKind.MLA else 4
    sources = engine(tp_size, kind=kind, num_kv_heads=heads)
    chosen: Counter[int] = Counter()
    for selector in range(64):
        assignments = choose_sources(sources, rank(kind=kind, num_kv_heads=heads), selector)
        assert len(assignments) == heads, "no more ranks than needed"
        chosen.update(assignment.source_index for assignment in assignments)
    assert set(chosen.values()) == {64 // replicas}, "every replica equally often"
    together = [
        choose_sources(sources, destination, 5) for destination in engine(tp_size, kind=kind, num_kv_heads=heads)
    ]
    assert Counter(part.source_index for assignments in together for part in assignments) == Counter(range(tp_size))


def test_a_negative_selector_is_refused() -> None:
    refused(Reason.INVALID_REQUEST, lambda: Planner([rank()], rank()).plans(-1))


def test_plans_are_cached() -> None:
    planner = Planner(engine(16), rank())
    assert planner.plans(3)[0] is planner.plans(3 + 16 * 1000)[0]
    assert len({plan for selector in range(1000) for plan in planner.plans(selector)}) == 16


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x00", b"\x81\xa1x\x01", b"\xff" * 64, bytes(MAX_SHARD_BYTES + 1)])
def test_garbage_is_no_shard(garbage: bytes) -> None:
    refused(Reason.MALFORMED_MESSAGE, lambda: decode_shard(garbage))


def test_every_truncation_of_a_shard_is_refused() -> None:
    encoded = encode_shard(rank())
    assert decode_shard(encoded) == rank()
    for length in range(len(encoded)):
        refused(Reason.MALFORMED_MESSAGE, lambda length=length: decode_shard(encoded[:length]))  # type: ignore[misc]


def test_a_shard_that_cannot_exist_keeps_its_reason() -> None:
    raw = msgspec.to_builtins(rank())
    raw["regions"][0]["length"] = 8
    refused(Reason.OUT_OF_REGION, lambda: decode_shard(msgspec.msgpack.encode(raw)))
    raw["groups"][0]["components"][0]["layer_offsets"] = [0, 0]
    raw["regions"][0]["length"] = 1 << 30
    refused(Reason.INVALID_LAYOUT, lambda: decode_shard(msgspec.msgpack.encode(raw)))


def test_a_shard_too_long_to_send_is_refused() -> None:
    long = rank(layers=[f"{index:0500}" for index in range(3000)])
    refused(Reason.UNSUPPORTED, lambda: encode_shard(long))


def test_a_shard_that_no_decoder_reads_is_not_sent() -> None:
    """Only decoders check the lengths of lists: such an engine started, and each of its peers refused it."""
    [group] = rank().groups
    groups = [
        msgspec.structs.replace(
            group,
            name=str(number),
            components=tuple(
                msgspec.structs.replace(each, layers=tuple(f"{number}.{layer}" for layer in each.layers))
                for each in group.components
            ),
        )
        for number in range(MAX_GROUPS + 1)
    ]
    most = msgspec.structs.replace(rank(), groups=tuple(groups[1:]))
    assert decode_shard(encode_shard(most)) == most
    more = msgspec.structs.replace(most, groups=tuple(groups))
    refused(Reason.UNSUPPORTED, lambda: encode_shard(more))


def test_digests_tell_plans_apart() -> None:
    sources, destination = engine(2), rank(base_address=1 << 40)
    first, second = choose_sources(sources, destination, 0)
    digests = {
        PairPlan(sources[0], destination, first).digest,
        PairPlan(sources[0], destination, second).digest,
        PairPlan(sources[1], destination, first).digest,
        PairPlan(sources[0], rank(base_address=1 << 41), first).digest,
    }
    assert len(digests) == 4
    received = decode_shard(encode_shard(sources[0]))
    assert PairPlan(received, destination, first).digest in digests


@pytest.mark.parametrize("num_layers", [63, 64])
def test_blocks_of_too_many_runs_are_refused_at_handshake(num_layers: int) -> None:
    """A layer needs 4 heads * 8 tokens * 128 channels = 4096 runs for K and some for V; 64 * 4096 is the limit."""
    shape = {"layers": [str(index) for index in range(num_layers)], "head_size": 128, "block_size": 8}
    source = rank(content=Content.TRANSPOSED_KEYS, **shape)
    destination = rank(content=Content.PLANES, base_address=1 << 50, **shape)
    if num_layers == 64:
        refused(Reason.UNSUPPORTED, lambda: Planner([source], destination))
    else:
        Planner([source], destination)


def test_too_many_descriptors_are_refused() -> None:
    shape = {"layers": [str(index) for index in range(20)], "head_size": 128, "block_size": 8, "num_blocks": 300}
    source = rank(content=Content.TRANSPOSED_KEYS, **shape)
    destination = rank(content=Content.PLANES, base_address=1 << 50, **shape)
    (plan,) = Planner([source], destination).plans(0)
    ids = range(300)
    refused(
        Reason.UNSUPPORTED, lambda: plan.lower([ask(last_token=2400, source_block_ids=ids, destination_block_ids=ids)])
    )
