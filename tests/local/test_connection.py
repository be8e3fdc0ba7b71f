"""One connection: frames from bytes that are cut anywhere, and from any bytes, with keys and without."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire import server as connection_module
from kvferry.handoff.wire.server import Connection, Frame
from kvferry.handoff.wire.trust import Keys, make_keys

HOST = "127.0.0.1"
MAX_BYTES = 300
FRAMES = st.lists(
    st.builds(Frame, st.integers(0, (1 << 64) - 1), st.binary(max_size=8) | st.integers(250, MAX_BYTES).map(bytes)),
    max_size=5,
)


def data_of(frame: Frame) -> bytes:
    return len(frame.message).to_bytes(4, "big") + frame.number.to_bytes(8, "big") + frame.message


def taken(connection: Connection) -> list[Frame]:
    """Return the whole frames of the bytes that have come."""
    found = []
    connection.advance()
    while (frame := connection.take()) is not None:
        found.append(frame)
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


@settings(deadline=None, max_examples=50)
@given(FRAMES, st.data())
def test_frames_come_out_as_they_were_sent_however_they_are_cut(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(data_of, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    ours, theirs = tcp_pair()
    found = []
    with closing(theirs), closing(Connection(ours, HOST, MAX_BYTES, None, must_ask=True)) as connection:
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            theirs.sendall(stream[begin:end])
            found += taken(connection)
        assert connection.num_bytes == 0
    assert found == frames


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=400))
def test_any_bytes_are_frames_within_the_bounds_or_refused(data: bytes) -> None:
    ours, theirs = tcp_pair()
    found = []
    with closing(theirs), closing(Connection(ours, HOST, MAX_BYTES, None, must_ask=True)) as connection:
        theirs.sendall(data)
        with suppress(HandoffError):
            found = taken(connection)
        assert connection.num_bytes <= len(data)
    assert all(len(frame.message) <= MAX_BYTES for frame in found)
    assert data.startswith(b"".join(map(data_of, found)))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection. On this machine, what one end has sent the other can read at once."""
    with socket.create_server((HOST, 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), timeout=10)
        ours, _ = listening.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


@pytest.fixture
def pair(keys: Keys) -> Iterator[tuple[Connection, Connection]]:
    """The server's and the client's end of a connection with keys, open."""
    ours, theirs = tcp_pair()
    server = Connection(ours, HOST, 1 << 20, keys, must_ask=True)
    client = Connection(theirs, HOST, 1 << 20, keys, must_ask=False)
    while not (client.advance() & server.advance()):
        pass
    yield server, client
    server.close()
    client.close()


@pytest.mark.parametrize("read_bytes", [1, 100, 64 << 10])
def test_what_tls_has_read_ahead_is_taken_without_another_event(
    pair: tuple[Connection, Connection], read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of TLS may have more than is read at a time: the kernel has nothing left, and announces nothing."""
    server, client = pair
    frames = [Frame(number, bytes(number)) for number in (0, 5, 700)]
    assert client.send()
    client.socket.setblocking(True)
    client.socket.sendall(b"".join(map(data_of, frames)))  # one record
    monkeypatch.setattr(connection_module, "READ_BYTES", read_bytes)
    found = [frame for frame in (server.take(),) if frame is not None]
    while server.has_more:
        if (frame := server.take()) is not None:
            found.append(frame)
    assert found == frames


def test_a_long_message_goes_on_where_the_kernel_took_no_more(pair: tuple[Connection, Connection]) -> None:
    """OpenSSL wants the same bytes again, also when more is queued meanwhile."""
    server, client = pair
    sent = [Frame(number, bytes([number]) * (1 << 20)) for number in range(12)]
    found: list[Frame] = []
    for frame in sent:
        client.put(frame)
        client.send()
    assert client.num_unsent > 1 << 20, "the kernel takes all of it: nothing is tried here"
    while len(found) < len(sent):
        client.send()
        if (frame := server.take()) is not None:
            found.append(frame)
    assert found == sent
    assert client.num_unsent == 0
    assert client.is_idle


def test_a_certificate_that_a_trusted_one_has_issued_opens_no_connection(tmp_path: Path) -> None:
    """Where somebody trusts a certificate that is also an authority, OpenSSL takes what that authority issues."""
    authority, leaf = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    folder = make_keys(tmp_path / "keys").folder
    (folder / "trusted" / "authority.pem").write_bytes(issued(authority, authority, "authority"))
    (tmp_path / "leaf").write_bytes(
        issued(leaf, authority, "leaf") + leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(tmp_path / "leaf")
    ours, theirs = tcp_pair()
    server = Connection(ours, HOST, MAX_BYTES, Keys(folder), must_ask=True)
    peer = threading.Thread(target=context.wrap_socket, args=[theirs])
    peer.start()
    with pytest.raises(HandoffError, match="does not trust") as caught:
        open_it(server)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    server.close()
    peer.join()
    theirs.close()


def open_it(connection: Connection) -> None:
    while not connection.advance():
        pass


def issued(key: Ed25519PrivateKey, issuer: Ed25519PrivateKey, name: str) -> bytes:
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in ("authority", name)]
    builder = x509.CertificateBuilder(*names, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(9999, 12, 31))
    builder = builder.add_extension(x509.BasicConstraints(name == "authority", None), critical=True)
    return builder.sign(issuer, None).public_bytes(Encoding.PEM)
