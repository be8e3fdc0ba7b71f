"""Version 9 of the protocol, frozen: its messages, and a minimal client, prefill engine and decode engine.

Recorded from kvferry at commit a37e14d. Nothing here is imported from kvferry, and nothing here changes with kvferry:
a peer that runs version 9 cannot be changed either. Delete this module when version 9 is no longer spoken.
"""

import contextlib
import ctypes
import hashlib
import itertools
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

VERSION = 9
HOST = "127.0.0.1"
SECONDS = 30.0

# The messages.

MAX_QUESTION_BYTES, MAX_ANSWER_BYTES = 4 << 20, 16 << 20
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_ANSWER_BYTES)]
LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=7 * 86400.0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Handle(msgspec.Struct, frozen=True):
    request_id: Identifier
    generation: Unsigned


class Identity(msgspec.Struct, frozen=True):
    model: Identifier
    weights: Identifier
    architecture: Identifier
    kv_dtype: Identifier
    num_layers: Unsigned
    num_kv_heads: Unsigned
    head_size: Unsigned
    quantization: Identifier
    compute_dtype: Identifier


class EndPoint(msgspec.Struct, frozen=True):
    host: Identifier
    port: Port
    epoch: Unsigned


class DigestTable(msgspec.Struct, frozen=True):
    kept: Literal["sample", "full"]
    address: Unsigned
    seed: Unsigned


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: Annotated[int, msgspec.Meta(ge=0)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_time: Annotated[int, msgspec.Meta(ge=0)]
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class RankEntry(msgspec.Struct, frozen=True):
    tp_rank: Unsigned
    pp_rank: Unsigned
    shard: Payload
    end_points: dict[Identifier, Payload]
    words_address: Unsigned
    num_words: Unsigned
    push_end_point: EndPoint | None = None
    process: ProcessIdentity | None = None
    digests: DigestTable | None = None


class DirectoryRequest(msgspec.Struct, frozen=True, tag="directory-request", tag_field="type"):
    version: Unsigned
    sender: Identifier


class Directory(msgspec.Struct, frozen=True, tag="directory", tag_field="type"):
    version: Unsigned
    engine_id: Identifier
    epoch: Unsigned
    identity: Identity
    ranks: Annotated[tuple[RankEntry, ...], msgspec.Meta(min_length=1, max_length=4096)]
    weights_version: Text = "default"


Handles = Annotated[tuple[Handle, ...], msgspec.Meta(max_length=1024)]


class Renew(msgspec.Struct, frozen=True, tag="renew", tag_field="type"):
    epoch: Unsigned
    handles: Handles


class Renewed(msgspec.Struct, frozen=True, tag="renewed", tag_field="type"):
    epoch: Unsigned
    lease_seconds: LeaseSeconds
    lost: Handles


class Release(msgspec.Struct, frozen=True, tag="release", tag_field="type"):
    epoch: Unsigned
    handles: Handles


class Drain(msgspec.Struct, frozen=True, tag="drain", tag_field="type"):
    begin: bool


class Draining(msgspec.Struct, frozen=True, tag="draining", tag_field="type"):
    engine_id: Identifier
    epoch: Unsigned
    is_draining: bool
    num_holds: Unsigned
    num_loads: Unsigned


class StillWriting(msgspec.Struct, frozen=True, tag="still-writing", tag_field="type"):
    epoch: Unsigned
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    rank: Unsigned
    number: Unsigned
    request_ids: Annotated[tuple[Identifier, ...], msgspec.Meta(max_length=1024)]


class Noted(msgspec.Struct, frozen=True, tag="noted", tag_field="type"):
    epoch: Unsigned


class WriteKey(msgspec.Struct, frozen=True):
    receiver: Identifier
    receiver_epoch: Unsigned
    number: Unsigned


class AnnouncedBlocks(msgspec.Struct, frozen=True):
    group: Identifier
    first_token: Unsigned
    end_token: Unsigned
    block_token: Unsigned
    block_ids: Annotated[tuple[Unsigned, ...], msgspec.Meta(max_length=1 << 18)]


class Introduce(msgspec.Struct, frozen=True, tag="introduce", tag_field="type"):
    version: Unsigned
    epoch: Unsigned
    receiver: Identifier
    identity: Identity
    sources: Annotated[tuple[Payload, ...], msgspec.Meta(min_length=1, max_length=4096)]
    shard: Payload
    end_points: dict[Identifier, Payload]
    answers_at: EndPoint
    registration: Unsigned = 0


class Announce(msgspec.Struct, frozen=True, tag="announce", tag_field="type"):
    epoch: Unsigned
    key: WriteKey
    registration: Unsigned
    transfer_id: Identifier
    num_tokens: Unsigned
    prompt_digest: Identifier
    blocks: Annotated[tuple[AnnouncedBlocks, ...], msgspec.Meta(min_length=1, max_length=256)]
    digest: Identifier
    seconds: LeaseSeconds


class Announced(msgspec.Struct, frozen=True, tag="announced", tag_field="type"):
    epoch: Unsigned
    transport: Text


class Revoke(msgspec.Struct, frozen=True, tag="revoke", tag_field="type"):
    epoch: Unsigned
    key: WriteKey


class Revoked(msgspec.Struct, frozen=True, tag="revoked", tag_field="type"):
    epoch: Unsigned
    is_quiet: bool


class Written(msgspec.Struct, frozen=True, tag="pushed", tag_field="type"):
    key: WriteKey
    source_index: Unsigned
    digest: Identifier
    num_bytes: Unsigned
    num_descriptors: Unsigned
    transport: Text
    transfer_seconds: Annotated[float, msgspec.Meta(ge=0)]


class WriteFailed(msgspec.Struct, frozen=True, kw_only=True, tag="push-failed", tag_field="type"):
    reason: Identifier
    message: Text
    remedy: Text = ""
    key: WriteKey
    source_index: Unsigned


class Refusal(msgspec.Struct, frozen=True, tag="refusal", tag_field="type"):
    reason: Identifier
    message: Text
    remedy: Text = ""


Question = (
    DirectoryRequest | Renew | Release | Drain | StillWriting | Introduce | Announce | Revoke | Written | WriteFailed
)
Answer = Directory | Renewed | Draining | Noted | Announced | Revoked | Refusal

# What messages carry as bytes: shards, and end points of the transport that this peer uses.

Name = Annotated[str, msgspec.Meta(max_length=512)]


class Region(msgspec.Struct, frozen=True):
    base_address: int
    length: int
    device: Name = "cpu"


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    start: int
    end: int


class Atom(StrEnum):
    CONTENT = "content"
    PAGE = "page"


class Component(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    layers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
    layer_offsets: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
    heads: Annotated[tuple[HeadRange, ...], msgspec.Meta(max_length=64)]
    total_heads: int
    num_channels: int
    itemsize: int
    block_stride: int
    head_stride: int
    token_stride: int
    channel_stride: int
    region: int = 0
    atom: Atom = Atom.CONTENT
    packing: Name = ""
    is_padding: bool = False


class CacheKind(StrEnum):
    ATTENTION = "attention"
    MLA = "mla"
    SLIDING_WINDOW = "sliding-window"
    STATE = "state"


class TokenShare(msgspec.Struct, frozen=True):
    rank: int = 0
    size: int = 1
    interleave: int = 1


class TensorScale(msgspec.Struct, frozen=True):
    layer: Name
    tensor: Name
    value: float


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    kind: CacheKind
    block_size: int
    num_blocks: int
    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=64)]
    window: int = 0
    token_share: TokenShare = TokenShare()
    scales: Annotated[tuple[TensorScale, ...], msgspec.Meta(max_length=4 * 4096)] = ()


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=4096)]
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(max_length=64)]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


class ComponentHeads(msgspec.Struct, frozen=True):
    group: str
    component: str
    heads: tuple[HeadRange, ...]


class Assignment(msgspec.Struct, frozen=True):
    source_index: int
    components: tuple[ComponentHeads, ...]


Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class ProcessEndPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: Literal["cma", "memcpy"]
    version: Literal[1]
    identity: ProcessIdentity
    regions: Annotated[list[tuple[Address, Length]], msgspec.Meta(max_length=65536)]
    nonce_address: Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


# What routers carry: the parameters of a held prompt, and the offer of an engine that pushes.

BlockSize = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
RoutersName = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z", max_length=512)]


class Ferry(msgspec.Struct, frozen=True):
    version: Unsigned
    epoch: Unsigned
    generation: Annotated[str, msgspec.Meta(pattern="^[0-3][0-9a-f]{15}$", max_length=16)]
    slot: Unsigned
    is_late: bool
    lease_seconds: LeaseSeconds
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    prompt_digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    block_sizes: Annotated[tuple[BlockSize, ...], msgspec.Meta(max_length=64)]
    signature: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z", max_length=512)] = ""


class RemoteParams(msgspec.Struct, frozen=True):
    remote_engine_id: RoutersName
    remote_request_id: RoutersName
    remote_host: Annotated[str, msgspec.Meta(pattern=r"^(\[[0-9A-Za-z._:%-]+\]|[0-9A-Za-z._:%-]+)\Z", max_length=255)]
    remote_port: Port
    remote_block_ids: Annotated[
        tuple[Annotated[tuple[Unsigned, ...], msgspec.Meta(max_length=1 << 20)], ...], msgspec.Meta(max_length=64)
    ]
    kvferry: Ferry


class Offer(msgspec.Struct, frozen=True):
    version: Unsigned
    engine_id: Identifier
    control: EndPoint
    block_sizes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(max_length=256)]
    signature: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{144})?\Z")] = ""


class Entry(msgspec.Struct, frozen=True):
    engine_id: Identifier
    kvferry: Offer | None = None


class Refused(Exception):
    """What this peer refuses, by its reason."""

    def __init__(self, reason: str, message: str, remedy: str = "Run the same kvferry version on both sides.") -> None:
        super().__init__(f"{message} [{reason}]")
        self.answer = Refusal(reason, message, remedy)


def check_version(version: int) -> None:
    """Version 9 speaks with no other version."""
    if version != VERSION:
        raise Refused("protocol-mismatch", f"the peer speaks protocol version {version}, this side {VERSION}.")


# Digests that both sides compute.


def signed_params(parsed: RemoteParams) -> bytes:
    unsigned = msgspec.structs.replace(parsed.kvferry, signature="")
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed, kvferry=unsigned))


def signed_offer(offer: Offer) -> bytes:
    return b"bootstrap offer\0" + msgspec.msgpack.encode(msgspec.structs.replace(offer, signature=""))


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Of a prompt of text, without an adapter."""
    parts = (np.asarray(token_ids, dtype=np.int64).tobytes(), [], None)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()


def guard_word(engine_id: str, parsed: Ferry, request_id: str, block_ids: Sequence[Sequence[int]]) -> bytes:
    named = (
        engine_id,
        parsed.epoch,
        request_id,
        int(parsed.generation, 16),
        parsed.prompt_digest,
        parsed.num_tokens,
        list(parsed.block_sizes),
        [np.asarray(ids, dtype="<i8").tobytes() for ids in block_ids],
    )
    digest = hashlib.blake2b(msgspec.msgpack.encode(named), digest_size=16, person=b"kvferry guard").digest()
    word = (int.from_bytes(digest, "little") | 1 | 1 << 64) & ~(1 << 127)
    return word.to_bytes(16, "little")


def plan_digest(source: Shard, destination: Shard) -> str:
    """Of the plan between two ranks that hold the same heads of the same components."""
    heads = tuple(
        ComponentHeads(group.name, component.name, component.heads)
        for group in destination.groups
        for component in group.components
    )
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    encoded = encoder.encode((source, destination, Assignment(0, heads)))
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def part_digest(source: Shard, destination: Shard, blocks: Sequence[AnnouncedBlocks]) -> str:
    """Of the plan and the destination's blocks."""
    encoded = msgspec.msgpack.encode((plan_digest(source, destination), tuple(blocks)))
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


# Connections: a frame is the length of its message, a number, and the message.

HEADER = struct.Struct(">IQ")


class Keys:
    """A folder of keys: TLS 1.3 with certificates on both sides, each trusted because it lies in the folder."""

    def __init__(self, folder: Path) -> None:
        trusted = [folder / "certificate.pem", *sorted((folder / "trusted").glob("*.pem"))]
        self.certificates = {ssl.PEM_cert_to_DER_cert(path.read_text()) for path in trusted}
        self.server, self.client = (
            self._context(kind, folder) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )

    def _context(self, kind: int, folder: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(kind)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(self.certificates))
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        return context


def send_frame(connection: socket.socket, number: int, message: bytes) -> None:
    connection.sendall(HEADER.pack(len(message), number) + message)


def read_frame(connection: socket.socket) -> tuple[int, bytes]:
    length, number = HEADER.unpack(_read(connection, HEADER.size))
    assert length <= MAX_ANSWER_BYTES
    return number, _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        found = connection.recv(length - len(data))
        if not found:
            raise ConnectionError("the peer has closed the connection")
        data += found
    return data


def ask(port: int, question: Question, keys: Keys | None = None) -> Answer:
    """Ask one question, as a client of version 9 does, and return the answer."""
    with socket.create_connection((HOST, port), SECONDS) as plain:
        connection = plain if keys is None else keys.client.wrap_socket(plain)
        if isinstance(connection, ssl.SSLSocket):
            assert keys is not None
            assert connection.getpeercert(binary_form=True) in keys.certificates
        send_frame(connection, 1, msgspec.msgpack.encode(question))
        number, message = read_frame(connection)
        assert number == 1, msgspec.msgpack.decode(message)
        return msgspec.msgpack.decode(message, type=Answer)  # type: ignore[no-any-return]


class Server:
    """Answers questions of version 9 on threads, and notes every question, decoded without a schema in ``raw``."""

    def __init__(self, answer: Callable[[Question], Answer], keys: Keys | None = None) -> None:
        self._answer, self._keys = answer, keys
        self.raw: list[dict[str, Any]] = []
        self.refused: list[Refusal] = []
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                self._connections.append(plain)
                threading.Thread(target=self._serve, args=[plain], daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            connection = plain if self._keys is None else self._keys.server.wrap_socket(plain, server_side=True)
            while True:
                number, message = read_frame(connection)
                assert len(message) <= MAX_QUESTION_BYTES
                send_frame(connection, number, msgspec.msgpack.encode(self._answer_or_refuse(message)))

    def _answer_or_refuse(self, message: bytes) -> Answer:
        try:
            self.raw.append(msgspec.msgpack.decode(message))
            return self._answer(msgspec.msgpack.decode(message, type=Question))
        except Refused as error:
            refusal = error.answer
        except msgspec.MsgspecError as error:
            refusal = Refusal("malformed-message", f"a message is not one of the protocol's: {error}.")
        self.refused.append(refusal)
        return refusal


# Memory, described by a shard.


def own_process() -> ProcessIdentity:
    stat = Path("/proc/self/stat").read_bytes()
    return ProcessIdentity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=os.getpid(),
        start_time=int(stat[stat.rindex(b")") + 2 :].split()[19]),
        uid=os.geteuid(),
    )


class Memory:
    """The memory of one rank: caches like those of ``shard``, another rank's, and guard words."""

    def __init__(self, shard: Shard, num_words: int = 8) -> None:
        self.regions = [np.zeros(region.length, np.uint8) for region in shard.regions]
        addresses = [int(region.ctypes.data) for region in self.regions]
        self.shard = msgspec.structs.replace(
            shard,
            regions=tuple(Region(at, len(region)) for at, region in zip(addresses, self.regions, strict=True)),
        )
        self.words = np.zeros((num_words, 16), np.uint8)
        self._nonce = np.frombuffer(bytearray(os.urandom(16)), np.uint8)

    @property
    def encoded_shard(self) -> bytes:
        return msgspec.msgpack.encode(self.shard, order="deterministic")

    @property
    def end_points(self) -> dict[str, bytes]:
        regions = [(int(each.ctypes.data), each.nbytes) for each in [*self.regions, self.words]]
        point = ProcessEndPoint("cma", 1, own_process(), regions, int(self._nonce.ctypes.data), self._nonce.tobytes())
        return {"cma": msgspec.msgpack.encode(point)}

    def entry(self, push_end_point: EndPoint | None = None) -> RankEntry:
        at = int(self.words.ctypes.data)
        return RankEntry(0, 0, self.encoded_shard, self.end_points, at, len(self.words), push_end_point, own_process())


def bytes_at(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def blocks_of(shard: Shard, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield, for each layer of each component, the bytes of these blocks, by block, head, token, channel: a view."""
    for component in group.components:
        region = shard.regions[component.region]
        memory = np.frombuffer((ctypes.c_uint8 * region.length).from_address(region.base_address), np.uint8)
        heads = sum(each.end - each.start for each in component.heads)
        strides = component.head_stride, component.token_stride, component.channel_stride, 1
        shape = heads, group.block_size, component.num_channels, component.itemsize
        for offset, block in itertools.product(component.layer_offsets, block_ids):
            start = offset + block * component.block_stride
            yield np.lib.stride_tricks.as_strided(memory[start:], shape, strides)


# The engines.


class PrefillEngine:
    """A prefill engine of version 9 with one rank: it holds prompts, and pushes those that are announced."""

    def __init__(self, memory: Memory, identity: Identity, engine_id: str = "nine", keys: Keys | None = None) -> None:
        self.memory, self.identity, self.engine_id, self.epoch = memory, identity, engine_id, 9009
        self.held: dict[Handle, RemoteParams] = {}
        self.pushed: dict[str, Sequence[int]] = {}
        self.destinations: dict[tuple[str, int], Introduce] = {}
        self._keys = keys
        self.server = Server(self._answer, keys)

    def close(self) -> None:
        self.server.close()

    def hold(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Hold a prompt in these blocks, and return the parameters that the router carries."""
        slot = len(self.held)
        sizes = tuple(group.block_size for group in self.memory.shard.groups)
        ferry = Ferry(
            VERSION,
            self.epoch,
            f"{slot + 77:016x}",
            slot,
            False,
            60.0,
            len(token_ids),
            prompt_digest(token_ids),
            sizes,
        )
        ids = tuple(map(tuple, block_ids))
        params = RemoteParams(self.engine_id, request_id, HOST, self.server.port, ids, ferry)
        self.held[Handle(request_id, slot + 77)] = params
        word = guard_word(self.engine_id, ferry, request_id, block_ids)
        self.memory.words[slot] = np.frombuffer(word, np.uint8)
        return {"do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1, **msgspec.to_builtins(params)}

    def _answer(self, question: Question) -> Answer:
        match question:
            case DirectoryRequest():
                check_version(question.version)
                pushes_at = EndPoint(HOST, self.server.port, self.epoch)
                entries = (self.memory.entry(pushes_at),)
                return Directory(VERSION, self.engine_id, self.epoch, self.identity, entries)
            case Renew():
                self._check_epoch(question.epoch)
                return Renewed(self.epoch, 10.0, tuple(set(question.handles) - self.held.keys()))
            case Release():
                self._check_epoch(question.epoch)
                for handle in question.handles:
                    if (params := self.held.pop(handle, None)) is not None:
                        self.memory.words[params.kvferry.slot] = 0
                return Noted(self.epoch)
            case Introduce():
                self._check_epoch(question.epoch)
                check_version(question.version)
                if question.identity != self.identity:
                    raise Refused("model-mismatch", "the engines do not serve the same cache.")
                assert question.sources == (self.memory.encoded_shard,)
                self.destinations[question.receiver, question.answers_at.epoch] = question
                return Noted(self.epoch)
            case Announce():
                self._check_epoch(question.epoch)
                destination = self.destinations[question.key.receiver, question.key.receiver_epoch]
                threading.Thread(target=self._push, args=[question, destination], daemon=True).start()
                return Announced(self.epoch, "cma")
            case Revoke():
                return Revoked(self.epoch, True)
        raise Refused("unsupported", f"this engine does not answer a {type(question).__name__}.")

    def _push(self, announce: Announce, destination: Introduce) -> None:
        """Write the announced blocks, which the prompt fills, and report."""
        shard = msgspec.msgpack.decode(destination.shard, type=Shard)
        assert announce.digest == part_digest(self.memory.shard, shard, announce.blocks), "the sides plan differently"
        num_bytes = 0
        for source, group, blocks in zip(self.memory.shard.groups, shard.groups, announce.blocks, strict=True):
            assert (blocks.group, blocks.first_token, blocks.block_token) == (group.name, 0, 0)
            assert blocks.end_token == announce.num_tokens == len(blocks.block_ids) * group.block_size
            ours = blocks_of(self.memory.shard, source, self.pushed[announce.transfer_id])
            for sent, received in zip(ours, blocks_of(shard, group, blocks.block_ids), strict=True):
                received[:] = sent
                num_bytes += sent.nbytes
        report = Written(announce.key, 0, announce.digest, num_bytes, 1, "cma", 0.001)
        answer = ask(destination.answers_at.port, report, self._keys)
        assert answer == Noted(destination.answers_at.epoch), answer

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Refused("peer-changed", f"the message is for epoch {epoch} of this engine, which is in {self.epoch}.")


class DecodeEngine:
    """A decode engine of version 9 with one rank: it reads what is held, and awaits what is pushed."""

    def __init__(self, identity: Identity, keys: Keys | None = None) -> None:
        self.identity, self._keys, self.epoch = identity, keys, 9010
        self.reports: list[Written | WriteFailed] = []
        self.has_report = threading.Event()
        self.server = Server(self._report, keys)

    def close(self) -> None:
        self.server.close()

    def ask(self, port: int, question: Question) -> Answer:
        return ask(port, question, self._keys)

    def meet(self, port: int, epoch: int) -> Directory:
        """Shake hands with a prefill engine, with the checks of version 9."""
        directory = self.ask(port, DirectoryRequest(VERSION, "nine/0"))
        if not isinstance(directory, Directory):
            raise Refused("protocol-mismatch", f"the engine answered a handshake with {directory}.")
        check_version(directory.version)
        if (directory.epoch, directory.identity) != (epoch, self.identity):
            raise Refused("peer-changed", f"another engine answers: {directory}.")
        return directory

    def parse(self, params: dict[str, Any]) -> RemoteParams:
        """Read the parameters that a router carries."""
        parsed = msgspec.convert(params, RemoteParams)
        check_version(parsed.kvferry.version)
        return parsed

    def read(self, params: dict[str, Any], token_ids: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Read a held prompt between two looks at its guard word: its blocks, as :func:`blocks_of` orders them."""
        parsed = self.parse(params)
        ferry = parsed.kvferry
        assert ferry.prompt_digest == prompt_digest(token_ids)
        assert ferry.num_tokens == len(token_ids)
        entry = self.meet(parsed.remote_port, ferry.epoch).ranks[0]
        shard = msgspec.msgpack.decode(entry.shard, type=Shard)
        end_point = msgspec.msgpack.decode(entry.end_points["cma"], type=ProcessEndPoint)
        assert end_point.identity == entry.process == own_process()
        assert ctypes.string_at(end_point.nonce_address, 16) == end_point.nonce
        word = guard_word(parsed.remote_engine_id, ferry, parsed.remote_request_id, parsed.remote_block_ids)
        found = []
        assert ctypes.string_at(entry.words_address + 16 * ferry.slot, 16) == word
        for group, block_ids in zip(shard.groups, parsed.remote_block_ids, strict=True):
            found += [view.copy() for view in blocks_of(shard, group, block_ids)]
        assert ctypes.string_at(entry.words_address + 16 * ferry.slot, 16) == word
        return found

    def announce(
        self, port: int, epoch: int, memory: Memory, block_ids: Sequence[int], transfer_id: str, digest: str
    ) -> Announced | Refusal:
        """Meet an engine that pushes, introduce this rank to its only rank, and announce blocks to it."""
        entry = self.meet(port, epoch).ranks[0]
        where = entry.push_end_point
        assert where is not None
        answers_at = EndPoint(HOST, self.server.port, self.epoch)
        introduction = Introduce(
            VERSION,
            where.epoch,
            "nine/0",
            self.identity,
            (entry.shard,),
            memory.encoded_shard,
            memory.end_points,
            answers_at,
        )
        answer = self.ask(where.port, introduction)
        if isinstance(answer, Refusal):
            return answer
        assert answer == Noted(where.epoch)
        [group] = memory.shard.groups
        num_tokens = len(block_ids) * group.block_size
        blocks = (AnnouncedBlocks(group.name, 0, num_tokens, 0, tuple(block_ids)),)
        announcement = Announce(
            epoch=where.epoch,
            key=WriteKey("nine/0", self.epoch, 1),
            registration=0,
            transfer_id=transfer_id,
            num_tokens=num_tokens,
            prompt_digest=digest,
            blocks=blocks,
            digest=part_digest(msgspec.msgpack.decode(entry.shard, type=Shard), memory.shard, blocks),
            seconds=SECONDS,
        )
        announced = self.ask(where.port, announcement)
        assert isinstance(announced, Announced | Refusal)
        return announced

    def revoke(self, port: int, epoch: int) -> Answer:
        return self.ask(port, Revoke(epoch, WriteKey("nine/0", self.epoch, 1)))

    def _report(self, question: Question) -> Answer:
        assert isinstance(question, Written | WriteFailed)
        self.reports.append(question)
        self.has_report.set()
        return Noted(self.epoch)
