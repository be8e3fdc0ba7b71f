"""Messages of the control plane, bounded and schema-checked; no pickle.

A message is a msgpack map with a ``type`` tag. A server answers a message that does not decode with a
:class:`Refusal` and goes on.

Fields that a message does not know are ignored, and a field that is added after version 1 has a default: so an engine
can read the messages of the version before and of the version after its own. ``docs/contributing.md`` says how to add a
field.
"""

from collections import OrderedDict
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.wire.trust import check_host
from kvferry.transport.protocol import ProcessIdentity

PROTOCOL_VERSION = 1
"""An engine that does not speak it is refused (protocol-mismatch)."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Limit of an answer: a directory of many ranks is long."""
MAX_QUESTION_BYTES = 4 * 1024 * 1024
MAX_REQUESTS_PER_MESSAGE = 1024
"""Keeps a question of the longest identifiers, four bytes a character, within ``MAX_QUESTION_BYTES``."""
MAX_IDENTIFIER_LENGTH = 512
EPOCH_BITS = 53  # an epoch passes through JSON, which routers may parse as a double
MAX_ANNOUNCED_BLOCKS = 1 << 18
"""Limit for all groups of an announcement together: keeps the question within ``MAX_QUESTION_BYTES``."""
MAX_ANNOUNCED_GROUPS = 256
MAX_DIGEST_BYTES = 1 << 20
"""Limit of the digests of one write."""
MAX_TEXT_LENGTH = 4096
FIRST_WEIGHTS = "default"
"""The version of the weights that an engine has loaded at its start, by vLLM's name."""
MAX_LEASE_SECONDS = 7 * 86400.0

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_IDENTIFIER_LENGTH)]
# Names go into log lines and messages: no control characters, and no surrogates, which no message can carry.
Name = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z", max_length=MAX_IDENTIFIER_LENGTH)]
"""An :data:`Identifier` that a request's parameters carry too."""
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_LENGTH)]
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Digests = Literal["off", "sample", "full"]
"""Which bytes two ranks compare by digests, see :class:`kvferry.execution.digests.Integrity`."""
AdapterDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z", max_length=32)]
"""A digest in a peer's message or in a request's parameters, empty for none. It goes into log lines."""
LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_SECONDS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_LEASE_SECONDS)]


class Handle(msgspec.Struct, frozen=True, order=True):
    """The name of one hold of a prefill engine, see :mod:`kvferry.handoff.holds`."""

    request_id: Identifier
    generation: Unsigned


class Identity(msgspec.Struct, frozen=True):
    """What two engines must agree on before a byte moves, compared field by field.

    ``model`` is a digest of the model's configuration, ``weights`` a digest of its weights and revision; both are
    opaque here. ``quantization`` names the method that quantised the weights, in the checkpoint or while they are
    loaded. The model computes in ``compute_dtype`` and caches in ``kv_dtype``.
    """

    model: Identifier
    weights: Identifier
    architecture: Identifier
    kv_dtype: Identifier
    num_layers: Unsigned
    num_kv_heads: Unsigned
    head_size: Unsigned
    quantization: Identifier
    compute_dtype: Identifier


class EndPoint(msgspec.Struct, frozen=True, order=True):
    """Where a rank or an engine answers questions, and the epoch of its process."""

    host: Identifier
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    epoch: Unsigned

    def __post_init__(self) -> None:
        check_host(self.host)


class RankEntry(msgspec.Struct, frozen=True):
    """One rank of a prefill engine: where its cache lies and how to reach the cache.

    ``shard`` is an encoded :class:`kvferry.layout.Shard`, ``end_points`` maps a transport's name to its end point.
    The rank answers at ``answers_at``. ``process`` is the process that writes, whose end a destination on the same host
    can prove. ``digests`` says what the rank computes for destinations that ask.
    """

    tp_rank: Unsigned
    pp_rank: Unsigned
    shard: Payload
    end_points: dict[Identifier, Payload]
    answers_at: EndPoint
    process: ProcessIdentity | None = None
    digests: Digests = "off"


class DirectoryRequest(msgspec.Struct, frozen=True, tag="directory-request", tag_field="type"):
    """Asks a prefill engine for its ranks, and opens a handshake. ``sender`` is for the log only.

    ``version`` is the oldest version that the decode engine speaks, ``newest`` the newest one: the answer is in the
    lower of both engines' newest.
    """

    version: Unsigned
    newest: Unsigned
    sender: Identifier


class Directory(msgspec.Struct, frozen=True, tag="directory", tag_field="type"):
    """A prefill engine's ranks in this epoch. ``version`` is the one that both engines speak from now on.

    ``weights_version`` is the engine's own name of its current weights, which changes when weights are replaced in
    place; ``identity`` is that of the weights at the engine's start.
    """

    version: Unsigned
    engine_id: Identifier
    epoch: Unsigned
    identity: Identity
    ranks: Annotated[tuple[RankEntry, ...], msgspec.Meta(min_length=1, max_length=4096)]
    weights_version: Text = FIRST_WEIGHTS


class Renew(msgspec.Struct, frozen=True, tag="renew", tag_field="type"):
    """Extends the leases of holds that the decode engine still means to load."""

    epoch: Unsigned
    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]


class Renewed(msgspec.Struct, frozen=True, tag="renewed", tag_field="type"):
    """Answers :class:`Renew`: the lease in seconds from now, and the handles that are no longer held."""

    epoch: Unsigned
    lease_seconds: LeaseSeconds
    lost: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]


class Release(msgspec.Struct, frozen=True, tag="release", tag_field="type"):
    """Ends holds: no rank of the decode engine loads them any more. Idempotent."""

    epoch: Unsigned
    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]


class Drain(msgspec.Struct, frozen=True, tag="drain", tag_field="type"):
    """With ``begin`` the engine is no longer ready, and soon takes no more prompts to hold; else nothing changes."""

    begin: bool


class Draining(msgspec.Struct, frozen=True, tag="draining", tag_field="type"):
    """Answers :class:`Drain`.

    ``is_draining`` says to a probe (without ``begin``) whether the engine was told to drain, and with ``begin`` whether
    it takes no more prompts: routers need some seconds to notice. ``num_holds`` are the prompts that the engine holds
    for decode engines or computes for them, ``num_loads`` its requests that are not finished or use holds of others.
    """

    engine_id: Identifier
    epoch: Unsigned
    is_draining: bool
    num_holds: Unsigned
    num_loads: Unsigned


class StillWriting(msgspec.Struct, frozen=True, tag="still-writing", tag_field="type"):
    """A rank tells its own engine all requests that the rank gave up and into whose blocks a peer may still write.

    The report with the largest ``number`` counts. ``secret`` never leaves the engine.
    """

    epoch: Unsigned
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    rank: Unsigned
    number: Unsigned
    request_ids: Annotated[tuple[Identifier, ...], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]


class Noted(msgspec.Struct, frozen=True, tag="noted", tag_field="type"):
    """Acknowledges every question that asks for nothing more: the process in this epoch has it, and acts on it."""

    epoch: Unsigned


class WriteKey(msgspec.Struct, frozen=True, order=True):
    """The name of one write to one destination rank, the ``receiver``, which uses each number once in an epoch.

    Replicas of an engine may share the name ``receiver``: only name and epoch together name a process. The number is
    random: a report that names it comes from a source that the receiver has told it.
    """

    receiver: Identifier
    receiver_epoch: Unsigned
    number: Unsigned

    @property
    def name(self) -> str:
        """The same in the logs of both ranks.

        >>> WriteKey("d/0", 7, 5).name
        'write 5 to d/0 7'
        """
        return f"write {self.number} to {self.receiver} {self.receiver_epoch}"


class AnnouncedBlocks(msgspec.Struct, frozen=True):
    """Tokens of one cache group that a destination rank wants, and its blocks for these tokens.

    The first block begins at ``block_token``, at or before ``first_token``. A state is token 0 to 1 of one block.
    """

    group: Identifier
    first_token: Unsigned
    end_token: Unsigned
    block_token: Unsigned
    block_ids: Annotated[tuple[Unsigned, ...], msgspec.Meta(max_length=MAX_ANNOUNCED_BLOCKS)]


class Introduce(msgspec.Struct, frozen=True, tag="introduce", tag_field="type"):
    """A destination rank tells a source rank where its cache lies and how to reach the cache, once in an epoch.

    ``version`` is that of the handshake with the source's engine. ``sources`` are the shards of all ranks of the
    source's engine, as its directory names them: both ranks plan from the same shards. A destination that has
    registered its memory anew introduces itself again, with a larger ``registration``. Announcements name the
    introduction by its ``token``, which the destination has made for this source alone: an introduction that
    somebody else makes in its name does not take its place.
    """

    version: Unsigned
    epoch: Unsigned
    receiver: Identifier
    identity: Identity
    sources: Annotated[tuple[Payload, ...], msgspec.Meta(min_length=1, max_length=4096)]
    shard: Payload
    end_points: dict[Identifier, Payload]
    answers_at: EndPoint
    registration: Unsigned
    token: Unsigned


class Announce(msgspec.Struct, frozen=True, tag="announce", tag_field="type"):
    """A destination rank's blocks are ready to be written, from now on for ``seconds``.

    The ``transfer_id`` names the source's hold (see :func:`kvferry.handoff.holds.transfer_of`), ``engine_epoch`` is the
    epoch in which the destination knows the source's engine: after a reset the blocks of a hold are others.
    ``num_tokens`` and ``prompt_digest`` name the prompt, ``digest`` names the part of the plan that this source writes.
    The blocks are those of one ``registration`` of the destination's memory: an announcement that a fence overtook must
    not reach memory that is open again. ``integrity`` says which digests the destination compares. ``adapter`` is the
    digest of the weights of the prompt's adapter, empty where there is none. A source that may be told late of a hold
    waits ``late_seconds`` for it. ``token`` is that of the :class:`Introduce`.
    """

    epoch: Unsigned
    engine_epoch: Unsigned
    key: WriteKey
    registration: Unsigned
    token: Unsigned
    transfer_id: Identifier
    num_tokens: Unsigned
    prompt_digest: Identifier
    blocks: Annotated[tuple[AnnouncedBlocks, ...], msgspec.Meta(min_length=1, max_length=MAX_ANNOUNCED_GROUPS)]
    digest: Identifier
    seconds: LeaseSeconds
    integrity: Digests
    adapter: AdapterDigest
    late_seconds: Seconds


class Revoke(msgspec.Struct, frozen=True, tag="revoke", tag_field="type"):
    """The destination wants its blocks back: stop writing. Asked again until the answer says ``is_quiet``."""

    epoch: Unsigned
    key: WriteKey


class Revoked(msgspec.Struct, frozen=True, tag="revoked", tag_field="type"):
    """Answers :class:`Revoke`. With ``is_quiet`` no byte of this write lands any more.

    With ``may_land`` the source writes no more, but a write has failed in a connection that may still deliver it: no
    later answer will be ``is_quiet``.
    """

    epoch: Unsigned
    is_quiet: bool
    may_land: bool = False


class WriteSeconds(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the time of a write went at its source, from the announcement to the report.

    ``post`` is the time without a transfer: until the prompt is computed and the rank connected, and between batches.
    ``move`` is that of the transfers, ``confirm`` the rest, after the last of them.
    """

    post: Seconds = 0.0
    move: Seconds = 0.0
    confirm: Seconds = 0.0


class Written(msgspec.Struct, frozen=True, tag="written", tag_field="type"):
    """A source reports that its whole part has landed; ``digest`` is that of the announcement.

    ``digests`` are those of the bytes that the announcement asks for, 8 bytes each (see
    :mod:`kvferry.execution.digests`). The other fields are for the destination's log.
    """

    key: WriteKey
    source_index: Unsigned
    digest: Identifier
    num_bytes: Unsigned
    num_descriptors: Unsigned
    transport: Text
    seconds: WriteSeconds
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)] = b""


class Failure(msgspec.Struct, frozen=True):
    """An error of a peer: a stable reason, a message and a remedy.

    >>> Refusal.of(HandoffError(Reason.ABORTED, "x was aborted.")).error().reason.value
    'aborted'
    >>> Refusal("of a later version", "no.").error().reason.value
    'protocol-mismatch'
    """

    reason: Identifier
    message: Text
    remedy: Text = ""

    @classmethod
    def of(cls, error: KVFerryError, **fields: object) -> Self:
        """Return the message that tells a peer of an error."""
        message, remedy = error.message[:MAX_TEXT_LENGTH], error.remedy[:MAX_TEXT_LENGTH]
        return cls(reason=error.reason.value, message=message, remedy=remedy, **fields)

    def error(self) -> HandoffError:
        """Return the peer's error; its reason is protocol-mismatch where this version does not know the peer's."""
        known = self.reason in set(Reason)
        return HandoffError(Reason(self.reason) if known else Reason.PROTOCOL_MISMATCH, self.message, self.remedy)


class HandshakeRefused(Failure, frozen=True, kw_only=True, tag="handshake-refused", tag_field="type"):
    """A decode rank tells a prefill engine, for the engine's log, why the rank does not load from it.

    The decode rank compares: without this message only the decode engine's log would say why nothing is loaded.
    """

    version: Unsigned
    epoch: Unsigned
    sender: Identifier


class WriteFailed(Failure, frozen=True, kw_only=True, tag="write-failed", tag_field="type"):
    """A source gave a write up and writes no more; it ``may_land`` where a connection that broke may deliver it."""

    key: WriteKey
    source_index: Unsigned
    may_land: bool


class Announced(msgspec.Struct, frozen=True, tag="announced", tag_field="type"):
    """Answers :class:`Announce`. The source writes over this ``transport`` only; empty where that is still open.

    An announcement that is asked again is answered with ``over``, the report of a write that has ended: the report that
    the source sent may be lost.
    """

    epoch: Unsigned
    transport: Text
    over: Written | WriteFailed | None = None


class Refusal(Failure, frozen=True, tag="refusal", tag_field="type"):
    """Refuses a question."""


Question = (
    DirectoryRequest
    | HandshakeRefused
    | Renew
    | Release
    | Drain
    | StillWriting
    | Introduce
    | Announce
    | Revoke
    | Written
    | WriteFailed
)
Answer = Directory | Renewed | Draining | Noted | Announced | Revoked | Refusal

Message = TypeVar("Message")
Key = TypeVar("Key")
Value = TypeVar("Value")

_encoder = msgspec.msgpack.Encoder()
_question_decoder: "msgspec.msgpack.Decoder[Question]" = msgspec.msgpack.Decoder(Question)
_answer_decoder: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)


def as_peers_read(value: Message, kind: Any) -> Message:
    """Return a value of this engine as a peer gets it that expects this ``kind``, a type of a message's field.

    Raises ``ValueError`` where the peer would refuse it.

    >>> as_peers_read("engine-0", Identifier)
    'engine-0'
    >>> as_peers_read("", Identifier)
    Traceback (most recent call last):
    msgspec.ValidationError: Expected `str` of length >= 1
    """
    read: Message = msgspec.msgpack.decode(_encoder.encode(value), type=kind)
    return read


def encode(message: Question | Answer) -> bytes:
    """Return the message as bytes.

    >>> decode_question(encode(Release(epoch=7, handles=(Handle("a", 1),)))).handles[0].request_id
    'a'
    """
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Return the question in ``data``; raises :class:`HandoffError` (malformed-message)."""
    return _decode(_question_decoder, data, MAX_QUESTION_BYTES)


def decode_answer(data: bytes) -> Answer:
    """Return the answer in ``data``; raises :class:`HandoffError` (malformed-message)."""
    return _decode(_answer_decoder, data, MAX_MESSAGE_BYTES)


def _decode(decoder: "msgspec.msgpack.Decoder[Message]", data: bytes, max_bytes: int) -> Message:
    foreign = "Check which program sent it: it may be no engine, or run kvferry with another protocol version."
    if len(data) > max_bytes:
        problem = f"a message of {len(data)} bytes exceeds the limit of {max_bytes}."
        raise HandoffError(Reason.MALFORMED_MESSAGE, problem, foreign)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = f"a message of {len(data)} bytes is not one of the protocol's: {error}."
        raise HandoffError(Reason.MALFORMED_MESSAGE, problem, foreign) from error


class Bounded(OrderedDict[Key, Value]):
    """A dictionary for keys that peers choose: keeps ``most`` entries, and one entry more removes the oldest one.

    >>> kept: Bounded[str, int] = Bounded(2)
    >>> [kept.setdefault(key, number) for number, key in enumerate("abca")]
    [0, 1, 2, 3]
    >>> list(kept)
    ['c', 'a']
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
