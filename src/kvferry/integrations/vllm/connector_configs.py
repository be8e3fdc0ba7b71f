"""What ``--kv-transfer-config`` says of each connector of an engine, which may be several under ``MultiConnector``."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Name, as_peers_read
from kvferry.handoff.wire.bootstrap import id_in_epoch
from kvferry.handoff.wire.trust import LAST_PORT
from kvferry.integrations.vllm.offload_settings import parse_offload_settings
from kvferry.integrations.vllm.scheduler.router_beacon import decode_request_id, encode_zmq_address
from kvferry.integrations.vllm.settings import Settings, invalid_setting, parse_settings
from kvferry.integrations.vllm.step import EPOCH_BITS

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


_LAST_EPOCH = (1 << EPOCH_BITS) - 1


def check_transfer_config(transfer: "KVTransferConfig | None") -> None:
    """Check the settings of kvferry's connectors, and the engine's id where a connector tells it to peers.

    Else the engine would start, and each request would fail on another engine, where peers check what they are told.
    Raises :class:`SettingsError`: unknown-setting, invalid-setting.
    """
    for name, settings in connector_configs(transfer):
        if name == CONNECTOR:
            assert transfer is not None
            check_engine_id(str(transfer.engine_id), parse_settings(settings))
        elif name == TAKES_NO_PARAMS:
            parse_offload_settings(settings)


def check_engine_id(engine_id: str, settings: Settings) -> None:
    """Refuse an id that peers would refuse, with the epoch beside it, or that a router's request ids would not bring.

    Raises :class:`SettingsError` (invalid-setting).
    """
    in_epoch = id_in_epoch(engine_id, _LAST_EPOCH)
    try:
        as_peers_read(engine_id, Name)
        # Longer than the id with a rank's number, which is the name of the rank.
        as_peers_read(in_epoch, Name)
    except ValueError as error:
        raise invalid_setting(
            f"other engines refuse engine_id {engine_id[:40]!r}, of {len(engine_id)} characters: an id has one "
            f"character or more, at most {MAX_IDENTIFIER_LENGTH} with the epoch that follows it, and no control "
            "character.",
            'Set "engine_id" in --kv-transfer-config to another name, or leave it out.',
        ) from error
    address = encode_zmq_address(settings.reachable_host, LAST_PORT, LAST_PORT, in_epoch)
    found = decode_request_id(f"___prefill_addr_{address}___decode_addr_")
    if settings.router_address and (found is None or found[1] != in_epoch):
        raise invalid_setting(
            f"engine_id {engine_id!r} could not be read out of the ids of requests, into which the router writes it.",
            "Set \"engine_id\" in --kv-transfer-config to a name of letters, digits, '-' and '.', or leave it out.",
        )
