"""What translation shares: the specification of a group's layers, and how what cannot be moved is refused."""

from typing import TYPE_CHECKING, Any, NoReturn

from kvferry.errors import LayoutError, Reason

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def spec_of(group: "KVCacheGroupSpec", layer_name: str | None = None) -> Any:
    """Return the specification of a layer of the group.

    Without a name that of any of its layers: a stage of a pipeline may hold none, and the scheduler is told the names
    of the first stage only.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec: Any = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return next(iter(spec.kv_cache_specs.values())) if layer_name is None else spec.kv_cache_specs[layer_name]


UNEXPECTED = "This is not what kvferry knows of vLLM 0.32: please report it, with the engine's log."
"""The remedy for what no setting can change."""


def refuse(what: str, remedy: str = UNEXPECTED) -> NoReturn:
    """Raise :class:`LayoutError` (unsupported)."""
    raise LayoutError(Reason.UNSUPPORTED, f"{what}.", remedy)
