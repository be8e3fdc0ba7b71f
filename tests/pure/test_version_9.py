"""Version 9 of the protocol: today's messages have its fields, and read and write what it recorded."""

import json
import secrets
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.execution.digests import DigestTable
from kvferry.handoff import messages as today
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.holds import handle_of_transfer
from kvferry.handoff.messages import OLDEST_PROTOCOL_VERSION, Answer, Handle, Question, decode_answer, decode_question
from kvferry.handoff.wire import bootstrap
from kvferry.layout import component, group, shard
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import decode_shard, encode_shard
from kvferry.plan import match
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.match import selector_of
from kvferry.plan.planner import Planner
from kvferry.transport import end_points

from .. import version_9 as nine

RECORDED: dict[str, Any] = json.loads(Path(nine.__file__).with_suffix(".json").read_text())
MESSAGES: dict[str, str] = RECORDED["messages"]
FROZEN = [
    *(each for kind in (nine.Question, nine.Answer) for each in kind.__args__),
    nine.Handle,
    nine.Identity,
    nine.EndPoint,
    nine.DigestTable,
    nine.RankEntry,
    nine.WriteKey,
    nine.AnnouncedBlocks,
]
CARRIED = [
    (nine.Shard, shard.Shard),
    (nine.Region, shard.Region),
    (nine.CacheGroup, group.CacheGroup),
    (nine.TokenShare, group.TokenShare),
    (nine.TensorScale, group.TensorScale),
    (nine.Component, component.Component),
    (nine.HeadRange, component.HeadRange),
    (nine.Assignment, match.Assignment),
    (nine.ComponentHeads, match.ComponentHeads),
    (nine.ProcessIdentity, end_points.ProcessIdentity),
    (nine.ProcessEndPoint, end_points.ProcessEndPoint),
    (nine.Offer, bootstrap.Offer),
    (nine.Offer, bootstrap.SignedOffer),
    (nine.Entry, bootstrap.Entry),
]
IN_DIGESTS = {nine.AnnouncedBlocks, *(each for each, _ in CARRIED[:9])}
"""Structs of which both sides compute digests, so that not even a field may be added."""
PAIRS = [(each, getattr(today, each.__name__)) for each in FROZEN] + CARRIED


def shape(kind: Any) -> Any:
    """Return a type as plain data: bounds, and of a struct its name alone, since each struct is compared by itself."""
    if isinstance(kind, msgspec.inspect.StructType):
        return kind.cls.__name__.removeprefix("Signed")
    if isinstance(kind, msgspec.inspect.EnumType):
        return kind.cls.__name__
    if isinstance(kind, msgspec.inspect.Type):
        parts = {name: shape(getattr(kind, name)) for name in kind.__struct_fields__}
        return type(kind).__name__, *parts.items()
    return tuple(sorted(map(str, map(shape, kind)))) if isinstance(kind, tuple) else kind


def compare(frozen: type[msgspec.Struct], ours: type[msgspec.Struct]) -> None:
    """Compare a struct of version 9 with today's, which may have more fields, each with a default."""
    before, after = msgspec.inspect.type_info(frozen), msgspec.inspect.type_info(ours)
    assert isinstance(before, msgspec.inspect.StructType)
    assert isinstance(after, msgspec.inspect.StructType)
    assert (after.tag_field, after.tag, after.array_like) == (before.tag_field, before.tag, before.array_like)
    assert not after.forbid_unknown_fields, "a later version may add a field"
    found = {field.encode_name: field for field in after.fields}
    for field in before.fields:
        kept = found.pop(field.encode_name)
        assert shape(kept.type) == shape(field.type), field.name
        assert kept.required == field.required, field.name
        assert kept.default == field.default or not field.required, field.name
    if before.array_like or frozen in IN_DIGESTS:
        assert not found, "both sides compute digests of these fields"
    assert [name for name, field in found.items() if field.required] == [], "version 9 does not send these fields"


@pytest.mark.parametrize(("frozen", "ours"), PAIRS, ids=lambda kind: kind.__name__)
def test_no_field_of_version_9_was_renamed_or_retyped(frozen: type[msgspec.Struct], ours: type[msgspec.Struct]) -> None:
    assert OLDEST_PROTOCOL_VERSION <= nine.VERSION, "delete version_9.py and its tests"
    compare(frozen, ours)


def test_a_member_of_version_9_still_exists() -> None:
    for frozen, ours in ((nine.CacheKind, group.CacheKind), (nine.Atom, component.Atom)):
        assert {each.value for each in frozen} <= {each.value for each in ours}


def test_the_comparison_finds_what_version_9_could_not_read() -> None:
    def like(name: str, **changes: Any) -> type[msgspec.Struct]:
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(nine.Renewed)} | changes
        kept = [(field, kind) for field, kind in fields.items() if kind is not None]
        return msgspec.defstruct("Renewed", kept, tag=name, tag_field="type", frozen=True)

    compare(nine.Renewed, like("renewed"))
    for changed in (
        like("was-renewed"),
        like("renewed", epoch=None, its_epoch=nine.Unsigned),
        like("renewed", epoch=int),
        like("renewed", epoch=nine.Text),
        like("renewed", lost=tuple[nine.Handle, ...]),
        like("renewed", more=nine.Unsigned),
    ):
        with pytest.raises((AssertionError, KeyError)):
            compare(nine.Renewed, changed)


def rank_of_version_9(**fields: int) -> shard.Shard:
    """Return the shard of a rank of the model that was recorded."""
    sizes = {"num_kv_heads": 4, "head_size": 8, "itemsize": 4, "block_size": 4, "num_blocks": 6}
    return shard_for(layers=["0", "1"], layout=NamedLayout.BHLNC, **sizes, **fields)  # type: ignore[arg-type]


def raw(message: bytes) -> Any:
    return msgspec.msgpack.decode(message)


def is_within(told: Any, read: Any) -> bool:
    """Return whether all that one side has told was read by the other, which may know more fields."""
    if isinstance(told, dict):
        return all(name in read and is_within(value, read[name]) for name, value in told.items())
    if isinstance(told, list):
        return len(told) == len(read) and all(map(is_within, told, read))
    return bool(told == read)


@pytest.mark.parametrize("tag", MESSAGES)
def test_a_recorded_message_of_version_9_is_read_whole_and_written_so_that_version_9_reads_it(tag: str) -> None:
    recorded = bytes.fromhex(MESSAGES[tag])
    is_question = tag in {each.__struct_config__.tag for each in nine.Question.__args__}
    ours: Question | Answer = (decode_question if is_question else decode_answer)(recorded)
    assert is_within(raw(recorded), raw(today.encode(ours))), "a field was lost or renamed"
    theirs = msgspec.msgpack.decode(today.encode(ours), type=nine.Question if is_question else nine.Answer)
    assert msgspec.msgpack.encode(theirs) == recorded, "version 9 reads what this version writes"


def test_every_message_of_version_9_is_recorded() -> None:
    kinds = {each.__struct_config__.tag for kind in (nine.Question, nine.Answer) for each in kind.__args__}
    assert MESSAGES.keys() == kinds


@pytest.mark.parametrize("name", RECORDED["shards"])
def test_a_shard_has_the_bytes_of_version_9(name: str) -> None:
    """Ranks of a push compare digests of their shards, so that not even a field may be added."""
    recorded = bytes.fromhex(RECORDED["shards"][name])
    assert encode_shard(decode_shard(recorded)) == recorded
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(recorded, type=nine.Shard), order="deterministic") == recorded


def test_plans_are_named_and_chosen_as_in_version_9() -> None:
    source, destination = (decode_shard(bytes.fromhex(RECORDED["shards"][each])) for each in ("source", "destination"))
    [plan] = Planner([source], destination).plans(0)
    assert {"whole": plan.digest} == RECORDED["plan_digests"]
    frozen = (msgspec.msgpack.decode(encode_shard(each), type=nine.Shard) for each in (source, destination))
    assert nine.plan_digest(*frozen) == RECORDED["plan_digests"]["whole"]
    ranks = [rank_of_version_9(tp_rank=rank, tp_size=8, base_address=4096) for rank in range(8)]
    planner = Planner(ranks, destination)
    chosen = {
        name: [plan.assignment.source_index for plan in planner.plans(selector_of(name))]
        for name in RECORDED["chosen_sources"]
    }
    assert chosen == RECORDED["chosen_sources"]
    assert msgspec.to_builtins(handle_of_transfer("transfer")) == RECORDED["handle_of_transfer"]


def test_a_guard_word_is_that_of_version_9() -> None:
    params = msgspec.convert(RECORDED["params"], nine.RemoteParams)
    ferry, ids = params.kvferry, params.remote_block_ids
    prompt = HeldPrompt(ferry.prompt_digest, ferry.num_tokens, ferry.block_sizes, [np.array(each) for each in ids])
    assert guard_word("p", 7, Handle("request a", 3), prompt).hex() == RECORDED["guard_word"]
    assert nine.guard_word("p", ferry, "request a", ids).hex() == RECORDED["guard_word"]


@pytest.mark.parametrize("kept", ["sample", "full"])
def test_digests_of_a_cache_are_those_of_version_9(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode rank compares its own digests with those that the prefill rank has computed."""
    memory = (np.arange(12288) * 31 % 251).astype(np.uint8)
    monkeypatch.setattr(secrets, "randbits", lambda bits: 99)
    cache = rank_of_version_9(base_address=int(memory.ctypes.data))
    table = DigestTable(cache, Integrity(kept))
    assert table.entry.seed == 99
    table.fill(10, {"full": np.array([5, 1, 3])})
    length = table.entry.open_address - table.entry.address  # version 9 knows no words behind these
    words = np.frombuffer(nine.bytes_at(table.entry.address, length), np.uint64)
    found = [*(f"{word:016x}" for word in words if word)][:6], int((words != 0).sum()), len(words)
    assert [*found[0], *found[1:]] == RECORDED["digests"][kept]


def test_the_end_point_of_a_process_is_that_of_version_9() -> None:
    recorded = bytes.fromhex(RECORDED["end_point"])
    ours = end_points.decode_end_point(recorded, end_points.ProcessEndPoint, "cma")
    assert msgspec.msgpack.encode(ours) == recorded
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(recorded, type=nine.ProcessEndPoint)) == recorded


def test_an_offer_is_signed_over_the_bytes_of_version_9() -> None:
    ours = msgspec.convert(RECORDED["offer"], bootstrap.Offer)
    newer = msgspec.structs.replace(ours, newest=10)
    signed = {bootstrap._signed_data(each).hex() for each in (ours, newer)}
    assert signed == {RECORDED["signed_offer"]}
    assert nine.signed_offer(msgspec.convert(RECORDED["offer"], nine.Offer)).hex() == RECORDED["signed_offer"]
    assert msgspec.convert(msgspec.to_builtins(newer), nine.Offer) == msgspec.convert(RECORDED["offer"], nine.Offer)
