"""The adapters of prompts that are held or loaded: their weights as vLLM has read them."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.handshake import NO_ADAPTER, Adapter
from kvferry.integrations.vllm.adapters import AdapterRead, Adapters

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


def _unknown_weights(request_id: str, name: str, why: str) -> HandoffError:
    return HandoffError(
        Reason.UNKNOWN_WEIGHTS,
        f"the weights that vLLM has for the adapter {name!r} of {request_id} are unknown: {why}.",
        "Load the adapter again, with load_inplace or from another path; one of a hub from a folder.",
    )
