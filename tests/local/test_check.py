"""``kvferry check``: which pairs of engines cannot exchange caches and why, one prompt through them, bad answers."""

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.cli import check, check_pair, check_prompt
from kvferry.cli.main import main
from kvferry.cli.plan_report import Blocks, EngineShape, make_report
from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire.trust import Keys, make_keys
from kvferry.harness.launch import free_port
from kvferry.integrations.vllm.facts import MIDDLEWARE, ReadyAnswer
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind
from kvferry.models.families import alike
from kvferry.models.groups import AttentionCache
from kvferry.transport.nixl import NixlEndPoint
from kvferry.transport.protocol import own_identity

from ..support.dense import shard_for
from .api_servers import OPTIONS, PHASES, ApiServer, EngineInProcess, RouterInProcess
from .engines_in_process import IDENTITY, DecodeRank

ELSEWHERE = msgspec.structs.replace(own_identity(), boot_id="another host")
SHAPE: dict[str, Any] = {
    "layers": ["0", "1"],
    "num_kv_heads": 4,
    "head_size": 8,
    "itemsize": 4,
    "block_size": 16,
    "num_blocks": 700,
    "layout": NamedLayout.BHLNC,
    "base_address": 1 << 20,
}
Json = dict[str, Any]


def rank(**changes: Any) -> Any:
    return SimpleNamespace(shard=shard_for(**{**SHAPE, **changes}))


class Pair:
    """Makes engines and a router, and runs the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self._servers: list[ApiServer] = []

    def engine(self, role: str, *ranks: Any, keys: Keys | None = None, **changes: Any) -> EngineInProcess:
        return self.opened(EngineInProcess(ranks or (rank(),), role, keys, **changes))

    def prefill(self, *ranks: Any, **given: Any) -> EngineInProcess:
        return self.engine("kv_producer", *ranks, **given)

    def decode(self, *ranks: Any, **given: Any) -> EngineInProcess:
        return self.engine("kv_consumer", *ranks, **given)

    def opened(self, server: Any) -> Any:
        self._servers.append(server)
        return server

    def run(self, *arguments: Any) -> tuple[object, str]:
        """Return the exit code and what was printed."""
        words = [each.url if isinstance(each, ApiServer) else str(each) for each in arguments]
        self._monkeypatch.setattr(sys, "argv", ["kvferry", "check", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    def report(self, *arguments: Any) -> tuple[object, Json]:
        code, printed = self.run(*arguments, "--json")
        return code, json.loads(printed)

    def problems(self, *arguments: Any) -> list[Json]:
        """Return why the pair cannot work."""
        code, found = self.report(*arguments)
        assert (code, found["works"]) == (check.CANNOT_WORK, False), found
        problems: list[Json] = found["problems"]
        return problems

    def refusals(self, *arguments: Any) -> list[Json]:
        """Return why engines cannot be asked."""
        code, found = self.report(*arguments)
        assert (code, found["works"]) == (check.CANNOT_ASK, False), found
        refusals: list[Json] = found["cannot_ask"]
        return refusals

    def close(self) -> None:
        for server in self._servers:
            server.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Pair]:
    monkeypatch.setattr(check_prompt, "METRICS_SECONDS", 0.3)
    monkeypatch.setattr(check_pair, "CONNECT_SECONDS", 1.0)
    made = Pair(monkeypatch, capsys)
    yield made
    made.close()


def test_a_pair_that_works_is_told_what_a_long_prompt_takes_and_where_the_time_of_one_went(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    code, found = pair.report(prefill, decode)
    assert (code, found["works"], found["problems"]) == (check.WORKS, True, [])
    # As many as "kvferry plan" says for engines of this shape.
    caches = alike(AttentionCache(num_kv_heads=4, head_size=8, itemsize=4), 2)
    shape = EngineShape(1, NamedLayout.BHLNC, 16)
    planned = [
        make_report(caches, shape, shape, check_pair.PROMPT_TOKENS, order)
        for order in (Blocks.SCATTERED, Blocks.CONTIGUOUS)
    ]
    route = found["route"]
    assert (route["transport"], route["tokens"]) == ("cma", check_pair.PROMPT_TOKENS)
    assert [route["descriptors"], route["joined"]] == [each.descriptors for each in planned]
    assert route["num_bytes"] == planned[0].bytes
    [sent] = found["prompts"]
    assert (sent["received_tokens"], sent["bytes"], sent["descriptors"]) == (64, 4096, 4)
    times = {(row["where"], row["what"]): row["milliseconds"] for row in sent["times"]}
    assert times["decode", "wait for the cache"] == pytest.approx(20)
    assert times["decode", "comparing digests"] == pytest.approx(0.5)
    phases = {row["phase"]: (row["transport"], row["milliseconds"]) for row in sent["times"] if row["phase"]}
    assert phases == {phase: ("cma", pytest.approx(1e3 * seconds)) for phase, seconds in PHASES.items()}
    assert list(phases) == list(PHASES)
    assert sent["transports"] == ["cma"]
    assert times["prefill", "prompt computed"] == pytest.approx(4)
    assert times["prefill", "HTTP request"] > 0
    assert prefill.released == [], "the decode engine releases what it has loaded"


def test_the_table_says_the_same(pair: Pair) -> None:
    decode = pair.decode()
    decode.transport = "nixl"
    code, printed = pair.run(pair.prefill(), decode)
    assert code == check.WORKS
    for words in ("625 descriptors", "over cma", "wait for the cache", "20.0"):
        assert words in printed
    for phase, seconds in PHASES.items():
        [line] = [line for line in printed.splitlines() if f" {phase}: " in line]
        assert line.split()[-3:-1] == ["│", f"{1e3 * seconds:.1f}"], line
        assert "nixl" in line


def test_without_a_prompt_no_completion_is_asked_for(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    code, found = pair.report(prefill, decode, "--no-prompt")
    assert (code, found["prompts"]) == (check.WORKS, [])
    assert prefill.asked == decode.asked == ["/ready"]


def test_a_cache_with_less_room_says_for_how_many_tokens_the_count_is(pair: Pair) -> None:
    _, found = pair.report(pair.prefill(rank(num_blocks=101)), pair.decode(rank(num_blocks=400)), "--no-prompt")
    tokens = found["route"]["tokens"]
    assert 1300 < tokens <= 1600
    assert found["route"]["descriptors"] == -(-tokens // 16)


def test_ranks_of_unequal_tensor_parallel_sizes_are_planned_for_each_pair(pair: Pair) -> None:
    prefill = pair.prefill(*(rank(tp_rank=index, tp_size=2, base_address=index << 40) for index in range(2)))
    _, found = pair.report(prefill, pair.decode(), "--no-prompt")
    assert (found["route"]["pairs"], found["route"]["descriptors"]) == (2, 1250)


# Pairs that cannot work. Each makes both engines, and names the reason, words of the message and the option.


def differ(decode: EngineInProcess, **options: str) -> EngineInProcess:
    decode.change_options(**options)
    return decode


def of_identity(**fields: Any) -> dict[str, Any]:
    return {"identity": msgspec.structs.replace(IDENTITY, **fields)}


def with_facts(engine: EngineInProcess, **facts: Any) -> EngineInProcess:
    engine.change_facts(**facts)
    return engine


def drains(engine: EngineInProcess) -> EngineInProcess:
    engine.ready = ReadyAnswer(ready=False, reason="draining")
    return engine


Makes = Callable[[Pair], tuple[EngineInProcess, EngineInProcess]]
IMPOSSIBLE: dict[str, tuple[Makes, str, str, str]] = {
    "other weights": (
        lambda pair: (pair.prefill(), differ(pair.decode(**of_identity(weights="others")), model="n")),
        "model-mismatch",
        "weights: prefill has 'weights', decode has 'others'",
        "--model",
    ),
    "weights replaced in place": (
        lambda pair: (pair.prefill(), pair.decode(weights_version="step 2")),
        "model-mismatch",
        "weights_version: prefill has 'default', decode has 'step 2'",
        "",
    ),
    "cache dtype": (
        lambda pair: (pair.prefill(), differ(pair.decode(**of_identity(kv_dtype="fp8_e4m3")), kv_cache_dtype="fp8")),
        "dtype-mismatch",
        "kv_dtype: prefill has 'float32', decode has 'fp8_e4m3'",
        "--kv-cache-dtype",
    ),
    "a draft model on one side": (
        lambda pair: (
            pair.prefill(),
            differ(pair.decode(rank(layers=["0", "1", "draft"])), speculative_config="method eagle"),
        ),
        "layer-mismatch",
        "no source has layers draft",
        "--speculative-config",
    ),
    "windows as full attention": (
        lambda pair: (
            pair.prefill(rank(kind=CacheKind.SLIDING_WINDOW, window=40)),
            differ(pair.decode(), disable_hybrid_kv_cache_manager="True"),
        ),
        "group-mismatch",
        "cache kinds",
        "--disable-hybrid-kv-cache-manager",
    ),
    "block sizes of packed pages": (
        lambda pair: (
            pair.prefill(rank(packing="amx")),
            differ(pair.decode(rank(packing="amx", block_size=32)), block_size="32"),
        ),
        "block-size-mismatch",
        "pages of 16 and 32 tokens",
        "--block-size",
    ),
    "cached windows in longer blocks": (
        lambda pair: (
            pair.prefill(rank(kind=CacheKind.SLIDING_WINDOW, window=40)),
            differ(pair.decode(rank(kind=CacheKind.SLIDING_WINDOW, window=40, block_size=32)), block_size="32"),
        ),
        "block-size-mismatch",
        "blocks of 16 tokens on the prefill side",
        "--block-size",
    ),
    "digests": (
        lambda pair: (
            with_facts(pair.prefill(), options={**OPTIONS, "integrity": "off"}),
            with_facts(pair.decode(entry={"digests": "sample"}), requires_digests=True),
        ),
        "unsupported",
        'the decode engine has "integrity": "sample", the prefill engine "off"',
        "integrity",
    ),
    "protocol versions": (
        lambda pair: (with_facts(pair.prefill(), oldest=2, newest=3), pair.decode()),
        "protocol-mismatch",
        "prefill speaks 2 to 3, decode speaks 1",
        "",
    ),
    "a role reversed": (
        lambda pair: (pair.prefill(), pair.engine("kv_producer")),
        "invalid-setting",
        "kv_role: the decode engine has 'kv_producer'",
        "",
    ),
    "an engine that drains": (lambda pair: (drains(pair.prefill()), pair.decode()), "draining", "prefill engine", ""),
    "no transport in common": (
        lambda pair: (
            pair.prefill(entry={"end_points": {"nixl": b""}}),
            differ(pair.decode(entry={"end_points": {"mooncake": b""}})),
        ),
        "transport-unavailable",
        "prefill has nixl, decode has mooncake",
        "",
    ),
    "cma between hosts": (
        lambda pair: (
            pair.prefill(entry={"end_points": {"cma": b""}}),
            pair.decode(entry={"end_points": {"cma": b""}, "process": ELSEWHERE}),
        ),
        "transport-unavailable",
        "cma needs both processes on one host",
        "",
    ),
    "loopback between hosts": (
        lambda pair: (pair.prefill(), pair.decode(entry={"process": ELSEWHERE})),
        "peer-unreachable",
        "where no other host reaches it",
        "",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_makes_a_pair_impossible_is_named_with_both_values(case: str, pair: Pair) -> None:
    make, reason, words, option = IMPOSSIBLE[case]
    prefill, decode = make(pair)
    problem, *others = sorted(pair.problems(prefill, decode), key=lambda each: words not in each["message"])
    assert (problem["reason"], words in problem["message"]) == (reason, True), problem
    assert problem["remedy"]
    assert len(others) == (case == "cma between hosts"), "those are on loopback besides"
    if option:
        expected = [prefill.facts.options[option], decode.facts.options[option]]
        assert expected[0] != expected[1]
        named = {each["option"]: [each["prefill"], each["decode"]] for each in problem["options"]}
        assert named == {option: expected}
    assert "/v1/completions" not in prefill.asked + decode.asked, "no prompt is sent"


def test_both_roles_reversed_are_two_reasons(pair: Pair) -> None:
    problems = pair.problems(pair.decode(), pair.prefill())
    assert [each["message"].split(":")[0] for each in problems] == ["kv_role", "kv_role"]


def test_several_reasons_are_all_listed(pair: Pair) -> None:
    decode = pair.decode(rank(layers=["0", "1", "draft"]), weights_version="step 2")
    assert {each["reason"] for each in pair.problems(pair.prefill(), decode)} == {"model-mismatch", "layer-mismatch"}


def test_an_engine_on_another_network_is_not_connected_to_without_keys(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = pair.decode()
    elsewhere = msgspec.structs.replace(decode.directory().ranks[0].answers_at, host="192.0.2.7")
    decode.changes["entry"] = {"answers_at": elsewhere, "process": None}
    with_facts(decode, connects_anywhere=True)
    connect, tried = socket.create_connection, set[str]()

    def watched(address: tuple[str, int], *given: Any, **more: Any) -> socket.socket:
        tried.add(address[0])
        return connect(("127.0.0.1", address[1]), *given, **more)

    monkeypatch.setattr(socket, "create_connection", watched)
    code, found = pair.report(pair.prefill(), decode)
    assert (code, tried) == (check.CANNOT_WORK, {"127.0.0.1"})
    assert [note for note in found["notes"] if "192.0.2.7" in note and "Run it with --keys" in note]
    [problem] = [each for each in found["problems"] if each["reason"] == "permission-denied"]
    assert "the prefill engine: host: '192.0.2.7'" in problem["message"]
    assert "allowed_hosts" in problem["remedy"]


def test_the_port_of_a_rank_that_takes_no_connection_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, port = pair.prefill(), free_port()
    closed = msgspec.structs.replace(prefill.directory().ranks[0].answers_at, port=port)
    prefill.changes["entry"] = {"answers_at": closed}
    [problem] = pair.problems(prefill, pair.decode())
    assert problem["reason"] == "peer-unreachable"
    assert f"Open TCP port {port} of 127.0.0.1 to the decode engine" in problem["remedy"]
    # From a third host it may be this host's firewall.
    monkeypatch.setattr(check_pair.Side, "is_on_this_host", property(lambda side: side.server.url == prefill.url))
    code, found = pair.report(prefill, pair.decode(), "--no-prompt")
    assert code == check.WORKS
    assert str(port) in found["notes"][0]


OTHER_PORTS = "the decode engine has taken other ports since a fence (its log says so)"


def over_nixl(pair: Pair, places: Sequence[tuple[str, int]], port_range: str = "") -> list[EngineInProcess]:
    """Return a prefill engine, and a decode engine whose NIXL says that it listens at the places."""
    nixl = NixlEndPoint("nixl", 1, "decode", b"metadata", [], 4096, bytes(16))
    values = msgspec.to_builtins(nixl) | {"tcp_ports": (places, port_range)}  # also what a rank refuses
    ends = {"end_points": {"nixl": msgspec.msgpack.encode(values | {"nonce": bytes(16), "metadata": b"metadata"})}}
    return [pair.prefill(entry={"end_points": {"nixl": b""}}), pair.decode(entry=ends)]


@pytest.mark.parametrize("num_open", [0, 1])
def test_the_port_of_the_data_that_takes_no_connection_is_named_and_the_prompt_decides(
    num_open: int, pair: Pair
) -> None:
    """One of a rank's interfaces that the prefill engine reaches will do. RDMA needs no port, and a fence takes others:
    a pair that worked could not, and got no prompt.
    """
    port = free_port()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        places = [("127.0.0.1", port), *[listening.getsockname()][:num_open]]
        code, found = pair.report(*over_nixl(pair, places, "23700-23799"))
    assert (code, found["problems"], len(found["prompts"])) == (check.WORKS, [], 1)
    told = [text for text in found["notes"] if f"127.0.0.1:{port}, and this machine gets no connection" in text]
    assert len(told) == 1 - num_open
    what = "Open TCP ports 23700-23799 of 127.0.0.1 (UCX_TCP_PORT_RANGE there)"
    assert all(what in text and f"A firewall closes these ports, or {OTHER_PORTS}." in text for text in told)


@pytest.mark.parametrize("step", [1, -1], ids=["closed first", "closed last"])
def test_places_that_are_closed_and_places_that_are_not_tried_are_both_named(step: int, pair: Pair) -> None:
    """Whichever came last hid the other."""
    places = [("127.0.0.1", free_port()), ("192.0.2.7", 23700)]
    code, found = pair.report(*over_nixl(pair, places[::step]), "--no-prompt")
    [note] = [text for text in found["notes"] if "192.0.2.7:23700" in text]
    assert code == check.WORKS
    assert f"at 127.0.0.1:{places[0][1]}, and this machine gets no connection there: [Errno 111]" in note
    assert "192.0.2.7:23700, where the decode engine says that it listens, was not tried: without keys" in note
    assert note.endswith(" Or run it with --keys.")


@pytest.mark.parametrize("address", ["::ffff:127.0.0.1", "::ffff:0.0.0.0", "0.0.0.0", "::", "1.2.3.4.5", "::::"])
def test_no_spelling_of_an_address_leads_to_a_loopback_that_is_another_host_s(
    address: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_pair.Side, "is_on_this_host", property(lambda side: False))
    connect, tried = check_pair.connects_to, set[int]()

    def watched(addresses: Sequence[str], port: int, until: float) -> bool:
        tried.add(port)
        return connect(addresses, port, until)

    monkeypatch.setattr(check_pair, "connects_to", watched)
    monkeypatch.setattr(check_pair, "look_up", lambda host, _: [host])
    port = free_port()
    _, found = pair.report(*over_nixl(pair, [(address, port)]), "--no-prompt")
    assert port not in tried
    assert str(port) not in str(found["notes"])


def test_ports_are_not_tried_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0, 40)
    monkeypatch.setattr(check_pair, "time", SimpleNamespace(monotonic=lambda: next(times)))
    code, found = pair.report(pair.prefill(), pair.decode(), "--no-prompt")
    assert code == check.WORKS
    assert found["notes"] == ["2 ports of ranks were not tried: 60 s were over. Raise --timeout."]


SHARDS = [
    {},
    {"layers": ["0"]},
    {"layers": ["0", "1", "2"]},
    {"num_kv_heads": 8},
    {"head_size": 16},
    {"itemsize": 2},
    {"block_size": 32},
    {"group_name": "other"},
    {"layout": NamedLayout.LBNHC},
    {"packing": "amx"},
    {"kind": CacheKind.MLA, "num_kv_heads": 1},
]


@pytest.mark.parametrize("changes", SHARDS, ids=str)
def test_the_verdict_is_that_of_a_decode_rank(changes: dict[str, Any], pair: Pair) -> None:
    engine = pair.prefill(rank(**changes))
    hold = msgspec.structs.replace(engine.engine.hold(), port=engine.listener.port)
    decode = DecodeRank(rank())
    try:
        decode.engine(hold)
        refused = None
    except HandoffError as error:
        refused = error.reason.value
    except ValueError as error:  # PlanError
        refused = error.reason.value  # type: ignore[attr-defined]
    code, found = pair.report(engine, pair.decode(), "--no-prompt")
    assert [each["reason"] for each in found["problems"]] == ([] if refused is None else [refused])
    assert code == (check.WORKS if refused is None else check.CANNOT_WORK)


class TestKeys:
    """Engines with keys say what they are to whoever has a trusted key, wherever that is."""

    def test_a_pair_with_keys_works_with_a_key_that_both_trust(self, pair: Pair, tmp_path: Path) -> None:
        keys = make_keys(tmp_path / "keys")
        code, found = pair.report(pair.prefill(keys=keys), pair.decode(keys=keys), "--keys", keys.folder)
        assert (code, found["problems"]) == (check.WORKS, [])

    def test_an_engine_of_another_host_is_asked_where_other_hosts_reach_it(
        self, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = make_keys(tmp_path / "keys")
        engines = [with_facts(make(keys=keys), host="192.0.2.7") for make in (pair.prefill, pair.decode)]
        arguments = (*engines, "--keys", keys.folder, "--no-prompt", "--timeout", "0.5")
        assert pair.report(*arguments)[0] == check.CANNOT_ASK
        monkeypatch.setattr(check_pair, "is_loopback", lambda _: False)
        assert pair.report(*arguments[:-2])[0] == check.WORKS

    @pytest.mark.parametrize("has_keys", [False, True])
    def test_without_a_trusted_key_nothing_is_told(self, has_keys: bool, pair: Pair, tmp_path: Path) -> None:
        keys, other = make_keys(tmp_path / "keys"), make_keys(tmp_path / "other")
        options = ["--keys", other.folder] if has_keys else []
        found = pair.refusals(pair.prefill(keys=keys), pair.decode(keys=keys), *options)
        assert [each["reason"] for each in found] == ["permission-denied"] * 2
        assert ("trusted/" if has_keys else "--keys") in found[0]["remedy"]

    def test_keys_on_one_side_only(self, pair: Pair, tmp_path: Path) -> None:
        keys = make_keys(tmp_path / "keys")
        [problem] = pair.problems(pair.prefill(keys=keys), pair.decode(), "--keys", keys.folder)
        assert (problem["reason"], problem["message"]) == (
            "permission-denied",
            "keys: prefill has keys, decode has none.",
        )

    def test_a_key_that_the_other_engine_does_not_trust(self, pair: Pair, tmp_path: Path) -> None:
        own = [make_keys(tmp_path / name) for name in ("operator", "prefill", "decode")]
        certificate = (own[0].folder / "certificate.pem").read_bytes()
        for keys in own[1:]:
            (keys.folder / "trusted" / "operator.pem").write_bytes(certificate)
            (own[0].folder / "trusted" / f"{keys.folder.name}.pem").write_bytes(
                (keys.folder / "certificate.pem").read_bytes()
            )
        prefill, decode = (Keys(keys.folder) for keys in own[1:])
        engines = pair.prefill(keys=prefill), pair.decode(keys=decode)
        [problem] = pair.problems(*engines, "--keys", own[0].folder)
        assert problem["reason"] == "permission-denied"
        assert prefill.fingerprint[:16] in problem["message"]
        assert "certificate.pem of the prefill engine into trusted/ of the decode engine" in problem["remedy"]


class TestWhatCannotBeAsked:
    """Exit code 2, within the time, whatever answers at a URL."""

    def test_nothing_listens(self, pair: Pair) -> None:
        port = free_port()
        [refusal] = pair.refusals(f"http://127.0.0.1:{port}", pair.decode())
        assert (refusal["reason"], f"TCP port {port}" in refusal["remedy"]) == ("peer-unreachable", True)

    @pytest.mark.parametrize("url", ["127.0.0.1:8100", "ftp://host", "http://", "http://a:0", "http://h:1/?q", "x\x1b"])
    def test_what_is_no_url(self, url: str, pair: Pair) -> None:
        [refusal] = pair.refusals(url, pair.decode())
        assert refusal["reason"] == "invalid-setting"
        assert "http://127.0.0.1:8100" in refusal["remedy"]

    def test_a_server_that_is_no_vllm(self, pair: Pair) -> None:
        [refusal] = pair.refusals(pair.opened(ApiServer()), pair.decode())
        assert refusal["reason"] == "malformed-message"
        assert "no vLLM engine answers" in refusal["message"]

    def test_a_vllm_without_the_middleware(self, pair: Pair) -> None:
        prefill = pair.prefill()
        del prefill.replies["/ready"]
        [refusal] = pair.refusals(prefill, pair.decode())
        assert (refusal["reason"], MIDDLEWARE in refusal["remedy"]) == ("invalid-setting", True)

    def test_an_engine_without_a_fixed_port_or_connector(self, pair: Pair) -> None:
        prefill = pair.prefill()
        prefill.replies["/ready"] = lambda *_: (503, {"ready": False, "reason": "invalid-setting"})
        [refusal] = pair.refusals(prefill, pair.decode())
        assert '"port"' in refusal["remedy"]

    def test_a_control_end_point_that_is_closed(self, pair: Pair) -> None:
        prefill, port = pair.prefill(), free_port()
        with_facts(prefill, ports=(port,))
        [refusal] = pair.refusals(prefill, pair.decode())
        assert refusal["reason"] == "peer-unreachable"
        assert f"Open 127.0.0.1:{port} to this machine" in refusal["remedy"]

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b'{"ready": 1}',
            b'{"ready": true, "engine": {}}',
            b'{"ready": true, "engine": {"ready": ' + b"[" * 5000,
            b"\xff\xfe",
            b"{" + b" " * (1 << 20),
        ],
        ids=["empty", "another type", "no fields", "nested", "no text", "huge"],
    )
    def test_forged_and_huge_answers(self, body: bytes, pair: Pair) -> None:
        prefill = pair.opened(ApiServer())
        prefill.replies["/ready"] = lambda *_: (200, body)
        [refusal] = pair.refusals(prefill, pair.decode())
        assert refusal["reason"] == "malformed-message"

    def test_forged_facts_lead_to_no_other_host(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        prefill = with_facts(pair.prefill(), host="192.0.2.7")
        connect = socket.socket.connect

        def watched(self: socket.socket, address: Any) -> None:
            assert address[0] == "127.0.0.1"
            connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", watched)
        [refusal] = pair.refusals(prefill, pair.decode())
        assert refusal["reason"] == "permission-denied"

    def test_an_answer_that_comes_byte_by_byte_ends_at_the_time_limit(self, pair: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            over = threading.Event()

            def drip() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                    while not over.wait(0.02):
                        try:
                            connection.sendall(b" ")
                        except OSError:
                            return

            thread = threading.Thread(target=drip)
            thread.start()
            began_at = time.monotonic()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            [refusal] = pair.refusals(url, pair.decode(), "--timeout", "0.5")
            over.set()
            thread.join()
        assert refusal["reason"] == "peer-unreachable"
        assert "no whole answer within 0.5 s" in refusal["message"]
        assert time.monotonic() - began_at < 30

    def test_a_plan_that_takes_too_long_is_given_up(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        over = threading.Event()
        monkeypatch.setattr(check_pair, "_planned", lambda *_: over.wait(60))
        monkeypatch.setattr(check, "judge", lambda prefill, decode, _: check_pair.judge(prefill, decode, 0.1))
        problems = pair.problems(pair.prefill(), pair.decode())
        over.set()
        assert [each["reason"] for each in problems] == ["deadline-exceeded"]

    def test_a_plan_that_fails_unexpectedly_is_a_problem(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(check_pair, "_planned", fail)
        [problem] = pair.problems(pair.prefill(), pair.decode())
        assert "ZeroDivisionError" in problem["message"]

    def test_a_text_of_an_engine_moves_no_cursor(self, pair: Pair) -> None:
        decode = differ(pair.decode(**of_identity(weights="\x1b[2J[bold]")), model="\x1b[2J[bold]")
        _, printed = pair.run(pair.prefill(), decode)
        assert "\x1b[2J" not in printed
        assert "[bold]" in printed


class TestOnePrompt:
    """What becomes of the prompt, and of its hold."""

    @pytest.mark.parametrize(
        "answer", [{"choices": []}, {"kv_transfer_params": [1]}, {"kv_transfer_params": {}}], ids=str
    )
    def test_a_prompt_that_the_prefill_engine_does_not_hold(self, answer: Json, pair: Pair) -> None:
        prefill = pair.prefill()
        prefill.replies["/v1/completions"] = lambda *_: (200, answer)
        [problem] = pair.problems(prefill, pair.decode())
        assert "without naming a hold" in problem["message"]

    @pytest.mark.parametrize("says", [True, False], ids=["by the middleware", "by the metrics"])
    def test_a_load_that_failed_is_named_by_its_reason_and_the_hold_is_released(self, says: bool, pair: Pair) -> None:
        prefill, decode = pair.prefill(), pair.decode()

        def fail(*_: Any) -> tuple[int, Any]:
            decode.counts["success"] += 1
            decode.failures["peer-died"] = 1
            error = {"message": "no \x1b.", **({"reason": "peer-died"} if says else {})}
            return 500, {"error": error}

        decode.replies["/v1/completions"] = fail
        [problem] = pair.problems(prefill, decode)
        assert problem["reason"] == "peer-died"
        assert "kvferry-check-" in problem["remedy"]
        assert prefill.released == ["cmpl-1"]

    @pytest.mark.parametrize(("loads", "port_range"), [(True, ""), (False, ""), (False, "23700-23799")])
    def test_a_late_answer_names_the_ports_between_the_engines_unless_the_cache_has_come(
        self, loads: bool, port_range: str, pair: Pair
    ) -> None:
        listening = pair.opened(socket.create_server(("127.0.0.1", 0)))
        at = listening.getsockname()
        [prefill, decode], over = over_nixl(pair, [at], port_range), threading.Event()
        answer = decode.replies["/v1/completions"]

        def late(*given: Any) -> tuple[int, Any]:
            if loads:
                answer(*given)
            over.wait(30)
            return 200, {}

        decode.replies["/v1/completions"] = late
        [problem] = pair.problems(prefill, decode, "--timeout", "3")
        over.set()
        assert problem["reason"] == "deadline-exceeded"
        assert "within 3 s" in problem["message"]
        assert ("loaded the cache" in problem["message"]) == loads
        told = (
            f"from decode to prefill 127.0.0.1:{prefill.listener.port}; "
            f"from prefill to decode 127.0.0.1:{decode.listener.port}; for nixl 127.0.0.1:"
            f"{port_range or f'{at[1]}, unless {OTHER_PORTS}'}."
        )
        assert (told in problem["remedy"]) == (not loads), problem
        assert prefill.released == ["cmpl-1"]

    @pytest.mark.parametrize("is_error", [True, False], ids=["a failed request", "a computed prompt"])
    @pytest.mark.parametrize(
        ("end_point", "told"),
        [
            ({"mooncake": msgspec.msgpack.encode({"host": "10.0.0.7", "port": 15003})}, "for mooncake 10.0.0.7:15003"),
            ({"mooncake": b"no end point"}, "for mooncake 127.0.0.1, and MC_MIN_RPC_PORT"),
            ({"nixl": b""}, "for nixl any port of 127.0.0.1."),
        ],
        ids=["mooncake", "an unreadable end point", "nixl"],
    )
    def test_a_load_that_fails_as_behind_a_firewall_names_the_ports(
        self, end_point: dict[str, bytes], told: str, is_error: bool, pair: Pair
    ) -> None:
        prefill, decode = (make(entry={"end_points": end_point}) for make in (pair.prefill, pair.decode))
        decode.loads = False
        answer = decode.replies["/v1/completions"]

        def fail(*given: Any) -> tuple[int, Any]:
            decode.failures["transfer-failed"] = 1
            _, computed = answer(*given)
            return (500, {"error": {"message": "no."}}) if is_error else (200, computed)

        decode.replies["/v1/completions"] = fail
        [problem] = pair.problems(prefill, decode)
        assert problem["reason"] == "transfer-failed"
        assert told in problem["remedy"]

    def test_a_decode_engine_that_computes_the_prompt_itself(self, pair: Pair) -> None:
        decode = pair.decode()
        decode.loads = False
        [problem] = pair.problems(pair.prefill(), decode)
        assert problem["reason"] == "wrong-parameters"

    def test_a_load_that_was_computed_instead_is_a_problem(self, pair: Pair) -> None:
        decode = pair.decode()
        answer = decode.replies["/v1/completions"]
        decode.loads = False

        def recompute(*given: Any) -> tuple[int, Any]:
            decode.failures["integrity-mismatch"] = 1
            return answer(*given)

        decode.replies["/v1/completions"] = recompute
        [problem] = pair.problems(pair.prefill(), decode)
        assert problem["reason"] == "integrity-mismatch"
        assert "firewall" not in problem["remedy"]

    def test_without_metrics_it_is_said_that_nothing_can_be_known(self, pair: Pair) -> None:
        prefill, decode = pair.prefill(), pair.decode()
        for engine in (prefill, decode):
            engine.replies["/metrics"] = lambda *_: (200, b"process_cpu_seconds_total 1\n")
        code, found = pair.report(prefill, decode)
        assert code == check.WORKS
        [sent] = found["prompts"]
        assert "--disable-log-stats" in sent["unknown"][0]
        known = {row["what"] for row in sent["times"] if row["milliseconds"] is not None}
        assert known == {"HTTP request"}

    def test_traffic_of_others_makes_times_unknown(self, pair: Pair) -> None:
        decode = pair.decode()
        answer = decode.replies["/v1/completions"]

        def twice(*given: Any) -> tuple[int, Any]:
            answer(*given)
            return answer(*given)

        decode.replies["/v1/completions"] = twice
        _, found = pair.report(pair.prefill(), decode)
        times = {row["what"]: row["milliseconds"] for row in found["prompts"][0]["times"] if row["where"] == "decode"}
        assert times["wait for the cache"] is None
        phases = [row["milliseconds"] for row in found["prompts"][0]["times"] if row["phase"]]
        assert phases == [None] * len(PHASES)
        assert "1 loads of others" in found["prompts"][0]["unknown"][0]

    def test_a_load_that_fails_beside_the_prompt_may_be_the_prompt_s(self, pair: Pair) -> None:
        decode = pair.decode()
        answer = decode.replies["/v1/completions"]

        def beside(*given: Any) -> tuple[int, Any]:
            decode.failures["peer-died"] = 1
            return answer(*given)

        decode.replies["/v1/completions"] = beside
        code, found = pair.report(pair.prefill(), decode)
        assert code == check.WORKS
        told = "1 loads failed meanwhile (peer-died): this prompt's may be one of them."
        assert found["prompts"][0]["unknown"] == [told]

    def test_a_key_of_vllm_is_needed_and_given(self, pair: Pair) -> None:
        prefill, decode = pair.prefill(), pair.decode()
        for engine in (prefill, decode):
            for path in ("/v1/models", "/v1/completions"):
                inner = engine.replies[path]
                engine.replies[path] = lambda headers, body, inner=inner: (
                    inner(headers, body) if headers.get("Authorization") == "Bearer secret" else (401, {"error": "no"})
                )
        [problem] = pair.problems(prefill, decode)
        assert (problem["reason"], "--api-key" in problem["remedy"]) == ("permission-denied", True)
        assert pair.report(prefill, decode, "--api-key", "secret")[0] == check.WORKS


class TestRouters:
    """Another prompt goes through the router."""

    def test_a_router_that_moves_prompts(self, pair: Pair) -> None:
        prefill, decode = pair.prefill(), pair.decode()
        code, found = pair.report(prefill, decode, pair.opened(RouterInProcess(prefill, decode)))
        assert (code, len(found["prompts"])) == (check.WORKS, 2)
        through = found["prompts"][1]
        assert through["received_tokens"] == 64
        total, rest, *engines = through["times"]
        assert total["where"] == rest["where"] == "router"
        spent = sum(row["milliseconds"] for row in engines if row["depth"] == 1)
        assert rest["milliseconds"] == pytest.approx(max(total["milliseconds"] - spent, 0))

    def test_a_router_that_drops_the_parameters(self, pair: Pair) -> None:
        prefill, decode = pair.prefill(), pair.decode()
        [problem] = pair.problems(prefill, decode, pair.opened(RouterInProcess(prefill, decode, copies=False)))
        assert problem["reason"] == "wrong-parameters"
        assert "--kv-connector" in problem["remedy"]

    def test_a_router_of_other_engines(self, pair: Pair) -> None:
        others = pair.prefill(), pair.decode()
        [problem] = pair.problems(pair.prefill(), pair.decode(), pair.opened(RouterInProcess(*others)))
        assert "--prefill URL --decode URL" in problem["remedy"]

    def test_a_router_that_does_not_answer(self, pair: Pair) -> None:
        port = free_port()
        [problem] = pair.problems(pair.prefill(), pair.decode(), f"http://127.0.0.1:{port}")
        assert (problem["reason"], str(port) in problem["message"]) == ("peer-unreachable", True)

    def test_an_error_of_the_router_is_told(self, pair: Pair) -> None:
        router = pair.opened(ApiServer())
        router.replies["/v1/completions"] = lambda *_: (
            400,
            {"error": {"message": "kv_transfer_params name no transfer"}},
        )
        [problem] = pair.problems(pair.prefill(), pair.decode(), router)
        assert "kv_transfer_params name no transfer" in problem["message"]


class TestInterrupts:
    """Ctrl-C ends the command at once, and leaves nothing behind."""

    def test_during_the_plan(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(check, "judge", interrupt)
        assert pair.run(pair.prefill(), pair.decode()) == (check.INTERRUPTED, "kvferry: interrupted\n")

    def test_a_hold_that_nobody_has_loaded_is_released(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        prefill, decode = pair.prefill(), pair.decode()
        ask = check_pair.Server.ask

        def interrupt(server: check_pair.Server, path: str, *given: Any, **more: Any) -> Any:
            if (server.url, path) == (decode.url, "/v1/completions"):
                raise KeyboardInterrupt
            return ask(server, path, *given, **more)

        monkeypatch.setattr(check_pair.Server, "ask", interrupt)
        code, _ = pair.run(prefill, decode)
        assert code == check.INTERRUPTED
        assert prefill.released == ["cmpl-1"]


def test_reasons_are_those_of_the_list() -> None:
    assert {reason for _, reason, _, _ in IMPOSSIBLE.values()} <= set(Reason)
