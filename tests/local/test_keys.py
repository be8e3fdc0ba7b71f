"""The keys of a deployment: folders that are refused, signatures, and which peers TLS lets in."""

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.handoff.wire.trust import Keys, make_keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


def refusal(folder: Path) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        Keys(folder)
    assert caught.value.remedy
    return caught.value


def trust(ours: Keys, theirs: Keys) -> Keys:
    """Copy a certificate into an allow-list, and read the folder again."""
    copied = ours.folder / "trusted" / f"{theirs.fingerprint[:8]}.pem"
    copied.write_bytes((theirs.folder / "certificate.pem").read_bytes())
    return Keys(ours.folder)


def test_new_keys_are_for_their_owner_only_and_are_not_overwritten(keys: Keys) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (keys.folder, *keys.folder.iterdir())}
    assert (modes["keys"], modes["key.pem"]) == (0o700, 0o600)
    for path in ("certificate.pem", "key.pem"):
        before = {each: each.read_bytes() for each in keys.folder.glob("*.pem")}
        with pytest.raises(SettingsError, match="exists"):
            make_keys(keys.folder)
        assert {each: each.read_bytes() for each in keys.folder.glob("*.pem")} == before
        (keys.folder / path).unlink()
    assert list(keys.trusted) == [keys.fingerprint]


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_a_key_that_others_can_read_is_refused(keys: Keys, mode: int) -> None:
    (keys.folder / "key.pem").chmod(mode)
    error = refusal(keys.folder)
    assert error.reason is Reason.PERMISSION_DENIED
    assert "chmod 600" in error.remedy


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ["certificate.pem", "trusted", "trusted/peer.pem", ".", ".."])
def test_a_folder_or_a_certificate_that_others_can_write_is_refused(keys: Keys, name: str, mode: int) -> None:
    """Whoever writes there says whom the engine trusts."""
    peer = keys.folder / "trusted" / "peer.pem"
    peer.write_bytes((keys.folder / "certificate.pem").read_bytes())
    path = (keys.folder / name).resolve()
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    error = refusal(keys.folder)
    assert error.reason is Reason.PERMISSION_DENIED
    assert f"chmod go-w {path}'" in error.remedy
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
    assert list(Keys(keys.folder).trusted) == [keys.fingerprint]


def test_links_are_followed_to_a_folder_that_others_can_write(keys: Keys, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(keys.folder / "trusted", elsewhere / "trusted")
    (keys.folder / "trusted").symlink_to(elsewhere / "trusted")
    Keys(keys.folder)
    elsewhere.chmod(0o777)
    assert str(elsewhere) in refusal(keys.folder).message


def test_the_sticky_bit_protects_a_folder_but_not_what_is_trusted(keys: Keys) -> None:
    """Kubernetes mounts a secret in a folder of root that everybody may write."""
    keys.folder.chmod(0o1777)
    assert list(Keys(keys.folder).trusted) == [keys.fingerprint]
    (keys.folder / "trusted").chmod(0o1777)
    assert refusal(keys.folder).reason is Reason.PERMISSION_DENIED


def test_a_folder_of_another_user_is_refused(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from a user to whom nothing belongs here: only root could give the folder away."""
    status = Path.stat

    def given_away(path: Path, **options: Any) -> os.stat_result:
        found = list(status(path, **options))
        found[stat.ST_UID] = 12345 if path.name in given else found[stat.ST_UID]
        return os.stat_result(found)

    given: list[str] = []
    monkeypatch.setattr(Path, "stat", given_away)
    Keys(keys.folder)
    for name in ("trusted", "certificate.pem", "keys", keys.folder.parent.name):
        given[:] = [name]
        assert "owner 12345" in refusal(keys.folder).message


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem"])
def test_a_folder_without_one_of_its_files_is_refused(keys: Keys, name: str) -> None:
    (keys.folder / name).unlink()
    error = refusal(keys.folder)
    assert error.reason is Reason.INVALID_SETTING
    assert f"{name} cannot be read" in error.message
    assert "kvferry keys new" in error.remedy


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "trusted/peer.pem"])
@pytest.mark.parametrize("data", [b"", b"-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n"])
def test_a_file_that_is_no_key_or_certificate_is_refused_by_name(keys: Keys, name: str, data: bytes) -> None:
    (keys.folder / name).write_bytes(data)
    error = refusal(keys.folder)
    assert error.reason is Reason.INVALID_SETTING
    assert name in error.message
    assert ("the other engine's certificate.pem" in error.remedy) is name.startswith("trusted/")


def test_a_certificate_of_another_key_is_refused(keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    (keys.folder / "certificate.pem").write_bytes((other.folder / "certificate.pem").read_bytes())
    assert "is not the certificate of key.pem" in refusal(keys.folder).message


def test_other_kinds_of_keys_and_authorities_are_refused(keys: Keys) -> None:
    rsa = generate_private_key(65537, 2048)
    (keys.folder / "trusted" / "rsa.pem").write_bytes(certificate(rsa, rsa, "rsa", "rsa"))
    assert "rsa.pem" in refusal(keys.folder).message
    (keys.folder / "trusted" / "rsa.pem").unlink()
    issuer, own = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    (keys.folder / "trusted" / "issued.pem").write_bytes(certificate(own, issuer, "own", "issuer"))
    assert "issued.pem" in refusal(keys.folder).message
    (keys.folder / "trusted" / "issued.pem").unlink()
    (keys.folder / "key.pem").write_bytes(rsa.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert "Ed25519" in refusal(keys.folder).message


def certificate(key: Any, issuer: Any, name: str, issuer_name: str, is_authority: bool = False) -> bytes:
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer_name)]
    builder = x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(9999, 12, 31))
    builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    is_edwards = isinstance(issuer, Ed25519PrivateKey)
    return builder.sign(issuer, None if is_edwards else SHA256()).public_bytes(Encoding.PEM)


def test_a_signature_names_its_signer_and_holds_for_its_data_only(keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    signature = other.sign(b"data")
    with pytest.raises(HandoffError) as caught:
        keys.check(b"data", signature)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    keys = trust(keys, other)
    assert keys.check(b"data", signature) == other.fingerprint
    assert keys.check(b"data", keys.sign(b"data")) == keys.fingerprint


@pytest.mark.parametrize("at", [0, 7, 8, 40, 71])
def test_a_changed_signature_or_changed_data_is_refused(keys: Keys, at: int) -> None:
    signature = bytearray(keys.sign(b"data"))
    signature[at] ^= 1
    for data, forged in (
        (b"data", bytes(signature)),
        (b"date", keys.sign(b"data")),
        (b"data", keys.sign(b"data")[:at]),
        (b"data", keys.sign(b"data") + b"\0"),
    ):
        with pytest.raises(HandoffError) as caught:
            keys.check(data, forged)
        assert caught.value.reason is Reason.PERMISSION_DENIED


def test_data_that_was_changed_on_its_way_is_not_to_be_sent_again(keys: Keys) -> None:
    """A proxy that writes another name for the engine does so with each request."""
    with pytest.raises(HandoffError, match="has not signed this data: it was changed on its way") as caught:
        keys.check(b"remote_host localhost", keys.sign(b"remote_host 127.0.0.1"))
    assert "writes remote_host or remote_port" in caught.value.remedy
    assert "'localhost' is another text than '127.0.0.1'" in caught.value.remedy
    assert "again" not in caught.value.remedy


def test_a_signature_is_none_of_the_bare_data(keys: Keys) -> None:
    """A key also signs in TLS: what one use signs must not pass for the other."""
    private = load_pem_private_key((keys.folder / "key.pem").read_bytes(), None)
    assert isinstance(private, Ed25519PrivateKey)
    with pytest.raises(HandoffError):
        keys.check(b"data", keys.sign(b"data")[:8] + private.sign(b"data"))


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes | None, bytes | None] | None:
    """Return the certificates that the server and the client have seen; None where either refuses."""
    ends = socket.socketpair()
    seen: list[bytes | None] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ends[0], server_side=True) as wrapped:
                seen.append(wrapped.getpeercert(binary_form=True))
                wrapped.send(b"hello")
        except (ssl.SSLError, OSError):
            ends[0].close()

    thread = Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ends[1]) as wrapped:
            assert wrapped.recv(5) in (b"hello", b"")
            seen.append(wrapped.getpeercert(binary_form=True))
            assert wrapped.version() == "TLSv1.3"
    except (ssl.SSLError, OSError):
        pass
    finally:
        ends[1].close()
        thread.join()
    return (seen[0], seen[1]) if len(seen) == 2 else None


def test_engines_that_trust_each_other_shake_hands(keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    assert shake_hands(keys.server_context, other.client_context) is None
    keys = trust(keys, other)
    assert shake_hands(keys.server_context, other.client_context) is None, "the client does not trust the server"
    other = trust(other, keys)
    seen = shake_hands(keys.server_context, other.client_context)
    assert seen is not None
    assert (keys.check_peer(seen[0]), other.check_peer(seen[1])) == (other.fingerprint, keys.fingerprint)


def test_engines_with_one_folder_shake_hands(keys: Keys) -> None:
    copied = Keys(keys.folder)
    assert shake_hands(keys.server_context, copied.client_context) is not None


def test_a_peer_without_certificate_or_with_an_earlier_version_is_refused(keys: Keys) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    assert shake_hands(keys.server_context, bare) is None
    own = (keys.folder / "certificate.pem", keys.folder / "key.pem")
    bare.load_cert_chain(*own)
    assert shake_hands(keys.server_context, bare) is not None
    bare.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake_hands(keys.server_context, bare) is None


def test_a_certificate_that_a_trusted_one_has_signed_is_not_trusted(keys: Keys, tmp_path: Path) -> None:
    """Where somebody trusts a certificate that is also an authority, TLS takes what that authority signs."""
    authority, leaf = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    (keys.folder / "trusted" / "authority.pem").write_bytes(
        certificate(authority, authority, "authority", "authority", is_authority=True)
    )
    issued = tmp_path / "issued"
    issued.write_bytes(
        certificate(leaf, authority, "leaf", "authority")
        + leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    keys = Keys(keys.folder)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.load_cert_chain(issued)
    seen = shake_hands(keys.server_context, client)
    assert seen is not None, "TLS alone takes the certificate"
    with pytest.raises(HandoffError) as caught:
        keys.check_peer(seen[0])
    assert caught.value.reason is Reason.PERMISSION_DENIED
    with pytest.raises(HandoffError):
        keys.check_peer(None)


def test_the_command_makes_shows_and_refuses_keys(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    made = CliRunner().invoke(app, ["keys", "new", folder, "--json"])
    shown = CliRunner().invoke(app, ["keys", "show", folder, "--json"])
    assert made.exit_code == shown.exit_code == 0
    other = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "other")]).output
    assert f'"keys": "{tmp_path}/other"' in other.replace("\n", "")
    assert json.loads(made.output) == json.loads(shown.output)
    keys = Keys(folder)
    assert json.loads(shown.output) == {
        "folder": folder,
        "fingerprint": keys.fingerprint,
        "trusted": {keys.fingerprint: f"{folder}/certificate.pem"},
    }
    assert keys.fingerprint in CliRunner().invoke(app, ["keys", "show", folder]).output
    (tmp_path / "keys" / "trusted" / "peer.crt").touch()
    (tmp_path / "keys" / "trusted" / "..data").touch()  # as Kubernetes mounts secrets
    listed = CliRunner().invoke(app, ["keys", "show", folder]).output.replace("\n", "")
    assert "does not end in .pem" in listed
    assert "peer.crt" in listed
    assert "..data" not in listed
    again = CliRunner().invoke(app, ["keys", "new", folder])
    assert isinstance(again.exception, KVFerryError)
    refused = CliRunner().invoke(app, ["keys", "show", str(tmp_path / "none"), "--json"])
    assert refused.exit_code == 2
    assert json.loads(refused.output)["error"]["reason"] == "invalid-setting"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_computes_the_same_fingerprint(keys: Keys) -> None:
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", keys.folder / "certificate.pem"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip().rpartition("=")[2].replace(":", "").lower() == keys.fingerprint


def test_cryptography_is_imported_only_where_keys_are_used() -> None:
    program = "import sys, kvferry.handoff.wire.trust; print('cryptography' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"
