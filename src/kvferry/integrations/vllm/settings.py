"""Settings of the connector, ``kv_connector_extra_config``, validated when the engine starts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from kvferry.errors import (
    KVFerryError,
    Reason,
    SettingsError,
    SeveralErrors,
    did_you_mean,
    in_words,
    nearest,
    raise_all,
)
from kvferry.execution.digests import Integrity
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Identifier, as_peers_read
from kvferry.handoff.wire.trust import (
    EVERY_INTERFACE,
    LAST_PORT,
    Keys,
    Trust,
    as_network,
    check_host,
    host_meant,
    is_loopback,
    is_wildcard,
    parse_place,
)
from kvferry.transport.network import THIS_HOST
from kvferry.transport.registry import FACTORIES
from kvferry.transport.registry import check_setting as check_transport

NO_KEYS = "none"
_LISTED = "'kvferry settings' lists the settings of each connector and what they may be."
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400, extra={"unit": "seconds"})]
Port = Annotated[int, msgspec.Meta(ge=0, le=LAST_PORT)]
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_NAME = re.compile(r"[0-9A-Za-z_]([0-9A-Za-z_.-]*[0-9A-Za-z_])?")
AnySettings = TypeVar("AnySettings", bound=msgspec.Struct)


def about(meaning: str, **more: str | tuple[str, ...]) -> msgspec.Meta:
    """Return what is said of a setting beside its type and default.

    ``unit``; ``unset``: what an empty default stands for; ``values``: names that a string may be, where they are
    checked elsewhere; ``page``: where docs/ says more.
    """
    return msgspec.Meta(description=meaning, extra=more)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings with their defaults; ``kvferry settings`` prints what is written here, and docs/settings.md has it.

    An empty default stands for what ``unset`` says.
    """

    bootstrap_port: Annotated[
        Port,
        about(
            "Where a prefill engine answers the bootstrap query of vllm-router (`--kv-connector mooncake --prefill URL "
            "PORT`); 0 takes a free port.",
        ),
    ] = 0
    router_address: Annotated[
        str,
        about(
            "The address of vllm-router's `--vllm-discovery-address` (`--kv-connector moriio`), which then sends each "
            "request to both engines at once; goes together with `http_address`.",
            unit="host:port",
            unset="none",
        ),
    ] = ""
    http_address: Annotated[
        str,
        about("With `router_address`, the address of this engine's own API server.", unit="host:port", unset="none"),
    ] = ""
    transport: Annotated[
        str,
        about(
            "`auto` takes `cma` for host memory of one host, where it works, else `nixl`.",
            values=("auto", *FACTORIES),
        ),
    ] = "auto"
    host: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)],
        about("Where the engine answers handshakes, renewals and releases of other engines.", page="two-hosts.md"),
    ] = "127.0.0.1"
    advertised_host: Annotated[
        str,
        about(
            "The address or name that the engine's answers give for `host`; needed where `host` means every interface "
            "(`0.0.0.0`, `::`).",
            unset="`host`",
            page="two-hosts.md",
        ),
    ] = ""
    keys: Annotated[
        str,
        about(
            "A folder made by `kvferry keys new`: engines encrypt their messages, accept only engines whose "
            "certificates they trust, and sign what passes through routers; needed where `host` is not loopback, or "
            '`"none"` there: other hosts connect without keys, and whoever reaches the ports is taken for an engine.',
            unit="path",
            unset="no keys",
            page="security.md#keys",
        ),
    ] = ""
    allowed_hosts: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=253)], ...],
        about(
            'A list of names, addresses and networks (`["prefill-0.example", "10.1.0.0/16"]`) to which the engine '
            "connects where a request or a router names them, besides loopback and hosts that a trusted engine has "
            'signed; without it, `"keys": "none"` allows every host.',
            unset="none",
            page="security.md#where-an-engine-connects",
        ),
    ] = ()
    port: Annotated[
        Port,
        about(
            "The port at `host`; 0 takes a free one, another is that of data-parallel rank 0, and each further rank "
            "takes the next.",
        ),
    ] = 0
    rank_ports: Annotated[
        str,
        about(
            "The ports at `host`, such as `5700-5799`, of which each rank takes the first free one, so that a firewall "
            "can open them; engines of one host may share them.",
            unit="first-last",
            unset="any free port",
            page="two-hosts.md#ports",
        ),
    ] = ""
    lease_seconds: Annotated[
        Seconds,
        about(
            "How long a finished prompt is held until a decode engine comes and renews, ten times this at most; also "
            "how long a decode engine whose steps hang goes on renewing.",
            page="failures.md#leases",
        ),
    ] = 60.0
    turn_seconds: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=86400, extra={"unit": "seconds"})],
        about(
            "How long a decode engine keeps what it has computed for the next turn of the conversation, where the "
            "router gives its answer's parameters to a prefill engine; the engine takes the blocks back when it needs "
            "them. 0 keeps nothing.",
            page="conversations.md",
        ),
    ] = 0.0
    load_timeout_seconds: Annotated[
        Seconds,
        about(
            "How long a load may take, behind concurrent routers with the prompt's computation; some 10 s later the "
            "request fails even if the prefill engine is stopped, and half of this time after the load's failure a "
            "fence ends the wait for one on another host.",
            page="decisions/quarantined-blocks.md",
        ),
    ] = 120.0
    integrity: Annotated[
        Literal["auto", "off", "sample", "full"],
        about(
            "How much of a loaded cache is compared with the prefill engine's digests before it is used: `sample` one "
            "layer and KV head of every 16 tokens, `full` every byte; the prefill engine needs at least the decode "
            "engine's value. `auto` is `sample`, and compares neither what an engine without digests writes nor caches "
            "of numbers of other than 1, 2 or 4 bytes.",
            page="decisions/integrity.md",
        ),
    ] = "auto"
    transfer_log: Annotated[
        str,
        about(
            "A file that gets one JSON line per load and rank, and the events of writes (`.rank<rank>` or `.scheduler` "
            "is appended).",
            unit="path",
            unset="none",
            page="metrics.md#one-line-for-each-load",
        ),
    ] = ""
    model_id: Annotated[
        str,
        about(
            "What both engines must agree on in place of the digests of model and weights and of their quantisation.",
            unset="digests",
            page="security.md",
        ),
    ] = ""

    @property
    def wanted_integrity(self) -> Integrity:
        """How much of a transfer is compared."""
        return Integrity.SAMPLE if self.integrity == "auto" else Integrity(self.integrity)

    @property
    def requires_digests(self) -> bool:
        """Whether a load from a prefill engine without digests, and a cache that has none, is refused."""
        return self.integrity != "auto"

    @property
    def max_hold_seconds(self) -> float:
        """The greatest age of a held prompt, whatever is renewed."""
        return max(10 * self.lease_seconds, self.load_timeout_seconds, self.turn_seconds)

    @property
    def fence_seconds(self) -> float:
        """How long the blocks of a failed load wait for a prefill engine on another host to confirm that it writes no
        more; then a fence keeps it out.
        """
        return self.load_timeout_seconds / 2

    @property
    def handshake_timeout_seconds(self) -> float:
        """How long a prefill engine may take to answer a handshake: the other half of a load's time is for the load.

        A load may wait for a prompt, so its time says little of handshakes; a lease bounds what an engine may leave
        unanswered.
        """
        return min(self.load_timeout_seconds / 2, self.lease_seconds / 4)

    @property
    def local_host(self) -> str:
        """The address at which processes of this host reach a listener at ``host``."""
        # Where the host has no IPv6, "::" cannot be connected to, although a listener there is reached over IPv4.
        return "127.0.0.1" if is_wildcard(self.host) else self.host

    @property
    def reachable_host(self) -> str:
        """Where peers reach what listens on ``host``."""
        return self.advertised_host or self.host

    @property
    def ports_of_ranks(self) -> range:
        """The ports of which each rank takes the first free one; without ``rank_ports`` port 0, any free one."""
        first, _, last = self.rank_ports.partition("-")
        return range(int(first), int(last) + 1) if self.rank_ports else range(1)

    @property
    def meets_other_hosts(self) -> bool:
        """Whether ranks of engines on other hosts may connect to this engine's ranks, or this engine's to theirs.

        With keys, signed parameters name hosts that no setting does.
        """
        hosts = (self.host, *self.allowed_hosts)
        return bool(self.keys) or not all(is_loopback(host) for host in hosts)

    @property
    def transports_listen_at(self) -> str:
        """Where the ports of the transports of this engine's ranks are; empty for every interface."""
        if not self.meets_other_hosts or (is_loopback(self.host) and is_loopback(self.reachable_host)):
            return THIS_HOST
        return "" if is_wildcard(self.host) or is_loopback(self.host) else self.host


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Return the settings in ``extra_config``.

    Raises :class:`SettingsError`: unknown-setting naming the nearest valid key, invalid-setting; several as one
    :class:`~kvferry.errors.SeveralErrors`.

    >>> parse_settings({"lease_seconds": 90}).lease_seconds
    90.0
    >>> parse_settings({"lease_second": 90})
    Traceback (most recent call last):
    kvferry.errors.SettingsError: unknown setting 'lease_second'. Did you mean 'lease_seconds'? [unknown-setting]
    """
    found = read_settings(extra_config)
    raise_all(found.errors)
    return found.settings


@dataclass(slots=True)
class Found(Generic[AnySettings]):
    """What was read of a connector's settings: a wrong one has its default, and is among ``wrong``."""

    settings: AnySettings
    errors: list[KVFerryError]
    wrong: set[str]
    """Settings with another value than the operator means: nothing more is said of them."""

    def note(self, names: Sequence[str], check: Callable[[AnySettings], object]) -> None:
        """Note the errors that a check of these settings raises. What a check of one alone refuses is wrong."""
        if not self.wrong.isdisjoint(names):
            return
        try:
            check(self.settings)
        except KVFerryError as error:
            self.errors.extend(error.errors if isinstance(error, SeveralErrors) else [error])
            if len(names) == 1:
                self.wrong.update(names)


def _check_transport(settings: Settings) -> None:
    if settings.transport != "auto":
        check_transport(settings.transport)


def read_settings(extra_config: Mapping[str, Any]) -> Found[Settings]:
    """Return the settings in ``extra_config``, and all that is wrong with them."""
    found = converted(extra_config, Settings)
    found.note(["transport"], _check_transport)
    found.note(["transfer_log"], _check_log)
    for name in ("host", "advertised_host"):
        found.note([name], partial(_check_host, name))
    found.note(["model_id"], _check_model_id)
    found.note(["rank_ports"], _check_rank_ports)
    found.note(["port", "bootstrap_port", "rank_ports"], _check_ports)
    num_errors = len(found.errors)
    found.note(["host", "advertised_host"], _check_reachable)
    found.note(["host", "keys"], _check_has_keys)
    if len(of_host := found.errors[num_errors:]) > 1:
        remedy = " ".join(each.remedy for each in of_host)
        found.errors[num_errors:] = [invalid_setting(" ".join(each.message for each in of_host), remedy)]
    found.note(["allowed_hosts"], _check_allowed_hosts)
    found.note(["router_address", "http_address"], _check_router)
    return found


def invalid_setting(problem: str, remedy: str) -> SettingsError:
    """Return the error (invalid-setting) of a setting that cannot be as it is."""
    return SettingsError(Reason.INVALID_SETTING, problem, remedy)


def converted(extra_config: Mapping[str, Any], kind: type[AnySettings], **required: Any) -> Found[AnySettings]:
    """Return the settings of a connector, each checked by its type: unknown-setting naming the nearest valid key,
    invalid-setting. ``required`` are values that stand in the place of wrong ones without a default.
    """
    given, errors, wrong = dict(extra_config), list[KVFerryError](), set[str]()
    for key in [key for key in given if key not in kind.__struct_fields__]:
        del given[key]
        remedy = did_you_mean(key, kind.__struct_fields__, _LISTED)
        errors.append(SettingsError(Reason.UNKNOWN_SETTING, f"unknown setting {key!r}.", remedy))
        # The operator has meant this one.
        if meant := nearest(key, kind.__struct_fields__):
            wrong.add(meant)
    while True:
        try:
            return Found(msgspec.convert(given, kind), errors, wrong)
        except msgspec.ValidationError as error:
            name = _name_of(error)
            if name not in wrong:
                told = f"kv_connector_extra_config: {in_words(error)}."
                errors.append(invalid_setting(told, f"{_choices(kind, name)}{_LISTED}"))
            wrong.add(name)
            given.pop(name, None)
            given |= {each: value for each, value in required.items() if each == name}


_NAMED_FIRST = re.compile(r"(?:Object missing required field `|.* - at `\$\.)(\w+)", re.DOTALL)


def _name_of(error: msgspec.ValidationError) -> str:
    """Return the setting that an error is about.

    >>> _name_of(msgspec.ValidationError("Expected `str` - at `$.allowed_hosts[0]`"))
    'allowed_hosts'
    """
    found = _NAMED_FIRST.match(str(error))
    assert found is not None, str(error)
    return found[1]


def _choices(kind: type[msgspec.Struct], name: str) -> str:
    """Return the values that a setting may have, where they are few words.

    >>> _choices(Settings, "integrity")
    "Use 'auto' or 'full' or 'off' or 'sample'. "
    """
    information = msgspec.inspect.type_info(kind)
    assert isinstance(information, msgspec.inspect.StructType)
    for field in information.fields:
        about = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
        if field.name == name and isinstance(about, msgspec.inspect.LiteralType):
            return f"Use {' or '.join(map(repr, about.values))}. "
    return ""


def _check_log(settings: Settings) -> None:
    folder = Path(settings.transfer_log).parent
    if settings.transfer_log and not folder.is_dir():
        problem = f"transfer_log {settings.transfer_log!r}: there is no folder {str(folder)!r}."
        raise invalid_setting(problem, "Make the folder, or name a file in one that exists.")


def _check_model_id(settings: Settings) -> None:
    try:
        as_peers_read(settings.model_id or "unset", Identifier)
    except ValueError as error:
        given = f"model_id {settings.model_id[:40]!r}, of {len(settings.model_id)} characters"
        remedy = f"Write a name of at most {MAX_IDENTIFIER_LENGTH} characters."
        raise invalid_setting(f"other engines refuse {given}: {in_words(error)}.", remedy) from error


def _check_host(name: str, settings: Settings) -> None:
    """Check by the rule by which peers check the host that this engine's answers give."""
    if (given := getattr(settings, name)) in ("", EVERY_INTERFACE):
        return
    try:
        check_host(given)
    except ValueError as error:
        meant = host_meant(given)
        write = f"{meant!r}, a host alone, without 'http://' and without a port" if meant else "an address or a name"
        raise invalid_setting(f"{name} {error}.", f'Write {write}. The port has its own setting, "port".') from error


def _check_reachable(settings: Settings) -> None:
    if is_wildcard(settings.reachable_host):
        name = "advertised_host" if settings.advertised_host else "host"
        raise invalid_setting(
            f"{name} {settings.reachable_host!r} means every interface, which is no address that other engines can "
            "connect to.",
            'Set "advertised_host" to the address or name at which they reach this machine.',
        )


def _check_has_keys(settings: Settings) -> None:
    if not (settings.keys or is_loopback(settings.host)):
        raise invalid_setting(
            f"host {settings.host!r} can be reached from other machines, and there are no keys: anybody there could"
            " read, change and free caches.",
            "Run 'kvferry keys new FOLDER', copy the folder to all engines, and set \"keys\" to its path; or set "
            '"keys": "none" where nobody else reaches the network.',
        )


def _check_rank_ports(settings: Settings) -> None:
    found = _PORTS.fullmatch(settings.rank_ports)
    if settings.rank_ports and not (found and 1 <= int(found[1]) <= int(found[2]) <= LAST_PORT):
        problem = f"rank_ports {settings.rank_ports!r} names no range of ports from 1 to {LAST_PORT}."
        raise invalid_setting(problem, "Write the first and the last one, such as '5700-5799'.")


def _check_ports(settings: Settings) -> None:
    control_port(settings, 0)
    _check_not_of_ranks(settings, settings.bootstrap_port, f"bootstrap_port {settings.bootstrap_port}")
    if settings.port and settings.port == settings.bootstrap_port:
        raise invalid_setting(
            f"port and bootstrap_port are both {settings.port}: each needs a port of its own.", "Set another one."
        )


def _check_not_of_ranks(settings: Settings, port: int, name: str) -> None:
    if settings.rank_ports and port in settings.ports_of_ranks:
        raise invalid_setting(
            f"{name} is also in rank_ports {settings.rank_ports!r}: a rank may take it first.",
            'Set "rank_ports" to a range without it.',
        )


def _check_allowed_hosts(settings: Settings) -> None:
    raise_all(
        [
            invalid_setting(
                f"allowed_hosts has {host!r}, which is no name, address or network.",
                "Write 'prefill-0.example', '10.1.2.3', '[fd00::1]' or '10.1.0.0/16', without a port.",
            )
            for host in settings.allowed_hosts
            if as_network(host) is None and not _NAME.fullmatch(host)
        ]
    )


def trust_of(settings: Settings) -> Trust:
    """Return whom the engine trusts. Reads the keys; raises :class:`SettingsError` as :class:`Keys` does."""
    if settings.keys == NO_KEYS:
        return Trust(None, settings.allowed_hosts, anywhere=not settings.allowed_hosts)
    return Trust(Keys(settings.keys) if settings.keys else None, settings.allowed_hosts)


def _check_router(settings: Settings) -> None:
    if bool(settings.router_address) != bool(settings.http_address):
        raise invalid_setting(
            "router_address and http_address go together: where the router listens, and where it is to send requests.",
            "Set both, or none where the router sends to one engine after the other.",
        )
    for name in ("router_address", "http_address") if settings.router_address else ():
        given = getattr(settings, name)
        try:
            host, _ = parse_place(given)
        except ValueError as error:
            raise invalid_setting(
                f"{name} {error}.", "Write host:port without 'http://', such as '10.0.0.1:8000'."
            ) from error
        if name == "http_address" and is_wildcard(host):
            raise invalid_setting(
                f"{name} {given!r} means every interface, which is no address that the router can connect to.",
                "Write the address or name at which the router reaches this engine's API server, and its port.",
            )


def control_port(settings: Settings, data_parallel_index: int) -> int:
    """Return the port of this data-parallel rank: the settings name the port of rank 0, and each rank takes the next.

    0 takes a free port for each rank. Peers learn the port from an answer and never compute it.

    Raises :class:`SettingsError` (invalid-setting) beyond the last port, and for a port of ``rank_ports``.

    >>> control_port(Settings(port=5600), 1), control_port(Settings(port=0), 1)
    (5601, 0)
    """
    if settings.port == 0:
        return 0
    port = settings.port + data_parallel_index
    if port > LAST_PORT:
        raise invalid_setting(
            f"port {settings.port} leaves no port for data-parallel rank {data_parallel_index}: ports end at "
            f"{LAST_PORT}.",
            'Set a lower "port", or 0, which takes a free one for each rank.',
        )
    _check_not_of_ranks(settings, port, f"port {port} of data-parallel rank {data_parallel_index}")
    return port
