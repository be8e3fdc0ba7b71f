"""Before the weights load: all for which a configuration is refused, at once and in one place.

vLLM makes its configuration first in the process that starts the engine, and there alone, before an engine core runs,
ports, folders and memory are looked at. Other processes of the engine get this configuration, or make their own while
the engine runs: its ports and its folder are taken by then, by the engine itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import KVFerryError, TierError, did_you_mean, raise_all
from kvferry.handoff.wire.client import within
from kvferry.handoff.wire.server import check_port, check_ports
from kvferry.integrations.vllm.connector_configs import (
    CONNECTOR,
    OFFLOAD,
    ConnectorConfig,
    check_engine_id,
    connector_configs,
    connectors_in,
)
from kvferry.integrations.vllm.facts import local_ranks
from kvferry.integrations.vllm.offload_settings import OffloadSettings, disk_folder, read_offload_settings
from kvferry.integrations.vllm.refused_flags import check_flags
from kvferry.integrations.vllm.settings import Found, Settings, control_port, invalid_setting, read_settings, trust_of
from kvferry.integrations.vllm.versions import is_child_process
from kvferry.transport.registry import check_installed

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

READERS: dict[str, Callable[[Mapping[str, Any]], Found[Any]]] = {
    CONNECTOR: read_settings,
    OFFLOAD: read_offload_settings,
}
"""How the settings of each connector of kvferry's are read."""
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOCAL_EXECUTORS = (None, "mp", "uni")
"""vLLM's executors with which the process that makes the configuration starts all ranks of this host."""
ANSWER_SECONDS = 4.0
"""How long the network may take to look a name up, or a pool's master to answer."""
_CHECKED = "_kvferry_checked"


@dataclass(frozen=True, slots=True)
class EngineHere:
    """What of an engine runs on this machine: its data-parallel ranks, and how many ranks each of them has.

    ``has_bootstrap``: whether a prefill engine answers a router's bootstrap queries.
    """

    data_parallel_ranks: range = field(default_factory=lambda: range(1))
    num_ranks: int = 1
    has_bootstrap: bool = True


def check_configuration(vllm_config: "VllmConfig") -> None:
    """Check the settings of kvferry's connectors, vLLM's flags, and in the process that starts the engine the machine.

    vLLM copies a configuration with changes, for a drafter for example, also in an engine that runs: a copy of one that
    was checked is not checked again. Raises :class:`KVFerryError`, for several errors
    :class:`~kvferry.errors.SeveralErrors`.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or _CHECKED in vars(transfer):
        return
    here = None if is_child_process() else engine_here(vllm_config.parallel_config)
    raise_all(errors_of(connector_configs(transfer), here, vllm_config))
    vars(transfer)[_CHECKED] = True


def engine_here(parallel: "ParallelConfig") -> EngineHere | None:
    """Return what of an engine the process that makes this configuration starts on this machine; None where that is
    not known: ranks on several hosts, or started by something else.
    """
    is_here = parallel.nnodes_within_dp == 1 and parallel.distributed_executor_backend in LOCAL_EXECUTORS
    is_here &= parallel.data_parallel_backend == "mp"  # Ray places ranks where it likes
    if not is_here or not parallel.data_parallel_size_local:
        return None
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return EngineHere(local_ranks(parallel), num_ranks, has_bootstrap=parallel.data_parallel_size == 1)


def errors_of(
    connectors: Sequence[ConnectorConfig], here: EngineHere | None, vllm_config: "VllmConfig | None" = None
) -> list[KVFerryError]:
    """Return every error of kvferry's connectors, each once; without ``here`` nothing of the machine is looked at."""
    ours = [(each, READERS[each.name](each.settings)) for each in connectors if each.name in READERS]
    for connector, found in ours:
        found.note((), partial(_check_role, connector))
        if connector.name == CONNECTOR and connector.engine_id is not None:
            names = ("host", "advertised_host", "router_address")
            found.note(names, partial(check_engine_id, connector.engine_id))
        if vllm_config is not None:
            check_flags(vllm_config, connector, found)
        if here is not None:
            if connector.name == CONNECTOR:
                _note_moving(connector, found, here)
            else:
                _note_offload(found, here)
    errors = [error for _, found in ours for error in found.errors]
    if here is not None:
        errors += _memory_errors([found for connector, found in ours if connector.name == OFFLOAD], here)
    return list({str(error): error for error in errors}.values())


def warnings_of(connectors: Sequence[ConnectorConfig], here: EngineHere) -> list[str]:
    """Return what connectors without errors lack on this machine: an engine starts, and logs the same."""
    tiers = [READERS[OFFLOAD](each.settings).settings for each in connectors if each.name == OFFLOAD]
    return [told for settings in tiers for rank in here.data_parallel_ranks if (told := _check_disk(rank, settings))]


def transfer_of(given: Any) -> list[ConnectorConfig]:
    """Return the connectors in JSON: a value of ``--kv-transfer-config``, or settings of one connector, which the names
    of the settings tell. Raises :class:`SettingsError` (invalid-setting).

    >>> [each.name for each in transfer_of({"host_bytes": "8 GiB"})]
    ['KVFerryOffloadConnector']
    """
    if not isinstance(given, Mapping):
        raise invalid_setting(
            f"an object is wanted, and {str(given)[:80]!r} was given.",
            'Write {"kv_connector": "KVFerryConnector", "kv_role": ...}.',
        )
    if "kv_connector" not in given:
        is_offload = len(OffloadSettings.__struct_fields__ & given.keys()) > len(
            Settings.__struct_fields__ & given.keys()
        )
        return [ConnectorConfig(OFFLOAD if is_offload else CONNECTOR, given)]
    found = list(connectors_in(given, None))
    if not any(each.name in READERS for each in found):
        named = " and ".join(repr(each.name) for each in found) or "no connector"
        raise invalid_setting(f"--kv-transfer-config names {named}.", did_you_mean(str(given["kv_connector"]), READERS))
    return found


def settings_in_force(connector: ConnectorConfig) -> dict[str, Any]:
    """Return every setting of a connector of kvferry's, as JSON values, with the defaults."""
    found: dict[str, Any] = msgspec.to_builtins(READERS[connector.name](connector.settings).settings)
    return found


def _check_role(connector: ConnectorConfig, _: object) -> None:
    if connector.role is not None and connector.role not in ROLES:
        told = f"kv_role {connector.role!r} of {connector.name} is none of vLLM's roles."
        raise invalid_setting(told, f'Set "kv_role" to {", ".join(ROLES[:-1])} or {ROLES[-1]}.')


def _note_moving(connector: ConnectorConfig, found: Found[Settings], here: EngineHere) -> None:
    """Note what of a machine does not let a ``KVFerryConnector`` start."""
    found.note(["keys"], trust_of)
    found.note(["transport"], lambda settings: check_installed(settings.transport))
    found.note(["host"], _check_host)
    for rank in here.data_parallel_ranks:
        found.note(["host", "port", "rank_ports"], partial(_check_control_port, rank))
    if here.has_bootstrap and connector.role != "kv_consumer":
        found.note(["host", "bootstrap_port"], _check_bootstrap_port)
    needed = len(here.data_parallel_ranks) * here.num_ranks
    found.note(["host", "rank_ports"], lambda settings: _check_rank_ports(settings, needed))


def _check_host(settings: Settings) -> None:
    _within("look-up of host", check_port, settings.host, 0)


def _check_control_port(rank: int, settings: Settings) -> None:
    if port := control_port(settings, rank):
        check_port(settings.host, port)


def _check_bootstrap_port(settings: Settings) -> None:
    if settings.bootstrap_port:
        check_port(settings.host, settings.bootstrap_port, "bootstrap_port")


def _check_rank_ports(settings: Settings, num_needed: int) -> None:
    if settings.rank_ports:
        check_ports(settings.host, settings.ports_of_ranks, num_needed)


def _note_offload(found: Found[OffloadSettings], here: EngineHere) -> None:
    """Note what of a machine does not let a ``KVFerryOffloadConnector`` store blocks."""
    for rank in here.data_parallel_ranks:
        found.note(["disk_path", "disk_bytes"], partial(_check_disk, rank))
    found.note(["pool_bytes", "pool_master"], _check_share)
    found.note(["pool_master"], _check_pool)


def _check_disk(rank: int, settings: OffloadSettings) -> str:
    if not (settings.disk_path and settings.disk_bytes):
        return ""
    from kvferry.tiers.local_disk import check_directory  # most engines have no disk tier

    return check_directory(disk_folder(settings, rank), settings.disk_bytes)


def _check_share(settings: OffloadSettings) -> None:
    if settings.pool_master and settings.pool_bytes:
        from kvferry.tiers.remote_pool import check_share

        check_share(settings.pool_bytes)


def _check_pool(settings: OffloadSettings) -> None:
    if settings.pool_master:
        from kvferry.tiers.remote_pool import check_master_answers

        check_installed("mooncake")
        _within("question to the pool's master", check_master_answers, settings.pool_master)


def _memory_errors(tiers: Sequence[Found[OffloadSettings]], here: EngineHere) -> list[KVFerryError]:
    from kvferry.tiers.slab_memory import check_memory

    sizes = [found.settings for found in tiers if found.wrong.isdisjoint(("host_bytes", "pool_bytes"))]
    host_bytes, pool_bytes = sum(each.host_bytes for each in sizes), sum(each.pool_bytes for each in sizes)
    try:
        check_memory(host_bytes, pool_bytes, len(here.data_parallel_ranks))
    except TierError as error:
        return [error]
    return []


def _within(what: str, check: Callable[..., None], *arguments: Any) -> None:
    """Raise what a check raises that asks the network, or where it takes longer than :data:`ANSWER_SECONDS`."""

    def call() -> bool:
        check(*arguments)
        return True

    within(ANSWER_SECONDS, what, call, "Name an address that this machine reaches.")
