"""What ``--kv-transfer-config`` says of each connector of an engine, which may be several under ``MultiConnector``."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.handoff.messages import EPOCH_BITS, MAX_IDENTIFIER_LENGTH, Name, as_peers_read
from kvferry.handoff.wire.bootstrap import id_in_epoch
from kvferry.handoff.wire.trust import LAST_PORT
from kvferry.integrations.vllm.scheduler.router_beacon import decode_request_id, encode_zmq_address
from kvferry.integrations.vllm.settings import Settings, invalid_setting

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR = "KVFerryConnector"
"""The connector that moves prompts between engines."""
OFFLOAD = "KVFerryOffloadConnector"
"""The connector that offloads. Nothing in a request's ``kv_transfer_params`` is for it."""
SEVERAL = "MultiConnector"
"""vLLM's connector that passes each call on to those that its settings list."""


class ConnectorConfig(NamedTuple):
    """One connector of an engine: the name of its class, its ``kv_connector_extra_config``, its role and id."""

    name: str
    settings: Mapping[str, Any]
    role: str | None = None
    engine_id: str | None = None


def connector_configs(transfer: "KVTransferConfig | None") -> list[ConnectorConfig]:
    """Return the connectors that do an engine's work, in the order in which vLLM asks them.

    Raises :class:`SettingsError` (invalid-setting) for a list of connectors in which one has no name.

    >>> from types import SimpleNamespace
    >>> listed = [{"kv_connector": CONNECTOR}, {"kv_connector": "B", "kv_connector_extra_config": {"b": 1}}]
    >>> several = SimpleNamespace(kv_connector=SEVERAL, kv_connector_extra_config={"connectors": listed})
    >>> [each[:2] for each in connector_configs(several)], connector_configs(None)
    ([('KVFerryConnector', {}), ('B', {'b': 1})], [])
    """
    if transfer is None or transfer.kv_connector is None:
        return []
    role, engine_id = getattr(transfer, "kv_role", None), getattr(transfer, "engine_id", None)
    own = {"kv_connector": transfer.kv_connector, "kv_role": role}
    return list(connectors_in({**own, "kv_connector_extra_config": transfer.kv_connector_extra_config}, engine_id))


def connectors_in(given: Any, engine_id: str | None) -> Iterator[ConnectorConfig]:
    """Yield the connectors in an object such as ``--kv-transfer-config`` has; a list in one has further objects.

    Raises :class:`SettingsError` (invalid-setting) for an object without a connector's name.
    """
    named = isinstance(given, Mapping) and isinstance(given.get("kv_connector"), str)
    settings = (given.get("kv_connector_extra_config") or {}) if named else None
    listed = settings.get("connectors") or () if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(listed, list | tuple):
        raise invalid_setting(
            f"{str(given)[:80]!r} configures no connector.",
            'Write an object with "kv_connector", a name, and "kv_connector_extra_config", an object; that of '
            f'{SEVERAL} has "connectors", a list of such objects.',
        )
    engine_id = given.get("engine_id", engine_id)
    if given["kv_connector"] == SEVERAL:
        for each in listed:
            yield from connectors_in(each, engine_id)
    else:
        yield ConnectorConfig(given["kv_connector"], settings, given.get("kv_role", ""), engine_id)


def own_settings(transfer: "KVTransferConfig | None") -> Mapping[str, Any] | None:
    """Return the settings of the engine's ``KVFerryConnector``; None for an engine without one."""
    return next((each.settings for each in connector_configs(transfer) if each.name == CONNECTOR), None)


def may_be_for_another(transfer: "KVTransferConfig | None") -> bool:
    """Return whether a request's ``kv_transfer_params`` may be for another connector than ``KVFerryConnector``."""
    return any(each.name not in (CONNECTOR, OFFLOAD) for each in connector_configs(transfer))


_LAST_EPOCH = (1 << EPOCH_BITS) - 1


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
