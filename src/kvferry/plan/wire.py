"""Shards as bytes for the handshake, and digests of plans."""

import hashlib

import msgspec

from kvferry.errors import KVFerryError, PlanError, Reason
from kvferry.layout.shard import Shard
from kvferry.plan.match import Assignment

MAX_SHARD_BYTES = 1 << 20
"""Limit of the encoding of a shard."""
SAME_VERSION = "Run the same kvferry version in both engines."

_DIGEST_BYTES = 16
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Shard)


def encode_shard(shard: Shard) -> bytes:
    """Return the shard as MessagePack. Raises :class:`PlanError` (``unsupported``) above :data:`MAX_SHARD_BYTES`.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.testing.dense_shards import shard_for
    >>> shard = shard_for(layers=["0"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10,
    ...     layout=NamedLayout.BHLNC)
    >>> decode_shard(encode_shard(shard)) == shard
    True
    """
    encoded = _encoder.encode(shard)
    if len(encoded) > MAX_SHARD_BYTES:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"the shard of {shard.rank_name} encodes to {len(encoded)} bytes; the limit is {MAX_SHARD_BYTES}.",
            "Split the model's layers over more pipeline stages.",
        )
    return encoded


def decode_shard(encoded: bytes) -> Shard:
    """Return the shard, with all checks of its constructor.

    Raises :class:`KVFerryError`: for a shard that cannot exist with the reason of the failed check, else
    ``malformed-message``.
    """
    if len(encoded) > MAX_SHARD_BYTES:
        raise PlanError(
            Reason.MALFORMED_MESSAGE,
            f"a received shard has {len(encoded)} bytes; the limit is {MAX_SHARD_BYTES}.",
            SAME_VERSION,
        )
    try:
        return _decoder.decode(encoded)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, KVFerryError):
            raise error.__cause__ from None
        raise PlanError(Reason.MALFORMED_MESSAGE, f"a message is no shard: {error}.", SAME_VERSION) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PlanError(Reason.MALFORMED_MESSAGE, f"a message is no shard: {error}.", SAME_VERSION) from None


def digest(source: Shard, destination: Shard, assignment: Assignment) -> str:
    """Return a digest that is equal in every process, so that a message about a push can name its plan."""
    encoded = _encoder.encode((source, destination, assignment))
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()
