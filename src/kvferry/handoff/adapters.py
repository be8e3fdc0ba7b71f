"""The adapter (LoRA) of a prompt that moves between two engines: compared by name and by weights.

The name is part of the prompt's digest. The weights are not, and are compared apart.
"""

from typing import Annotated

import msgspec

from kvferry.errors import HandoffError, Reason

AdapterDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z", max_length=32)]
"""A digest in a peer's message or in a request's parameters, empty for none. It goes into log lines."""


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
