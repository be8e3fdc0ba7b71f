"""``kv_transfer_params``: a prefill engine answers them, a router copies them, a decode engine reads them.

The outer fields are those of vLLM's NIXL connector, so that routers for that connector work unmodified; kvferry's own
fields are under ``kvferry``.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from kvferry.errors import HandoffError, KVFerryError, Reason, in_words
from kvferry.handoff.handshake import NO_ADAPTER, OURS, Adapter, Versions, agree
from kvferry.handoff.holds import Hold, Holds, is_of_hold
from kvferry.handoff.messages import (
    AdapterDigest,
    EndPoint,
    Handle,
    LeaseSeconds,
    Name,
    Unsigned,
)
from kvferry.handoff.remote_holds import LeaseKeeper, RemoteHold
from kvferry.handoff.source import Prompt
from kvferry.handoff.wire.trust import Keys, Trust, check_host
from kvferry.integrations.vllm.adapters import AdapterRead, Adapters
from kvferry.integrations.vllm.scheduler.blocks import (
    GroupShape,
    KeptBlocks,
)
from kvferry.integrations.vllm.scheduler.router_beacon import decode_request_id
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import (
    StepMetadata,
)
from kvferry.integrations.vllm.worker.records import Statistics
from kvferry.layout.shard import MAX_BLOCK_SIZE, MAX_GROUPS

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class PromptAdapter:
    """The adapter of one prompt, and what vLLM had read for it when the prompt began."""

    request_id: str
    adapter: Adapter = NO_ADAPTER
    read: AdapterRead | None = None

    def check(self) -> None:
        """Refuse a prompt whose adapter may have got other weights since. Raises :class:`HandoffError`."""
        try:
            is_certain = self.read is None or self.read.is_certain()
        except OSError as error:
            raise _unknown_weights(self.request_id, self.adapter.name, str(error)) from error
        if not is_certain:
            raise _unknown_weights(self.request_id, self.adapter.name, "its files have changed, or its id has others")


class PromptAdapters:
    """The adapters of one engine's prompts."""

    def __init__(self, *, caches_prefixes: bool) -> None:
        self._adapters = Adapters()
        self._caches_prefixes = caches_prefixes

    def of(self, request: "Request") -> PromptAdapter:
        """Return the adapter of a request.

        Raises :class:`HandoffError` (unknown-weights) where the weights that vLLM has are unknown, such as those of a
        hub's adapter without a commit: another engine may have others under the same name.
        """
        lora = request.lora_request
        if lora is None:
            return PromptAdapter(request.request_id)
        try:
            read = self._adapters.read_by(lora)
        except OSError as error:
            raise _unknown_weights(request.request_id, lora.lora_name, str(error)) from error
        if not read.weights.are_known:
            why = f"nothing says which weights {lora.lora_path} had when vLLM read it"
            raise _unknown_weights(request.request_id, lora.lora_name, why)
        found = PromptAdapter(request.request_id, Adapter(lora.lora_name, read.weights.digest), read)
        found.check()
        return found

    def of_computed(self, request: "Request") -> PromptAdapter:
        """Return the adapter of a request that this engine computes for another. Raises as :meth:`of`, and where the
        prompt may have begun in vLLM's prefix cache with blocks of earlier weights.
        """
        found = self.of(request)
        if self._may_be_stale(request) and not request.skip_reading_prefix_cache:
            raise _unknown_weights(request.request_id, found.adapter.name, "its weights were replaced meanwhile")
        return found

    def avoid_stale_blocks(self, request: "Request") -> None:
        """Let a new prompt for another engine begin outside of vLLM's prefix cache, where the cache may have blocks of
        earlier weights: vLLM's hash of a block has the adapter's name and path, and not its weights.
        """
        if request.lora_request is not None:
            with suppress(OSError):  # :meth:`of_computed` raises it
                self._adapters.read_by(request.lora_request)  # the weights may be others than before
        if self._may_be_stale(request):
            request.skip_reading_prefix_cache = True

    def prefix_cache_is_empty(self) -> None:
        """VLLM has cleared its prefix cache."""
        self._adapters.prefix_cache_is_empty()

    def _may_be_stale(self, request: "Request") -> bool:
        lora = request.lora_request
        return lora is not None and self._caches_prefixes and self._adapters.may_be_stale(lora.lora_path)


@dataclass
class EngineState:
    """The state of one engine. ``step`` has the orders for the next step, ``statistics`` what its scheduler counts.

    ``holds_lock`` guards ``holds``, which the server's thread uses too. ``answers_at`` is set once the server runs.
    """

    settings: Settings
    engine_id: str
    epoch: int
    tp_size: int
    groups: Sequence[GroupShape]
    caches_prefixes: bool
    holds: Holds
    trust: Trust
    leases: LeaseKeeper
    adapters: PromptAdapters
    kept_blocks: KeptBlocks = field(default_factory=KeptBlocks)
    holds_lock: threading.Lock = field(default_factory=threading.Lock)
    step: StepMetadata = field(default_factory=StepMetadata)
    statistics: Statistics = field(default_factory=Statistics)
    answers_at: EndPoint = field(default_factory=lambda: EndPoint("127.0.0.1", 1, 0))


def _unknown_weights(request_id: str, name: str, why: str) -> HandoffError:
    return HandoffError(
        Reason.UNKNOWN_WEIGHTS,
        f"the weights that vLLM has for the adapter {name!r} of {request_id} are unknown: {why}.",
        "Load the adapter again, with load_inplace or from another path; one of a hub from a folder.",
    )


MAX_BLOCKS = 1 << 20
NOT_OF_THE_SCHEMA = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for values of other types: besides its own errors, ``UnicodeEncodeError`` for a surrogate."""
MAX_SIGNATURE_LENGTH = 512
MAX_TOKENS = 1 << 31
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
BlockIds = Annotated[tuple[Unsigned, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
Generation = Annotated[str, msgspec.Meta(pattern="^(?!0{16})[0-3][0-9a-f]{15}$", max_length=16)]
Signature = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z", max_length=MAX_SIGNATURE_LENGTH)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]


class Ferry(msgspec.Struct, frozen=True):
    """kvferry's fields: the hold and its epoch, the prompt's tokens and digest, and the block size of each group.

    ``version`` is the oldest version that the prefill engine speaks, ``newest`` the newest one: the engine does not
    know who will read its answer. The ``generation`` is text of hexadecimal digits: routers may parse a number as a
    double; 0 names no hold. ``is_late`` says that the prefill engine's ranks learn of the hold with its next step.
    ``adapter`` is the digest of the weights of the prompt's adapter, empty where there is none. The ``signature`` of
    :func:`signed_bytes` by the prefill engine's key is hexadecimal; an engine without keys does not sign.
    """

    version: Unsigned
    newest: Unsigned
    epoch: Unsigned
    generation: Generation
    is_late: bool
    lease_seconds: LeaseSeconds
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    prompt_digest: Digest
    block_sizes: Annotated[tuple[BlockSize, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    adapter: AdapterDigest = ""
    signature: Signature = ""


class HoldParams(msgspec.Struct, frozen=True):
    """The fields of ``kv_transfer_params`` that the decode side uses; others are ignored."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    kvferry: Ferry

    def __post_init__(self) -> None:
        check_host(self.remote_host)

    def hold(self, *, is_trusted: bool) -> RemoteHold:
        """Return the hold that these parameters name; ``is_trusted`` says that their signature is right."""
        handle = Handle(self.remote_request_id, int(self.kvferry.generation, 16))
        where = (self.remote_engine_id, self.kvferry.epoch, self.remote_host, self.remote_port)
        return RemoteHold(*where, handle, is_trusted)


class TransferParams(msgspec.Struct, frozen=True):
    """The fields of a router that speaks Mooncake's protocol; others are ignored."""

    transfer_id: Name
    remote_engine_id: Name
    remote_bootstrap_addr: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

    def __post_init__(self) -> None:
        if is_of_hold(self.transfer_id):
            raise ValueError(f"transfer_id {self.transfer_id!r} is the name of a hold")


def names_transfer(params: Mapping[str, Any], request_id: str) -> bool:
    """Return whether the parameters, or the request's id, name a router's transfer and not a hold.

    >>> names_transfer({"transfer_id": "x"}, "r"), names_transfer({"transfer_id": "x", "kvferry": {}}, "r")
    (True, False)
    """
    return "kvferry" not in params and ("transfer_id" in params or decode_request_id(request_id) is not None)


def parse_transfer_params(params: Mapping[str, Any], request_id: str) -> TransferParams:
    """Return the transfer that ``kv_transfer_params`` name, or the request's id where the router puts the address
    there. Raises :class:`HandoffError` (malformed-message).
    """
    given = dict(params)
    if given.get("remote_engine_id") is None and (found := decode_request_id(request_id)) is not None:
        given["remote_bootstrap_addr"], given["remote_engine_id"] = found
    try:
        return msgspec.convert(given, TransferParams)
    except NOT_OF_THE_SCHEMA as error:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"kv_transfer_params of {request_id} name no transfer: {in_words(error)}.",
            "Run vllm-router with --kv-connector mooncake and each prefill engine's bootstrap_port, or with "
            "--kv-connector moriio and --vllm-discovery-address, which is each engine's router_address.",
        ) from error


def answer_params(
    hold: Hold, prompt: Prompt, block_ids: Sequence[Sequence[int]], state: EngineState, *, is_late: bool
) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` that a prefill engine answers for a held prompt, signed where it has keys."""
    answer: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": state.engine_id,
        "remote_request_id": hold.handle.request_id,
        "remote_host": state.answers_at.host,
        "remote_port": state.answers_at.port,
        "tp_size": state.tp_size,
        "kvferry": {
            "version": OURS.oldest,
            "newest": OURS.newest,
            "epoch": state.epoch,
            "generation": f"{hold.handle.generation:016x}",
            "is_late": is_late,
            "lease_seconds": state.settings.turn_seconds if hold.yields else state.settings.lease_seconds,
            "num_tokens": prompt.num_tokens,
            "prompt_digest": prompt.digest,
            "block_sizes": [group.block_size for group in state.groups],
        },
    }
    if prompt.adapter.digest:
        answer["kvferry"]["adapter"] = prompt.adapter.digest
    if (keys := state.trust.keys) is not None:
        with suppress(KVFerryError):  # a client may choose a name that no decode engine takes
            parsed = parse_params(answer, hold.handle.request_id)
            answer["kvferry"]["signature"] = keys.sign(signed_bytes(parsed)).hex()
    return answer


def check_own_answers(state: EngineState) -> None:
    """Read an answer of this engine as a decode engine reads it. Raises :class:`HandoffError` (unsupported)."""
    hold = Hold(Handle("sample", state.epoch or 1), "sample")
    answer = answer_params(hold, Prompt(1, "0" * 32, {}, 0), [[] for _ in state.groups], state, is_late=False)
    try:
        msgspec.convert(msgspec.json.decode(msgspec.json.encode(answer)), HoldParams)
    except NOT_OF_THE_SCHEMA as error:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"no decode engine could read the answers of engine {state.engine_id!r}: {in_words(error)}.",
            "The message names the value; where no setting changes it, run another model.",
        ) from error


def signed_bytes(parsed: HoldParams) -> bytes:
    """Return what a prefill engine signs: every field that a decode engine loads by, host and blocks included."""
    # Structs are encoded in the order of their fields, whatever order a router gave them.
    unsigned = msgspec.structs.replace(parsed.kvferry, signature="")
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed, kvferry=unsigned))


def check_signature(parsed: HoldParams, keys: Keys, request_id: str) -> None:
    """Refuse parameters that no trusted key has signed. Raises :class:`HandoffError` (permission-denied)."""
    signature = parsed.kvferry.signature
    if not signature:
        raise HandoffError(
            Reason.PERMISSION_DENIED,
            f"the kv_transfer_params of {request_id} are not signed, and this engine has keys.",
            'Give the prefill engine the setting "keys" too, and check that the router copies its answer whole.',
        )
    keys.check(signed_bytes(parsed), bytes.fromhex(signature))


def check_adapter_is_said(parsed: HoldParams, request_id: str) -> None:
    """Refuse parameters that do not say the weights of the prompt's adapter. Raises :class:`HandoffError`
    (unknown-weights).
    """
    if not parsed.kvferry.adapter:
        raise HandoffError(
            Reason.UNKNOWN_WEIGHTS,
            f"the kv_transfer_params of {request_id} do not say which weights its adapter has on the prefill engine.",
            "Check that the router copies the prefill engine's answer whole.",
        )


def parse_params(params: Mapping[str, Any], request_id: str) -> HoldParams:
    """Return the hold that ``kv_transfer_params`` name, with its prompt and blocks.

    Raises :class:`HandoffError`: malformed-message, protocol-mismatch.
    """
    parsed = read_params(params, request_id)
    agree(prefill=Versions(parsed.kvferry.version, parsed.kvferry.newest))
    return parsed


def read_params(params: Mapping[str, Any], request_id: str) -> HoldParams:
    """Return the hold as :func:`parse_params` does, whatever version the prefill engine speaks.

    Raises :class:`HandoffError` (malformed-message).
    """
    try:
        return msgspec.convert(dict(params), HoldParams)
    except NOT_OF_THE_SCHEMA as error:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"kv_transfer_params of {request_id} do not come from a kvferry prefill engine: {in_words(error)}.",
            "Check that the router copies the prefill engine's kv_transfer_params whole.",
        ) from error


def check_prompt(parsed: HoldParams, request: "Request", num_tokens: int) -> str:
    """Return the digest of the request's first ``num_tokens`` tokens; refuse a hold of another prompt.

    Raises :class:`HandoffError` (invalid-request).
    """
    found, digest = parsed.kvferry, prompt_digest(request, num_tokens)
    if found.num_tokens != num_tokens or found.prompt_digest != digest:
        name, theirs, ours = (
            ("num_tokens", found.num_tokens, num_tokens)
            if found.num_tokens != num_tokens
            else ("prompt_digest", found.prompt_digest, digest)
        )
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"the first {num_tokens} of {len(request.prompt_token_ids or ())} prompt tokens of {request.request_id} "
            f"are not the {found.num_tokens} tokens that {parsed.remote_request_id} prefilled: {name}: the "
            f"kv_transfer_params have {theirs!r}, this request has {ours!r}.",
            "Send one prompt per request, and the same prompt, template, images and adapter to both engines; append no "
            "generated token.",
        )
    return digest


def leave_last_token(request: "Request") -> None:
    """Let the prefill engine compute all of the prompt but its last token, which the decode engine computes.

    Otherwise that token would advance a Mamba state twice, or move a block that the decode engine needs out of a
    sliding window. Call it once, for a new request. A prompt of a single token stays whole, and so does one that reads
    no cache (prompt log probabilities), which the decode engine does not load either. So does the prompt of a session,
    whose client sends more tokens later: they would follow the wrong token.
    """
    token_ids = token_ids_of(request)
    is_whole = request.num_prompt_tokens < 2 or request.skip_reading_prefix_cache or request.resumable
    if token_ids is None or is_whole:
        return
    # Parallel samples in one process share the list of the prompt.
    request.prompt_token_ids = token_ids[:-1]
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def token_ids_of(request: "Request") -> list[int] | None:
    """Return the tokens of a prompt; None for a prompt with embeddings."""
    return request.prompt_token_ids if request.prompt_embeds is None else None


def prompt_digest(request: "Request", num_tokens: int) -> str:
    """Return a digest of all inputs of the cache of the prompt's first ``num_tokens``, besides the model.

    They are the tokens, of which the last may be generated ones, the identifiers and positions of images, sound and
    video, and the adapter's name. A cache salt changes no byte of a cache.

    Raises :class:`HandoffError` (unsupported) for prompts with embeddings.
    """
    token_ids = token_ids_of(request)
    if token_ids is None:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"{request.request_id} has a prompt with embeddings, which the two engines cannot compare.",
            "Send tokens or text, or send the request to an engine that computes its prompt itself.",
        )
    if num_tokens > len(token_ids):
        token_ids = list(request.all_token_ids[:num_tokens])
    lora = request.lora_request
    parts = (
        np.asarray(token_ids[:num_tokens], dtype=np.int64).tobytes(),
        [
            (each.modality, each.identifier, int(each.mm_position.offset), int(each.mm_position.length))
            for each in request.mm_features or ()
            if each.mm_position.offset < num_tokens
        ],
        # Not the adapter's number, nor its path: each engine numbers and mounts adapters by itself.
        None if lora is None else lora.lora_name,
    )
    # msgpack marks where each part ends.
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()
