"""What ``--kv-transfer-config`` says of each connector of an engine, which may be several under ``MultiConnector``."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR = "KVFerryConnector"
"""The connector that moves prompts between engines."""
TAKES_NO_PARAMS = "KVFerryOffloadConnector"
"""A connector that nothing in a request's ``kv_transfer_params`` is for. Of any other, nothing is known."""
SEVERAL = "MultiConnector"
"""vLLM's connector that passes each call on to those that its settings list."""


class ConnectorConfig(NamedTuple):
    """One connector of an engine: the name of its class, and its ``kv_connector_extra_config``."""

    name: str
    settings: Mapping[str, Any]


def connector_configs(transfer: "KVTransferConfig | None") -> list[ConnectorConfig]:
    """Return the connectors that do an engine's work, in the order in which vLLM asks them.

    >>> from types import SimpleNamespace
    >>> listed = [{"kv_connector": CONNECTOR}, {"kv_connector": "B", "kv_connector_extra_config": {"b": 1}}]
    >>> [name for name, _ in connector_configs(SimpleNamespace(kv_connector="A", kv_connector_extra_config={}))]
    ['A']
    >>> several = SimpleNamespace(kv_connector=SEVERAL, kv_connector_extra_config={"connectors": listed})
    >>> [tuple(each) for each in connector_configs(several)], connector_configs(None)
    ([('KVFerryConnector', {}), ('B', {'b': 1})], [])
    """
    if transfer is None or transfer.kv_connector is None:
        return []
    return list(_children(transfer.kv_connector, transfer.kv_connector_extra_config))


def own_settings(transfer: "KVTransferConfig | None") -> Mapping[str, Any] | None:
    """Return the settings of the engine's ``KVFerryConnector``; None for an engine without one."""
    return next((each.settings for each in connector_configs(transfer) if each.name == CONNECTOR), None)


def may_be_for_another(transfer: "KVTransferConfig | None") -> bool:
    """Return whether a request's ``kv_transfer_params`` may be for another connector than ``KVFerryConnector``."""
    return any(each.name not in (CONNECTOR, TAKES_NO_PARAMS) for each in connector_configs(transfer))


def _children(name: str, settings: Mapping[str, Any]) -> Iterator[ConnectorConfig]:
    if name != SEVERAL:
        yield ConnectorConfig(name, settings)
        return
    for each in settings.get("connectors") or ():
        yield from _children(each["kv_connector"], each.get("kv_connector_extra_config") or {})
