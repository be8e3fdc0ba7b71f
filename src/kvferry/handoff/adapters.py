"""The adapter (LoRA) of a prompt that moves between two engines: compared by name, and by weights where both know them.

The name is part of the prompt's digest. The weights are not: an engine of an older version compares names alone.
"""

from typing import Annotated

import msgspec

from kvferry.errors import HandoffError, Reason

AdapterDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z", max_length=32)]
"""A digest in a peer's message or in a request's parameters, empty for none. It goes into log lines."""


class Adapter(msgspec.Struct, frozen=True):
    """An adapter's name and the digest of its weights, empty where the engine does not know them.

    The adapter of a prompt without one has no name either.
    """

    name: str = ""
    digest: str = ""


NO_ADAPTER = Adapter()


def compare_adapters(name: str, prefill: str, decode: str) -> None:
    """Refuse a prompt whose adapter has other weights on the other engine.

    ``prefill`` and ``decode`` are the digests of the weights there, empty where they are unknown. Raises
    :class:`HandoffError` (adapter-mismatch).

    >>> compare_adapters("sql", "0a", "0a"), compare_adapters("sql", "", "0a")
    (None, None)
    >>> compare_adapters("sql", "0a", "0b")
    Traceback (most recent call last):
    ...
    kvferry.errors.HandoffError: the adapter 'sql' has other weights on each engine: prefill has '0a', decode has \
'0b'. Load the same adapter_model and adapter_config.json under this name on both engines: the digests are of these \
files as vLLM has read them. [adapter-mismatch]
    """
    if prefill and decode and prefill != decode:
        raise HandoffError(
            Reason.ADAPTER_MISMATCH,
            f"the adapter {name!r} has other weights on each engine: prefill has {prefill!r}, decode has {decode!r}.",
            "Load the same adapter_model and adapter_config.json under this name on both engines: the digests are of "
            "these files as vLLM has read them.",
        )
