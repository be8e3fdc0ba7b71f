"""Shared by the translation: the specification of a group's layers, and the refusal of a cache that cannot be moved."""

from typing import TYPE_CHECKING, Any, NoReturn

from kvferry.errors import LayoutError, Reason

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def spec_of(group: "KVCacheGroupSpec", layer_name: str | None = None) -> Any:
    """Return the specification of a layer of the group, without a name that of any layer.

    A pipeline stage may hold none of the group's layers, and vLLM tells the scheduler only the first stage's names.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec: Any = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return next(iter(spec.kv_cache_specs.values())) if layer_name is None else spec.kv_cache_specs[layer_name]


UNEXPECTED = "kvferry does not expect this of this vLLM: please report it, with the engine's log."
"""The remedy where no setting helps."""


def refuse(problem: str, remedy: str = UNEXPECTED) -> NoReturn:
    """Raise :class:`LayoutError` (unsupported)."""
    raise LayoutError(Reason.UNSUPPORTED, f"{problem}.", remedy)
