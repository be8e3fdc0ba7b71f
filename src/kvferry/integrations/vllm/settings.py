"""Settings of the connector, ``kv_connector_extra_config``, validated when the engine starts."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.addresses import is_wildcard
from kvferry.plan.staging.strategy import DEFAULT_STAGE_BYTES, Strategy
from kvferry.transport.faults import FaultPlan
from kvferry.transport.registry import check_setting as check_transport

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
LAST_PORT = 65535
_FOR_PUSHES = frozenset(("bootstrap_port", "router_address", "http_address", "push_timeout_seconds"))


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings with their defaults.

    mode: how caches move: ``pull``, when the prompt has been computed, or ``push``, while it is.
    bootstrap_port: with ``push``, where a prefill engine answers the router's bootstrap query; port 0 takes a free one.
    router_address, http_address: with ``push``, the host:port of vllm-router's ``--vllm-discovery-address`` and that of
        this engine's API server; the router then sends to both engines at once.
    push_timeout_seconds: with ``push``, how long a decode engine waits for a prompt to be computed and pushed.
    transport: ``auto``, or the name of one transport.
    layout: the KV cache layout to ask the engine for; empty lets the connector choose.
    host, port: where a prefill engine's control end point listens; port 0 takes a free one, another one is that of
        data-parallel rank 0 and the other ranks take those behind it.
    advertised_host: the address or name that its answers give for ``host``; needed where that means every interface.
    lease_seconds: how long finished prompts are held for a reader that does not renew.
    load_timeout_seconds: after this a load fails; must be below ``lease_seconds``. A handshake may take half of it.
    strategy: of a decode engine that reads: ``direct`` from cache to cache, ``scatter`` by way of a stage, ``auto``
        chooses for each pair of ranks by predicted times. Pushes are ``direct``.
    stage_bytes: memory of the stage that a rank has with ``auto`` and ``scatter``. Larger loads go in rounds.
    transfer_cores: cores for the transfer thread; empty means all but the compute cores.
    transfer_log: a file that gets one JSON line per load and rank (``.rank<rank>`` is appended), and with ``push`` per
        push that a rank sends, with its events, and per step that computes pushed prompts.
    model_id: what both sides must agree on in place of the digest of model and weights.
    faults: injected faults, for negative controls in tests.
    """

    mode: Literal["pull", "push"] = "pull"
    bootstrap_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    router_address: str = ""
    http_address: str = ""
    push_timeout_seconds: Seconds = 120.0
    transport: str = "auto"
    layout: str = ""
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    advertised_host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    lease_seconds: Seconds = 60.0
    load_timeout_seconds: Seconds = 30.0
    strategy: Literal["auto", "direct", "scatter"] = "direct"
    stage_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 36)] = DEFAULT_STAGE_BYTES
    transfer_cores: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    transfer_log: str = ""
    model_id: str = ""
    faults: FaultPlan | None = None

    @property
    def wanted_strategy(self) -> Strategy | None:
        """The strategy asked for; None leaves the choice to each pair of ranks."""
        return None if self.strategy == "auto" else Strategy(self.strategy)

    @property
    def handshake_timeout_seconds(self) -> float:
        """How long a prefill engine may take to answer a handshake: the other half of the time is for the load."""
        return self.load_timeout_seconds / 2

    @property
    def reachable_host(self) -> str:
        """Where peers reach what listens on ``host``."""
        return self.advertised_host or self.host

    @property
    def scatters(self) -> bool:
        """Whether a rank that reads needs a stage."""
        return self.strategy in ("auto", "scatter")


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Return the settings in ``extra_config``.

    Raises :class:`SettingsError`: unknown-setting naming the nearest valid key, invalid-setting.

    >>> parse_settings({"lease_seconds": 90}).lease_seconds
    90.0
    >>> parse_settings({"lease_second": 90})
    Traceback (most recent call last):
    kvferry.errors.SettingsError: unknown setting 'lease_second'. Did you mean 'lease_seconds'? [unknown-setting]
    """
    for key in extra_config:
        if key not in Settings.__struct_fields__:
            nearest = difflib.get_close_matches(key, Settings.__struct_fields__, n=1, cutoff=0.0)
            raise SettingsError(Reason.UNKNOWN_SETTING, f"unknown setting {key!r}.", f"Did you mean {nearest[0]!r}?")
    try:
        settings = msgspec.convert(dict(extra_config), Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"kv_connector_extra_config: {error}.",
            "docs/settings.md lists the settings and what they may be.",
        ) from error
    if settings.transport != "auto":
        check_transport(settings.transport)
    _check_transfer_log(settings)
    _check_times(settings, extra_config)
    _check_host(settings)
    _check_push(settings, extra_config)
    return settings


def _if_default(name: str, given: Mapping[str, Any]) -> str:
    return "" if name in given else ", the default"


def _check_times(settings: Settings, given: Mapping[str, Any]) -> None:
    load, lease = settings.load_timeout_seconds, settings.lease_seconds
    if load >= lease:
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"load_timeout_seconds ({load:g}{_if_default('load_timeout_seconds', given)}) must be below lease_seconds "
            f"({lease:g}{_if_default('lease_seconds', given)}): a load ends before the prefill engine may free the "
            "blocks that it reads.",
            f"Set lease_seconds above {load:g}, or load_timeout_seconds below {lease:g}.",
        )


def _check_transfer_log(settings: Settings) -> None:
    folder = Path(settings.transfer_log).parent
    if settings.transfer_log and not folder.is_dir():
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"transfer_log {settings.transfer_log!r}: there is no folder {str(folder)!r}.",
            "Make the folder, or name a file in one that exists.",
        )


def _check_host(settings: Settings) -> None:
    name = "advertised_host" if settings.advertised_host else "host"
    host = settings.reachable_host
    if is_wildcard(host):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"{name} {host!r} means every interface, which is no address that decode engines can connect to.",
            'Set "advertised_host" to the address or name at which they reach this machine.',
        )


def _check_push(settings: Settings, given: Mapping[str, Any]) -> None:
    if settings.mode != "push" and (ignored := sorted(_FOR_PUSHES & given.keys())):
        raise SettingsError(
            Reason.INVALID_SETTING, f"{ignored[0]} is for pushes.", 'Set "mode" to "push", or leave it out.'
        )
    if settings.mode == "push" and settings.strategy != "direct":
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"strategy {settings.strategy!r} is for reads; mode 'push' writes every cache directly.",
            'Set "strategy" to "direct", or leave it out.',
        )
    if bool(settings.router_address) != bool(settings.http_address):
        raise SettingsError(
            Reason.INVALID_SETTING,
            "router_address and http_address go together: where the router listens, and where it is to send requests.",
            "Set both, or none where the router sends to one engine after the other.",
        )


def control_port(port: int, data_parallel_index: int) -> int:
    """Return where this data-parallel rank listens: a port that the settings name is that of rank 0.

    The others take those behind it, on whichever host they run; 0 takes a free one for each. Peers learn the port from
    an answer and never compute it. Raises :class:`SettingsError` (invalid-setting) beyond the last port.

    >>> control_port(5600, 1), control_port(0, 1)
    (5601, 0)
    """
    if port == 0:
        return 0
    if port + data_parallel_index > LAST_PORT:
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"port {port} leaves none for data-parallel rank {data_parallel_index}, which takes one so far behind.",
            'Set a lower "port", or 0, which takes a free one for each rank.',
        )
    return port + data_parallel_index
