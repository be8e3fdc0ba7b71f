"""Whether two engines can exchange caches, for ``kvferry check``.

Each engine is asked for what it tells a peer: its directory. The functions by which engines decide about one another
then decide here, so that this never says yes where an engine says no.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvferry.cli.plan_report import Blocks, GroupSizes, requests_for
from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.destination import Compares, SourceEngine, refuse_loopback
from kvferry.execution.digests import Integrity
from kvferry.handoff.handshake import Versions, agree, ask_directory, compare_engines, decode_shards
from kvferry.handoff.messages import Directory, Identity, RankEntry
from kvferry.handoff.wire.bootstrap import FAILURES, HttpAnswer, HttpRequest, exchange
from kvferry.handoff.wire.client import within
from kvferry.handoff.wire.trust import Keys, Trust, in_url, is_loopback, is_numeric, look_up
from kvferry.integrations.vllm.facts import (
    ASKS,
    MAX_FACTS_BYTES,
    MIDDLEWARE,
    PATH,
    EngineFacts,
    Port,
    ReadyAnswer,
    Value,
    signed_now,
)
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, check_cached_windows, check_filled_whole
from kvferry.layout.shard import CacheKind, Shard
from kvferry.peer_log import printable
from kvferry.plan.match import GroupBlocks, of_rank
from kvferry.plan.planner import PairPlan
from kvferry.transport.cma import check_same_host
from kvferry.transport.network import interface_of
from kvferry.transport.nixl import NO_PORTS, NixlEndPoint, TcpPorts
from kvferry.transport.protocol import bare, decode_end_point, is_on_this_host
from kvferry.transport.registry import in_common, nothing_in_common

PROMPT_TOKENS = 10_000
SENDER = "kvferry check"
ASK_SECONDS = 10.0
"""At most, for the answer of one control end point, or to a connection."""
CONNECT_SECONDS = 2.0
OTHER_PORTS = "the decode engine has taken other ports since a fence (its log says so)"
READY_REASONS = {
    Reason.INVALID_SETTING: (
        f"has no KVFerryConnector, or no fixed port at which {PATH} could ask it",
        'Start it with "kv_connector": "KVFerryConnector" and with "port" in kv_connector_extra_config.',
    ),
    Reason.PERMISSION_DENIED: (
        "has an API server with other keys than the engine",
        'Let both read the same folder "keys", and start them again.',
    ),
}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ROLE_REASONS = {
    "prefill": "it answers no bootstrap query, and registers with routers as a decode engine",
    "decode": "it registers with routers as a prefill engine",
}


class _Listens(msgspec.Struct):
    """What of Mooncake's end point says where it listens."""

    host: Value
    port: Port


@dataclass(frozen=True, slots=True)
class Server:
    """The URL of an API server or of a router."""

    name: str
    url: str
    parts: SplitResult

    @classmethod
    def parse(cls, name: str, url: str) -> "Server":
        """Return the server at ``http://HOST:PORT``. Raises :class:`HandoffError` (invalid-setting)."""
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.query or parts.fragment or parts.username is not None or not url.isprintable():
            raise HandoffError(
                Reason.INVALID_SETTING,
                f"{url[:200]!r} is not the URL of the {name}.",
                "Write http://HOST:PORT, such as http://127.0.0.1:8100.",
            )
        return cls(name, url.rstrip("/"), parts)

    @property
    def place(self) -> tuple[str, int]:
        """The host and the port."""
        assert self.parts.hostname is not None
        return in_url(self.parts.hostname), self.parts.port or (443 if self.parts.scheme == "https" else 80)

    def ask(self, path: str, seconds: float, most_bytes: int, **more: Any) -> HttpAnswer:
        """Send one request. Raises :class:`HandoffError`: peer-unreachable, malformed-message (too long)."""
        host, port = self.place
        is_tls = self.parts.scheme == "https"
        request = HttpRequest(host, port, self.parts.path.rstrip("/") + path, tls=is_tls, **more)
        try:
            answer = exchange(request, look_up(host, port), seconds, most_bytes)
        except FAILURES as error:
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"the {self.name} at {self.url} does not answer {request.method} {path}: {error}.",
                f"Check that it runs with this --host and --port, and open TCP port {port} of {host} to this machine.",
            ) from error
        if answer.is_cut:
            raise HandoffError(
                Reason.MALFORMED_MESSAGE,
                f"the {self.name} at {self.url} answers {request.method} {path} with more than {most_bytes} bytes.",
                "Check which program listens there: no engine answers so.",
            )
        return answer


@dataclass(frozen=True, slots=True)
class Side:
    """What is known of one engine. ``reason`` says why it is not ready, ``trust`` and ``host`` how it was asked;
    ``directories`` has one for each of its data-parallel ranks.
    """

    server: Server
    facts: EngineFacts
    reason: str
    trust: Trust
    host: str
    directories: tuple[Directory, ...]

    @property
    def directory(self) -> Directory:
        """The directory of the first data-parallel rank: the others have caches like it."""
        return self.directories[0]

    @property
    def ranks(self) -> tuple[RankEntry, ...]:
        """The ranks of the first data-parallel rank."""
        return self.directory.ranks

    @property
    def is_on_this_host(self) -> bool:
        """Whether all ranks are known to be on the host of this process."""
        return all(rank.process is not None and is_on_this_host(rank.process) for rank in self.ranks)


class OptionValues(NamedTuple):
    """An option of vLLM, or a setting of the connector, with the values of both engines."""

    option: str
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why two engines cannot exchange caches, and the options that do it."""

    error: KVFerryError
    options: tuple[OptionValues, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        told = {"reason": self.error.reason.value, "message": self.error.message, "remedy": self.error.remedy}
        return {**told, "options": [each._asdict() for each in self.options]}


@dataclass(frozen=True, slots=True)
class Route:
    """How a prompt of ``tokens`` would move, ``transport`` being the first that both engines may use.

    ``descriptors`` are those of blocks that are nowhere neighbours, ``joined`` those of consecutive blocks.
    """

    transport: str
    tokens: int
    num_bytes: int
    descriptors: int
    joined: int
    pairs: int


@dataclass(slots=True)
class Verdict:
    """What was found of a pair: it works where there is no problem. ``notes`` are what could not be seen from here."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    route: Route | None = None


def ask_engine(name: str, url: str, keys: Keys | None, seconds: float) -> Side:
    """Ask an engine's API server for its facts, and its schedulers for their directories.

    Raises :class:`HandoffError` where the engine cannot be asked: peer-unreachable, permission-denied,
    invalid-setting, malformed-message, protocol-mismatch.
    """
    server = Server.parse(name, url)
    found = _ready_answer(server, keys, seconds)
    if (facts := found.engine) is None:
        raise _says_nothing(server, found, keys)
    asked_at = server.place[0]
    host = facts.host if is_loopback(asked_at) else facts.reachable_host
    # Without keys anybody may have sent the answer: it leads to this machine or to the host of the URL.
    trust = Trust(keys) if facts.key and keys else Trust(None, [bare(asked_at), *_own(host)])
    ask = partial(ask_directory, sender=SENDER, timeout_seconds=min(seconds, ASK_SECONDS), trust=trust)
    try:
        directories = tuple(ask(host, port, is_trusted=trust.keys is not None) for port in facts.ports)
    except HandoffError as error:
        where = ", ".join(f"{in_url(host)}:{port}" for port in facts.ports)
        raise HandoffError(
            error.reason,
            f"the {name} cannot be asked at {where}: {error.message}",
            f"Open {where} to this machine, or run this on the engine's host."
            if error.reason is Reason.PEER_UNREACHABLE
            else error.remedy,
        ) from error
    return Side(server, facts, found.reason, trust, host, directories)


def _own(host: str) -> list[str]:
    """Return the host where it is an address of this machine."""
    return [bare(host)] if is_numeric(host) and interface_of(bare(host)) is not None else []


def _ready_answer(server: Server, keys: Keys | None, seconds: float) -> ReadyAnswer:
    """Return what the middleware says. Raises :class:`HandoffError` as :func:`ask_engine`."""
    answer = server.ask(PATH, seconds, MAX_FACTS_BYTES, headers={ASKS: signed_now(keys)})
    try:
        if answer.status in (200, 503):
            return msgspec.json.decode(answer.body, type=ReadyAnswer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if b'"ready"' in answer.body:
            raise HandoffError(
                Reason.MALFORMED_MESSAGE,
                f"the {server.name} at {server.url} answers {PATH} in another way: {error}.",
                "Run the same kvferry version here and there.",
            ) from error
    version = server.ask("/version", seconds, MAX_FACTS_BYTES)
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        found = msgspec.json.decode(version.body, type=dict[str, str]).get("version")
        if version.status == 200 and found:
            raise HandoffError(
                Reason.INVALID_SETTING,
                f"the {server.name} at {server.url} runs vLLM {printable(found)[:40]} without kvferry's readiness "
                f"middleware: {PATH} has status {answer.status}.",
                f"Start its API server with --middleware {MIDDLEWARE}",
            )
    raise HandoffError(
        Reason.MALFORMED_MESSAGE,
        f"no vLLM engine answers at {server.url}, the URL of the {server.name}: {PATH} has status {answer.status}, "
        f"/version has status {version.status}.",
        "Give the URLs of the API servers of the prefill engine and the decode engine, and then that of the router.",
    )


def _says_nothing(server: Server, found: ReadyAnswer, keys: Keys | None) -> HandoffError:
    """Return the error of an engine that does not say its facts."""
    reason = Reason(found.reason) if found.reason in set(Reason) else None
    if reason in READY_REASONS:
        what, remedy = READY_REASONS[reason]
        return HandoffError(reason, f"the {server.name} at {server.url} {what}.", remedy)
    if keys is None:
        what, remedy = "has keys, or is not asked from its own host", "Give --keys a folder that the engine trusts."
    else:
        what = f"does not trust the key {keys.fingerprint[:16]} of --keys, or its clock is over a minute off"
        remedy = "Copy certificate.pem into trusted/ of the engine's keys; ask an engine without keys on its host."
    return HandoffError(
        Reason.PERMISSION_DENIED, f"the {server.name} at {server.url} tells nothing of itself: it {what}.", remedy
    )


def judge(prefill: Side, decode: Side, seconds: float = 120.0) -> Verdict:
    """Return whether the decode engine can load from the prefill engine."""
    verdict = Verdict()
    for error in _refusals(prefill, decode):
        verdict.problems.append(Problem(error, options_named(error, prefill.facts, decode.facts)))
    try:
        # An engine could describe a cache that takes hours to plan for, and no interrupt ends arrays' computations.
        remedy = "Raise --timeout. Engines plan once, at their first request."
        plan = "plan between the two engines"
        errors, verdict.route = within(seconds, plan, partial(_planned, prefill, decode), remedy)
    except KVFerryError as error:
        errors = [error]
    known = {problem.error.message for problem in verdict.problems}
    for refusal in errors:
        if refusal.message not in known:
            verdict.problems.append(Problem(refusal, options_named(refusal, prefill.facts, decode.facts)))
    over = "" if verdict.route is None else verdict.route.transport
    for closed, is_certain in _closed_ports(prefill, decode, seconds, over):
        if is_certain:
            verdict.problems.append(Problem(closed))
        else:
            verdict.notes.append(f"{closed.message} {closed.remedy}")
    return verdict


def options_named(error: KVFerryError, prefill: EngineFacts, decode: EngineFacts) -> tuple[OptionValues, ...]:
    """Return the options that an error's remedy names and that differ, with both values."""
    names = sorted(prefill.options.keys() | decode.options.keys())
    values = [OptionValues(name, *(side.options.get(name, "not told") for side in (prefill, decode))) for name in names]
    words = set(error.remedy.replace(",", " ").replace(".", " ").replace('"', " ").split())
    return tuple(each for each in values if each.option in words and each.prefill != each.decode)


def _refusals(prefill: Side, decode: Side) -> Iterator[KVFerryError]:
    """Yield the refusals of all but the plan."""
    for side in (prefill, decode):
        yield from _of_side(side)
    checks: list[Callable[[], object]] = [
        partial(_check_keys, prefill, decode),
        partial(
            agree,
            prefill=Versions(prefill.facts.oldest, prefill.facts.newest),
            decode=Versions(decode.facts.oldest, decode.facts.newest),
        ),
        partial(compare_engines, prefill.directory, decode.directory.identity, decode.directory.weights_version),
        partial(_check_hosts, prefill, decode),
    ]
    for check in checks:
        try:
            check()
        except KVFerryError as error:
            yield error


def _of_side(side: Side) -> Iterator[KVFerryError]:
    part, facts = side.server.name.split()[0], side.facts
    if facts.role not in (ROLES[part], "kv_both"):
        yield HandoffError(
            Reason.INVALID_SETTING,
            f"kv_role: the {side.server.name} has {printable(facts.role)!r}: {ROLE_REASONS[part]}.",
            f'Set "kv_role" of --kv-transfer-config to "{ROLES[part]}", or exchange the URLs.',
        )
    if side.reason == Reason.DRAINING:
        yield HandoffError(
            Reason.DRAINING, f"the {side.server.name} drains, and holds no more prompts.", "Start it again."
        )


def _check_keys(prefill: Side, decode: Side) -> None:
    """Raise unless both engines have keys that the other one trusts, or neither has any."""
    if bool(prefill.facts.key) != bool(decode.facts.key):
        has = "prefill has keys, decode has none" if prefill.facts.key else "prefill has none, decode has keys"
        raise HandoffError(
            Reason.PERMISSION_DENIED, f"keys: {has}.", 'Set "keys" in both engines, or in neither on one host.'
        )
    for one, other in ((prefill, decode), (decode, prefill)):
        if one.facts.key and one.facts.key not in other.facts.trusted:
            raise HandoffError(
                Reason.PERMISSION_DENIED,
                f"keys: the {other.server.name} does not trust the certificate {one.facts.key[:16]} of the "
                f"{one.server.name}.",
                f"Copy certificate.pem of the {one.server.name} into trusted/ of the {other.server.name}, and restart "
                "that.",
            )


def _check_hosts(prefill: Side, decode: Side) -> None:
    """Raise where an engine may not connect to the other one, or where loopback does not reach it."""
    for source in prefill.ranks:
        for rank in decode.ranks:
            if source.process is not None and rank.process is not None:
                is_on_one_host = source.process.boot_id == rank.process.boot_id
                refuse_loopback(rank.answers_at, source.answers_at, is_on_one_host=is_on_one_host)
                _refuse_loopback_of_source(prefill, is_on_one_host=is_on_one_host)
    if prefill.facts.key and decode.facts.key:
        return
    for one, hosts in (
        (prefill, {rank.answers_at.host for rank in decode.ranks}),
        (decode, {prefill.facts.reachable_host, *(rank.answers_at.host for rank in prefill.ranks)}),
    ):
        trust = Trust(None, one.facts.allowed_hosts, anywhere=one.facts.connects_anywhere)
        for host in sorted(hosts):
            try:
                trust.refuse_numeric(host)
            except KVFerryError as error:
                raise HandoffError(error.reason, f"the {one.server.name}: {error.message}", error.remedy) from error


def _refuse_loopback_of_source(prefill: Side, *, is_on_one_host: bool) -> None:
    host = prefill.facts.reachable_host
    if is_loopback(host) and not is_on_one_host:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the prefill engine answers at {host}, where no other host reaches it, and the decode engine is on "
            "another host.",
            'Set "host" (and "advertised_host") of the prefill engine to an address that the decode engine reaches.',
        )


def _planned(prefill: Side, decode: Side) -> tuple[list[KVFerryError], Route | None]:
    """Return the refusals of the decode ranks, each once, and what would move where there are none.

    Raises :class:`KVFerryError` for a directory that no engine could use.
    """
    sources, destinations = decode_shards(prefill.directory), decode_shards(decode.directory)
    refusals: dict[tuple[Reason, str], KVFerryError] = {}
    plans: list[tuple[Shard, tuple[PairPlan, ...]]] = []
    transport = ""
    try:
        transport = transport_between(prefill.ranks, decode.ranks)
    except KVFerryError as error:
        refusals[error.reason, error.remedy] = error
    ours, theirs = prefill.directory.identity, decode.directory.identity
    if ours.model != theirs.model and _sizes(ours) != _sizes(theirs):
        return list(refusals.values()), None  # of unequal models the identities tell
    for entry, shard in zip(decode.ranks, destinations, strict=True):
        compares = Compares(Integrity(entry.digests), is_required=decode.facts.requires_digests)
        try:
            plans.append((shard, SourceEngine(prefill.directory, shard, compares).plans("")))
        except KVFerryError as error:
            refusals.setdefault((error.reason, error.remedy), error)
    try:
        _check_block_sizes(sources, destinations, decode.facts)
    except KVFerryError as error:
        refusals.setdefault((error.reason, error.remedy), error)
    return list(refusals.values()), None if refusals else _route(transport, sources, plans)


def _sizes(identity: Identity) -> tuple[int, int, int]:
    return identity.num_layers, identity.num_kv_heads, identity.head_size


def transport_between(sources: Sequence[RankEntry], destinations: Sequence[RankEntry]) -> str:
    """Return the first transport by which each source rank may reach each destination rank.

    Whether the kernel and the network let it, only the engines find out. Raises :class:`TransportError`
    (transport-unavailable).
    """
    found: dict[str, None] = {}
    for source, destination in product(sources, destinations):
        names = in_common(source.end_points, destination.end_points)
        if not names:
            raise nothing_in_common("prefill", source.end_points, "decode", destination.end_points)
        if names[0] == "cma" and source.process is not None and destination.process is not None:
            try:
                check_same_host(source.process, destination.process)
            except KVFerryError:
                if len(names) == 1:
                    raise
                names = names[1:]
        found[names[0]] = None
    return ", ".join(found)


def _shapes(shards: Sequence[Shard]) -> dict[str, GroupShape]:
    """Return the shape of each cache group of an engine, by its name, in vLLM's order."""
    groups = {group.name: group for shard in shards for group in shard.groups}
    return {
        name: GroupShape(group.kind, 1 if group.kind is CacheKind.STATE else group.block_size, group.window)
        for name, group in sorted(groups.items(), key=lambda item: (len(item[0]), item[0]))
    }


def _check_block_sizes(sources: Sequence[Shard], destinations: Sequence[Shard], decode: EngineFacts) -> None:
    """Refuse as the decode engine's scheduler does. Raises :class:`HandoffError` (block-size-mismatch)."""
    sent, received = _shapes(sources), _shapes(destinations)
    if sent.keys() != received.keys():
        return  # the plan refuses them
    groups, sizes = list(received.values()), [shape.block_size for shape in sent.values()]
    check_cached_windows(groups, sizes, decode.caches_prefixes)
    if not decode.clears_in_part:
        check_filled_whole(groups, sizes)


def _route(transport: str, sources: Sequence[Shard], plans: Sequence[tuple[Shard, tuple[PairPlan, ...]]]) -> Route:
    """Return what would move of a prompt of :data:`PROMPT_TOKENS`, or of as many as the smaller cache takes."""
    shards = [*sources, *(shard for shard, _ in plans)]
    num_blocks = min(group.num_blocks for shard in shards for group in shard.groups)
    sent, received = _shapes(sources), _shapes([shard for shard, _ in plans])
    groups = [
        GroupSizes(name, shape.kind, shape.window, shape.block_size, received[name].block_size)
        for name, shape in sent.items()
        if name in received
    ]

    def requests(tokens: int, order: Blocks) -> tuple[list[GroupBlocks], int]:
        found, used = requests_for(groups, tokens, order, 0)
        return found, max(used)

    tokens = PROMPT_TOKENS
    while tokens > 1 and requests(tokens, Blocks.CONTIGUOUS)[1] > num_blocks:
        tokens = tokens * 9 // 10
    counts, num_bytes = {}, 0
    for order in (Blocks.SCATTERED, Blocks.CONTIGUOUS):
        blocks, _ = requests(tokens, order)
        lists = [pair.lower(of_rank(blocks, shard)) for shard, pairs in plans for pair in pairs]
        counts[order] = sum(map(len, lists))
        num_bytes = sum(int(rows[:, 2].sum()) for rows in lists)
    num_pairs = sum(len(pairs) for _, pairs in plans)
    return Route(transport, tokens, num_bytes, counts[Blocks.SCATTERED], counts[Blocks.CONTIGUOUS], num_pairs)


def _closed_ports(prefill: Side, decode: Side, seconds: float, over: str) -> Iterator[tuple[HandoffError, bool]]:
    """Yield the ports of ranks, and of NIXL at decode ranks that are written to ``over`` it, that take no connection of
    this process, and those that it does not try.

    It is certain that the other engine gets none where that engine runs on this host; elsewhere a firewall may tell the
    two apart. It is never certain of NIXL's ports: a fence takes others, and RDMA needs none. No connection begins
    after ``seconds``.
    """
    until, num_untried = time.monotonic() + seconds, 0
    for side, other in ((prefill, decode), (decode, prefill)):
        answers = {(rank.answers_at.host, rank.answers_at.port): None for rank in side.ranks}
        if side is prefill:
            answers |= {(side.facts.reachable_host, port): None for port in side.facts.ports}
        told = 'Open TCP port {1} of {0} to the {2}, or set "advertised_host".'
        ways = [([place], told.format(*place, other.server.name), other.is_on_this_host) for place in answers]
        if side is decode and "nixl" in over:
            of_data = "A firewall closes these ports, or " + OTHER_PORTS
            ways += [(list(ports.places), f"{of_data}. {ports.remedy()}", False) for ports in _nixl_ports(decode)]
        for listed, remedy, is_certain in ways:
            places = [place for place in listed if side.is_on_this_host or not is_loopback(place[0])]
            if not places:
                continue
            if time.monotonic() >= until:
                num_untried += 1
                continue
            attempt = _connect_to_one(side, places, until)
            num_untried += attempt.is_late
            name, where = side.server.name, " or ".join(attempt.untried)
            untried = (
                f"{where}, where the {name} says that it listens, was not tried: without keys this command connects "
            )
            untried += "to this machine and to the hosts of the URLs."
            if attempt.closed:
                closed = (
                    f"the {other.server.name} must reach the {name} at {' or '.join(attempt.closed)}, and this machine "
                )
                closed += f"gets no connection there: {'; '.join(dict.fromkeys(attempt.closed.values()))}."
                if attempt.untried:
                    closed, remedy = f"{closed} {untried}", f"{remedy} Or run it with --keys."
                yield HandoffError(Reason.PEER_UNREACHABLE, closed, remedy), is_certain and not attempt.untried
            elif attempt.untried:
                yield HandoffError(Reason.PERMISSION_DENIED, untried, "Run it with --keys."), False
    if num_untried:
        what = f"{num_untried} ports of ranks were not tried: {seconds:g} s were over."
        yield HandoffError(Reason.DEADLINE_EXCEEDED, what, "Raise --timeout."), False


def _nixl_ports(decode: Side) -> Iterator[TcpPorts]:
    """Yield where each rank's NIXL listens: nowhere by a malformed end point, of which the prefill engine says so."""
    for rank in decode.ranks:
        found = NO_PORTS
        with suppress(TransportError):
            found = decode_end_point(rank.end_points.get("nixl", b""), NixlEndPoint, "nixl").tcp_ports
        yield found


@dataclass(slots=True)
class _Attempt:
    """What was found of several places, of which one will do; nothing where one takes a connection.

    ``closed`` says why places take none, ``untried`` are those to which this command may not connect without keys, and
    ``is_late`` says that the time was over before one of the places.
    """

    closed: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    is_late: bool = False


def _connect_to_one(side: Side, places: Sequence[tuple[str, int]], until: float) -> _Attempt:
    """Connect to one of the places."""
    found = _Attempt()
    for host, port in places:
        where = f"{in_url(host)}:{port}"
        try:
            return _Attempt(is_late=not connects_to(_addresses_to_try(side, host, port), port, until))
        except KVFerryError as error:
            if error.reason is Reason.PERMISSION_DENIED:
                found.untried.append(where)
            else:
                found.closed[where] = error.message
        except OSError as error:
            found.closed[where] = str(error)
    return found


def ports_to_open(prefill: Side, decode: Side, route: Route) -> str:
    """Return what firewalls must let through for a load, by the end points of both engines."""
    to_prefill = {f"{in_url(prefill.facts.reachable_host)}:{port}" for port in prefill.facts.ports}
    to_prefill |= {f"{in_url(rank.answers_at.host)}:{rank.answers_at.port}" for rank in prefill.ranks}
    to_decode = {f"{in_url(rank.answers_at.host)}:{rank.answers_at.port}" for rank in decode.ranks}
    hosts = sorted({in_url(rank.answers_at.host) for rank in decode.ranks})
    told = f"Open in firewalls, over TCP: from decode to prefill {', '.join(sorted(to_prefill))}; "
    told += f"from prefill to decode {', '.join(sorted(to_decode))}"
    for transport in route.transport.split(", "):
        if transport == "nixl":
            places = {
                f"{in_url(host)}:{ports.port_range or port}"
                for ports in _nixl_ports(decode)
                for host, port in ports.places
            }
            told += f"; for nixl {', '.join(sorted(places)) or 'any port of ' + ', '.join(hosts)}"
            if not all(ports.port_range for ports in _nixl_ports(decode) if ports.places):
                told += f", unless {OTHER_PORTS}"
        elif transport == "mooncake":
            places = set()
            with suppress(KVFerryError):
                ends = [decode_end_point(rank.end_points["mooncake"], _Listens, "mooncake") for rank in decode.ranks]
                places = {f"{in_url(end.host)}:{end.port}" for end in ends}
            told += f"; for mooncake {', '.join(sorted(places) or hosts)}, and MC_MIN_RPC_PORT to MC_MAX_RPC_PORT there"
    return f"{told}."


def _addresses_to_try(side: Side, host: str, port: int) -> list[str]:
    """Return the addresses of a host that an engine names. Without keys anybody may have named it.

    Raises :class:`HandoffError`: permission-denied where the engine's answers may not lead there, peer-unreachable for
    an unknown name.
    """
    own = [address for address in look_up(host, port) if _own(address)]
    return own or side.trust.addresses_named_by_peers(host, port)


def connects_to(addresses: Sequence[str], port: int, until: float) -> bool:
    """Connect to one of a host's addresses and close the connection; return False where the time was over before.

    Raises ``OSError`` where no address takes a connection.
    """
    refused: OSError | None = None
    for address in addresses:
        if time.monotonic() >= until:
            return False
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            refused = error
        else:
            return True
    raise refused or OSError("the name has no address")
