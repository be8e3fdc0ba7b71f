"""Keys and allowed hosts through the connector's settings, without an engine."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from kvferry.errors import HandoffError, Reason, SettingsError
from kvferry.handoff.messages import EndPoint, Noted, RankEntry, Release
from kvferry.handoff.wire.client import ask
from kvferry.handoff.wire.trust import Trust, make_keys
from kvferry.integrations.vllm.scheduler.params import parse_params, read_params, signed_bytes
from kvferry.integrations.vllm.settings import parse_settings, trust_of

from ..waits import wait_until
from .flows import to_decode
from .scheduler_requests import FULL, PROMPT, allocated, kept, next_step, request, run_prefill, scheduled

HOST = "127.0.0.1"
ELSEWHERE = "203.0.113.1"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def others(tmp_path: Path) -> str:
    """Keys of another deployment."""
    make_keys(tmp_path / "others")
    return str(tmp_path / "others")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "prefill-0.invalid"])
def test_a_host_that_others_reach_needs_keys_or_a_word(host: str, folder: str) -> None:
    given = {"host": host, "advertised_host": "192.0.2.1"}
    with pytest.raises(SettingsError) as caught:
        parse_settings(given)
    assert caught.value.reason is Reason.INVALID_SETTING
    assert "kvferry keys new" in caught.value.remedy
    assert '"keys": "none"' in caught.value.remedy
    assert parse_settings({**given, "keys": "none"}).host == host
    assert parse_settings({**given, "keys": folder}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_this_machine_needs_no_keys(host: str) -> None:
    assert parse_settings({"host": host}).host == host


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_hosts": "10.0.0.0/8"},
        {"allowed_hosts": ["10.0.0.0/33"]},
        {"allowed_hosts": ["http://prefill-0"]},
        {"allowed_hosts": ["prefill-0:5600"]},
        {"allowed_hosts": [""]},
        {"allowed_hosts": ["*"]},
    ],
    ids=str,
)
def test_settings_that_contradict_or_are_no_hosts_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(given)
    assert caught.value.reason is Reason.INVALID_SETTING


def test_where_an_engine_connects_follows_from_its_settings() -> None:
    def connects(**given: Any) -> bool:
        try:
            return trust_of(parse_settings(given)).addresses(ELSEWHERE, 5600, False) == [ELSEWHERE]
        except HandoffError as error:
            if error.reason is not Reason.PERMISSION_DENIED:
                raise
            return False

    assert not connects()
    assert connects(allowed_hosts=["203.0.113.0/24"])
    assert connects(keys="none")
    assert not connects(keys="none", allowed_hosts=["10.0.0.0/8"])


def test_only_the_word_alone_means_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "none")
    assert trust_of(parse_settings({"keys": "none"})).keys is None
    for folder in ("./none", str(tmp_path / "none")):
        assert trust_of(parse_settings({"keys": folder})).keys is not None


def test_an_engine_without_a_complete_folder_does_not_start(make_role: Any, folder: str, tmp_path: Path) -> None:
    (Path(folder) / "key.pem").chmod(0o644)
    for given, reason in ((folder, Reason.PERMISSION_DENIED), (str(tmp_path), Reason.INVALID_SETTING)):
        with pytest.raises(SettingsError) as caught:
            make_role(FULL, keys=given)
        assert caught.value.reason is reason


def test_sglang_39400_an_engine_with_keys_hears_only_engines_that_it_trusts(
    make_role: Any, folder: str, others: str
) -> None:
    role = make_role(FULL, keys=folder)
    where, release = role._state.answers_at, Release(role._state.epoch, ())
    for trust in (Trust(), trust_of(parse_settings({"keys": others}))):
        with pytest.raises(HandoffError) as caught:
            ask(HOST, where.port, release, 10.0, trust)
        assert caught.value.reason is Reason.PERMISSION_DENIED
    assert ask(HOST, where.port, release, 10.0, trust_of(parse_settings({"keys": folder}))) == Noted(where.epoch)


def load(decode: Any, params: dict[str, Any]) -> None:
    """Let a decode engine load a prompt, and end the load."""
    ours = request(PROMPT, dict(params), "d")  # the engine notes in them that it has loaded
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    next_step(decode)
    decode.update_connector_output(KVConnectorOutput(finished_recving={"d"}, failed_recving=set()))


def test_a_release_ends_a_hold_only_with_the_same_keys(make_role: Any, folder: str, others: str) -> None:
    """Anybody who could connect could end the holds of others, so that their requests failed."""
    prefill, stranger, plain, decode = (make_role(FULL, keys=keys) for keys in (folder, others, "", folder))
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    assert params is not None
    for role in (stranger, plain):
        load(role, params)
    for _ in range(30):
        time.sleep(0.01)
        next_step(prefill)
        assert sorted(kept(prefill)) == [1, 2, 3, 4, 5]
    load(decode, params)
    wait_until(lambda: not kept(prefill), "the hold is not released", each=lambda: next_step(prefill))


def test_an_engine_with_keys_connects_nowhere_for_parameters_of_another_version_that_are_not_signed(
    make_role: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the API server cannot check them: they name the host and port that are told the versions of both."""
    prefill, decode = (make_role(FULL, keys=folder) for _ in range(2))
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    assert params is not None
    told: list[tuple[int, bool]] = []

    def tell(_host: str, port: int, *_: Any, is_trusted: bool = False) -> None:
        told.append((port, is_trusted))

    monkeypatch.setattr(decode._state.leases._client, "tell", tell)
    signed = prefill._state.trust.keys.sign
    for is_signed in (False, True):
        ferry = {**params["kvferry"], "version": 99, "newest": 99}
        parsed = read_params({**params, "kvferry": ferry}, "d")
        if is_signed:
            ferry["signature"] = signed(signed_bytes(parsed)).hex()
        decode.on_new_request(request(PROMPT, {**params, "kvferry": ferry}, f"d{is_signed}"))
    assert told == [(prefill._server.port, True)], "only the signed ones, to wherever a trusted engine is"


def test_a_transfer_takes_the_offer_of_an_engine_with_its_keys_only(make_role: Any, folder: str, others: str) -> None:
    prefill, decode, stranger = (make_role(FULL, keys=keys) for keys in (folder, folder, others))
    prefill.publish([RankEntry(0, 0, b"", {}, EndPoint(HOST, 1, 1))])
    params = to_decode("concurrent", prefill, None)
    for role in (decode, stranger):
        ours = request(PROMPT, dict(params), "d")
        role.on_new_request(ours)
        wait_until(lambda role=role, ours=ours: role.get_num_new_matched_tokens(ours, 0)[0] is not None)  # type: ignore[misc]
    hold = decode._destination.hold_of("d")
    assert (hold.port, hold.is_trusted) == (prefill._server.port, True)
    refused = stranger._destination._expected["d"]
    assert isinstance(refused, HandoffError)
    assert refused.reason is Reason.PERMISSION_DENIED


def test_a_request_whose_name_no_decode_engine_takes_does_not_end_the_prefill_engine(
    make_role: Any, folder: str
) -> None:
    """A client chooses the name, in the header X-Request-Id."""
    prefill = make_role(FULL, keys=folder)
    ours = request(PROMPT, {"do_remote_decode": True}, "a\x85b")
    prefill.on_new_request(ours)
    prefill.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    prefill.build_connector_meta(scheduled({ours.request_id: 80}, {ours.request_id: ([5, 4, 3, 2, 1],)}))
    ours.num_computed_tokens = ours.num_prompt_tokens
    assert prefill.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True) is not None


def test_an_address_in_brackets_is_a_host(make_role: Any, folder: str) -> None:
    prefill = make_role(FULL, keys=folder, advertised_host="[fd00::1]")
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    assert params is not None
    assert parse_params(params, "d").hold(is_trusted=True).host == "[fd00::1]"
    assert params["kvferry"]["signature"]
