"""Messages from bytes that are cut anywhere, and from any bytes. The server's tests use zmq itself."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire.zmtp import COMMAND, DEALERS_HELLO, HELLO, LONG, MORE, Inbox, encode_message

MAX_BYTES = 300
BODIES = st.binary(max_size=8) | st.integers(250, MAX_BYTES).map(bytes)
MESSAGES = st.lists(st.lists(BODIES, min_size=1, max_size=2), max_size=5)


def taken(inbox: Inbox) -> list[list[bytes]]:
    found = []
    while (message := inbox.take()) is not None:
        found.append(message)
    return found


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_messages_come_out_as_they_were_sent_however_they_are_cut(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    stream = HELLO + b"".join(encode_message(*frames) for frames in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    inbox, found = Inbox(2, MAX_BYTES), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        inbox.add(stream[begin:end])
        found += taken(inbox)
    assert found == messages
    assert inbox.num_bytes == 0


@settings(deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_messages_within_the_bounds_or_refused(data: bytes, is_greeted: bool) -> None:
    inbox = Inbox(2, MAX_BYTES)
    inbox.add(DEALERS_HELLO * is_greeted + data)
    found = []
    with suppress(HandoffError):
        found = taken(inbox)
    assert all(1 <= len(frames) <= 2 and max(map(len, frames)) <= MAX_BYTES for frames in found)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1",
        DEALERS_HELLO[:10] + b"\x01",
        DEALERS_HELLO[:12] + b"CURVE" + DEALERS_HELLO[17:],
        DEALERS_HELLO + bytes((MORE, 0)) * 2,
        DEALERS_HELLO + bytes((LONG,)) + (MAX_BYTES + 1).to_bytes(8, "big"),
        DEALERS_HELLO + bytes((COMMAND | LONG,)) + (1 << 63).to_bytes(8, "big"),
        DEALERS_HELLO + bytes((8, 0)),
    ],
    ids=["another protocol", "version 2", "security", "a third frame", "a long frame", "a long command", "a flag"],
)
def test_an_impossible_message_is_refused_before_its_end(sent: bytes) -> None:
    inbox = Inbox(2, MAX_BYTES)
    inbox.add(sent)
    with pytest.raises(HandoffError) as caught:
        inbox.take()
    assert caught.value.reason is Reason.MALFORMED_MESSAGE
    assert caught.value.remedy


def test_commands_are_no_messages() -> None:
    inbox = Inbox(2, MAX_BYTES)
    inbox.add(DEALERS_HELLO + bytes((COMMAND, 5)) + b"\x04PING" + encode_message(b"one"))
    assert taken(inbox) == [[b"one"]]
