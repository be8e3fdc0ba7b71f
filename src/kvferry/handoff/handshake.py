"""Agreement of two engines before a byte moves: a common protocol version, one epoch, the same model and adapter.

A decode engine fetches a prefill engine's :class:`Directory`, and compares what it names with its own field by field.
It loads nothing where anything differs, and tells the prefill engine why.
"""

from contextlib import suppress
from itertools import product
from typing import NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.messages import (
    FIRST_WEIGHTS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Directory,
    DirectoryRequest,
    HandshakeRefused,
    Identity,
    as_peers_read,
    encode,
)
from kvferry.handoff.wire import client
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust
from kvferry.layout.shard import Shard, decode_shard

TELL_SECONDS = 2.0
"""How long a handshake that fails waits until the prefill engine knows why."""
_OPTIONS = {
    "model": ("--model", "--revision", "--hf-overrides"),
    "weights": ("--model", "--revision"),
    "kv_dtype": ("--kv-cache-dtype",),
    "quantization": ("--quantization",),
    "compute_dtype": ("--dtype",),
}
"""vLLM's options that decide a field of an identity; of the other fields it is the model."""
_REASONS = {
    "kv_dtype": Reason.DTYPE_MISMATCH,
    "compute_dtype": Reason.DTYPE_MISMATCH,
    "head_size": Reason.HEAD_SIZE_MISMATCH,
}


class Versions(NamedTuple):
    """The versions that an engine speaks, from the ``oldest`` to the ``newest``, both included.

    >>> str(Versions(1, 2)), str(Versions(1, 1))
    ('1 to 2', '1')
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


OURS = Versions(PROTOCOL_VERSION, PROTOCOL_VERSION)


def agree(*, prefill: Versions = OURS, decode: Versions = OURS) -> int:
    """Return the version that both engines speak with each other.

    Raises :class:`HandoffError` (protocol-mismatch) where there is none, with the versions of both engines.

    >>> agree(prefill=Versions(1, 2), decode=Versions(1, 1)), agree(prefill=Versions(1, 2), decode=Versions(2, 3))
    (1, 2)
    """
    spoken = min(prefill.newest, decode.newest)
    if spoken >= max(prefill.oldest, decode.oldest):
        return spoken
    older = "prefill" if prefill.newest < decode.newest else "decode"
    raise HandoffError(
        Reason.PROTOCOL_MISMATCH,
        f"the engines speak no version of the protocol in common: protocol version: prefill speaks {prefill}, decode "
        f"speaks {decode}.",
        f"Update kvferry on the {older} engine.",
    )


def compare_identities(prefill: Identity, decode: Identity) -> None:
    """Raise :class:`HandoffError` naming every field that differs, with both values.

    >>> ours = Identity("m", "w", "Qwen3ForCausalLM", "float32", 8, 4, 64, "none", "float32")
    >>> compare_identities(ours, ours)
    """
    options = [
        option for field in _different(prefill, decode) for option in _OPTIONS.get(field, ("--model", "--revision"))
    ]
    _compare(
        ("prefill", prefill),
        ("decode", decode),
        "the engines do not serve the same cache",
        f"Start both engines with the same {', '.join(dict.fromkeys(options))}.",
    )


def check_rank(scheduler: Identity, rank: Identity, index: int) -> None:
    """Raise :class:`HandoffError` naming every field in which a rank of this engine differs from its scheduler."""
    _compare(
        ("its scheduler", scheduler),
        ("the rank", rank),
        f"rank {index} does not serve what its engine's scheduler does",
        'Give all of the engine\'s hosts the same files of the model, or set "model_id" to a name of the weights.',
    )


def _compare(one: tuple[str, Identity], other: tuple[str, Identity], what: str, remedy: str) -> None:
    (name, ours), (other_name, theirs) = one, other
    different = _different(ours, theirs)
    if not different:
        return
    reason = next((_REASONS[field] for field in different if field in _REASONS), Reason.MODEL_MISMATCH)
    listing = [
        f"{field}: {name} has {here!r}, {other_name} has {there!r}" for field, (here, there) in different.items()
    ]
    raise HandoffError(reason, f"{what}: {'; '.join(listing)}.", remedy)


def _different(one: Identity, other: Identity) -> dict[str, tuple[object, object]]:
    """Return both values of each field that differs."""
    here, there = msgspec.structs.asdict(one), msgspec.structs.asdict(other)
    return {field: (here[field], there[field]) for field in here if here[field] != there[field]}


class Adapter(msgspec.Struct, frozen=True):
    """An adapter's name and the digest of its weights, both empty for a prompt without an adapter."""

    name: str = ""
    digest: str = ""


NO_ADAPTER = Adapter()


def compare_adapters(name: str, prefill: str, decode: str) -> None:
    """Refuse a prompt unless its adapter is known to have the same weights on both engines, or there is no adapter.

    ``prefill`` and ``decode`` are the digests of the weights there, empty where they are unknown. Raises
    :class:`HandoffError` (adapter-mismatch).

    >>> compare_adapters("sql", "0a", "0a"), compare_adapters("", "", "")
    (None, None)
    >>> compare_adapters("sql", "", "0a")
    Traceback (most recent call last):
    ...
    kvferry.errors.HandoffError: the adapter 'sql' may have other weights on each engine: prefill does not say which, \
decode has '0a'. Look for unknown-weights in the log of the engine that does not say which. A line with it says why \
the weights are unknown there, such as those of a hub's adapter without a commit or of files that have changed, and \
what to do. [adapter-mismatch]
    >>> compare_adapters("sql", "0a", "0b")
    Traceback (most recent call last):
    ...
    kvferry.errors.HandoffError: the adapter 'sql' has other weights on each engine: prefill has '0a', decode has \
'0b'. Load the same adapter_model and adapter_config.json under this name on both engines: the digests are of these \
files as vLLM has read them. [adapter-mismatch]
    """
    if prefill == decode and (prefill or not name):
        return
    if prefill and decode:
        raise HandoffError(
            Reason.ADAPTER_MISMATCH,
            f"the adapter {name!r} has other weights on each engine: prefill has {prefill!r}, decode has {decode!r}.",
            "Load the same adapter_model and adapter_config.json under this name on both engines: the digests are of "
            "these files as vLLM has read them.",
        )
    sides = (("prefill", prefill), ("decode", decode))
    said = [f"{side} has {digest!r}" if digest else f"{side} does not say which" for side, digest in sides]
    raise HandoffError(
        Reason.ADAPTER_MISMATCH,
        f"the adapter {name!r} may have other weights on each engine: {', '.join(said)}.",
        f"Look for {Reason.UNKNOWN_WEIGHTS.value} in the log of the engine that does not say which. A line with it "
        "says why the weights are unknown there, such as those of a hub's adapter without a commit or of files that "
        "have changed, and what to do.",
    )


def fetch_directory(
    host: str,
    port: int,
    sender: str,
    epoch: int,
    ours: Identity,
    timeout_seconds: float,
    weights_version: str = FIRST_WEIGHTS,
    trust: Trust = THIS_MACHINE,
    *,
    is_trusted: bool = False,
) -> Directory:
    """Ask a prefill engine for its ranks and check its epoch, its identity and the version of its weights.

    The request names ``epoch``. A prefill engine that this side refuses is told why. Raises :class:`HandoffError`
    (peer-unreachable, permission-denied, protocol-mismatch, peer-changed, or a mismatch of the identity).
    """
    answer = ask_directory(host, port, sender, timeout_seconds, trust, is_trusted=is_trusted)
    try:
        agree(prefill=Versions(answer.version, answer.version))
        if answer.epoch != epoch:
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"the request was prefilled in epoch {epoch} of {host}:{port}, which now is in epoch {answer.epoch}.",
                "The prefill engine was restarted or its cache was reset: send the prompt again.",
            )
        compare_engines(answer, ours, weights_version)
    except HandoffError as error:
        tell_refusal(host, port, sender, answer.version, answer.epoch, error, trust, is_trusted=is_trusted)
        raise
    return answer


def ask_directory(
    host: str, port: int, sender: str, timeout_seconds: float, trust: Trust = THIS_MACHINE, *, is_trusted: bool = False
) -> Directory:
    """Ask an engine for its ranks, and compare nothing. Raises :class:`HandoffError`: peer-unreachable,
    permission-denied, protocol-mismatch.
    """
    question = DirectoryRequest(OURS.oldest, OURS.newest, sender)
    answer = client.ask(host, port, question, timeout_seconds, trust, is_trusted=is_trusted)
    if not isinstance(answer, Directory):
        raise HandoffError(
            Reason.PROTOCOL_MISMATCH,
            f"{host}:{port} answered a handshake with {type(answer).__name__}.",
            "Run the same kvferry version on both sides.",
        )
    return answer


def compare_engines(prefill: Directory, identity: Identity, weights_version: str) -> None:
    """Refuse a prefill engine with another identity than this one, or other weights. Raises :class:`HandoffError`."""
    compare_identities(prefill.identity, identity)
    if prefill.weights_version != weights_version:
        raise HandoffError(
            Reason.MODEL_MISMATCH,
            f"the engines do not serve the same cache: weights_version: prefill has {prefill.weights_version!r}, "
            f"decode has {weights_version!r}.",
            "Give both engines the same weights and set the same weight version, then reset both caches.",
        )


def tell_refusal(
    host: str,
    port: int,
    sender: str,
    version: int,
    epoch: int,
    error: KVFerryError,
    trust: Trust,
    *,
    is_trusted: bool,
) -> None:
    """Tell a prefill engine, with the version and epoch of its directory, why this side refuses it, so that the log of
    that engine says so too.

    Waits for at most :data:`TELL_SECONDS`. An engine that was restarted is told nothing: that is no fault of either
    side.
    """
    told = HandshakeRefused.of(error, version=version, epoch=epoch, sender=sender)
    if error.reason is not Reason.PEER_CHANGED:
        with suppress(KVFerryError):
            client.ask(host, port, told, TELL_SECONDS, trust, is_trusted=is_trusted)


def check_complete(directory: Directory, num_ranks: int) -> None:
    """Refuse a directory that no peer could use: with too few ranks, longer than a message may be, or with a value that
    a peer refuses.

    Raises :class:`HandoffError` (missing-source, unsupported).
    """
    if len(directory.ranks) != num_ranks:
        raise HandoffError(
            Reason.MISSING_SOURCE,
            f"{len(directory.ranks)} of the {num_ranks} ranks of engine {directory.engine_id} described their cache.",
            "Under MultiConnector name KVFerryConnector before other connectors that have handshakes: vLLM hands the "
            "metadata of the first connector to all.",
        )
    num_bytes = len(encode(directory))
    if num_bytes > MAX_MESSAGE_BYTES:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"the directory of the {num_ranks} ranks of engine {directory.engine_id} takes {num_bytes} bytes, a "
            f"message has at most {MAX_MESSAGE_BYTES}.",
            "Run this engine with fewer ranks.",
        )
    try:
        as_peers_read(directory, Directory)
    except ValueError as error:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"no other engine could read the directory of engine {directory.engine_id!r}: {error}.",
            "The end of the message names the value; where no setting changes it, run another model.",
        ) from error


def decode_shards(directory: Directory) -> list[Shard]:
    """Return the shard of each rank of a prefill engine, in the directory's order.

    The directory must name every rank, by its pipeline stage and tensor-parallel rank, once. Raises
    :class:`HandoffError` (missing-source, malformed-message), and as :func:`decode_shard`.
    """
    shards = [decode_shard(entry.shard) for entry in directory.ranks]
    entries = [(entry.pp_rank, entry.tp_rank) for entry in directory.ranks]
    are_as_named = entries == [(shard.pp_rank, shard.tp_rank) for shard in shards]
    sizes, named = {(shard.pp_size, shard.tp_size) for shard in shards}, set(entries)
    if not are_as_named or len(named) < len(entries) or len(sizes) > 1:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"engine {directory.engine_id} names its ranks (pp, tp) {entries} with the caches of "
            f"{[shard.rank_name for shard in shards]}.",
            "Run the same kvferry version on both sides.",
        )
    [(pp_size, tp_size)] = sizes
    for stage, rank in product(range(pp_size), range(tp_size)):
        if (stage, rank) not in named:
            raise HandoffError(
                Reason.MISSING_SOURCE,
                f"engine {directory.engine_id} names {len(entries)} of its {pp_size * tp_size} ranks; tensor-parallel "
                f"rank {rank} of pipeline stage {stage} is missing.",
                "Check the prefill engine's log: that worker may have failed.",
            )
    return shards
