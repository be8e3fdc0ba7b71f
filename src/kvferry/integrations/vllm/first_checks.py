"""Checks what an engine's configuration says before the engine loads weights, and above all what its peers will get.

An engine's id and its settings travel in messages and in parameters of requests, where peers check them. Without these
checks an engine would start, and each request would fail on another engine.
"""

from typing import TYPE_CHECKING

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Name, as_peers_read
from kvferry.handoff.wire.addresses import LAST_PORT
from kvferry.handoff.wire.bootstrap import id_in_epoch
from kvferry.integrations.vllm.connector_configs import CONNECTOR, TAKES_NO_PARAMS, connector_configs
from kvferry.integrations.vllm.offload_settings import parse_offload_settings
from kvferry.integrations.vllm.scheduler.router_beacon import decode_request_id, encode_zmq_address
from kvferry.integrations.vllm.settings import Settings, parse_settings
from kvferry.integrations.vllm.step import EPOCH_BITS

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_LAST_EPOCH = (1 << EPOCH_BITS) - 1


def check_transfer_config(transfer: "KVTransferConfig | None") -> None:
    """Check the settings of kvferry's connectors, and the engine's id where a connector tells it to peers.

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
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"other engines refuse engine_id {engine_id[:40]!r}, of {len(engine_id)} characters: an id has one "
            f"character or more, at most {MAX_IDENTIFIER_LENGTH} with the epoch that follows it, and no control "
            "character.",
            'Set "engine_id" in --kv-transfer-config to another name, or leave it out.',
        ) from error
    address = encode_zmq_address(settings.reachable_host, LAST_PORT, LAST_PORT, in_epoch)
    found = decode_request_id(f"___prefill_addr_{address}___decode_addr_")
    if settings.router_address and (found is None or found[1] != in_epoch):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"engine_id {engine_id!r} could not be read out of the ids of requests, into which the router writes it.",
            "Set \"engine_id\" in --kv-transfer-config to a name of letters, digits, '-' and '.', or leave it out.",
        )
