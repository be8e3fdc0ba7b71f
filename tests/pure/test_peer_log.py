"""Log lines that peers and clients cause: printable, limited in number, and counted where they are left out."""

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import peer_log
from kvferry.peer_log import LINES_OF_A_KIND_PER_SECOND, LINES_PER_SECOND, MAX_LENGTH, Limit, PeerLog, printable

TIMES = st.floats(0, 5)


@given(st.text())
def test_foreign_text_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) <= MAX_LENGTH + 3
    if text.isprintable() and len(text) <= MAX_LENGTH:
        assert printable(text) == text


@pytest.mark.parametrize("each", ["\n", "\r", "\x1b", "\x00", "\u2028", "\u202e", "\udcff", "\x85"])
def test_no_character_breaks_or_hides_a_line(each: str) -> None:
    found = printable(f"a{each}b")
    assert found.isprintable()
    assert found.startswith("a\\")


@given(st.lists(st.tuples(TIMES, st.sampled_from("abc"), st.sampled_from("xyz")), max_size=200))
def test_no_second_has_more_lines_than_allowed(asked: list[tuple[float, str, str]]) -> None:
    limit = Limit()
    written = [(now, kind, peer) for now, kind, peer in sorted(asked) if limit.admits(kind, peer, now)]
    for begin, kind, peer in written:
        # As the limit reckons: a sum of floats may differ in its last digit.
        second = [line for line in written if line[0] >= begin and line[0] - begin < 1]
        assert len(second) <= LINES_PER_SECOND
        assert sum(line[1] == kind for line in second) <= LINES_OF_A_KIND_PER_SECOND
        assert sum(line[1:] == (kind, peer) for line in second) == 1
    assert len(written) + sum(limit.take_left_out().values()) == len(asked)
    assert limit.take_left_out() == {}


def test_a_flood_of_one_kind_leaves_room_for_others() -> None:
    limit = Limit()
    assert sum(limit.admits("flood", f"peer {number}", 0.0) for number in range(10_000)) == LINES_OF_A_KIND_PER_SECOND
    assert limit.admits("rare", "another", 0.0)


def test_what_the_limit_keeps_does_not_grow_with_the_number_of_peers() -> None:
    limit = Limit()
    for number in range(10_000):
        limit.admits("flood", f"peer {number}", number / 100)
    assert len(limit._written) <= LINES_PER_SECOND
    assert limit.take_left_out().keys() == {"flood"}


def test_hole_4_lines_that_are_left_out_are_counted_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_log, "REPORT_SECONDS", 0.05)
    log = PeerLog(logging.getLogger("kvferry.tested"))
    for _ in range(100):
        log.warning("refused %s", "x", peer="10.0.0.1")
    end = time.monotonic() + 5
    while len(caplog.messages) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert caplog.messages == [
        "refused x",
        "kvferry: 99 log lines were left out, because peers or clients caused too many: 99 of 'refused %s'",
    ]


def test_a_traceback_does_not_carry_text_of_peers_as_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog(logging.getLogger("kvferry.tested"))
    try:
        try:
            raise KeyError("inner\nERROR forged")
        except KeyError as error:
            raise ValueError("outer\nERROR forged\x1b[2J") from error
    except ValueError:
        log.exception("failed on %s", "a\nb")
    lines = caplog.records[0].getMessage().splitlines()
    assert lines[0] == "failed on a\\nb"
    assert lines[-1] == "ValueError: outer\\nERROR forged\\x1b[2J"
    assert any("test_peer_log.py" in line for line in lines)
    assert any(line.startswith("KeyError: ") for line in lines)
    assert not any(line.startswith("ERROR") for line in lines)


def test_a_line_names_the_place_that_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    PeerLog(logging.getLogger("kvferry.tested")).error("failed")
    assert caplog.records[0].funcName == "test_a_line_names_the_place_that_wrote_it"


def test_a_line_that_the_level_hides_takes_no_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvferry.tested")
    log = PeerLog(logging.getLogger("kvferry.tested"))
    for number in range(LINES_PER_SECOND):
        log.debug("hidden %d", number, peer=number)
    log.warning("shown")
    assert caplog.messages == ["shown"]
