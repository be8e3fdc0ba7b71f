"""Agreement of two engines before a byte moves: same protocol, same epoch, same model, field by field."""

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import courier
from kvferry.handoff.protocol import PROTOCOL_VERSION, Directory, DirectoryRequest, Identity

_REASONS = {"kv_dtype": Reason.DTYPE_MISMATCH, "head_size": Reason.HEAD_SIZE_MISMATCH}


def compare_identities(prefill: Identity, decode: Identity) -> None:
    """Raise :class:`HandoffError` naming every field that differs, with both values.

    >>> ours = Identity("m", "w", "Qwen3ForCausalLM", "float32", 8, 4, 64)
    >>> compare_identities(ours, ours)
    """
    different = [
        (field, getattr(prefill, field), getattr(decode, field))
        for field in Identity.__struct_fields__
        if getattr(prefill, field) != getattr(decode, field)
    ]
    if not different:
        return
    reason = next((_REASONS[field] for field, _, _ in different if field in _REASONS), Reason.MODEL_MISMATCH)
    listing = "; ".join(f"{field}: prefill has {theirs!r}, decode has {ours!r}" for field, theirs, ours in different)
    raise HandoffError(
        reason,
        f"the engines do not serve the same cache: {listing}.",
        "Start both engines with the same model, revision and cache dtype.",
    )


def fetch_directory(host: str, port: int, sender: str, epoch: int, ours: Identity, timeout_seconds: float) -> Directory:
    """Ask a prefill engine for its ranks and check that it is the one expected.

    ``epoch`` is the one that the request names. Raises :class:`HandoffError`
    (peer-unreachable, protocol-mismatch, peer-changed, or a mismatch of the identity).
    """
    answer = courier.ask(host, port, DirectoryRequest(PROTOCOL_VERSION, sender), timeout_seconds)
    if not isinstance(answer, Directory):
        raise HandoffError(
            Reason.PROTOCOL_MISMATCH, f"{host}:{port} answered a handshake with {type(answer).__name__}."
        )
    check_version(answer.version)
    if answer.epoch != epoch:
        raise HandoffError(
            Reason.PEER_CHANGED,
            f"the request was prefilled in epoch {epoch} of {host}:{port}, which now is in epoch {answer.epoch}.",
            "The prefill engine was restarted: send the prompt again.",
        )
    compare_identities(answer.identity, ours)
    return answer


def check_version(version: int) -> None:
    """Raise :class:`HandoffError` (protocol-mismatch) unless the peer speaks our version."""
    if version != PROTOCOL_VERSION:
        raise HandoffError(
            Reason.PROTOCOL_MISMATCH,
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}.",
            "Run the same kvferry version on both sides.",
        )
