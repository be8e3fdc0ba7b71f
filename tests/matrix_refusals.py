"""The list of combinations that must be refused, each with its reason code. Tests of the same names check them."""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import Reason


class Where(StrEnum):
    """The place of the refusal in the test: two engines that meet, one that starts, or no engine."""

    ENGINES = "engines"
    START = "start"
    ADAPTER = "adapter"
    HANDSHAKE = "handshake"


@dataclass(frozen=True)
class Refusal:
    """One combination. ``name`` is that of its file and test."""

    name: str
    combination: str
    reason: Reason
    where: Where


REFUSALS = (
    Refusal("another-model", "another model", Reason.HEAD_SIZE_MISMATCH, Where.ENGINES),
    Refusal("another-dtype", "caches of float32 and bfloat16", Reason.DTYPE_MISMATCH, Where.ENGINES),
    Refusal("mla-cross-layer", "MLA in a cross-layer layout on the CPU", Reason.KERNEL_CANNOT_READ_LAYOUT, Where.START),
    Refusal("concurrent-ranks", "data-parallel ranks behind a concurrent router", Reason.UNSUPPORTED, Where.START),
    Refusal("context-parallel", "decode context parallelism", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("prefill-context-parallel", "prefill context parallelism", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("quantised-cache", "a cache quantised to NVFP4", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("chunked-attention", "chunked local attention", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("cached-states", "states that are cached by prefix", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("draft-states", "states of draft tokens", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("other-states", "states of lightning attention (MiniMax)", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("drafter-ahead", "a drafter that embeds tokens ahead", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("host-resident", "a cache kept in host memory", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("kernel-splits-blocks", "blocks that the kernel does not take whole", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("empty-stage", "a pipeline stage without any cache", Reason.UNSUPPORTED, Where.ADAPTER),
    Refusal("other-weights", "other weights of the same model", Reason.MODEL_MISMATCH, Where.HANDSHAKE),
    Refusal("other-quantisation", "weights quantised otherwise", Reason.MODEL_MISMATCH, Where.HANDSHAKE),
    Refusal("other-compute-dtype", "models computed in other types", Reason.DTYPE_MISMATCH, Where.HANDSHAKE),
    Refusal("protocol-version", "another version of the protocol", Reason.PROTOCOL_MISMATCH, Where.HANDSHAKE),
    Refusal("restarted", "a prefill engine that was restarted", Reason.PEER_CHANGED, Where.HANDSHAKE),
    Refusal("packed-and-plain", "packed pages (AMX) and plain ones", Reason.SPLIT_ATOM, Where.HANDSHAKE),
    Refusal("packed-blocks", "packed pages of 32 and 64 tokens", Reason.PACKING_MISMATCH, Where.HANDSHAKE),
    Refusal("layer-missing", "a layer that the prefill engine has not", Reason.LAYER_MISMATCH, Where.HANDSHAKE),
    Refusal("layer-more", "a layer that the decode engine has not", Reason.LAYER_MISMATCH, Where.HANDSHAKE),
    Refusal("group-missing", "one cache group and two", Reason.GROUP_MISMATCH, Where.HANDSHAKE),
    Refusal("other-kind", "full attention and a sliding window", Reason.GROUP_MISMATCH, Where.HANDSHAKE),
    Refusal("other-window", "windows of 40 and 64 tokens", Reason.MODEL_MISMATCH, Where.HANDSHAKE),
    Refusal("other-scales", "FP8 caches of other scales", Reason.MODEL_MISMATCH, Where.HANDSHAKE),
    Refusal("rank-missing", "a prefill engine of two ranks that names one", Reason.MISSING_SOURCE, Where.HANDSHAKE),
)
