"""Messages of the control plane: round trips, and one kind of refusal for any other bytes."""

import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.handshake import OURS, Versions, agree, compare_identities
from kvferry.handoff.messages import (
    MAX_ANNOUNCED_BLOCKS,
    MAX_ANNOUNCED_GROUPS,
    MAX_IDENTIFIER_LENGTH,
    MAX_LEASE_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_QUESTION_BYTES,
    MAX_REQUESTS_PER_MESSAGE,
    MAX_TEXT_LENGTH,
    PROTOCOL_VERSION,
    Announce,
    Announced,
    AnnouncedBlocks,
    Answer,
    Directory,
    DirectoryRequest,
    EndPoint,
    Handle,
    HandshakeRefused,
    Identity,
    Introduce,
    Noted,
    Question,
    RankEntry,
    Refusal,
    Release,
    Renew,
    Renewed,
    Revoke,
    Revoked,
    WriteFailed,
    WriteKey,
    WriteSeconds,
    Written,
    decode_answer,
    decode_question,
    encode,
)
from kvferry.transport.protocol import ProcessIdentity

IDENTITY = Identity("model", "weights", "Qwen3ForCausalLM", "float32", 8, 4, 64, "none", "float32")

identifiers = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
texts = st.text(st.characters(codec="utf-8"), max_size=50)
unsigned = st.integers(0, (1 << 63) - 1)
handles = st.lists(st.builds(Handle, identifiers, unsigned), max_size=5).map(tuple)
lease_seconds = st.floats(min_value=1e-3, max_value=MAX_LEASE_SECONDS)
identities = st.builds(Identity, *[identifiers] * 4, *[unsigned] * 3, *[identifiers] * 2)
end_points = st.dictionaries(identifiers, st.binary(max_size=20), max_size=3)
integrities = st.sampled_from(["off", "sample", "full"])
names = st.from_regex(r"a[a-z0-9_-]{0,20}(\.[a-z0-9_-]{1,20}){0,3}", fullmatch=True)
hosts = names | st.ip_addresses().map(str) | st.ip_addresses(v=6).map("[{}]".format)
places = st.builds(EndPoint, hosts, st.integers(1, 65535), unsigned)
processes = st.builds(
    ProcessIdentity,
    st.text(st.characters(codec="utf-8"), max_size=64),
    unsigned,
    st.integers(1, (1 << 31) - 1),
    unsigned,
    st.integers(0, (1 << 32) - 1),
)
ranks = st.builds(
    RankEntry,
    unsigned,
    unsigned,
    st.binary(max_size=50),
    end_points,
    places,
    st.none() | processes,
    integrities,
)
write_keys = st.builds(WriteKey, identifiers, unsigned, unsigned)
announced = st.builds(AnnouncedBlocks, identifiers, *[unsigned] * 3, st.lists(unsigned, max_size=4).map(tuple))
written = st.builds(
    Written,
    write_keys,
    unsigned,
    identifiers,
    unsigned,
    unsigned,
    identifiers,
    st.builds(WriteSeconds, lease_seconds, lease_seconds, lease_seconds),
    st.binary(max_size=50),
)
write_failed = st.builds(WriteFailed, identifiers, texts, key=write_keys, source_index=unsigned, may_land=st.booleans())
questions = st.one_of(
    st.builds(DirectoryRequest, unsigned, unsigned, identifiers),
    st.builds(HandshakeRefused, identifiers, texts, texts, version=unsigned, epoch=unsigned, sender=identifiers),
    st.builds(Renew, unsigned, handles),
    st.builds(Release, unsigned, handles),
    st.builds(
        Introduce,
        unsigned,
        unsigned,
        identifiers,
        identities,
        st.lists(st.binary(max_size=20), min_size=1, max_size=3).map(tuple),
        st.binary(max_size=20),
        end_points,
        places,
        unsigned,
        unsigned,
    ),
    st.builds(
        Announce,
        unsigned,
        unsigned,
        write_keys,
        unsigned,
        unsigned,
        identifiers,
        unsigned,
        identifiers,
        st.lists(announced, min_size=1, max_size=3).map(tuple),
        identifiers,
        lease_seconds,
        integrities,
        st.sampled_from(["", "0123456789abcdef" * 2]),
        st.floats(min_value=0, max_value=MAX_LEASE_SECONDS),
    ),
    st.builds(Revoke, unsigned, write_keys),
    written,
    write_failed,
)
answers = st.one_of(
    st.builds(
        Directory, unsigned, identifiers, unsigned, identities, st.lists(ranks, min_size=1, max_size=3).map(tuple)
    ),
    st.builds(Renewed, unsigned, lease_seconds, handles),
    st.builds(Revoked, unsigned, st.booleans(), st.booleans()),
    st.builds(Noted, unsigned),
    st.builds(Announced, unsigned, texts, st.none() | written | write_failed),
    st.builds(Refusal, identifiers, st.text(st.characters(codec="utf-8"), max_size=50)),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(questions)
def test_questions_survive_the_wire(question: Question) -> None:
    assert decode_question(encode(question)) == question


def test_an_end_point_is_a_host_alone() -> None:
    rank = RankEntry(0, 0, b"", {}, EndPoint("prefill0", 5600, 1))
    encoded = encode(Directory(PROTOCOL_VERSION, "e", 1, IDENTITY, (rank,)))
    with pytest.raises(HandoffError, match="'http://a' is no host: it is a URL") as refused:
        decode_answer(encoded.replace(b"prefill0", b"http://a"))
    assert refused.value.reason is Reason.MALFORMED_MESSAGE


@given(answers)
def test_answers_survive_the_wire(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer


def decode_or_refuse(data: bytes) -> list[Question | Answer]:
    """Return what decodes; anything but a malformed-message refusal fails the test."""
    decoded: list[Question | Answer] = []
    reasons = set()
    for decode in (decode_question, decode_answer):
        try:
            decoded.append(decode(data))
        except HandoffError as error:
            reasons.add(error.reason)
    assert reasons <= {Reason.MALFORMED_MESSAGE}
    return decoded


def announcement_of(**changes: Any) -> Announce:
    announcement = Announce(
        epoch=1,
        engine_epoch=7,
        key=WriteKey("d", 1, 1),
        registration=0,
        token=5,
        transfer_id="x",
        num_tokens=16,
        prompt_digest="digest",
        blocks=(AnnouncedBlocks("full", 0, 0, 16, (1,)),),
        digest="plan",
        seconds=1.0,
        integrity="off",
        adapter="",
        late_seconds=0.0,
    )
    return msgspec.structs.replace(announcement, **changes)


def test_an_announcement_of_the_most_blocks_is_within_a_questions_bound() -> None:
    longest, name = (1 << 63) - 1, "\N{GRINNING FACE}" * MAX_IDENTIFIER_LENGTH
    share = MAX_ANNOUNCED_BLOCKS // MAX_ANNOUNCED_GROUPS
    blocks = AnnouncedBlocks(name, longest, longest, longest, (longest,) * share)
    key = WriteKey(name, longest, longest)
    announcement = announcement_of(
        epoch=longest,
        engine_epoch=longest,
        key=key,
        registration=longest,
        token=longest,
        transfer_id=name,
        num_tokens=longest,
        prompt_digest=name,
        blocks=(blocks,) * MAX_ANNOUNCED_GROUPS,
        digest=name,
    )
    assert len(encode(announcement)) <= MAX_QUESTION_BYTES
    assert decode_question(encode(announcement)) == announcement


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert decode_or_refuse(data) == []


@given(questions | answers, st.data())
def test_a_truncated_message_is_refused(message: Question | Answer, data: st.DataObject) -> None:
    encoded = encode(message)
    length = data.draw(st.integers(0, len(encoded) - 1))
    assert decode_or_refuse(encoded[:length]) == []


@given(questions | answers, st.binary(min_size=1, max_size=4))
def test_trailing_bytes_are_refused(message: Question | Answer, tail: bytes) -> None:
    assert decode_or_refuse(encode(message) + tail) == []


@given(questions | answers, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_mutated_message_is_refused_or_valid(message: Question | Answer, changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(encode(message))
    for position, value in changes:
        mutated[position % len(mutated)] = value
    for decoded in decode_or_refuse(bytes(mutated)):
        assert decode_or_refuse(encode(decoded)) == [decoded], "what was accepted is a message itself"


@given(questions | answers, st.data())
def test_a_field_of_another_type_is_refused_or_valid(message: Question | Answer, data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(anything)
    for decoded in decode_or_refuse(msgspec.msgpack.encode(fields)):
        assert decode_or_refuse(encode(decoded)) == [decoded]


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


ARRAY_OF_4_GI = b"\xdd\xff\xff\xff\xff"
ENDING_WITH_AN_ARRAY = packed(type="release", epoch=1, handles=0)[:-1]
ENDING_WITH_AN_UNKNOWN_FIELD = packed(type="noted", epoch=1, unknown=0)[:-1]
TIMESTAMP_OUT_OF_RANGE = b"\xc7\x0c\xff" + b"\xff" * 12


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"pickle",
        packed(type="no-such-message"),
        packed(epoch=1, handles=[]),
        packed(type="release", epoch=1),
        packed(type="release", epoch=-1, handles=[]),
        packed(type="release", epoch=1 << 63, handles=[]),
        packed(type="release", epoch=True, handles=[]),
        packed(type="release", epoch=1.5, handles=[]),
        packed(type="release", epoch=1, handles=None),
        packed(type="release", epoch=1, handles=[["a", 1]]),
        packed(type="release", epoch=1, handles=[{"request_id": "", "generation": 1}]),
        packed(type="release", epoch=1, handles=[{"request_id": "a" * 513, "generation": 1}]),
        packed(
            type="renew",
            epoch=1,
            handles=[{"request_id": "a", "generation": n} for n in range(MAX_REQUESTS_PER_MESSAGE + 1)],
        ),
        ENDING_WITH_AN_ARRAY + ARRAY_OF_4_GI,
        ENDING_WITH_AN_ARRAY + b"\x91" * 100_000,
        ENDING_WITH_AN_ARRAY + TIMESTAMP_OUT_OF_RANGE,
        ENDING_WITH_AN_ARRAY + b"\xa2\xff\xff",
        packed(type="renewed", epoch=1, lease_seconds=0.0, lost=[]),
        packed(type="renewed", epoch=1, lease_seconds=float("nan"), lost=[]),
        packed(type="renewed", epoch=1, lease_seconds=float("inf"), lost=[]),
        packed(type="renewed", epoch=1, lease_seconds=-1.0, lost=[]),
        packed(type="refusal", reason="", message=""),
        packed(type="refusal", reason="x", message="m" * 4097),
        packed(
            type="directory",
            version=1,
            engine_id="e",
            epoch=1,
            identity=msgspec.to_builtins(IDENTITY),
            ranks=[],
        ),
        ENDING_WITH_AN_UNKNOWN_FIELD + ARRAY_OF_4_GI,
        ENDING_WITH_AN_UNKNOWN_FIELD + b"\x91" * 100_000,
        packed(type="noted", epoch=1, unknown=bytes(MAX_MESSAGE_BYTES)),
    ],
    ids=lambda data: f"{len(data)}-{data[:12].hex()}",
)
def test_a_field_beyond_its_bound_is_refused(data: bytes) -> None:
    assert decode_or_refuse(data) == []


@pytest.mark.parametrize(
    ("adapter", "is_one"),
    [
        ("", True),
        ("0123456789abcdef" * 2, True),
        ("0123456789abcdef", False),
        ("0123456789abcdef" * 4, False),
        ("0123456789ABCDEF" * 2, False),
        ("0123456789abcdef" * 2 + "\n", False),
    ],
)
def test_the_digest_of_an_adapter_is_one_or_empty(adapter: str, is_one: bool) -> None:
    """It goes into log lines; ``kv_transfer_params`` have it with the same bounds."""
    asked = announcement_of(adapter=adapter)
    assert decode_or_refuse(encode(asked)) == ([asked] if is_one else [])


def test_bounds_admit_their_last_value() -> None:
    """The refusals above are by the bound and nothing else."""
    full = tuple(Handle("a" * 512, (1 << 63) - 1) for _ in range(MAX_REQUESTS_PER_MESSAGE))
    renew = Renew((1 << 63) - 1, full)
    assert decode_question(encode(renew)) == renew
    longest = tuple(Handle("😀" * 512, (1 << 63) - 1) for _ in range(MAX_REQUESTS_PER_MESSAGE))
    assert decode_question(encode(Renew((1 << 63) - 1, longest))).handles == longest  # type: ignore[union-attr]
    renewed = decode_answer(encode(Renewed(0, MAX_LEASE_SECONDS, ())))
    assert isinstance(renewed, Renewed)
    assert renewed.lease_seconds == MAX_LEASE_SECONDS
    assert decode_answer(encode(Refusal("x" * 512, "é" * 4096))) == Refusal("x" * 512, "é" * 4096)


def test_a_question_has_a_lower_limit_than_an_answer() -> None:
    """A server takes questions of anybody: the limit holds before the question is decoded."""
    limits = [(decode_question, Release(1, ()), MAX_QUESTION_BYTES), (decode_answer, Noted(1), MAX_MESSAGE_BYTES)]
    for decode, message, limit in limits:
        frame = len(packed(**msgspec.to_builtins(message), padding=b""))  # type: ignore[arg-type]
        for padding, is_refused in ((limit - frame - 3, False), (limit - frame - 2, True)):
            data = packed(**msgspec.to_builtins(message), padding=bytes(padding))  # type: ignore[arg-type]
            assert (len(data) > limit) == is_refused
            if is_refused:
                with pytest.raises(HandoffError, match="exceeds the limit"):
                    decode(data)
            else:
                assert decode(data) == message


def test_a_question_is_no_answer_and_an_answer_no_question() -> None:
    with pytest.raises(HandoffError):
        decode_answer(encode(Release(1, ())))
    with pytest.raises(HandoffError):
        decode_question(encode(Noted(1)))


def test_a_refused_message_says_what_to_check() -> None:
    with pytest.raises(HandoffError, match=r"protocol version.*\[malformed-message\]"):
        decode_question(b"GET / HTTP/1.1")


def test_the_longest_error_still_reaches_its_peer() -> None:
    """A peer refuses a text beyond its bound, so that a load would fail at its deadline only."""
    error = HandoffError(Reason.ABORTED, "m" * (MAX_TEXT_LENGTH + 1), "r" * (MAX_TEXT_LENGTH + 1))
    refusal = decode_answer(encode(Refusal.of(error)))
    failed = decode_question(encode(WriteFailed.of(error, key=WriteKey("d/0", 7, 1), source_index=0, may_land=False)))
    for told in (refusal, failed):
        assert isinstance(told, Refusal | WriteFailed)
        found = told.error()
        assert found.reason is Reason.ABORTED
        assert (found.message, found.remedy) == (error.message[:-1], error.remedy[:-1])


def test_unknown_fields_are_left_to_later_versions() -> None:
    assert decode_answer(packed(type="noted", epoch=7, more=[1, {"a": 2}])) == Noted(7)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model", "other", Reason.MODEL_MISMATCH),
        ("weights", "other", Reason.MODEL_MISMATCH),
        ("architecture", "LlamaForCausalLM", Reason.MODEL_MISMATCH),
        ("kv_dtype", "bfloat16", Reason.DTYPE_MISMATCH),
        ("num_layers", 9, Reason.MODEL_MISMATCH),
        ("num_kv_heads", 2, Reason.MODEL_MISMATCH),
        ("head_size", 128, Reason.HEAD_SIZE_MISMATCH),
        ("quantization", "fp8", Reason.MODEL_MISMATCH),
        ("compute_dtype", "bfloat16", Reason.DTYPE_MISMATCH),
    ],
)
def test_every_field_of_the_identity_is_compared(field: str, value: str | int, reason: Reason) -> None:
    theirs = msgspec.structs.replace(IDENTITY, **{field: value})
    with pytest.raises(HandoffError) as caught:
        compare_identities(prefill=theirs, decode=IDENTITY)
    assert caught.value.reason is reason
    assert f"{field}: prefill has {value!r}, decode has {getattr(IDENTITY, field)!r}" in caught.value.message
    others = set(Identity.__struct_fields__) - {field}
    assert not [other for other in others if f"{other}:" in caught.value.message], "only what differs is named"


def test_dynamo_10027_all_differences_are_named_at_once() -> None:
    theirs = msgspec.structs.replace(IDENTITY, model="other", head_size=1, kv_dtype="float16")
    with pytest.raises(HandoffError) as caught:
        compare_identities(theirs, IDENTITY)
    assert all(f"{field}:" in caught.value.message for field in ("model", "head_size", "kv_dtype"))


@pytest.mark.parametrize(
    "field", ["engine_epoch", "registration", "token", "integrity", "adapter", "late_seconds", "prompt_digest"]
)
def test_an_announcement_says_everything(field: str) -> None:
    """A source that filled in what is not said would write what the destination has not meant."""
    fields = msgspec.msgpack.decode(encode(announcement_of()))
    del fields[field]
    assert decode_or_refuse(msgspec.msgpack.encode(fields)) == []


@pytest.mark.parametrize("epoch", [-1, 1 << 63, "7", None, True])
def test_the_epoch_of_the_source_s_engine_is_a_number(epoch: object) -> None:
    fields = msgspec.msgpack.decode(encode(announcement_of()))
    assert fields["engine_epoch"] == 7
    assert decode_or_refuse(msgspec.msgpack.encode({**fields, "engine_epoch": epoch})) == []


@pytest.mark.parametrize("over", [True, False])
def test_an_announcement_that_is_asked_again_is_answered_with_the_report_that_was_lost(over: bool) -> None:
    report = (
        Written(WriteKey("d/0", 7, 1), 2, "plan", 512, 3, "cma", WriteSeconds(0.1, 0.5, 0.2), bytes(8))
        if over
        else None
    )
    answer = decode_answer(encode(Announced(1, "cma", report)))
    assert isinstance(answer, Announced)
    assert answer.over == report
    assert decode_answer(encode(Announced(1, ""))) == Announced(1, "", None)


@pytest.mark.parametrize("over", [packed(type="noted", epoch=1), packed(type="written"), b"\xc3", b"\xa1x"])
def test_an_answer_is_over_with_a_report_and_with_nothing_else(over: bytes) -> None:
    fields = {**msgspec.msgpack.decode(encode(Announced(1, "cma"))), "over": msgspec.msgpack.decode(over)}
    assert decode_or_refuse(msgspec.msgpack.encode(fields)) == []


@pytest.mark.parametrize("may_land", ["yes", "no", "unsaid", 1, None])
def test_what_may_land_is_said_with_yes_or_no(may_land: object) -> None:
    failed = WriteFailed.of(
        HandoffError(Reason.ABORTED, "no."), key=WriteKey("d/0", 7, 1), source_index=0, may_land=True
    )
    fields = msgspec.msgpack.decode(encode(failed))
    assert fields["may_land"] is True
    assert decode_or_refuse(msgspec.msgpack.encode({**fields, "may_land": may_land})) == []
    del fields["may_land"]
    assert decode_or_refuse(msgspec.msgpack.encode(fields)) == []


@pytest.mark.parametrize(
    ("theirs", "spoken"),
    [
        (Versions(PROTOCOL_VERSION, PROTOCOL_VERSION), PROTOCOL_VERSION),
        (Versions(PROTOCOL_VERSION, PROTOCOL_VERSION + 1), PROTOCOL_VERSION),
        (Versions(0, PROTOCOL_VERSION), PROTOCOL_VERSION),
        (Versions(0, 1 << 62), PROTOCOL_VERSION),
    ],
)
def test_two_engines_speak_the_lower_of_their_newest_versions(theirs: Versions, spoken: int) -> None:
    assert agree(decode=theirs) == agree(prefill=theirs) == spoken
    later = Versions(PROTOCOL_VERSION, PROTOCOL_VERSION + 3)
    assert agree(prefill=later, decode=later) == PROTOCOL_VERSION + 3


@pytest.mark.parametrize(
    ("theirs", "older"),
    [
        (Versions(PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1), "peer"),
        (Versions(PROTOCOL_VERSION, PROTOCOL_VERSION - 1), "peer"),
        (Versions(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2), "this side"),
    ],
)
def test_engines_without_a_common_version_are_told_both_and_which_one_to_update(theirs: Versions, older: str) -> None:
    for ours, peers, versions in (
        ("prefill", "decode", {"decode": theirs}),
        ("decode", "prefill", {"prefill": theirs}),
    ):
        with pytest.raises(HandoffError) as caught:
            agree(**versions)
        assert caught.value.reason is Reason.PROTOCOL_MISMATCH
        assert f"{ours} speaks {OURS}" in caught.value.message
        assert f"{peers} speaks {theirs}" in caught.value.message
        assert f"on the {peers if older == 'peer' else ours} engine" in caught.value.remedy


def test_reasons_on_the_wire_are_stable() -> None:
    """Peers of other versions match on these strings; a change here is a change of the protocol."""
    assert set(string.ascii_lowercase + "-") >= set("".join(Reason))
    assert Reason.PEER_CHANGED.value == "peer-changed"
    assert Reason.PEER_UNREACHABLE.value == "peer-unreachable"
